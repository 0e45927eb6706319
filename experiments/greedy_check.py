"""Is the text of a lossless method that of autoregressive decoding? Compared token by token, at temperature 0."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from experiments import cli, records
from jspec import cache as kv
from jspec import generation, types
from jspec.models import transformer

# Two ways to sum the same products differ in the last bits, so a token may flip where the two best logits nearly tie.
NEAR_TIE_GAP = 1e-3
MAX_NEAR_TIES = 1 / 30  # of the prompts


class OutputsDiffer(cli.RunFailed):
    """A method that is said to be lossless changed the text."""


def compare(target: types.Target, groups: Sequence, own: Sequence, baseline: Sequence) -> records.GreedyCheck:
    """Compare a method's answers with the baseline's.

    Args:
      target: the model, to look at the logits where a difference begins.
      groups: the prompts; `lengths` of each row.
      own: what the method decoded, group by group.
      baseline: what autoregressive decoding did.

    Raises:
      OutputsDiffer: an answer differs, and not at a near-tie.
    """
    prompts = equal = near_ties = 0
    for group, mine, theirs in zip(groups, own, baseline):
        for row, prompt in enumerate(group.prompts):
            prompts += 1
            first, second = (run.output.tokens[row, : run.output.lengths[row]] for run in (mine, theirs))
            shared = min(len(first), len(second))
            differs = np.flatnonzero(first[:shared] != second[:shared])
            if not len(differs) and len(first) == len(second):
                equal += 1
                continue
            place = int(differs[0]) if len(differs) else shared
            gap = gap_below_best(target, second[:place], [first[place], second[place]]) if len(differs) else np.inf
            if gap >= NEAR_TIE_GAP:
                start = place - int(group.lengths[row])
                raise OutputsDiffer(
                    f"prompt {prompt.id}: the greedy answer differs from autoregressive decoding from token {start} on "
                    f"(logits {gap:.3g} below the best; a near-tie is under {NEAR_TIE_GAP:g})"
                )
            near_ties += 1
    return records.GreedyCheck(prompts, equal, near_ties)


def gap_below_best(target: types.Target, tokens: np.ndarray, candidates: Sequence[int]) -> float:
    """How far the worst of `candidates` is below the best logit after `tokens`."""
    padded, length = generation.pad([tokens])
    logits = np.asarray(_last_logits(target.model, jnp.asarray(padded), jnp.asarray(length)))
    return float(logits.max() - logits[np.asarray(candidates)].min())


@jax.jit
def _last_logits(model: transformer.Model, tokens: jax.Array, length: jax.Array) -> jax.Array:
    order = jnp.arange(tokens.shape[1])
    outputs, _ = transformer.forward(
        model,
        tokens,
        order[None],
        kv.init(model.config, 1, 1, model.dtype),
        (order[:, None] >= order)[None],
        logits_at=length[:, None] - 1,
    )
    return outputs.logits[0, 0]


def limit_near_ties(results: Sequence[records.Record]) -> None:
    """Fail a run with more near-ties than noise makes.

    Raises:
      OutputsDiffer: a method has more near-ties than one prompt in 30; a single one is always let pass.
    """
    for name in dict.fromkeys(record.method for record in results):
        checks = [record.greedy_check for record in results if record.method == name and record.greedy_check]
        prompts, near_ties = (sum(getattr(check, key) for check in checks) for key in ("prompts", "near_ties"))
        if near_ties > max(1, prompts * MAX_NEAR_TIES):
            raise OutputsDiffer(f"{name}: {near_ties} near-ties in {prompts} greedy answers; at most 1 in 30 is noise")
