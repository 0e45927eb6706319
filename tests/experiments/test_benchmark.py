"""The benchmark on random weights: the whole way from config to table, interruption, and every early refusal."""

import dataclasses
import json
import pathlib
import types as python_types

import jax
import numpy as np
import pytest

from experiments import benchmark, cli, greedy_check, records, report, run_folder, runner, settings, traces
from jspec import config as config_lib
from jspec import generation, metrics, topology

DEBUG = str(pathlib.Path(__file__).parents[2] / "configs" / "debug.yaml")


pytestmark = pytest.mark.usefixtures("own_folder")


def run(*overrides):
    return cli.run(benchmark.main, benchmark.Benchmark, "", [DEBUG, *overrides])


def last_line(capsys):
    out, err = capsys.readouterr()
    return json.loads(out.splitlines()[-1]), out, err


def test_debug_config_from_start_to_table_and_resume(capsys, monkeypatch):
    # Interrupted after the first task: its cells are kept, and the same command finishes the rest.
    decoded = runner.Runner.decode
    groups = []

    def interrupted(self, name, group, temperature, **kwargs):
        groups.append((group.prompts[0].task, temperature))
        if group.prompts[0].task == "code" and not kwargs:
            raise KeyboardInterrupt
        return decoded(self, name, group, temperature, **kwargs)

    monkeypatch.setattr(runner.Runner, "decode", interrupted)
    assert run("run.folder=out") == cli.INTERRUPTED
    assert "what is finished is kept in out" in capsys.readouterr().err
    kept = pathlib.Path("out/results.jsonl").read_text().splitlines()
    assert [json.loads(line)["task"] for line in kept] == ["chat"] * 3

    groups.clear()

    def recorded(self, name, group, temperature, **kwargs):
        if not kwargs:  # the shorter ones compile, or find the middle of an answer
            groups.append((group.prompts[0].task, temperature))
        return decoded(self, name, group, temperature, **kwargs)

    middle, timed = runner.Runner.middle, []

    def taken(self, groups):
        timed.append({prompt.task for group in groups for prompt in group.prompts})
        return middle(self, groups)

    monkeypatch.setattr(runner.Runner, "decode", recorded)
    monkeypatch.setattr(runner.Runner, "middle", taken)
    assert run("run.folder=out") == 0
    document, out, _ = last_line(capsys)
    assert groups.count(("chat", 0.0)) == 0  # nothing finished runs again
    assert timed == [{"code"}, {"chat"}]  # parts are timed at each task's own lengths, which are found once
    assert pathlib.Path("out/results.jsonl").read_text().splitlines()[:3] == kept
    assert document["run"] == "out" and len(document["records"]) == 2 * 2 * 3

    for record in map(records.Record.from_json, document["records"]):
        assert record.tokens_per_second > 0 and record.target == document["records"][0]["target"]
        assert sum(record.acceptance_histogram) == record.target_calls
        baseline = record.method == "autoregressive"
        if baseline:
            assert (record.tau, record.alpha, record.speedup) == (1.0, None, 1.0)
        check = record.greedy_check
        assert (check is None) == (baseline or record.temperature > 0)
        assert check is None or (check.prompts, check.equal) == (1, 1)
        assert record.draft == ("first 1 layers of the target" if record.method == "standard" else None)
        assert record.cost.draft_ms > 0 and record.expected_speedup > 0
        before = record.before_repeat
        assert before.new_tokens <= record.new_tokens and before.target_calls <= record.target_calls
    assert document["prompts"] == {"ids": {"chat": ["chat/1"], "code": ["code/1"]}, "skipped": {}}
    assert out.startswith("2 prompts (chat 1, code 1)\n")
    assert [(each["method"], each["temperature"], each["tasks"]) for each in document["overall"]] == [
        (method, temperature, 2)
        for temperature in (0.0, 1.0)
        for method in ("autoregressive", "standard", "prompt lookup")
    ]
    table = pathlib.Path("out/table.md").read_text()
    assert "equal to autoregressive: 1 of 1" in table and table in out
    # One answer of each cell is kept token by token, and the resumed run added only its own.
    kept = traces.read(pathlib.Path("out"))
    cells = [tuple(record[key] for key in records.CELL_KEYS) for record in document["records"]]
    assert sorted(trace.key[:-1] for trace in kept) == sorted(cells)
    assert len(pathlib.Path("out", traces.FILE).read_text().splitlines()) == len(kept)
    for trace, record in zip(kept, document["records"]):
        assert len(trace.tokens) == record["new_tokens"] and traces.rounds(trace.origins)[-1] == record["target_calls"]
        assert trace.origins.count("accepted") == round(record["mean_accepted"] * record["target_calls"])
    assert report.run(["out", "--out", "report"]) == 0
    assert "prompt lookup" in pathlib.Path("report/report.html").read_text()
    # A third call has nothing to do but print.
    groups.clear()
    assert run("run.folder=out") == 0 and not groups


