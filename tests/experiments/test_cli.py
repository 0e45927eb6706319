import dataclasses
import errno
import importlib.util
import json
import pathlib
import sys

import numpy as np
import pytest

from experiments import cli, prompt_sets, run_folder
from jspec import extras, metrics


@dataclasses.dataclass(frozen=True)
class Config:
    gamma: int = 4
    run: run_folder.RunSettings = run_folder.RunSettings()

    def __post_init__(self):
        if self.gamma < 0:
            raise ValueError(f"gamma {self.gamma} is below 0")


@pytest.fixture
def script(tmp_path, monkeypatch, capsys):
    """Runs a `main` as the command line would; gives exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path("debug.yaml").write_text("gamma: 3\n")

    def run(main, *argv):
        try:
            code = cli.run(main, Config, "What the script does.\n\nMore.", list(argv), registries={})
        except SystemExit as exit:
            code = exit.code
        out, err = capsys.readouterr()
        return code, out, err

    return run


def nothing(config):
    return {"run": config.run.folder, "records": []}


def one_line(err):
    assert err.count("\n") == 1 and err.endswith("\n") and "Traceback" not in err, err
    return err.strip()


def test_the_last_line_is_the_document(script):
    seen = []

    def main(config):
        seen.append(config)
        print("some table")
        return {"run": config.run.folder, "records": [{"tau": 2.5}]}

    code, out, err = script(main, "debug.yaml", "gamma=7")
    assert code == 0 and err == ""
    folder = f"runs/debug-{run_folder.config_hash(Config(7), {})}"
    assert json.loads(out.splitlines()[-1]) == {"run": folder, "records": [{"tau": 2.5}]}
    command = f"python -m {__name__} debug.yaml gamma=7"
    assert seen == [Config(7, run_folder.RunSettings(folder, command))]


def test_a_run_knows_the_command_that_started_it(script, monkeypatch):
    seen = []

    def main(config):
        seen.append(config.run)
        return {}

    pathlib.Path("my debug.yaml").write_text("gamma: 3\n")
    script(main, "my debug.yaml", "gamma=7", "run.folder=some where")  # where results go is no part of it
    assert seen == [run_folder.RunSettings("some where", f"python -m {__name__} 'my debug.yaml' gamma=7")]
    main.__module__ = "__main__"
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", importlib.util.find_spec("experiments.benchmark"))
    script(main, "debug.yaml")
    assert seen[1].command == "python -m experiments.benchmark debug.yaml"


def test_the_same_command_finds_the_same_folder_and_another_one_does_not(script):
    folders = [json.loads(script(nothing, "debug.yaml", *more)[1])["run"] for more in ((), (), ("gamma=5",))]
    assert folders[0] == folders[1] != folders[2]
    assert json.loads(script(nothing, "debug.yaml", "run.folder=here")[1])["run"] == "here"


def test_help_shows_the_description_and_the_usage(script):
    code, out, _ = script(nothing, "--help")
    assert code == 0 and "What the script does.\n\nMore." in out and "CONFIG" in out and "dotted.key=value" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "error: the following arguments are required: CONFIG"),
        (["--fast", "debug.yaml"], "error: unrecognized arguments: --fast"),
        (["missing.yaml"], "error: missing.yaml: No such file or directory"),
        (["debug.yaml", "gama=7"], "error: debug.yaml: gama: unknown key; did you mean 'gamma'?"),
        (["debug.yaml", "gamma=x"], 'error: debug.yaml: gamma: expected an integer, got "x"'),
        (["debug.yaml", "gamma=-1"], "error: debug.yaml: gamma: gamma -1 is below 0"),
        (["debug.yaml", "gamma"], "error: override 'gamma': expected dotted.key=value"),
        (["debug.yaml", "gamma=x"], "error: debug.yaml: gamma: expected an integer"),
    ],
)
def test_a_bad_command_is_one_line_and_exit_code_2(script, argv, message):
    def main(config):
        pytest.fail("main must not start")

    code, out, err = script(main, *argv)
    assert (code, out) == (2, "")
    assert one_line(err).startswith(message)


def missing_prompts(config):
    prompt_sets.load_prompts("missing.jsonl")


def bad_prompts(config):
    pathlib.Path("bad.jsonl").write_text("{}\n")
    prompt_sets.load_prompts("bad.jsonl")


def unpaired(config):
    metrics.speedup(metrics.Calls([1], [1]), metrics.Calls([1, 1], [1, 1]), compiling_calls=0)


def full_disk(config):
    raise OSError(errno.ENOSPC, "No space left on device", "runs/x/results.jsonl")


def unwritable_folder(config):
    pathlib.Path("file").write_text("")
    run_folder.open_folder("file/run", config, registries={})


def others_folder(config):
    run_folder.open_folder("run", Config(1), registries={})
    run_folder.open_folder("run", Config(2), registries={})


def missing_extra(config):
    extras.require("no_such_module", "weights")


@pytest.mark.parametrize(
    ("main", "message"),
    [
        (missing_prompts, "error: missing.jsonl: No such file or directory"),
        (bad_prompts, "error: bad.jsonl, line 1: unknown format"),
        (unpaired, "error: 1 baseline calls cannot be paired with 2"),
        (full_disk, "error: runs/x/results.jsonl: No space left on device"),
        (unwritable_folder, "error: cannot write file/run: Not a directory"),
        (others_folder, "error: run belongs to a run of another config"),
        (
            missing_extra,
            "error: no_such_module is not installed; it comes with the extra 'weights': pip install -e '.[weights]'",
        ),
    ],
)
def test_a_users_mistake_inside_main_is_one_line_and_exit_code_2(script, main, message):
    code, out, err = script(main, "debug.yaml")
    assert (code, out) == (2, "")
    assert one_line(err).startswith(message)


def wrong_shapes(config):
    np.zeros(3) + np.zeros(4)


def wrong_value_in_our_code(config):
    metrics.tokens_per_second(metrics.Calls(["many"], [1.0]), compiling_calls=0)


def not_json(config):
    return {"tau": float("nan")}


@pytest.mark.parametrize("main", [wrong_shapes, wrong_value_in_our_code, not_json])
def test_faults_of_the_program_keep_their_traceback(script, main):
    with pytest.raises(ValueError):
        script(main, "debug.yaml")


def test_other_missing_modules_keep_their_traceback(script):
    def main(config):
        import no_such_module  # noqa: F401

    with pytest.raises(ModuleNotFoundError):
        script(main, "debug.yaml")


def test_an_interrupted_run_says_where_its_cells_are_and_resumes(script):
    ran = []

    def main(config, stop_after):
        folder = run_folder.open_folder(config.run.folder, config, cell_keys=("task",), registries={})
        for task in "abc":
            if not folder.finished({"task": task}):
                if len(folder.records) == stop_after:
                    raise KeyboardInterrupt
                ran.append(task)
                folder.append({"task": task})
        return folder.document()

    code, out, err = script(lambda config: main(config, 2), "debug.yaml")
    folder = run_folder.default_folder("debug", Config(3), {})
    assert (code, out) == (130, "")
    assert one_line(err) == f"interrupted; what is finished is kept in {folder}; the same command resumes"
    code, out, _ = script(lambda config: main(config, None), "debug.yaml")
    assert code == 0 and ran == ["a", "b", "c"]
    assert json.loads(out)["records"] == [{"task": task} for task in "abc"]


def test_a_failed_run_may_print_its_document_all_the_same(script):
    def main(config, document):
        raise cli.RunFailed("they do not fit", document)

    code, out, err = script(lambda config: main(config, {"found": 1}), "debug.yaml")
    assert (code, json.loads(out), err) == (1, {"found": 1}, "failed: they do not fit\n")
    code, out, err = script(lambda config: main(config, None), "debug.yaml")
    assert (code, out, err) == (1, "", "failed: they do not fit\n")


def test_a_script_without_a_run_folder_is_interrupted_plainly(capsys, tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Plain:
        gamma: int = 4

    def main(config):
        raise KeyboardInterrupt

    (tmp_path / "plain.yaml").write_text("")
    assert cli.run(main, Plain, "", [str(tmp_path / "plain.yaml")], {}) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_progress_is_sparse_and_leaves_stdout_alone(capsys):
    with cli.progress(40, "cells") as advance:
        for i in range(40):
            advance(f"cell {i}")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [f"cells: {n}/40 cell {n - 1}" for n in range(4, 41, 4)]


def test_progress_of_few_steps_shows_each_and_of_none_nothing(capsys):
    with cli.progress(3, "cells") as advance:
        for i in range(3):
            advance(str(i))
    with cli.progress(0, "cells"):
        pass
    assert capsys.readouterr().err == "cells: 1/3 0\ncells: 2/3 1\ncells: 3/3 2\n"


def test_progress_in_a_terminal_is_a_bar_on_stderr(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with cli.progress(2, "cells") as advance:
        advance("chat [T = 0]")
        advance("code")
    out, err = capsys.readouterr()
    assert out == "" and "2/2" in err and "cells: code" in err


def test_show_prints_markdown_unless_in_a_terminal(capsys, monkeypatch, make_record):
    slow = make_record(speedup=0.5, speedup_ci=None)
    cli.show([slow])
    plain = capsys.readouterr().out
    assert plain.startswith("| task | T |") and "0.50x - drafting costs more" in plain
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "250")
    cli.show([slow])
    drawn = capsys.readouterr().out
    assert "| task |" not in drawn and "10/20/15/5" in drawn and "0.50x - drafting costs more" in drawn
