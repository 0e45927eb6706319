import json
import types as python_types

import numpy as np
import pytest

from experiments import settings, traces
from jspec import decode
from tests.experiments import run_folders

P, A, C, B, U = (decode.ORIGINS[i] for i in (1, 2, 3, 4, 5))


def test_a_round_ends_with_the_token_that_was_no_draft():
    origins = [P, A, A, B, C, A, C, U, A, A]
    assert traces.rounds(origins) == [0, 1, 1, 1, 2, 3, 3, 4, 5, 5]  # the last was ended by a stop id
    assert traces.rounds([P]) == [0]


def answers():
    """Two groups of one and two prompts: "ab", "c" and an unfinished character."""
    group = lambda *names: python_types.SimpleNamespace(
        prompts=tuple(python_types.SimpleNamespace(id=name, prompt=f"say {name}") for name in names),
        lengths=np.full(len(names), 2),
    )

    def run(*rows):
        tokens, origin = np.zeros((2, len(rows), 8), np.int32)
        for i, ids in enumerate(rows):
            tokens[i, 2 : 2 + len(ids)] = list(ids)
            origin[i, 2] = decode.PREFILL
            origin[i, 3 : 2 + len(ids)] = decode.BONUS
        lengths = np.array([2 + len(ids) for ids in rows])
        return python_types.SimpleNamespace(
            output=python_types.SimpleNamespace(tokens=tokens, origin=origin, lengths=lengths)
        )

    return [group("one"), group("two", "three")], [run(b"ab"), run(b"c", "é".encode()[:1])]


def test_the_first_answers_are_taken_with_their_texts_and_origins():
    target = python_types.SimpleNamespace(tokenizer=settings.ByteTokenizer())
    found = traces.take({"method": "m"}, target, *answers(), 2)
    assert [(t.prompt_id, t.tokens, t.texts, t.origins) for t in found] == [
        ("one", (97, 98), ("a", "b"), (P, B)),
        ("two", (99,), ("c",), (P,)),
    ]
    assert found[0].cell == {"method": "m"} and found[0].prompt == "say one"
    third = traces.take({}, target, *answers(), 9)[2]
    assert third.texts == ("\ufffd",)  # what never became a character is shown at the end
    assert traces.take({}, target, *answers(), 0) == []


@pytest.fixture
def kept(make_record):
    return run_folders.trace(make_record(), ["a", "b", "c"], [P, A, B])


def test_traces_come_back_as_they_were(tmp_path, kept, make_record):
    other = run_folders.trace(make_record(temperature=1.0), ["ä"], [P])
    traces.append(tmp_path, [kept, other])
    assert traces.read(tmp_path) == [kept, other]
    assert traces.read(tmp_path / "elsewhere") == []
    traces.append(tmp_path, [])
    assert len((tmp_path / traces.FILE).read_text().splitlines()) == 2


def test_a_cell_that_ran_again_is_there_once_and_half_a_line_goes(tmp_path, kept, make_record):
    traces.append(tmp_path, [kept])
    with open(tmp_path / traces.FILE, "a") as file:
        file.write('{"cell": {"method"')
    assert traces.read(tmp_path) == [kept]  # a reader repairs nothing
    assert (tmp_path / traces.FILE).read_text().endswith('"method"')
    again = run_folders.trace(make_record(), ["x"], [P])
    traces.append(tmp_path, [again])
    assert traces.read(tmp_path) == [again]
    assert len((tmp_path / traces.FILE).read_text().splitlines()) == 2


@pytest.mark.parametrize("damage", ['{"cell": 3}', "[]", '{"texts": 1'])
def test_a_damaged_line_is_named(tmp_path, kept, damage):
    (tmp_path / traces.FILE).write_text(damage + "\n")
    traces.append(tmp_path, [kept])
    with pytest.raises(ValueError, match=r"traces\.jsonl, line 1: not a trace"):
        traces.read(tmp_path)


def test_lists_of_unequal_length_are_damage(tmp_path, kept):
    traces.append(tmp_path, [kept])
    content = json.loads((tmp_path / traces.FILE).read_text())
    content["origins"].pop()
    (tmp_path / traces.FILE).write_text(json.dumps(content) + "\n")
    with pytest.raises(ValueError, match="line 1: not a trace"):
        traces.read(tmp_path)
