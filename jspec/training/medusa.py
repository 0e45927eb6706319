"""Training Medusa heads (Cai et al., arXiv:2401.10774, sections 2.2.1 and 2.2.2).

Medusa-1 trains K heads on a frozen target: head k sees the target's last state at token t and learns token t + k + 1,
weighted by 0.8^k. Blocks start at zero, so every head starts as the target's own output head. Medusa-2 trains the
target too: its own loss plus lambda_0 times the heads', the heads at a higher learning rate and warmed up alone. With
self-distillation the target's loss is KL(p_original || p), which keeps it close to what it was.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Literal

import jax
import jax.numpy as jnp

from jspec import topology as topology_lib
from jspec import types
from jspec.drafters import base
from jspec.drafters import medusa as medusa_drafter
from jspec.models import config as model_config
from jspec.models import heads as heads_lib
from jspec.models import layers, transformer
from jspec.training import data, losses, objectives, views
from jspec.weights import huggingface_export, medusa_files


@dataclasses.dataclass(frozen=True)
class Joint:
    """Medusa-2.

    heads:  lambda_0, weight of the heads' loss (0.2 for 7B and 13B targets, 0.01 with self-distillation).
    labels: of the target's own loss: `text`, or `original` for KL to the law it had.
    """

    heads: float = 0.2
    labels: Literal["text", "original"] = "original"

    def __post_init__(self):
        if not self.heads > 0:
            raise ValueError(f"joint.heads {self.heads} is not above 0")


@objectives.register("medusa")
@dataclasses.dataclass(frozen=True)
class Medusa:
    """Settings.

    num_heads:  K; the paper trains 5.
    num_layers: residual blocks in each.
    own_heads:  give each its own output matrix, as in the paper; else the target's serves all.
    decay:      lambda_k = decay^k, k from 1.
    labels:     `text`: the tokens that stand there, as in the paper; `target`: the target's law.
    joint:      train the target too (Medusa-2); None leaves it frozen (Medusa-1).
    """

    num_heads: int = 5
    num_layers: int = 1
    own_heads: bool = False
    decay: float = 0.8
    labels: Literal["text", "target"] = "text"
    joint: Joint | None = None

    def __post_init__(self):
        base.check_count("num_heads", self.num_heads, 1)
        base.check_count("num_layers", self.num_layers, 1)
        if not self.decay > 0:
            raise ValueError(f"decay {self.decay} is not above 0")

    def build(self, target: types.Target, vocabulary: objectives.Vocabulary) -> BoundMedusa:
        """See `objectives.Objective`.

        Raises:
          ValueError: settings that exclude each other.
        """
        if self.joint is not None and vocabulary.ids is not None:
            raise ValueError("joint: the target's own loss needs its whole vocabulary; leave vocabulary out")
        if self.own_heads and vocabulary.ids is not None:
            raise ValueError("own_heads: no file holds matrices of a reduced vocabulary; leave one of them out")
        size = len(vocabulary.matrix) if self.own_heads else None
        config = heads_lib.MedusaConfig(self.num_heads, self.num_layers, target.model.config.width, size)
        return BoundMedusa(config, target.model.config, self.decay, self.labels, self.joint)


@dataclasses.dataclass(frozen=True)
class BoundMedusa(objectives.Bound):
    """See `objectives.Objective` and `Medusa`."""

    config: heads_lib.MedusaConfig
    target_config: model_config.TransformerConfig
    decay: float
    labels: str
    joint: Joint | None

    @property
    def depths(self) -> int:
        """K."""
        return self.config.num_heads

    def init(self, rng_key, target, vocabulary):
        """Zero blocks, output matrices copied from the target's. Medusa-2: and the target's parameters."""
        zeros = lambda leaf: jnp.zeros(leaf.shape, jnp.float32)
        heads = jax.tree.map(zeros, heads_lib.medusa_shapes(self.config))
        if "heads" in heads:
            # An array of its own for each head: they part ways.
            heads["heads"] = jnp.tile(vocabulary.matrix.astype(jnp.float32)[None], (self.config.num_heads, 1, 1))
        if self.joint is None:
            return {"heads": heads}
        return {"heads": heads, "model": jax.tree.map(lambda x: jnp.array(x, jnp.float32), target.model.params)}

    def loss(self, params, batch, view, rng_key):
        """Sum over the heads of decay^k times the cross entropy; Medusa-2 adds the target's own."""
        draft: objectives.Draft = params.draft
        heads, vocabulary = draft.trained["heads"], draft.vocabulary
        original, own_loss, matrix = view, 0.0, vocabulary.matrix
        if self.joint is not None:
            model = transformer.Model(draft.trained["model"], self.target_config)
            matrix = transformer.output_matrix(model)
            view = views.view(model, batch, ())
            own_loss = self._own_loss(batch, original, view, vocabulary.matrix, matrix)

        seen = batch.at_places(original.replace(features=None))
        # Medusa-2's heads read what the target in training says.
        final = seen.final if self.joint is None else batch.at_places(view.final)
        final = final.astype(heads["blocks"].dtype)
        states = heads_lib.medusa_states(heads_lib.MedusaHeads(heads, self.config), final.reshape(-1, final.shape[-1]))
        states = states.reshape(*final.shape[:2], *states.shape[1:])
        law = vocabulary.law(seen)
        says = vocabulary.places(seen.top)
        next_tokens = batch.next_tokens
        total, ranks, overlaps, masks = 0.0, [], [], []
        for index in range(self.config.num_heads):
            output = heads["heads"][index] if "heads" in heads else matrix.astype(states.dtype)
            logits = layers.linear(states[:, :, index], output).astype(jnp.float32)
            own = jax.nn.log_softmax(logits, axis=-1)
            there, wanted = batch.labelled(index + 2), data.shift(law, index + 1)
            best = data.shift(says + 1, index + 1) - 1
            if self.labels == "text":
                label = vocabulary.places(data.shift(next_tokens, index + 1))
                entropy = losses.cross_entropy(own, jnp.maximum(label, 0))
            else:
                label = best
                entropy = -jnp.sum(jnp.exp(losses.renormalize(wanted)) * own, axis=-1)
            total += self.decay ** (index + 1) * losses.masked_mean(entropy, there & (label >= 0))
            ranks.append(losses.rank(own, best))
            overlaps.append(losses.overlap(wanted, own))
            masks.append(there)
        if self.joint is not None:
            total = own_loss + self.joint.heads * total
        return total, losses.Depths.of(ranks, overlaps, masks)

    def _own_loss(self, batch, original, view, original_matrix, matrix):
        """The target's: cross entropy with the text, or KL to the law it had."""
        there, own = batch.labelled(1), batch.at_places(view.replace(features=None)).log_probs(matrix)
        if self.joint.labels == "text":
            return losses.masked_mean(losses.cross_entropy(own, batch.next_tokens), there)
        law = batch.at_places(original.replace(features=None)).log_probs(original_matrix)
        return losses.masked_mean(losses.divergence("forward_kl", law, own), there)

    def learning_rates(self, trained):
        """Medusa-2: the target's is a fraction of the heads', and starts later."""
        return {name: "draft" if name == "heads" else "target" for name in trained}

    def heads(self, draft: objectives.Draft) -> heads_lib.MedusaHeads:
        """The heads alone."""
        return heads_lib.MedusaHeads(draft.trained["heads"], self.config)

    def target(self, target: types.Target, draft: objectives.Draft) -> types.Target:
        """The target that the heads were trained for: after Medusa-2 no longer the one they started from."""
        if self.joint is None:
            return target
        return dataclasses.replace(
            target,
            model=transformer.Model(draft.trained["model"], target.model.config),
            provenance=types.Provenance(f"{target.provenance.reference}, trained further"),
        )

    def bind(self, target, draft, gamma):
        """A chain of each head's best token."""
        target, gamma = self.target(target, draft), min(gamma, self.config.num_heads)
        return target, *medusa_drafter.bind(topology_lib.chain(gamma), target, self.heads(draft), draft.vocabulary.ids)

    def save(self, target: types.Target, draft: objectives.Draft, path: str | os.PathLike, base_model: str) -> None:
        """The released layout of `medusa_files`, the draft vocabulary with it; beside it, `target`: what Medusa-2 made
        of the target, as a folder."""
        own, heads = self.target(target, draft), self.heads(draft)
        if draft.vocabulary.ids is not None:
            heads = heads.replace(params={**heads.params, "draft_ids": draft.vocabulary.ids})
        if self.joint is not None:
            beside = pathlib.Path(path).with_name("target")
            huggingface_export.save_huggingface(own, beside)
            base_model = str(beside)
        medusa_files.save(heads, own, path, base_model=base_model)
