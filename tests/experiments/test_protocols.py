"""The protocol configs: each loads at each of its scales, plans, and its random-weights version runs."""

import functools
import json
import math
import pathlib

import pytest

from experiments import benchmark, cli, index, papers, plan, published, records
from jspec import config as config_lib
from jspec import config_files, optimal_trees, verify

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
PROTOCOLS = sorted(
    str(path.relative_to(CONFIGS)) for path in CONFIGS.glob("*/*.yaml") if path.parent.name in published.names()
)
ALTERNATIVES = {path: config_files.alternatives(CONFIGS / path) for path in PROTOCOLS}
EVERY = [
    (path, scale, model)
    for path, offered in ALTERNATIVES.items()
    for scale in offered["scale"]
    for model in offered.get("model", (None,))
]


@functools.cache
def load(path, scale, model=None):
    overrides = [f"scale={scale}", *([f"model={model}"] if model else [])]
    return config_lib.load(benchmark.Benchmark, CONFIGS / path, overrides)


def published_cells(config):
    """Method, task, temperature and number of every cell that has one."""
    cells = [
        (method.name, task, temperature, papers.find(
            config.paper, method.name, task=task, temperature=temperature, batch=config.batch
        ))
        for method in config.methods
        for task in config.paper.tasks
        for temperature in config.temperatures
    ]  # fmt: skip
    return [cell for cell in cells if cell[3] is not None]


def test_every_table_that_the_project_promises_has_a_config():
    promised = """leviathan2023/table2 leviathan2023/table3 leviathan2023/table5 chen2023/table1 medusa2024/table1
    medusa2024/figure3 eagle1_2024/table1 eagle1_2024/table2 eagle1_2024/table3 eagle1_2024/table4 eagle1_2024/table5
    eagle1_2024/table6 eagle1_2024/table7 eagle2_2024/table1 eagle2_2024/table2 eagle2_2024/table3 eagle3_2025/table1
    eagle3_2025/table2 eagle3_2025/table3 eagle3_2025/table4 eagle3_2025/table5 lookahead2024/main
    lookahead2024/ablation specbench2024/leaderboard frspec2025/vocabulary blockverification2024/gamma
    sequoia2024/headline""".split()
    assert {f"{name}.yaml" for name in promised} <= set(PROTOCOLS)


@pytest.mark.parametrize("path", PROTOCOLS)
def test_a_config_loads_at_each_scale_and_has_published_numbers(path):
    text = (CONFIGS / path).read_text()
    head = " ".join(line.removeprefix("#").strip() for line in text[: text.index("\nscale:")].splitlines())
    assert text.startswith("# ") and f"configs/{path}" in head
    assert "Differs:" in head and "Expected:" in head and index.stated_minutes(CONFIGS / path) and "scale=paper" in head
    assert max(map(len, text.splitlines())) <= 120
    named, rows = set(), set()
    for scale in ALTERNATIVES[path]["scale"]:
        for model in ALTERNATIVES[path].get("model", (None,)):
            config = load(path, scale, model)
            assert (config.scale, config.model) == (scale, model)
            assert config.paper.name == pathlib.Path(path).parent.name
            assert published_cells(config), (scale, model)
            named |= {method.name for method in config.methods}
            rows |= set(config.paper.rows)
    assert rows <= named, "rows of methods that no scale has"


def test_the_leaderboard_compares_at_least_seven_methods():
    config = load("specbench2024/leaderboard.yaml", "smollm2")
    assert len(config.methods) == 7 and config.max_new_tokens == 128 and config.prompts.per_task == 8
    cells = {(method, task): cell for method, task, _, cell in published_cells(config)}
    assert cells["eagle 2", "rag"].speedup == 2.25 and cells["standard", "multi_turn"].speedup == 1.67
    assert cells["eagle 2", "rag"].tau is None and cells["eagle 2", "overall"].tau == 4.43
    assert {method for method, _ in cells} == {method.name for method in config.methods}


PLANNED = [path for path in PROTOCOLS if "paper" in ALTERNATIVES[path]["scale"]]
# Every drafter, reduced vocabularies, a large static tree, block verification, an encoder-decoder.
PLANNED_QUICKLY = {
    "specbench2024/leaderboard.yaml",
    "frspec2025/vocabulary.yaml",
    "sequoia2024/headline.yaml",
    "blockverification2024/gamma.yaml",
    "leviathan2023/table2.yaml",
    "leviathan2023/table3.yaml",
}


def test_only_mixtral_has_no_paper_scale():
    assert set(PROTOCOLS) - set(PLANNED) == {"eagle1_2024/table3.yaml"}


@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=[] if path in PLANNED_QUICKLY else pytest.mark.slow) for path in PLANNED]
)
def test_the_papers_own_models_are_planned(path):
    config = load(path, "paper", ALTERNATIVES[path].get("model", (None,))[0])
    planned = plan.plan(config, plan.Options())
    assert planned["parameters"] > 5e9
    for row in planned["methods"]:
        assert math.isfinite(row["verify_ms"]) and row["breaks_even_at_tau"] >= 1
        assert row["held_bytes"] >= planned["parameter_bytes"] + planned["cache_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "model"),
    [(path, model) for path in PLANNED for model in ALTERNATIVES[path].get("model", ())[1:]],
)
def test_every_model_of_the_papers_is_planned(path, model):
    assert plan.plan(load(path, "paper", model), plan.Options())["parameters"] > 5e9


