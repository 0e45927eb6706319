"""Tokens per target call, measured in the real decoding loop with drafts that stand by chance, beside the formula.

The verifier `synthetic` accepts each tested draft with probability alpha whatever model decodes, so that equation 1 of
Leviathan et al. (arXiv:2211.17192) must come out of the loop that serves every method: proposals, verification, commit
and counting included.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from jspec import decode, drafters, generation, metrics, theory, types, verify
from jspec import sampling as sampling_lib


@dataclasses.dataclass(frozen=True)
class Cell:
    """One measurement: acceptance rate and draft length."""

    alpha: float
    gamma: int

    def __post_init__(self):
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha {self.alpha} is outside [0, 1]")
        if self.gamma < 1:
            raise ValueError(f"gamma {self.gamma} is below 1")


@dataclasses.dataclass(frozen=True)
class MonteCarlo:
    """Settings.

    cells:      what to measure.
    rows:       answers decoded side by side.
    new_tokens: of each, prefill's first one included.
    tolerance:  relative difference from the formula at which the run fails.
    seed:       of the drawing.
    """

    cells: tuple[Cell, ...] = ()
    rows: int = 256
    new_tokens: int = 1024
    tolerance: float = 0.01
    seed: int = 0

    def __post_init__(self):
        generation.check_seed(self.seed)
        if self.rows < 2:
            raise ValueError(f"rows {self.rows} is below 2: the error is that of the mean over rows")
        if self.new_tokens < 2:
            raise ValueError(f"new_tokens {self.new_tokens} is below 2: the first belongs to no target call")
        if not self.tolerance > 0:
            raise ValueError(f"tolerance {self.tolerance} is not above 0")
        if len(set(self.cells)) < len(self.cells):
            raise ValueError(f"cells {self.cells}: one is named twice")


def measure(target: types.Target, cell: Cell, settings: MonteCarlo) -> dict[str, Any]:
    """Decode, count, compare.

    Args:
      target: any model that follows `new_tokens` + 1 positions and has no stop ids, which would end answers at random.
      cell, settings: what to do.

    Returns:
      alpha, gamma, target_calls, tau (tokens per target call), formula (`theory.expected_tokens`), difference (relative
      to it), exact (what is expected of answers this short, `theory.expected_calls`), standard_errors (of the mean
      calls per answer, by which measured and exact are apart).

    Raises:
      ValueError: the target has stop ids, or follows too few positions.
    """
    if target.stop_ids:
        raise ValueError(f"the target has stop ids {list(target.stop_ids)}, which would cut answers short at random")
    # What is drafted does not matter; drawing it from counts costs nothing.
    bound, draft = drafters.Unigram(gamma=cell.gamma).build(target, sequences=[range(target.model.config.vocab_size)])
    padded, lengths = generation.pad([[0]] * settings.rows)
    output = decode.decode(
        types.Params(target.model, draft),
        generation.row_keys(settings.seed, settings.rows),
        padded,
        lengths,
        drafter=bound,
        verifier=verify.Synthetic(cell.alpha),
        sampling=sampling_lib.make(settings.rows, max_new_tokens=settings.new_tokens),
        max_new_tokens=settings.new_tokens,
        capacity=settings.new_tokens + 1,
    )
    output = jax.device_get(output)
    summary = metrics.summarize(output.acceptance, output.lengths - lengths)
    calls = np.asarray(output.acceptance.rounds, float)  # by answer; answers are independent
    emitted = settings.new_tokens - 1
    expected_calls = theory.expected_calls(cell.alpha, cell.gamma, emitted)
    formula = theory.expected_tokens(cell.alpha, cell.gamma)
    error = calls.std(ddof=1) / np.sqrt(len(calls))
    apart = calls.mean() - expected_calls
    return {
        "alpha": cell.alpha,
        "gamma": cell.gamma,
        "target_calls": summary.target_calls,
        "tau": summary.tau,
        "formula": formula,
        "difference": summary.tau / formula - 1,
        "exact": emitted / expected_calls,
        "standard_errors": float(apart / error) if error > 0 else None,  # None: nothing was left to chance
    }
