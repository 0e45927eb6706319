"""Medusa (Cai et al., arXiv:2401.10774): K extra heads guess the next K tokens from one feature of the target.

The heads know the target's state at the token before the pending one, and not what the heads before them guessed, so a
node's candidates depend on its depth alone. They are deterministic: node (r_1 .. r_d) proposes candidate r_d of head d.
Under `rejection` that is lossless at any temperature; the paper's own rule is the verifier `typical`, which is not.

Differs from the released code: there the root is the argmax of the target's last logits, also when sampling; here it is
the pending token, drawn by the verifier from the target's law (`decode`, invariant 1).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec import topology as topology_lib
from jspec import tree as tree_lib
from jspec import types
from jspec.drafters import base, draft_vocabulary
from jspec.models import heads as heads_lib
from jspec.weights import medusa_files


@dataclasses.dataclass(frozen=True)
class RandomMedusa:
    """Heads with random weights, for tests and timing.

    num_heads:  K.
    num_layers: residual blocks in each.
    own_heads:  give each its own output matrix; else the target's serves all.
    seed:       of the weights.
    """

    num_heads: int = 4
    num_layers: int = 1
    own_heads: bool = False
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class MedusaDraft(base.HeadSource):
    """Where the heads come from."""

    random: RandomMedusa | None = None


@base.register("medusa")
@dataclasses.dataclass(frozen=True)
class Medusa:
    """Settings.

    tree:       shape of the proposals; its depth is the number of heads used. None means `mc_sim_7b_63`.
    draft:      where the heads come from; None when they are handed to `build`.
    vocabulary: candidates come from these tokens only; None means from all.
    """

    tree: topology_lib.Tree | None = None
    draft: MedusaDraft | None = None
    vocabulary: draft_vocabulary.Vocabulary | None = None

    def build(
        self, target: types.Target, *, heads: heads_lib.MedusaHeads | None = None
    ) -> tuple[BoundMedusa, dict[str, Any]]:
        """See `types.Drafter`.

        Args:
          target: the model to speed up.
          heads: heads already in memory, used instead of `self.draft`.

        Raises:
          ValueError: the heads cannot be loaded, are fewer than the tree is deep, or do not fit the target.
        """
        if heads is None:
            heads = self._load(target)
        tree = self.tree or topology_lib.Tree(name="mc_sim_7b_63")
        return bind(tree.topology, target, heads, self.vocabulary and self.vocabulary.load(target))

    def _load(self, target: types.Target) -> heads_lib.MedusaHeads:
        if self.draft is None:
            raise ValueError("draft is not given: set draft.reference or draft.random")
        if self.draft.random is None:
            draft = self.draft
            return medusa_files.load(draft.reference, target, sha256=draft.sha256, force=draft.force)
        random, config = self.draft.random, target.model.config
        vocab_size = config.vocab_size if random.own_heads else None
        shape = heads_lib.MedusaConfig(random.num_heads, random.num_layers, config.width, vocab_size)
        return heads_lib.init_medusa(jax.random.key(random.seed), shape, target.model.dtype)


def bind(
    topology: topology_lib.Topology,
    target: types.Target,
    heads: heads_lib.MedusaHeads,
    draft_ids: np.ndarray | None = None,
) -> tuple[BoundMedusa, dict[str, Any]]:
    """A drafter from heads in memory; see `Medusa.build`.

    Args:
      topology: shape of the proposals.
      target: the model to speed up.
      heads: at least as many as the tree is deep.
      draft_ids: `[Vd]` from `draft_vocabulary.check`, or None.
    """
    config, model = heads.config, target.model
    if config.width != model.config.width:
        raise ValueError(f"the heads read features of width {config.width}; the target's have {model.config.width}")
    own_ids = heads.params.get("draft_ids")
    if own_ids is not None:
        draft_vocabulary.check(own_ids, target, where="of the heads")
        if draft_ids is not None:
            raise ValueError("vocabulary: the heads have a reduced vocabulary of their own")
    elif config.vocab_size not in (None, model.config.vocab_size):
        raise ValueError(f"the heads know {config.vocab_size} tokens; the target has {model.config.vocab_size}")
    depth = topology.max_depth
    if depth > config.num_heads:
        raise ValueError(f"tree is {depth} deep and needs as many heads; there are {config.num_heads}")
    ids = own_ids if draft_ids is None else draft_ids
    candidates = model.config.vocab_size if ids is None else len(ids)
    if topology.num_ranks > candidates:
        raise ValueError(f"tree asks for {topology.num_ranks} candidates of {candidates} tokens")
    params = {name: leaf if name in heads_lib.MEDUSA_SHARED else leaf[:depth] for name, leaf in heads.params.items()}
    if draft_ids is not None:
        if "heads" in params:
            params["heads"] = params["heads"][:, jnp.asarray(draft_ids)]
        else:
            params["head"] = draft_vocabulary.head_rows(model, draft_ids)
        params["draft_ids"] = jnp.asarray(draft_ids)
    return BoundMedusa(topology, dataclasses.replace(config, num_heads=depth)), params


@dataclasses.dataclass(frozen=True)
class BoundMedusa(base.StaticTree):
    """See `types.BoundDrafter`. Its parameters: those of the heads in use and, of a reduced vocabulary, `draft_ids` and
    the rows of the shared output matrix."""

    topology: topology_lib.Topology
    config: heads_lib.MedusaConfig
    feature_layers: types.FeatureLayers = ("final",)

    def propose(self, params, rng_keys, state, context, sampling):
        """Fill the tree with each head's best candidates."""
        heads = heads_lib.MedusaHeads(params.draft, self.config)
        logits = heads_lib.medusa_logits(heads, params.target, context.features[:, 0])
        _, candidates = jax.lax.top_k(logits, self.topology.num_ranks)
        if "draft_ids" in params.draft:
            candidates = params.draft["draft_ids"][candidates]
        drafts = candidates[:, np.array(self.topology.depth[1:]) - 1, np.array(self.topology.ranks[1:])]
        tokens = jnp.concatenate([base.pending(context)[:, None], drafts], axis=1)
        return tree_lib.from_topology(self.topology, tokens, jnp.ones(tokens.shape, bool)), state