@pytest.mark.parametrize(("path", "model"), [(path, model) for path, scale, model in EVERY if scale == "shape"])
def test_random_weights_are_accepted_as_the_paper_says(path, model):
    config = load(path, "shape", model)
    assert config.target.shape is not None and config.target.dtype == "bfloat16"
    places = dict(temperature=config.temperatures[0], batch=config.batch)
    for method in config.methods:
        # Where a table has no tau of the task, it has one over all of them, or none.
        cells = [
            papers.find(config.paper, method.name, task=task, **places)
            for task in (config.prompts.tasks[0], papers.OVERALL)
        ]
        taus = [cell.tau for cell in cells if cell is not None and cell.tau is not None]
        if isinstance(method.verifier, verify.Synthetic) and taus:
            assert method.verifier.tau == taus[0], method.name


def test_sequoias_trees_come_from_its_dynamic_programme():
    for scale, nodes, depth in (("smollm2", 8, 3), ("paper", 64, 6), ("shape", 64, 6)):
        tree = load("sequoia2024/headline.yaml", scale).methods[0].drafter.tree
        optimum = optimal_trees.Optimum(tree.acceptance, nodes, depth)
        assert tree.topology == optimum.topology() and tree.topology.num_nodes == nodes
        assert tree.topology.max_depth <= depth and tree.topology.num_ranks > 1


TOY = {"num_layers": 3, "width": 32, "num_heads": 2, "num_kv_heads": 2, "head_size": 16, "ffn_size": 48}


@pytest.mark.usefixtures("own_folder")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "overrides"),
    [
        (
            "chen2023/table1.yaml",
            ["temperatures=[1.0]"] + [f"methods.0.drafter.draft.shape.{key}={value}" for key, value in TOY.items()],
        ),
        ("medusa2024/table1.yaml", []),
        ("eagle2_2024/table1.yaml", [f"methods.0.drafter.draft.shape.{key}={value}" for key, value in TOY.items()]),
        ("frspec2025/vocabulary.yaml", [f"methods.{i}.drafter.vocabulary.size={256 >> i}" for i in range(1, 5)]),
        ("sequoia2024/headline.yaml", [f"methods.0.drafter.draft.shape.{key}={value}" for key, value in TOY.items()]),
        (
            "eagle3_2025/table5.yaml",
            [
                "methods.1.drafter.draft.random.vocab_size=128",
                "methods.1.drafter.feature_layers=[0,1,2]",
                "prompts.per_task=2",
            ],
        ),
    ],
)
def test_a_toy_shape_runs_from_config_to_record(capsys, path, overrides):
    toy = [f"target.shape.{key}={value}" for key, value in {**TOY, "vocab_size": 256}.items()]
    small = ["max_new_tokens=24", "prompts.per_task=1", "run.folder=out"]
    args = [str(CONFIGS / path), "scale=shape", *toy, *small, *overrides]
    assert cli.run(benchmark.main, benchmark.Benchmark, "", args) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    results = [records.Record.from_json(record) for record in document["records"]]
    assert [record.method for record in results][0] == "autoregressive" and len(results) > 1
    for record in results[1:]:
        assert not record.lossless and record.verifier == "synthetic" and record.greedy_check is None
        assert record.target.startswith("shape:") and record.dtype == "bfloat16"
        assert record.tau > 1 and record.speedup > 0
    assert any(record.published is not None for record in results)


@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize("path", ["leviathan2023/table2.yaml", "chen2023/table1.yaml"])
def test_what_cannot_run_says_why(capsys, path):
    args = [str(CONFIGS / path), "scale=paper"]
    assert cli.run(benchmark.main, benchmark.Benchmark, "", args) == cli.USER_ERROR
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: this can be planned (--plan) but not run: ")
    assert not list(pathlib.Path().glob("runs/*"))


def test_a_header_states_one_time(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("# Expected: much.\n# Time: about 3 minutes on 2 cores; 50 with the file.\nscale: smollm2\n")
    assert index.stated_minutes(path) == "about 3"
    path.write_text("# Time: 12 minutes on 2 cores.\n")
    assert index.stated_minutes(path) == "12"
    for text in ("# Expected: 3 minutes on 2 cores.\n", "# Time: 1 minutes on 2 cores.\n" * 2, "# Time: soon.\n"):
        path.write_text(text)
        with pytest.raises(ValueError, match="one is needed"):
            index.stated_minutes(path)


def test_the_index_is_up_to_date_and_has_every_table_once_or_with_each_of_its_configs():
    text = index.text()
    assert (CONFIGS / "README.md").read_text() == text, "run `python -m experiments.index`"
    lines = text.splitlines()
    for name in published.names():
        for id in published.load(name).tables:
            assert any(line.startswith(f"| {id} |") for line in lines), (name, id)


def test_the_index_wants_a_config_or_a_reason_for_each_table(monkeypatch):
    monkeypatch.setattr(index, "_entries", lambda: {})
    monkeypatch.setattr(index, "_reasons", lambda: {})
    with pytest.raises(ValueError, match="neither a config nor a reason in index.yaml"):
        index.text()
    paper = published.names()[0]
    table = next(iter(published.load(paper).tables))
    monkeypatch.setattr(index, "_entries", lambda: {(paper, table): ["its config"]})
    monkeypatch.setattr(index, "_reasons", lambda: {paper: {table: {"status": "planned", "why": "no reason"}}})
    with pytest.raises(ValueError, match="both a config and a reason in index.yaml"):
        index.text()


def test_run_folders_are_told_apart_by_paper(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load("eagle1_2024/table1.yaml", "smollm2")
    named = cli._with_folder(config, "configs/eagle1_2024/table1.yaml", None)
    assert named.run.folder.startswith("runs/eagle1_2024-table1-")
