"""Run folders made by hand, for the tests of the report."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import records, traces

CONFIG = {"prompts": {"file": "some/where/question.jsonl", "per_task": 2}, "max_new_tokens": 64}
PUBLISHED = records.Published("leviathan2023", "table2", "T5-base", speedup=2.8, alpha=0.8)
PAPER = {
    "name": "eagle2_2024",
    "table": "table1",
    "target": "Vicuna 7B",
    "tasks": {"chat": "MT-bench", "code": "HumanEval", "overall": "Mean"},
    "rows": {"eagle 2": [{"row": {"method": "EAGLE-2"}}]},
}
VERSIONS = {"python": "3.11.7", "jspec": "0.3.0", "jax": "0.10.2", "commit": "0123456789ab"}


def write(
    folder: pathlib.Path,
    results: Sequence[records.Record],
    kept: Sequence[traces.Trace] = (),
    config: Mapping[str, Any] = CONFIG,
) -> pathlib.Path:
    """A run folder of these cells."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    environment = {"config_hash": "0123456789", "versions": VERSIONS, "device": "cpu", "platform": "cpu"}
    (folder / "environment.json").write_text(json.dumps(environment))
    (folder / "results.jsonl").write_text("".join(json.dumps(record.to_json()) + "\n" for record in results))
    traces.append(folder, kept)
    return folder


def pair(make_record, **changes) -> list[records.Record]:
    """A method's cell and the baseline's beside it: 26 ms a step, alone 25; 38 ms a round, alone 30 + 8."""
    shared = {key: changes[key] for key in ("task", "temperature", "batch") if key in changes}
    cost = records.Cost(autoregressive_ms=25.0, verify_ms=30.0, draft_ms=8.0, c=0.1)
    nothing = dict.fromkeys(("draft", "alpha", "speedup_ci", "greedy_check", "published", "before_repeat"))
    nothing |= dict.fromkeys(("acceptance_by_position", "offered", "tested"), ())
    speed = dict(tau=1.0, tokens_per_second=1000 / 26, tpot_ms=26.0, speedup=1.0, expected_speedup=1.0)
    kind = dict(method="autoregressive", drafter="autoregressive", acceptance_histogram=(50,), new_tokens=52)
    baseline = make_record(**kind, **nothing, **speed, cost=cost, **shared)
    values = dict(tau=2.0, tpot_ms=19.0, tokens_per_second=1000 / 19, speedup=26 / 19, expected_speedup=50 / 38)
    method = make_record(**{"published": None, "cost": cost, **values, **changes})
    return [baseline, method]


def trace(record: records.Record, texts: Sequence[str], origins: Sequence[str], prompt: str = "Why?") -> traces.Trace:
    """An answer of the record's cell."""
    cell = {key: getattr(record, key) for key in records.CELL_KEYS}
    return traces.Trace(cell, "chat/1", prompt, tuple(range(len(texts))), tuple(texts), tuple(origins))


def full(folder: pathlib.Path, make_record) -> pathlib.Path:
    """Two tasks, two temperatures, two methods, one beside a paper's row, and an answer of each at T = 0."""
    results = []
    for temperature in (0.0, 1.0):
        for task in ("chat", "code"):
            place = dict(task=task, temperature=temperature)
            results += pair(make_record, **place, published=PUBLISHED, tpot_ms=38.0, speedup=26 / 38)
            results += pair(make_record, **place, method="<b>")[1:]
    origins = ["prefill", "accepted", "corrected", "bonus"]
    answers = zip(results[1:3], (["Be", "cause", "</script>", "\n"], ["No", "\x00", "", "!"]))
    return write(folder, results, [trace(record, texts, origins, "Why <i>?") for record, texts in answers])


def crowded(folder: pathlib.Path, make_record) -> pathlib.Path:
    """More methods than colours, with long names, beside one another at two temperatures."""
    names = ["standard", "lookahead", "eagle 2, small tree", "typical acceptance of a static tree"]
    names += [f"block verification of a chain, gamma {gamma}" for gamma in range(1, 10)]
    results = []
    for temperature in (0.0, 1.0):
        for i, name in enumerate(names):
            place = dict(task="question_answering", temperature=temperature, tpot_ms=19.0 + i, speedup=26 / (19 + i))
            results += pair(make_record, method=name, **place)[bool(i) :]
    return write(folder, results)


def joined(folder: pathlib.Path, *results: Sequence[records.Record], **kwargs) -> pathlib.Path:
    """A run folder of several groups of cells."""
    return write(folder, [record for group in results for record in group], **kwargs)


def markdown_rows(text: str) -> list[list[str]]:
    """The cells of all tables in a text, row by row."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