def test_a_prompt_is_sampled_alike_in_any_batch():
    config = benchmark.Benchmark(
        settings.TargetSettings(random=settings.RandomModel()),
        (),
        settings.PromptSettings(tasks=("chat",), per_task=2),
        max_new_tokens=8,
    )
    prompts = settings.load_prompts(config.prompts)
    encoded = {prompt: list(prompt.prompt.encode()) for prompt in prompts}
    both = runner.group(prompts, encoded, 256, 0)
    second = runner.group(prompts[1:], encoded, 256, 0)
    assert (jax.random.key_data(both.keys)[1] == jax.random.key_data(second.keys)[0]).all()
    other = runner.group(prompts[1:], encoded, 256, 1)
    assert (jax.random.key_data(other.keys) != jax.random.key_data(second.keys)).any()


def test_the_shipped_drafts_are_compared_as_they_say():
    """Chains of 4 and 5, trees of 24 nodes, ten prompts a task."""
    config = config_lib.load(benchmark.Benchmark, pathlib.Path(DEBUG).with_name("drafts.yaml"))
    shapes = {}
    for method in config.methods:
        drafter = method.drafter
        shapes[method.name] = drafter.dynamic.num_nodes if drafter.kind == "eagle" and drafter.dynamic else None
        if shapes[method.name] is None:
            shapes[method.name] = drafter.topology if drafter.kind != "medusa" else drafter.tree.topology.num_nodes
        assert drafter.draft.reference.startswith("pretrained:smollm2-135m/")
    chains = {"standard": topology.chain(4), "eagle 1": topology.chain(5), "eagle 3": topology.chain(5)}
    assert shapes == {**chains, "medusa": 24, "eagle 3, dynamic tree": 24}
    assert config.prompts == settings.PromptSubset(per_task=10, choose="hashed", max_tokens=1024)
    assert config.temperatures == (0.0, 1.0) and config.max_new_tokens == 128


def answer(tokens, prompt=(1, 2)):
    row = np.zeros((1, 16), np.int32)
    row[0, : len(prompt) + len(tokens)] = [*prompt, *tokens]
    return python_types.SimpleNamespace(
        output=python_types.SimpleNamespace(tokens=row, lengths=np.array([len(prompt) + len(tokens)]))
    )


def test_greedy_check_tells_near_ties_from_differences(monkeypatch):
    prompt = python_types.SimpleNamespace(id="chat-1")
    group = python_types.SimpleNamespace(prompts=(prompt,), lengths=np.array([2]))
    seen = []
    monkeypatch.setattr(
        greedy_check, "gap_below_best", lambda target, *found: seen.append([list(map(int, x)) for x in found]) or gap
    )
    gap = 1e-4
    base = answer([5, 6, 7])
    compare = lambda other: dataclasses.astuple(greedy_check.compare(None, [group], [other], [base]))
    assert compare(answer([5, 6, 7])) == (1, 1, 0)
    assert compare(answer([5, 9, 7])) == (1, 0, 1)
    assert seen == [[[1, 2, 5], [9, 6]]]  # looked up where the difference begins, for both tokens
    with pytest.raises(greedy_check.OutputsDiffer, match="chat-1: .* from token 2 on"):
        compare(answer([5, 6]))  # a shorter answer is no tie
    gap = 1e-2
    with pytest.raises(greedy_check.OutputsDiffer, match="chat-1: .* from token 1 on"):
        compare(answer([5, 9, 7]))


