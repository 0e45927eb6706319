"""Samples on disk and in rows: nothing is lost, nothing doubled, labels stand where the text says."""

from __future__ import annotations

import dataclasses
import json
import os

import numpy as np
import pytest

from jspec import folder_lock, types
from jspec.training import data
from tests import folder_locks, tiny
from tests import training_samples as make

SAMPLES = make.cycles(10, 16)


@pytest.fixture(scope="module")
def origin():
    return data.Origin.of(tiny.random_target(), "settings")


def _same(found, expected):
    assert [sample.number for sample in found] == [sample.number for sample in expected]
    for one, other in zip(found, expected):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.roles, other.roles)


# Labels.


def test_label_pairs_of_seven_tokens_equal_a_double_loop():
    rows = ([make.sample(0, [1, 2], [3, 4, 5]), make.sample(1, [6], [7])], [make.sample(2, [1, 2, 3], [4, 5])])
    batch = make.batch(*rows, length=7)
    places = np.asarray(batch.places)
    for ahead in (1, 2, 3):
        expected = []
        for row, members in enumerate(rows):
            texts = [(member, i) for member in members for i in range(len(member.tokens))]
            answers = lambda t, member: t < len(texts) and texts[t][0] is member and member.roles[texts[t][1]]
            for t, (member, _) in enumerate(texts):
                if answers(t + 1, member) and answers(t + ahead, member):
                    expected.append((row, t, int(batch.tokens[row, t + ahead])))
        there = np.asarray(batch.labelled(ahead))
        labels = np.asarray(data.shift(batch.next_tokens, ahead - 1))
        assert [(row, places[row, n], labels[row, n]) for row, n in zip(*np.nonzero(there))] == expected


def test_places_beyond_the_count_are_left_out():
    batch = make.batch([make.sample(0, [1, 2], [3, 4, 5])], length=7)
    found = data.places(np.asarray(batch.segments), np.asarray(batch.answer), 2)
    assert found.tolist() == [[1, 2]]
    assert batch.places.tolist() == [[1, 2, 3, 7, 7, 7, 7]]


def test_a_token_sees_earlier_tokens_of_its_own_sample():
    batch = make.batch([make.sample(0, [1], [2, 3]), make.sample(1, [4], [5])], length=6)
    expected = np.zeros((6, 6), bool)
    for start, end in ((0, 3), (3, 5), (5, 6)):
        expected[start:end, start:end] = np.tril(np.ones((end - start,) * 2, bool))
    np.testing.assert_array_equal(batch.causal[0], expected)


# Rows.


def test_packing_keeps_every_token():
    chosen = [make.sample(i, [i], range(i % 5 + 3)) for i in range(20)]
    rows = data.Rows(chosen, 16, shortest=2)
    packed = rows.take(np.arange(len(rows)))
    assert rows.num_answer_tokens == sum(int(sample.roles.sum()) for sample in chosen)
    found = []
    for tokens, segments, positions in zip(*map(np.asarray, (packed.tokens, packed.segments, packed.positions))):
        for segment in range(segments.max() + 1):
            inside = segments == segment
            found.append(tuple(tokens[inside]))
            np.testing.assert_array_equal(positions[inside], np.arange(inside.sum()))
    assert sorted(found) == sorted(tuple(sample.tokens) for sample in chosen)


def test_an_epoch_is_a_permutation_and_the_step_alone_decides_the_batch():
    rows = data.Rows(make.cycles(30, 16), 14, shortest=2)
    assert len(rows) == 30
    steps = [rows.at_step(step, 4, seed=3) for step in range(15)]
    drawn = np.concatenate(steps)
    for epoch in range(2):
        assert sorted(drawn[30 * epoch : 30 * epoch + 30]) == list(range(30))
    assert list(drawn[:30]) != list(drawn[30:])
    np.testing.assert_array_equal(data.Rows(make.cycles(30, 16), 14, shortest=2).at_step(9, 4, seed=3), steps[9])
    assert list(rows.at_step(9, 4, seed=4)) != list(steps[9])


def test_an_empty_row_has_no_label():
    rows = data.Rows(SAMPLES, 14, shortest=2)
    *_, last = rows.in_turn(4)
    assert list(last) == [8, 9, -1, -1]
    batch = rows.take(last)
    assert not batch.labelled(1)[2:].any() and (batch.segments[2:] == -1).all()


def test_long_samples_are_cut_and_useless_ones_left_out():
    rows = data.Rows([make.sample(0, [1], range(30)), make.sample(1, [1] * 9, [2])], 10, shortest=2)
    assert len(rows) == 1 and rows.num_answer_tokens == 9


def test_rows_hold_no_more_answer_tokens_than_they_may():
    """Every answer token is one of at most N places; what a sample has beyond them is cut off."""
    chosen = [make.sample(i, [i], range(i % 5 + 3)) for i in range(20)] + [make.sample(20, [1, 2], range(12))]
    rows = data.Rows(chosen, 24, shortest=2, answers=9)
    batch = rows.take(np.arange(len(rows)))
    assert batch.places.shape == (len(rows), 9)
    assert (np.asarray(batch.answer).sum(axis=1) <= 9).all()
    # No answer begins a row, so each of its tokens has a place before it.
    assert int((batch.places < 24).sum()) == rows.num_answer_tokens == sum(min(9, s.roles.sum()) for s in chosen)


@pytest.mark.parametrize(
    "length, samples, message",
    [(2, SAMPLES, "length 2 is too short"), (8, [make.sample(0, [1] * 7, [2, 3])], "none of 1 samples")],
)
def test_rows_too_short(length, samples, message):
    with pytest.raises(ValueError, match=message):
        data.Rows(samples, length, shortest=2)


# Held-out sets.


