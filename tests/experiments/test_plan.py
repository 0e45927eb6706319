"""`--plan`: from a config to a plan, without weights, compute or a run folder."""

import json
import pathlib

import pytest

from experiments import benchmark, cli, plan, settings
from jspec import config as config_lib

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"

pytestmark = pytest.mark.usefixtures("own_folder")


def run(config, *args):
    return cli.run(benchmark.main, benchmark.Benchmark, "", [str(CONFIGS / config), "--plan", *args], plan=plan.main)


def load(config, *overrides):
    return config_lib.load(benchmark.Benchmark, CONFIGS / config, overrides)


def test_a_plan_is_the_last_line_and_nothing_is_run(capsys, monkeypatch):
    monkeypatch.setattr(settings, "load_target", lambda *args: pytest.fail("must load nothing"))
    assert run("debug.yaml", "device=a100", "prompt_tokens=100", "max_new_tokens=60") == 0
    out, err = capsys.readouterr()
    planned = json.loads(out.splitlines()[-1])["plan"]
    assert err == "" and not list(pathlib.Path().iterdir())  # no run folder
    assert (planned["device"], planned["prompt_tokens"], planned["max_new_tokens"]) == ("a100", 100, 60)
    # V 256, width 64, 2 layers: qkv 8 heads of 16, output, gate and up, down; three norms of the width each layer pair.
    layer = 8 * 16 * 64 + 64 * 64 + 2 * 128 * 64 + 64 * 128
    assert planned["parameters"] == 256 * 64 + 2 * (layer + 2 * 64) + 64
    assert planned["parameter_bytes"] == 4 * planned["parameters"]
    assert planned["capacity"] == 512 and planned["cache_bytes"] == 2 * 2 * 2 * 16 * 512 * 4 + 4
    by_name = {row["method"]: row for row in planned["methods"]}
    assert list(by_name) == ["autoregressive", "standard", "prompt lookup"]
    assert by_name["autoregressive"]["breaks_even_at_tau"] == 1.0
    assert by_name["standard"]["draft_passes"] == 3 and by_name["standard"]["draft_parameters"] == 0
    assert planned["fits"] and planned["devices"] == 1
    assert "fits" in out and "NVIDIA A100" in out


def test_published_tau_becomes_a_speedup():
    planned = plan.plan(load("eagle1_2024/table5.yaml", "scale=paper"), plan.Options())
    _, tree, chain = planned["methods"]
    assert (tree["published_tau"], chain["published_tau"]) == (3.94, 3.2)
    assert tree["speedup_at_published_tau"] == pytest.approx(3.94 / tree["breaks_even_at_tau"])
    # 13.5 GB of weights at 4.8 TB/s, and a little for the cache.
    assert tree["autoregressive_ms"] == pytest.approx(2.83, rel=0.03)
    assert tree["draft_parameters"] == pytest.approx(0.24e9, rel=0.03)
    # A published alpha gives a chain's tau: (1 - 0.75^8) / 0.25.
    t5 = plan.plan(load("leviathan2023/table2.yaml", "scale=paper"), plan.Options(device="tpu_v4"))
    small = t5["methods"][1]
    assert small["published_tau"] == pytest.approx((1 - 0.75**8) / 0.25)
    assert "encoder-decoder" in t5["not_runnable"] and t5["parameters"] == pytest.approx(11.1e9, rel=0.01)
    assert small["draft_passes"] == 7 and small["draft_parameters"] == pytest.approx(77e6, rel=0.02)


def test_what_does_not_fit_says_how_many_devices():
    planned = plan.plan(load("chen2023/table1.yaml", "scale=paper"), plan.Options(device="rtx3090"))
    held = max(row["held_bytes"] for row in planned["methods"])
    assert not planned["fits"] and planned["devices"] == -(-held // (24 * 2**30)) == 6


def test_lowering_gives_the_compilers_count():
    planned = plan.plan(load("debug.yaml"), plan.Options(prompt_tokens=500, lower=True))
    for row in planned["methods"]:
        assert row["lowered_operations"] > 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["device=h20"], "--plan: device: device 'h20' is not known; did you mean 'h200'?"),
        (["prompt_tokens=0"], "prompt_tokens 0 is below 1"),
        (["device=["], "override 'device=[': '[' is not YAML"),
        (["prompt_tokens=x"], "--plan: prompt_tokens: expected an integer"),
        (["methods.0.drafter.gama=1"], "gama: unknown key"),
        (["target={reference: 'hf:no/where'}"], "hf:no/where: what this model looks like is not known"),
        (["prompt_tokens=4000"], "the model follows at most 2048"),
        (["methods.0.drafter.draft={layers: 9}"], "layers 9 is not between 1 and the target's 2"),
    ],
)
def test_a_bad_plan_is_one_line(capsys, args, words):
    assert run("debug.yaml", *args) == cli.USER_ERROR
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and words in err


def test_scripts_without_a_plan_know_no_such_flag(capsys):
    assert cli.run(benchmark.main, benchmark.Benchmark, "", [str(CONFIGS / "debug.yaml"), "--plan"]) == cli.USER_ERROR
    assert "unrecognized arguments: --plan" in capsys.readouterr().err
