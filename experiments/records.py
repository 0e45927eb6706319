"""The record of one cell: one method on one task at one temperature. Its JSON keys are the field names below."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

# What tells the cells of one config apart.
CELL_KEYS = ("method", "target", "task", "temperature", "batch", "dtype", "seed")


@dataclasses.dataclass(frozen=True)
class Cost:
    """Milliseconds of each part, timed alone at the same length and batch.

    autoregressive_ms: one autoregressive step.
    verify_ms:         one target pass over all nodes of a round.
    draft_ms:          all of a round's drafting.
    c:                 one draft call over one target call; None for drafters without such calls.
    """

    autoregressive_ms: float
    verify_ms: float
    draft_ms: float
    c: float | None


@dataclasses.dataclass(frozen=True)
class GreedyCheck:
    """Comparison with autoregressive decoding, token by token, at temperature 0 in float32.

    prompts:   compared.
    equal:     identical.
    near_ties: others whose first difference has a top-two logit gap under 1e-3.
    """

    prompts: int
    equal: int
    near_ties: int


@dataclasses.dataclass(frozen=True)
class BeforeRepeat:
    """The figures of a record over the tokens before the first repeated 8-gram of each answer (`jspec.rounds`)."""

    new_tokens: int
    target_calls: int
    tau: float | None
    alpha: float | None
    acceptance_histogram: tuple[int, ...]
    acceptance_by_position: tuple[float | None, ...]
    offered: tuple[int, ...]
    tested: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Latency:
    """Milliseconds that half, nine tenths and all but a hundredth stay within; see `metrics.inter_token_latency`."""

    p50: float
    p90: float
    p99: float


@dataclasses.dataclass(frozen=True)
class Published:
    """The number a paper gives for this cell, and where. None where it gives none.

    table:  that the config is for.
    others: quantity -> the table that it stands in, where that is another one.
    """

    paper: str
    table: str
    row: str
    speedup: float | None = None
    tau: float | None = None
    alpha: float | None = None
    others: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def source(self, quantity: str) -> str:
        """The table in which a quantity stands."""
        return self.others.get(quantity, self.table)


@dataclasses.dataclass(frozen=True)
class Record:
    """One cell. Rates are defined in `jspec.metrics`; None means that there is nothing to measure.

    method:        the config's name for drafter and verifier together; `autoregressive` is the baseline.
    drafter, verifier: their kinds.
    target, draft: references; draft is None for drafters without weights of their own.
    new_tokens:    over all prompts, prefill's first tokens included; they are not counted in tau.
    target_calls:  verifying calls.
    acceptance_by_position: unconditional: accepted at depth i / rounds that offered a draft there.
    tokens_per_second: while decoding: tokens after each prompt's first over the seconds they took; prefill is apart.
    ttft_ms, tpot_ms: time to the first token, prefill that is; time per later token of a request, over all of them:
                   those of a batch wait side by side.
    speedup:       `metrics.Speedup.ratio_of_totals`; `speedup_ci` its interval over calls: prompts, or batches.
    versions:      of python and the libraries.

    What follows is missing in records of earlier versions:

    draft_sha256:  of the draft's weights file, None where it has none.
    offered, tested: target calls that offered, that tested a draft at depth 1, 2, ...
    before_repeat: the same figures over a part of the answers.
    tau_ci, alpha_ci: bootstrap intervals over prompts.
    mean_accepted: accepted drafts per target call; the corrected or bonus token is not one.
    conditional_acceptance_by_position: accepted at depth i / rounds that tested a draft there.
    inter_token_ms: time between deliveries; the rounds of one call are taken to be equally long
                    (`metrics.equal_gaps`).
    """

    method: str
    drafter: str
    verifier: str
    lossless: bool
    target: str
    draft: str | None
    task: str
    temperature: float
    batch: int
    num_prompts: int
    new_tokens: int
    target_calls: int
    tau: float | None
    alpha: float | None
    acceptance_histogram: tuple[int, ...]
    acceptance_by_position: tuple[float | None, ...]
    tokens_per_second: float
    ttft_ms: float
    tpot_ms: float | None
    speedup: float | None
    speedup_ci: tuple[float, float] | None
    expected_speedup: float | None
    cost: Cost | None
    greedy_check: GreedyCheck | None
    published: Published | None
    device: str
    dtype: str
    versions: Mapping[str, str]
    seed: int
    config_hash: str
    draft_sha256: str | None = None
    offered: tuple[int, ...] | None = None
    tested: tuple[int, ...] | None = None
    before_repeat: BeforeRepeat | None = None
    tau_ci: tuple[float, float] | None = None
    alpha_ci: tuple[float, float] | None = None
    mean_accepted: float | None = None
    conditional_acceptance_by_position: tuple[float | None, ...] = ()
    inter_token_ms: Latency | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data for `json.dumps`; NaN, which JSON does not have, becomes None."""
        content = plain(dataclasses.asdict(self))
        for name in ("speedup_ci", "tau_ci", "alpha_ci"):
            if content[name] is not None and None in content[name]:
                content[name] = None
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Record:
        """The record that `to_json` wrote.

        Raises:
          ValueError: a key is missing or unknown.
        """
        return _build(cls, content, "record")


_NESTED = {"cost": Cost, "greedy_check": GreedyCheck, "published": Published}
_NESTED |= {"before_repeat": BeforeRepeat, "inter_token_ms": Latency}


def plain(value: Any) -> Any:
    """Data for `json.dumps`: tuples as lists, and None for what JSON does not have (NaN, infinities)."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _build(cls: type, content: Mapping[str, Any], name: str) -> Any:
    fields = {field.name: field for field in dataclasses.fields(cls)}
    needed = {
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    missing, unknown = sorted(needed - content.keys()), sorted(content.keys() - fields.keys())
    if missing or unknown:
        raise ValueError(f"{name}: missing keys {missing}, unknown keys {unknown}")
    values = {}
    for key, value in content.items():
        if key in _NESTED and cls is Record and value is not None:
            value = _build(_NESTED[key], value, f"{name}.{key}")
        values[key] = tuple(value) if isinstance(value, list) else value
    return cls(**values)
