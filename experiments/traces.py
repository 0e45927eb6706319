"""Traces: answers kept token by token, with how each token came (`decode.ORIGINS`), for the report to show.

A run folder's `traces.jsonl` has a line per answer. It is appended before the record of the answer's cell, so that a
finished cell has its traces; a cell that runs again after a kill writes them again, and the last ones count.

What Leviathan et al. (arXiv:2211.17192, figure 1) show as one line per round follows from the origins: every round but
the last ends in the one token that was no draft.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments import records, runner
from jspec import decode, files, types

FILE = "traces.jsonl"

# What ends a round: the token that the target gave itself.
ENDS = tuple(decode.ORIGINS[i] for i in (decode.PREFILL, decode.CORRECTED, decode.BONUS, decode.UNDRAFTED))


@dataclasses.dataclass(frozen=True)
class Trace:
    """One answer.

    cell:      keys and values that tell its record (`records.CELL_KEYS`).
    prompt_id: of the prompt, within its file.
    prompt:    the user's message.
    tokens:    new ids, the stop id included.
    texts:     characters that are complete with each; perhaps none.
    origins:   how each came, an entry of `decode.ORIGINS`.
    """

    cell: Mapping[str, Any]
    prompt_id: str
    prompt: str
    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    origins: tuple[str, ...]

    @property
    def key(self) -> tuple:
        """What it is an answer of."""
        return *(self.cell[key] for key in records.CELL_KEYS), self.prompt_id


def rounds(origins: Sequence[str]) -> list[int]:
    """The round of each token: 0 for prefill's, then 1, 2, ...

    A round ends behind the token that was no draft; one that a stop id ended inside its drafts ends the answer with it.
    """
    numbers, current = [], 0
    for origin in origins:
        numbers.append(current)
        current += origin in ENDS
    return numbers


def take(
    cell: Mapping[str, Any],
    target: types.Target,
    groups: Sequence[runner.Group],
    decoded: Sequence[runner.Decoded],
    count: int,
) -> list[Trace]:
    """The first `count` answers of a cell.

    Args:
      cell: keys and values of its record.
      target: for its tokenizer.
      groups: the cell's prompts.
      decoded: its answers, group by group.
      count: how many.
    """
    answers = []
    for group, run in zip(groups, decoded):
        for row, prompt in enumerate(group.prompts):
            if len(answers) == count:
                return answers
            new = slice(int(group.lengths[row]), int(run.output.lengths[row]))
            ids = run.output.tokens[row, new].tolist()
            origins = tuple(decode.ORIGINS[i] for i in run.output.origin[row, new])
            answers.append(Trace(cell, prompt.id, prompt.prompt, tuple(ids), _texts(target, ids), origins))
    return answers


def append(folder: pathlib.Path, traces: Iterable[Trace]) -> None:
    """Add traces to a run folder; they are on the disk when this returns. What a kill left half written goes.

    Raises:
      OSError: the file cannot be written.
    """
    lines = [json.dumps(dataclasses.asdict(trace)) + "\n" for trace in traces]
    if not lines:
        return
    path = folder / FILE
    with files.naming(path), open(path, "a+b") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write("".join(lines).encode())
        file.flush()
        os.fsync(file.fileno())


def read(folder: pathlib.Path) -> list[Trace]:
    """The traces of a run folder, each answer once; none where the file is missing.

    Raises:
      ValueError: a line, other than an unfinished last one, is no trace.
      OSError: the file cannot be read.
    """
    path = folder / FILE
    if not path.exists():
        return []
    found = {}
    *lines, _ = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            content = json.loads(line)
            if not isinstance(content, dict):
                raise ValueError("no object")
            trace = Trace(**{key: tuple(value) if isinstance(value, list) else value for key, value in content.items()})
            if not len(trace.tokens) == len(trace.texts) == len(trace.origins):
                raise ValueError("tokens, texts and origins differ in number")
            found[trace.key] = trace
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}, line {number}: not a trace; remove the line") from error
    return list(found.values())


def _texts(target: types.Target, ids: Sequence[int]) -> tuple[str, ...]:
    decoder = target.tokenizer.stream_decoder()
    texts = [decoder.push([token]) for token in ids]
    texts[-1] += decoder.finish()
    return tuple(texts)