def test_greedy_check_gap_is_the_models():
    target = settings.load_target(settings.TargetSettings(random=settings.RandomModel()))
    ids = list(b"hello there")
    logits = np.asarray(greedy_check._last_logits(target.model, *generation.pad([ids])))
    first, second, *_, worst = np.argsort(-logits)
    gap = lambda *tokens: greedy_check.gap_below_best(target, np.array(ids), tokens)
    assert gap(first) == 0
    assert gap(first, second) == pytest.approx(logits[first] - logits[second])
    assert gap(second, worst) == pytest.approx(logits[first] - logits[worst])  # the worse of the two counts


@pytest.mark.parametrize(
    ("checks", "fails"),
    [
        ([(30, 30, 0)], None),
        ([(30, 29, 1)], None),
        ([(12, 11, 1)], None),  # a single one is no pattern
        ([(20, 18, 2)], "2 near-ties in 20"),
        ([(60, 58, 2)], None),
    ],
)
def test_a_run_with_many_near_ties_fails(make_record, checks, fails):
    results = [make_record(greedy_check=records.GreedyCheck(*check)) for check in checks]
    results.append(make_record(method="other", greedy_check=None))
    if fails is None:
        greedy_check.limit_near_ties(results)
    else:
        with pytest.raises(greedy_check.OutputsDiffer, match=fails):
            greedy_check.limit_near_ties(results)


def test_how_many_answers_are_kept_is_not_what_is_computed():
    config = benchmark.Benchmark(settings.TargetSettings(random=settings.RandomModel()), ())
    assert run_folder.config_hash(config) == run_folder.config_hash(dataclasses.replace(config, traces=3))
    assert run_folder.config_hash(config) != run_folder.config_hash(dataclasses.replace(config, seed=3))


def test_a_method_that_changes_the_text_fails_the_run_and_is_not_recorded(capsys, monkeypatch):
    decoded = runner.Runner.decode

    def spoiled(self, name, group, temperature, *args, **kwargs):
        run = decoded(self, name, group, temperature, *args, **kwargs)
        if name == "standard":
            tokens = run.output.tokens.copy()
            tokens[0, run.output.lengths[0] - 1] ^= 1
            run = dataclasses.replace(run, output=run.output.replace(tokens=tokens))
        return run

    monkeypatch.setattr(runner.Runner, "decode", spoiled)
    assert run("run.folder=out", "temperatures=[0.0]") == cli.FAILED
    assert "failed: prompt chat" in capsys.readouterr().err
    kept = [json.loads(line)["method"] for line in pathlib.Path("out/results.jsonl").read_text().splitlines()]
    assert kept == ["autoregressive"]


def test_answers_of_one_token_leave_no_speed_but_a_table(capsys):
    assert run("run.folder=out", "temperatures=[0.0]", "max_new_tokens=1", "prompts.tasks=[chat]", "traces=0") == 0
    assert not pathlib.Path("out", traces.FILE).exists()
    document, out, _ = last_line(capsys)
    assert [record["speedup"] for record in document["records"]] == [None] * 3
    assert "equal to autoregressive: 1 of 1" in out


