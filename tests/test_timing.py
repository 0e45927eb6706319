import time

import pytest

from jspec import timing


class Lazy:
    """A result that is handed back before it is there."""

    def __init__(self, seconds):
        self.ready_at = time.perf_counter() + seconds

    def block_until_ready(self):
        time.sleep(max(0.0, self.ready_at - time.perf_counter()))
        return self


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"tokens": [x, 1]}])
def test_dev_27d_the_clock_waits_for_the_result(wrap):
    result, seconds = timing.timed(lambda *, value: wrap(Lazy(value)), value=0.05)
    assert seconds >= 0.05
    assert isinstance(result, Lazy) or isinstance(result["tokens"][0], Lazy)


def test_the_clock_does_not_charge_for_late_inputs():
    _, seconds = timing.timed(lambda x: x, Lazy(0.2))
    assert seconds < 0.15


def test_interleave_takes_turns_and_counts_no_warmup():
    calls = []

    def slow_at_first():
        calls.append("a")
        return Lazy(0.2 if calls.count("a") == 1 else 0.0)

    seconds = timing.interleave({"a": slow_at_first, "b": lambda: calls.append("b")}, rounds=3)
    assert calls == ["a", "b"] + ["a", "b", "b", "a", "a", "b"]
    assert [len(times) for times in seconds.values()] == [3, 3]
    assert max(seconds["a"]) < 0.15  # the compiling call is not among them


def test_interleave_needs_a_round():
    with pytest.raises(ValueError, match="rounds 0 is below 1"):
        timing.interleave({}, rounds=0)


def test_best_and_median():
    seconds = {"a": [3.0, 1.0, 2.5], "b": [4.0]}
    assert timing.best(seconds) == {"a": 1.0, "b": 4.0}
    assert timing.median(seconds) == {"a": 2.5, "b": 4.0}
