import dataclasses
import json
import math

import pytest

from experiments import records

# The keys a record has, in order, as documented for those who read results.jsonl.
KEYS = """method drafter verifier lossless target draft task temperature batch num_prompts new_tokens target_calls tau
alpha acceptance_histogram acceptance_by_position tokens_per_second ttft_ms tpot_ms speedup speedup_ci expected_speedup
cost greedy_check published device dtype versions seed config_hash draft_sha256 offered tested before_repeat tau_ci
alpha_ci mean_accepted conditional_acceptance_by_position inter_token_ms""".split()


def test_keys_are_those_documented(make_record):
    content = make_record().to_json()
    assert list(content) == KEYS
    assert list(content["cost"]) == ["autoregressive_ms", "verify_ms", "draft_ms", "c"]
    assert list(content["greedy_check"]) == ["prompts", "equal", "near_ties"]
    assert list(content["published"]) == ["paper", "table", "row", "speedup", "tau", "alpha", "others"]
    assert list(content["before_repeat"]) == [
        *("new_tokens", "target_calls", "tau", "alpha", "acceptance_histogram", "acceptance_by_position"),
        *("offered", "tested"),
    ]
    assert set(records.CELL_KEYS) <= set(KEYS)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"cost": None, "greedy_check": None, "published": None, "draft": None, "before_repeat": None},
        {"inter_token_ms": records.Latency(30.0, 31.5, 40.0), "tau_ci": (2.4, 2.6)},
    ],
)
def test_a_record_survives_json(make_record, changes):
    before = make_record(**changes)
    assert records.Record.from_json(json.loads(json.dumps(before.to_json()))) == before


def test_records_of_earlier_versions_are_read(make_record):
    content = make_record().to_json()
    for name in KEYS[KEYS.index("config_hash") + 1 :]:
        del content[name]
    del content["published"]["others"]
    record = records.Record.from_json(content)
    assert record == make_record(draft_sha256=None, offered=None, tested=None, before_repeat=None)


def test_nan_becomes_none_since_json_has_no_nan(make_record):
    content = make_record(
        alpha=math.nan,
        acceptance_by_position=(0.5, math.nan),
        speedup_ci=(math.nan, math.nan),
        cost=records.Cost(1.0, 1.0, 0.0, math.nan),
    ).to_json()
    json.dumps(content, allow_nan=False)
    assert content["alpha"] is None and content["speedup_ci"] is None and content["cost"]["c"] is None
    assert content["acceptance_by_position"] == [0.5, None]


def test_intervals_without_two_prompts_are_none(make_record):
    content = make_record(tau_ci=(math.nan, math.nan), alpha_ci=(math.nan, math.nan)).to_json()
    assert content["tau_ci"] is None and content["alpha_ci"] is None


def test_wrong_keys_are_named(make_record):
    content = make_record().to_json()
    content["taus"] = content.pop("tau")
    with pytest.raises(ValueError, match=r"record: missing keys \['tau'\], unknown keys \['taus'\]"):
        records.Record.from_json(content)
    content = make_record().to_json()
    del content["cost"]["c"]
    with pytest.raises(ValueError, match=r"record.cost: missing keys \['c'\]"):
        records.Record.from_json(content)


def test_records_are_frozen(make_record):
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_record().tau = 1.0
