import collections
import hashlib
import json

import pytest

from experiments import prompt_sets, settings
from jspec import types

TASKS = ("chat", "translation", "summarisation", "question_answering", "maths", "code")


def write(tmp_path, *lines):
    path = tmp_path / "set.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def ours(name, task="chat", **more):
    return {"id": name, "task": task, "prompt": f"Say {name}.", **more}


def error(path, **settings):
    with pytest.raises(ValueError) as caught:
        prompt_sets.load_prompts(path, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_projects_own_set():
    prompts = prompt_sets.load_prompts()
    assert collections.Counter(prompt.task for prompt in prompts) == dict.fromkeys(TASKS, 5)
    assert len({prompt.id for prompt in prompts}) == len({prompt.prompt for prompt in prompts}) == 30
    assert any(prompt.system for prompt in prompts)
    for prompt in prompts:
        if prompt.task in ("summarisation", "question_answering"):
            passage = max(prompt.prompt.split("\n\n"), key=len)
            assert 60 <= len(passage.split()) <= 180, prompt.id
        assert prompt.prompt == prompt.prompt.strip() and len(prompt.prompt.split()) <= 200, prompt.id


def test_tasks_and_per_task_choose_in_the_order_of_the_file():
    prompts = prompt_sets.load_prompts(tasks=["code", "chat"], per_task=2)
    assert [prompt.id for prompt in prompts] == ["chat/1", "chat/2", "code/1", "code/2"]
    assert len(prompt_sets.load_prompts(per_task=9)) == 30


def test_our_format(tmp_path):
    path = write(tmp_path, ours("a", system="Be brief."), "", ours("b", "maths"))
    assert prompt_sets.load_prompts(path) == (
        prompt_sets.Prompt("a", "chat", "Say a.", "Be brief."),
        prompt_sets.Prompt("b", "maths", "Say b."),
    )


def test_spec_bench_format_has_six_subtasks(tmp_path):
    categories = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
    categories += ("translation", "summarization", "qa", "math_reasoning", "rag")
    lines = [
        {"question_id": 81 + i, "category": category, "turns": [f"first {i}", "second"], "reference": []}
        for i, category in enumerate(categories)
    ]
    prompts = prompt_sets.load_prompts(write(tmp_path, *lines))
    tasks = [prompt.task for prompt in prompts]
    assert tasks == ["multi_turn"] * 8 + ["translation", "summarization", "qa", "math_reasoning", "rag"]
    assert prompts[1] == prompt_sets.Prompt("82", "multi_turn", "first 1")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            {"task_id": "HumanEval/0", "prompt": "def f(x):\n", "canonical_solution": "    return x", "test": ""},
            ("HumanEval/0", "code", "def f(x):\n"),
        ),
        ({"question": "2 + 2?", "answer": "#### 4"}, ("maths/1", "maths", "2 + 2?")),
        (
            {"id": "s0", "name": "n", "instruction": "Sort.", "instances": [{"input": "b a", "output": "a b"}]},
            ("s0", "instructions", "Sort.\n\nb a"),
        ),
        (
            {"id": "s1", "instruction": "Say hi.", "instances": [{"input": "", "output": "hi"}]},
            ("s1", "instructions", "Say hi."),
        ),
    ],
)
def test_other_formats_are_known_by_their_keys(tmp_path, line, expected):
    assert prompt_sets.load_prompts(write(tmp_path, line)) == (prompt_sets.Prompt(*expected),)


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(tmp_path):
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(json.dumps(ours(name)).encode() for name in "ab") + b"\r\n")
    assert [prompt.id for prompt in prompt_sets.load_prompts(path)] == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "b", "task"', "not valid JSON: Expecting ':' delimiter at column"),
        ("[1, 2]", "expected a JSON object, got a list"),
        ({"text": "hello"}, "unknown format with keys text; expected id, task and prompt"),
        ({}, "unknown format with keys none"),
        (ours("b", sytem="Be brief."), "unknown key 'sytem'; did you mean 'system'?"),
        (ours("b", system=3), "the system message is no text"),
        ({"id": "b", "task": "chat", "prompt": " "}, "the prompt is empty or no text"),
        ({"id": 3, "task": "chat", "prompt": "x"}, "the id is empty or no text"),
        ({"id": "b", "task": None, "prompt": "x"}, "the task is empty or no text"),
        (ours("a"), "id 'a' was used in line 1"),
        ({"question_id": 1, "category": "qa", "turns": []}, "turns holds no turn"),
        ({"question_id": 1, "category": ["qa"], "turns": ["x"]}, "the task is empty or no text"),
        ({"id": "b", "instruction": "x", "instances": "y"}, "instances is no list of objects"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    path = write(tmp_path, ours("a"), "", line)
    assert error(path).startswith(f"{path}, line 3: {message}")


def test_bad_choices(tmp_path):
    path = write(tmp_path, ours("a"), ours("b", "maths"))
    assert error(path, tasks=["math"]) == f"{path}: no task 'math'; did you mean 'maths'?"
    assert error(path, tasks=["zzz"]) == f"{path}: no task 'zzz'; known: chat, maths"
    assert error(path, tasks=[]) == f"{path}: the list of tasks is empty; known: chat, maths"
    assert error(path, per_task=0) == "per_task 0 is below 1"


def test_files_that_hold_nothing(tmp_path):
    assert error(write(tmp_path, "", "  ")).endswith("set.jsonl: no prompts")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    assert error(tmp_path / "binary.jsonl").endswith("binary.jsonl: not a UTF-8 text file")
    with pytest.raises(FileNotFoundError, match="missing.jsonl"):
        prompt_sets.load_prompts(tmp_path / "missing.jsonl")


def test_hashed_order_is_that_of_the_ids_digests_within_each_task(tmp_path):
    """Against the digests, worked out here; tasks stay in the order of the file, and the file's order means nothing."""
    names = [f"q/{number}" for number in range(12)]
    lines = [ours(name, ("chat", "maths")[number % 2]) for number, name in enumerate(names)]
    path = write(tmp_path, *lines)
    chosen = prompt_sets.load_prompts(path, choose="hashed", per_task=3)
    by_digest = lambda group: sorted(group, key=lambda name: hashlib.sha256(name.encode()).hexdigest())[:3]
    expected = by_digest(names[::2]) + by_digest(names[1::2])
    assert [prompt.id for prompt in chosen] == expected and expected != names[:6:2] + names[1:7:2]
    again = prompt_sets.load_prompts(write(tmp_path, *lines[::-1]), choose="hashed", per_task=3)
    assert {prompt.id for prompt in again} == set(expected)
    assert [prompt.task for prompt in again] == ["maths"] * 3 + ["chat"] * 3


class Letters:
    """A token a letter."""

    def encode(self, text):
        return list(text.encode())


def test_long_prompts_are_skipped_and_the_next_ones_taken(tmp_path):
    lengths = {"a": 5, "b": 9, "c": 10, "d": 3, "e": 11, "f": 12, "g": 2}
    tasks = dict(zip("abcdefg", ("x", "x", "x", "x", "y", "y", "y")))
    lines = [{"id": name, "task": tasks[name], "prompt": "." * size} for name, size in lengths.items()]
    prompts = prompt_sets.load_prompts(write(tmp_path, *lines))
    target = types.Target(None, Letters())

    def choose(**changes):
        return settings.choose_prompts(target, prompts, settings.PromptSubset(chat=False, **changes))

    found = choose(per_task=3, max_tokens=9)
    assert [prompt.id for prompt in found.prompts] == ["a", "b", "d", "g"]
    assert found.skipped == {"x": 1, "y": 2}
    assert [len(ids) for ids in found.encoded.values()] == [5, 9, 3, 2]
    assert found.to_json() == {"ids": {"x": ["a", "b", "d"], "y": ["g"]}, "skipped": {"x": 1, "y": 2}}
    assert found.describe() == "4 prompts (x 3, y 1); 3 longer ones skipped (x 1, y 2)"
    # What is not looked at is not counted.
    assert choose(per_task=2, max_tokens=9).skipped == {"y": 2}
    assert choose(per_task=1).skipped == {} and choose().describe() == "7 prompts (x 4, y 3)"
    with pytest.raises(ValueError, match="all of task 'y' have more than max_tokens 1 tokens|all of task 'x'"):
        choose(max_tokens=1)
    with pytest.raises(ValueError, match="max_tokens 0 is below 1"):
        settings.PromptSubset(max_tokens=0)
