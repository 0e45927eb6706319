"""The command line that every script shares.

    def main(config: Benchmark) -> dict: ...

    if __name__ == "__main__":
        sys.exit(cli.run(main, Benchmark, __doc__))

reads `CONFIG [dotted.key=value ...]`, fills in the run folder, and prints the document that `main` returns as the last
line of stdout. Progress and errors go to stderr. A user's mistake is one line there and exit code 2; a fault of the
program keeps its traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import pathlib
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax
import rich.console
import rich.progress
import rich.table

import jspec
from experiments import records, run_folder, settings, tables
from jspec import config as config_lib
from jspec import extras
from jspec.weights import references

FAILED = 1
USER_ERROR = 2
INTERRUPTED = 130

# Where the code lives whose `ValueError`s are meant for the user; those of jax or NumPy are faults of the program.
_OWN_CODE = tuple(pathlib.Path(file).resolve().parent for file in (jspec.__file__, __file__))


class RunFailed(Exception):
    """What was measured shows that something is wrong. One line on stderr and exit code 1.

    Args:
      message: that line.
      document: printed all the same, as the last line of stdout.
    """

    def __init__(self, message: str, document: Mapping[str, Any] | None = None):
        super().__init__(message)
        self.document = document


def run(
    main: Callable[[Any], Mapping[str, Any]],
    config_class: type,
    description: str,
    argv: Sequence[str] | None = None,
    registries: config_lib.Registries | None = None,
    default: str | None = None,
    plan: Callable[[type, str, Sequence[str]], Mapping[str, Any]] | None = None,
    load: Callable[..., Any] = config_lib.load,
) -> int:
    """Run a script. Returns its exit code.

    Args:
      main: takes the config and returns the document to print; `RunFolder.document()` for those with a run folder.
      config_class: a frozen dataclass. If it has a field `run: run_folder.RunSettings`, it is filled in.
      description: for `--help`; a module's docstring.
      argv: arguments; None means the process's.
      registries: as for `jspec.config.load`.
      default: the config to use when none is named.
      plan: what `--plan` does instead of running: takes class, file and overrides, returns the document.
      load: reads the config, like `jspec.config.load`.
    """
    config = None

    def work() -> Mapping[str, Any] | None:
        nonlocal config
        args = _parse_args(description, argv, default, plan is not None)
        if plan is not None and args.plan:
            return plan(config_class, args.config, args.overrides)
        config = load(config_class, args.config, args.overrides, registries)
        config = _with_folder(config, args.config, registries)
        config = _with_command(config, main, args)
        _keep_compiled_programs()
        if isinstance(getattr(config, "target", None), settings.TargetSettings):
            settings.compile_as_wanted(config.target)
        return main(config)

    def kept() -> str:
        folder = getattr(getattr(config, "run", None), "folder", None) or getattr(config, "data", None)
        return f"; what is finished is kept in {folder}; the same command resumes" if folder else ""

    return guarded(work, kept)


def guarded(work: Callable[[], Mapping[str, Any]], kept: Callable[[], str] = str) -> int:
    """Do the work of a script and print its document as the last line. Returns the exit code.

    Args:
      work: what the script does.
      kept: what to add to "interrupted".
    """
    try:
        _print_document(work())
        return 0
    except KeyboardInterrupt:
        print(f"interrupted{kept()}", file=sys.stderr)
        return INTERRUPTED
    except RunFailed as error:
        if error.document is not None:
            _print_document(error.document)
        print(f"failed: {error}", file=sys.stderr)
        return FAILED
    except (ValueError, OSError, ImportError) as error:
        if not _is_users(error):
            raise
        print(f"error: {_message(error)}", file=sys.stderr)
        return USER_ERROR


def _print_document(document: Mapping[str, Any]) -> None:
    print(json.dumps(document, allow_nan=False), flush=True)


def show(results: Sequence[records.Record]) -> None:
    """Print the results tables on stdout: as rich draws them in a terminal, else as Markdown."""
    if not sys.stdout.isatty():
        print(tables.report(results))
        return
    console = rich.console.Console()
    for table, lines in (
        (tables.terminal_table(results), (tables.DEFINITIONS, *tables.notes(results))),
        (tables.overall_terminal_table(results), (tables.OVERALL_DEFINITIONS,)),
    ):
        console.print(table)
        for line in lines:
            console.print(line, markup=False, highlight=False)


def show_values(values: Mapping[str, Any]) -> None:
    """Print names and values on stdout, a line each; a list or mapping on one line, None as a dash."""
    table = rich.table.Table(show_header=False, box=None)
    for name, value in values.items():
        items = value if isinstance(value, list | tuple) else [value]
        if isinstance(value, Mapping):
            items = [f"{key} {number:.3g}" for key, number in value.items()]
        shown = ["-" if x is None else f"{x:.3g}" if isinstance(x, float) else str(x) for x in items]
        table.add_row(name, " ".join(shown))
    rich.console.Console(highlight=False).print(table)


@contextlib.contextmanager
def progress(total: int, description: str) -> Iterator[Callable[[str], None]]:
    """Progress on stderr: a bar in a terminal, else a line whenever another tenth is done.

    Args:
      total: steps.
      description: what they do.

    Yields:
      A function to call after each step, with what was just done.
    """
    if sys.stderr.isatty():
        with _bar(total, description) as advance:
            yield advance
        return
    done, total = 0, max(total, 1)

    def advance(text: str) -> None:
        nonlocal done
        done += 1
        if done * 10 // total > (done - 1) * 10 // total:
            print(f"{description}: {done}/{total} {text}", file=sys.stderr, flush=True)

    yield advance


@contextlib.contextmanager
def _bar(total: int, description: str) -> Iterator[Callable[[str], None]]:
    columns = (
        rich.progress.TextColumn("{task.description}", markup=False),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    with rich.progress.Progress(*columns, console=rich.console.Console(stderr=True)) as bar:
        task = bar.add_task(description, total=total)
        yield lambda text: bar.update(task, advance=1, description=f"{description}: {text}")


class Parser(argparse.ArgumentParser):
    """Whose errors are a user's mistake, on one line."""

    def error(self, message: str) -> NoReturn:
        usage = " ".join(self.format_usage().split())
        raise config_lib.ConfigError(f"{message} ({usage})")


