"""Prompt sets: JSONL files of one prompt a line, recognised by their keys.

    ours          id, task, prompt, optional system
    Spec-Bench    question_id, category, turns    the first turn; MT-bench's eight categories are one task, `multi_turn`
    HumanEval     task_id, prompt                 task `code`
    GSM8K         question, answer                task `maths`
    seed tasks    id, instruction, instances      the instruction and its first input; task `instructions`

Two sets come with the project. `package:builtin` is for measuring: five prompts for each of six tasks.
`package:training` is for making training text: 442 prompts of five kinds, none of them in the other set or in
Spec-Bench.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from jspec import config

PACKAGED = "package:"
BUILTIN = f"{PACKAGED}builtin"
_FOLDER = pathlib.Path(__file__).parent / "prompts"

# The categories that Spec-Bench took over from MT-bench; it reports them as one subtask.
_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt.

    id:     unique within its file.
    task:   what results are grouped by.
    prompt: the user's message.
    system: the system message, if there is one.
    """

    id: str
    task: str
    prompt: str
    system: str | None = None


Order = Literal["file", "hashed"]


def load_prompts(
    path: str | pathlib.Path | None = None,
    tasks: Sequence[str] | None = None,
    per_task: int | None = None,
    choose: Order = "file",
) -> tuple[Prompt, ...]:
    """Read a prompt set.

    Args:
      path: a JSONL file, or `package:` and the name of a set that comes with the project; None means `package:builtin`.
      tasks: keep these only; None keeps all.
      per_task: keep the first so many of each task; None keeps all.
      choose: which come first: `file`, as they stand there; or `hashed`, tasks as they stand there and each one's
        prompts by the sha256 of their ids, which draws a subset of a set whose order means something.

    Raises:
      ValueError: a line that is no prompt (file and line number), an id used twice, an unknown task (with the nearest
        one), `per_task` below 1, or nothing to read.
      OSError: the file cannot be read.
    """
    path = _locate(BUILTIN if path is None else path)
    prompts = _read(path)
    known = list(dict.fromkeys(prompt.task for prompt in prompts))
    for task in known if tasks is None else tasks:
        if task not in known:
            raise ValueError(f"{path}: no task {task!r}; {config.nearest(task, known)}")
    if tasks is not None and not tasks:
        raise ValueError(f"{path}: the list of tasks is empty; known: {', '.join(sorted(known))}")
    if choose == "hashed":
        place = {task: index for index, task in enumerate(known)}
        prompts.sort(key=lambda prompt: (place[prompt.task], hashlib.sha256(prompt.id.encode()).digest()))
    return first_of_each([prompt for prompt in prompts if tasks is None or prompt.task in tasks], per_task)


def first_of_each(prompts: Sequence[Prompt], per_task: int | None) -> tuple[Prompt, ...]:
    """The first so many prompts of each task, in their order; None keeps all.

    Raises:
      ValueError: `per_task` is below 1.
    """
    if per_task is not None and per_task < 1:
        raise ValueError(f"per_task {per_task} is below 1")
    seen: dict[str, int] = {}
    chosen = []
    for prompt in prompts:
        seen[prompt.task] = seen.get(prompt.task, 0) + 1
        if per_task is None or seen[prompt.task] <= per_task:
            chosen.append(prompt)
    return tuple(chosen)


def _locate(path: str | pathlib.Path) -> pathlib.Path:
    if not str(path).startswith(PACKAGED):
        return pathlib.Path(path)
    name = str(path).removeprefix(PACKAGED)
    known = sorted(file.stem for file in _FOLDER.glob("*.jsonl"))
    if name not in known:
        raise ValueError(f"no set {name!r} comes with the project; {config.nearest(name, known)}")
    return _FOLDER / f"{name}.jsonl"


def _read(path: pathlib.Path) -> list[Prompt]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a UTF-8 text file") from error
    prompts: list[Prompt] = []
    first_use: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompt = _parse(line, number)
            if prompt.id in first_use:
                raise ValueError(f"id {prompt.id!r} was used in line {first_use[prompt.id]}")
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        first_use[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{path}: no prompts")
    return prompts


def _parse(line: str, number: int) -> Prompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, got a {type(record).__name__}")
    for keys, read in _FORMATS:
        if keys <= record.keys():
            prompt = read(record, number)
            for name in ("id", "task", "prompt"):
                value = getattr(prompt, name)
                if not isinstance(value, str) or not value.strip():
                    raise ValueError(f"the {name} is empty or no text")
            return prompt
    raise ValueError(f"unknown format with keys {', '.join(record) or 'none'}; expected id, task and prompt")


def _ours(record: Mapping[str, Any], number: int) -> Prompt:
    del number
    names = [field.name for field in dataclasses.fields(Prompt)]
    for key in record:
        if key not in names:  # a misspelt `system` would otherwise be dropped in silence
            raise ValueError(f"unknown key {key!r}; {config.nearest(key, names)}")
    system = record.get("system")
    if system is not None and not isinstance(system, str):
        raise ValueError("the system message is no text")
    return Prompt(record["id"], record["task"], record["prompt"], system)


def _spec_bench(record: Mapping[str, Any], number: int) -> Prompt:
    del number
    turns, category = record["turns"], record["category"]
    if not isinstance(turns, list) or not turns:
        raise ValueError("turns holds no turn")
    return Prompt(str(record["question_id"]), "multi_turn" if category in _MT_BENCH else category, turns[0])


def _human_eval(record: Mapping[str, Any], number: int) -> Prompt:
    del number
    return Prompt(record["task_id"], "code", record["prompt"])


def _gsm8k(record: Mapping[str, Any], number: int) -> Prompt:
    return Prompt(f"maths/{number}", "maths", record["question"])  # the file has no ids


def _seed_task(record: Mapping[str, Any], number: int) -> Prompt:
    del number
    instances = record["instances"]
    if not isinstance(instances, list) or not all(isinstance(instance, dict) for instance in instances):
        raise ValueError("instances is no list of objects")
    given = instances[0].get("input", "") if instances else ""
    return Prompt(record["id"], "instructions", f"{record['instruction']}\n\n{given}".strip())


# Tried in this order: the first whose keys are all there.
_FORMATS: tuple[tuple[set[str], Callable[[Mapping[str, Any], int], Prompt]], ...] = (
    ({"id", "task", "prompt"}, _ours),
    ({"question_id", "category", "turns"}, _spec_bench),
    ({"task_id", "prompt"}, _human_eval),
    ({"id", "instruction", "instances"}, _seed_task),
    ({"question", "answer"}, _gsm8k),
)