def test_dev27_clocks_leave_out_prefill_and_compilation(monkeypatch):
    # Speed is of decoding: tokens after each first one over the seconds they took; the second row ends half way.
    group = python_types.SimpleNamespace(lengths=np.array([2, 2]), prompts=("one", "two"))
    target = settings.load_target(settings.TargetSettings(random=settings.RandomModel()))
    config = benchmark.Benchmark(settings.TargetSettings(random=settings.RandomModel()), ())
    method = benchmark._methods(config)[0]
    rows = [metrics.from_matches(np.zeros((rounds, 0), bool)) for rounds in (10, 5)]
    acceptance = jax.tree.map(lambda *leaves: np.stack(leaves), *rows)
    origin = np.array([[0, 0, 1, *[5] * 10], [0, 0, 1, *[5] * 5, *[0] * 5]], np.int8)
    output = python_types.SimpleNamespace(
        lengths=np.array([2 + 11, 2 + 6]), acceptance=acceptance, origin=origin, tokens=np.arange(26).reshape(2, 13)
    )
    run = runner.Decoded(output, prefill_seconds=100.0, decode_seconds=2.0)
    identity = benchmark._Identity(config, target, [method])
    costs = {"autoregressive": python_types.SimpleNamespace(verify=0.2, draft=0.0)}
    record = benchmark._record(config, identity, method, "chat", 0.0, target, [group], {"autoregressive": [run]}, costs)
    assert record.tokens_per_second == pytest.approx(15 / 2.0)
    assert record.before_repeat.target_calls == record.target_calls == 15 and record.offered == ()
    assert record.ttft_ms == pytest.approx(100e3)
    assert record.tpot_ms == pytest.approx(1000 * (2.0 + 1.0) / 15)  # a request's own, not a fifteenth of 2 s


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["methods.0.drafter.gama=2"], "methods.0.drafter.gama: unknown key; did you mean 'gamma'?"),
        (["methods.0.drafter.gamma=-1"], "gamma -1"),
        (["methods.0.drafter.gamma=true"], "methods.0.drafter.gamma: expected"),
        (["methods.0.drafter.draft.layers=9"], "layers 9 is not between 1 and the target's 2"),
        (["temperatures=[-1.0]"], "temperature -1.0"),
        (["temperatures=[0.0,0.0]"], "temperatures (0.0, 0.0) holds one twice"),
        (["methods.0.name=autoregressive"], "'autoregressive' is the baseline's"),
        (["max_new_tokens=4294967296"], "max_new_tokens 4294967296 is above 2147483647"),
        (["target.random.num_heads=0"], "target.random.width: width 64 is not a multiple of num_heads 0"),
        (["target.random.num_layers=0"], "num_layers 0 is below 1"),
        (["target.random.seed=-1"], "seed -1"),
        (["methods.0.drafter.draft={reference: debug.yaml, sha256: zz}"], "debug.yaml"),
        (["filters.top_p=0.0"], "top_p 0.0"),
        (["prompts.file=none.jsonl"], "none.jsonl: No such file or directory"),
        (["prompts.tasks=[chatt]"], "did you mean 'chat'"),
        (["prompts.per_task=0"], "per_task 0 is below 1"),
        (["prompts.max_tokens=0"], "prompts.max_tokens: max_tokens 0 is below 1"),
        (["prompts.max_tokens=3"], "prompts: all of task 'chat' have more than max_tokens 3 tokens"),
        (["prompts.choose=random"], "prompts.choose: expected"),
        (["batch=2"], "batch 2 does not divide the 1 prompts of task 'chat'"),
        (["target={reference: nowhere.gguf}"], "nowhere.gguf"),
        (["target={reference: 'ftp:x'}"], "ftp"),
        (["methods.0.drafter.draft={reference: none.gguf}"], "weights reference 'none.gguf': no such file"),
        (
            ["methods.0.drafter.draft={}"],
            "methods.0.drafter.draft: draft needs exactly one of layers, reference and shape",
        ),
        (["methods.0.drafter={kind: standard}"], "set draft.layers, draft.reference or draft.shape"),
        (["traces=-1"], "traces -1 is below 0"),
        (["max_new_tokens=4000"], "the model follows at most 2048"),
        (["run.folder=/proc/none"], "cannot write /proc/none"),
    ],
)
def test_bad_input_is_one_line_before_anything_compiles(capsys, monkeypatch, overrides, message):
    monkeypatch.setattr(runner.Runner, "decode", lambda *args, **kwargs: pytest.fail("must not start"))
    assert run(*overrides) == cli.USER_ERROR
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("error: ") and message in err