def _parse_args(
    description: str, argv: Sequence[str] | None, default: str | None, can_plan: bool = False
) -> argparse.Namespace:
    parser = Parser(
        usage="%(prog)s CONFIG [dotted.key=value ...]",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    text = "a YAML file, see configs/" + (f"; default {default}" if default else "")
    parser.add_argument("config", metavar="CONFIG", nargs="?" if default else None, help=text)
    parser.add_argument("overrides", metavar="dotted.key=value", nargs="*", help="settings to change: drafter.gamma=7")
    if can_plan:
        parser.add_argument("--plan", action="store_true", help="what it would read, hold and take; nothing is run")
    args = parser.parse_intermixed_args(argv)
    if default and (args.config is None or "=" in args.config):  # overrides alone
        args.overrides = [item for item in (args.config, *args.overrides) if item is not None]
        args.config = default
    return args


def _keep_compiled_programs() -> None:
    """Let the next process find what this one compiles, unless the user chose a place for it."""
    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(references.cache_folder() / "compiled"))


def _with_folder(config: Any, path: str, registries: config_lib.Registries | None) -> Any:
    settings = getattr(config, "run", None)
    if not isinstance(settings, run_folder.RunSettings) or settings.folder is not None:
        return config
    paper = getattr(config, "paper", None)  # whose files are called table1, as others' are
    name = pathlib.Path(path).stem if paper is None else f"{paper.name}-{pathlib.Path(path).stem}"
    folder = run_folder.default_folder(name, config, registries)
    return dataclasses.replace(config, run=dataclasses.replace(settings, folder=str(folder)))


def _with_command(config: Any, main: Callable, args: argparse.Namespace) -> Any:
    settings = getattr(config, "run", None)
    if not isinstance(settings, run_folder.RunSettings):
        return config
    module = main.__module__
    if module == "__main__":  # `python -m experiments.benchmark`
        spec = sys.modules[module].__spec__
        module = module if spec is None else spec.name
    # Where results go changes none of them.
    overrides = [override for override in args.overrides if not override.startswith("run.")]
    command = shlex.join(["python", "-m", module, args.config, *overrides])
    return dataclasses.replace(config, run=dataclasses.replace(settings, command=command))


def _is_users(error: Exception) -> bool:
    """Whether an error reports a user's mistake: ours, raised for that purpose, or the operating system's."""
    if isinstance(error, OSError):
        return True
    if isinstance(error, ImportError):
        return isinstance(error, extras.MissingExtra)
    if isinstance(error, config_lib.ConfigError):
        return True
    # JAX hides its own frames, so the place alone would blame our line that called it: that line has to say `raise`.
    frame = traceback.extract_tb(error.__traceback__)[-1]
    own = any(root in pathlib.Path(frame.filename).resolve().parents for root in _OWN_CODE)
    return own and (frame.line or "").startswith("raise ")


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    else:
        text = str(error)
    # A config reports every fault on a line of its own; anything else is one line.
    return text if isinstance(error, config_lib.ConfigError) else " ".join(text.split())
