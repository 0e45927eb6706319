"""The pytrees and protocols that cross files.

Axis letters, used everywhere: `B` rows, `T` tokens in a block, `N` tree nodes, `P` path positions (depth + 1), `S`
cache slots, `L` layers, `H` heads, `K` key/value heads, `D` head size, `E` width, `F` feature layers, `V` vocabulary,
`Vd` draft vocabulary.

Words: the *target* is the model being sped up, the *draft* whatever proposes, the *drafter* the algorithm that does.
The *pending* token is the last committed one; it is not in the cache yet and is node 0 of every token tree.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Protocol, runtime_checkable

import flax.struct
import jax

# Layers whose input is wanted from a forward pass; "final" is the state after the last norm.
FeatureLayers = tuple[int | Literal["final"], ...]


@flax.struct.dataclass
class Params:
    """Everything a jitted function reads. Gradients are taken with respect to `draft` alone.

    target: the target `Model`.
    draft:  whatever the bound drafter reads: a `Model`, heads, counts; `()` when it has no parameters.
    """

    target: Any
    draft: Any = ()


@flax.struct.dataclass
class Outputs:
    """What one forward pass over a block says.

    logits:   unnormalised log-probabilities of the next token, at every position or at those asked for.
    features: residual streams entering the layers asked for, and `final`, in the order asked.
    """

    logits: jax.Array  # [B, T, V], or [B, Q, V] for Q positions asked for
    features: jax.Array  # [B, T, F, E]


@flax.struct.dataclass
class Context:
    """What is decided so far.

    tokens:   prompt and committed tokens; slots at `length` and beyond hold nothing.
    length:   committed tokens, the pending one included.
    features: of the node that produced the pending token.
    """

    tokens: jax.Array  # [B, S]
    length: jax.Array  # [B]
    features: jax.Array  # [B, F, E]


@flax.struct.dataclass
class Sampling:
    """How each row's law is shaped and when the row ends; one entry per row. Made by `sampling.make`.

    temperature: 0 is greedy.
    top_k:       0 keeps all.
    top_p:       1 keeps all.
    min_p:       0 keeps all.
    stop_ids:    any of these ends the row; -1 fills unused places.
    max_new_tokens: the row's token budget.
    """

    temperature: jax.Array  # [B] float32
    top_k: jax.Array  # [B] int32
    top_p: jax.Array  # [B] float32
    min_p: jax.Array  # [B] float32
    stop_ids: jax.Array  # [B, M] int32
    max_new_tokens: jax.Array  # [B] int32


@flax.struct.dataclass
class TokenTree:
    """The proposals of one round. Node 0 is the pending token; nodes stand in topological order.

    tokens:      proposed token of each node.
    parents:     index of each node's parent, always smaller than its own; -1 at the root; -2 at auxiliary and padding
                 nodes, which are scored at most and never verified.
    depth:       distance from the root; a node's position is that of the pending token plus its depth.
    mask:        `mask[i, j]` lets node i attend to node j: itself and its ancestors.
    draft_probs: the law each node was really drawn from, after the same filters as the target's. Siblings drawn without
                 replacement carry their conditional law. None means deterministic proposals (a one-hot law).
    draft_ids:   target id of each entry of a reduced draft vocabulary; None when the draft speaks the target's.
    max_depth:   length of the longest path, in edges.
    """

    tokens: jax.Array  # [B, N] int32
    parents: jax.Array  # [B, N] int32
    depth: jax.Array  # [B, N] int32
    mask: jax.Array  # [B, N, N] bool
    draft_probs: jax.Array | None  # [B, N, Vd]
    draft_ids: jax.Array | None  # [Vd] int32
    max_depth: int = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class Verdict:
    """What the verifier decided.

    path:         nodes of the accepted path, the root first; places beyond `num_accepted` hold the last node again.
    num_accepted: accepted drafts, the root not counted.
    next_token:   the corrected token (after a rejection) or the bonus token (after full acceptance).
    """

    path: jax.Array  # [B, P] int32
    num_accepted: jax.Array  # [B] int32
    next_token: jax.Array  # [B] int32


@flax.struct.dataclass
class Acceptance:
    """Acceptance statistics per row, summed over rounds. `metrics.summarize` turns them into alpha and tau.

    rounds:    target calls that verified this row (prefill is none).
    histogram: rounds that accepted exactly a drafts, a = 0 .. P - 1.
    offered:   rounds that offered a draft at depth i + 1 (the token budget may cut a block short).
    tested:    rounds that tested one there: behind accepted drafts alone. What a stop id cuts off is not tested.
    drafted:   nodes offered, the root not counted.
    """

    rounds: jax.Array  # [B] int32
    histogram: jax.Array  # [B, P] int32
    offered: jax.Array  # [B, P - 1] int32
    tested: jax.Array  # [B, P - 1] int32
    drafted: jax.Array  # [B] int32


@flax.struct.dataclass
class DecodeOutput:
    """What `decode` returns.

    tokens:        prompt and new tokens; slots at `lengths` and beyond hold nothing.
    lengths:       valid tokens in each row.
    finish_reason: `decode.STOP` or `decode.LENGTH`.
    origin:        how each token came: one of `decode.ORIGINS`.
    acceptance:    statistics per row.
    """

    tokens: jax.Array  # [B, S] int32
    lengths: jax.Array  # [B] int32
    finish_reason: jax.Array  # [B] int32
    origin: jax.Array  # [B, S] int8
    acceptance: Acceptance


@dataclasses.dataclass(frozen=True)
class Provenance:
    """Where weights came from.

    reference: as the user wrote it.
    sha256:    of the file, or of the files in order; None for weights that never were a file.
    trained_for: of a draft, the sha256 of the target it was trained for; None if it does not say.
    """

    reference: str
    sha256: str | None = None
    trained_for: str | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
    """A model ready to be sped up.

    model:      parameters and config.
    tokenizer:  a `weights.tokenizer.Tokenizer`, or None for bare token ids.
    provenance: where it came from.
    stop_ids:   ids that end its answers (the checkpoint's end tokens).
    draft_ids:  of a draft model, the target's ids that it was trained to propose, `[Vd]`; None means all.
    """

    model: Any
    tokenizer: Any = None
    provenance: Provenance = Provenance("in memory")
    stop_ids: tuple[int, ...] = ()
    draft_ids: Any = None


@runtime_checkable
class Drafter(Protocol):
    """A drafting algorithm: a frozen dataclass whose fields are its settings and its config schema."""

    def build(self, target: Target) -> tuple[BoundDrafter, Any]:
        """Resolve what depends on the target and load the draft.

        Returns:
          The bound drafter, static and hashable, and the draft's parameters for `Params.draft`.

        Raises:
          ValueError: the settings, the draft and the target do not fit.
        """
        ...


@runtime_checkable
class BoundDrafter(Protocol):
    """A drafter that knows its target: frozen, hashable by value, with pure methods.

    num_nodes:      N, nodes of every tree it proposes, the root included.
    max_depth:      of those trees, in edges; P = max_depth + 1.
    proposes_chains: no node of them ever has two children.
    feature_layers: target features that `extend` and `Context` need.
    """

    num_nodes: int
    max_depth: int
    proposes_chains: bool
    feature_layers: FeatureLayers

    def init(self, params: Params, batch: int, capacity: int) -> Any:
        """State before the prompt, for `batch` rows of at most `capacity` tokens."""
        ...

    def extend(self, params: Params, state: Any, tokens: jax.Array, outputs: Outputs, valid: jax.Array) -> Any:
        """Take in newly committed tokens: prompt chunks and accepted paths alike.

        Args:
          params: target and draft.
          state: the drafter's.
          tokens: `[B, T]`, left-aligned.
          outputs: the target's view of them; `features` only, logits may cover fewer positions.
          valid: `[B, T]` bool, which are real.
        """
        ...

    def propose(
        self, params: Params, rng_keys: jax.Array, state: Any, context: Context, sampling: Sampling
    ) -> tuple[TokenTree, Any]:
        """Propose one tree per row, rooted at the pending token.

        Args:
          params: target and draft.
          rng_keys: `[B]`, one key per row.
          state: the drafter's.
          context: what is decided so far.
          sampling: each row's filters, to be applied to the draft's law too.
        """
        ...

    def update(
        self, params: Params, state: Any, context: Context, tree: TokenTree, outputs: Outputs, verdict: Verdict
    ) -> Any:
        """Learn from a round. `context` is the one `propose` saw. The default gathers the accepted path and extends."""
        ...


class TargetLaw(Protocol):
    """What the target says to one row, computed node by node when asked for.

    greedy: scalar bool, whether the row's temperature is 0.
    """

    @property
    def greedy(self) -> jax.Array: ...

    def __call__(self, node: jax.Array) -> jax.Array:
        """`[V]`, the filtered law of the token after a node."""
        ...

    def log_ratio(self, node: jax.Array) -> jax.Array:
        """`[V]`, log(p / max p) at temperature 1 without filters: how near each token comes to the argmax."""
        ...


@runtime_checkable
class Verifier(Protocol):
    """Decides, for one row, which drafts stand: a frozen dataclass with one pure method. The driver vmaps it.

    lossless:       the output law equals the target's.
    follows_argmax: at temperature 0 it decides what `verify.greedy_walk` does, which is then used instead.
    chains_only:    it cannot judge a node with several children.
    """

    lossless: bool
    follows_argmax: bool
    chains_only: bool

    def verify(self, rng_key: jax.Array, tree: TokenTree, target_law: TargetLaw) -> Verdict:
        """Walk one row's tree.

        Args:
          rng_key: consumed here.
          tree: one row, without the leading axis.
          target_law: the target's, for this row.
        """
        ...