def test_equal_prompts_are_on_one_side():
    train, held_out = data.split(make.cycles(300, 16), 0.3)
    assert {s.key for s in train}.isdisjoint(s.key for s in held_out)
    assert len(train) + len(held_out) == 300
    data.check_disjoint(train, held_out)


def test_an_overlapping_held_out_set_is_refused():
    train, held_out = [make.sample(0, [1, 2], [3])], [make.sample(5, [1], [2]), make.sample(7, [1, 2], [9, 9])]
    with pytest.raises(ValueError, match="its sample 7 has the prompt of training sample 0"):
        data.check_disjoint(train, held_out)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_split_with_an_empty_side_is_refused(share):
    with pytest.raises(ValueError, match="leaves no"):
        data.split(SAMPLES, share)


# Folders.


def test_round_trip_in_any_order(tmp_path, origin):
    writer = data.open_writer(tmp_path / "data", origin, shard_size=4)
    for number in (3, 0, 9, 1, 2, 8, 5, 4, 7, 6):
        writer.add([SAMPLES[number]])
    assert sorted(path.name for path in (tmp_path / "data").glob("shard-*")) == ["shard-00000.npz", "shard-00001.npz"]
    _same(data.read(tmp_path / "data", tiny.random_target()), SAMPLES)  # two of them still in the journal
    writer.close()
    _same(data.read(tmp_path / "data", tiny.random_target()), SAMPLES)
    assert (tmp_path / "data" / "journal.jsonl").read_text() == ""
    with np.load(tmp_path / "data" / "shard-00000.npz") as shard:
        assert shard["tokens"].dtype == np.uint16


def test_what_was_added_survives_a_kill_and_is_not_doubled(tmp_path, origin):
    folder = tmp_path / "data"
    data.open_writer(folder, origin, shard_size=4).add(SAMPLES[:6])
    with open(folder / "journal.jsonl", "a") as file:
        file.write(json.dumps({"number": 6, "tokens": [1, 2]})[:-3])  # a line cut off
    writer = data.open_writer(folder, origin, shard_size=4)
    assert writer.finished == set(range(6))
    writer.add(SAMPLES)
    writer.close()
    whole = data.open_writer(tmp_path / "whole", origin, shard_size=4)
    whole.add(SAMPLES)
    whole.close()
    for path in sorted((tmp_path / "whole").iterdir()):
        assert (folder / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_closed_folder_grows(tmp_path, origin):
    folder = tmp_path / "data"
    writer = data.open_writer(folder, origin, shard_size=4)
    writer.add(SAMPLES[:6])
    writer.close()
    writer = data.open_writer(folder, origin, shard_size=4)
    writer.add(SAMPLES[6:])
    writer.close()
    _same(data.read(folder, tiny.random_target()), SAMPLES)
    with np.load(folder / "shard-00001.npz") as shard:
        assert list(shard["numbers"]) == [4, 5, 6, 7]


def test_samples_of_another_target_are_refused(tmp_path, origin):
    writer = data.open_writer(tmp_path / "data", origin)
    writer.add(SAMPLES)
    writer.close()
    with pytest.raises(ValueError, match="a draft learns to imitate one target"):
        data.read(tmp_path / "data", tiny.noisy_twin())
    other = dataclasses.replace(tiny.random_target(), provenance=types.Provenance("x", "0" * 64))
    with pytest.raises(ValueError, match="not by x .sha256 000"):
        data.read(tmp_path / "data", other)
    with pytest.raises(ValueError, match="token ids"):
        data.read(tmp_path / "data", tiny.bigram(tiny.successor()))
    with pytest.raises(ValueError, match="made with made_by 'settings', not 'others'"):
        data.open_writer(tmp_path / "data", dataclasses.replace(origin, made_by="others"))


def test_folders_that_hold_something_else_are_refused(tmp_path, origin):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="has notes.txt but no data.json"):
        data.open_writer(tmp_path, origin)
    with pytest.raises(ValueError, match="holds no samples"):
        data.read(tmp_path, tiny.random_target())
    (tmp_path / "data.json").write_text("{")
    with pytest.raises(ValueError, match="data.json is damaged"):
        data.read(tmp_path, tiny.random_target())


def test_a_damaged_shard_is_named(tmp_path, origin):
    writer = data.open_writer(tmp_path / "data", origin, shard_size=4)
    writer.add(SAMPLES)
    shard = tmp_path / "data" / "shard-00001.npz"
    shard.write_bytes(shard.read_bytes()[:200])
    with pytest.raises(ValueError, match="shard-00001.npz is damaged"):
        data.read(tmp_path / "data", tiny.random_target())


def test_a_full_disk_leaves_nothing_half_written(tmp_path, origin, monkeypatch):
    writer = data.open_writer(tmp_path / "data", origin, shard_size=4)
    writer.add(SAMPLES[:3])
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="cannot write .*shard-00000.npz: No space left"):
        writer.add(SAMPLES[3:5])
    monkeypatch.undo()
    names = sorted(path.name for path in (tmp_path / "data").iterdir() if path.name != folder_lock.NAME)
    assert names == ["data.json", "journal.jsonl"]
    _same(data.read(tmp_path / "data", tiny.random_target()), SAMPLES[:5])


def test_a_folder_that_another_process_writes_is_refused(tmp_path, origin):
    writer = data.open_writer(tmp_path / "data", origin)
    writer.add(SAMPLES)
    writer.close()
    with folder_locks.held_elsewhere(tmp_path / "data"):
        with pytest.raises(ValueError, match="data is being written by process 7 on elsewhere"):
            data.open_writer(tmp_path / "data", origin)
        _same(data.read(tmp_path / "data", tiny.random_target()), SAMPLES)  # reading is for all
    assert data.open_writer(tmp_path / "data", origin).finished == set(range(10))
