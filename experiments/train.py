"""Train a draft on a target's own answers.

    python -m experiments.train configs/train/eagle3.yaml [dotted.key=value ...]

Writes, to the run folder: `loss.jsonl` (a line a step), `clock.jsonl` (the seconds it took), `results.jsonl` (a record
an evaluation: loss and acceptance by depth on held-out answers), `curves.png`, `checkpoints/` (the last and the best),
and at the end the best draft as files in `draft/`, its reduced vocabulary with it. The same command goes on where it
was stopped, and ends where it would have ended.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from typing import Any

import numpy as np

from experiments import cli, curves, run_folder, settings
from jspec import checkpoint, files, types
from jspec import config as config_lib
from jspec.drafters import base, draft_vocabulary
from jspec.training import data, objectives, vocabulary
from jspec.training import train as train_lib


@dataclasses.dataclass(frozen=True)
class NewVocabulary:
    """A reduced draft vocabulary: the most frequent tokens of the training answers.

    size: Vd.
    """

    size: int

    def __post_init__(self):
        base.check_count("size", self.size, 1)


@dataclasses.dataclass(frozen=True)
class Data:
    """What is learned from.

    folder:      samples made by `experiments.synthesize`.
    more:        further folders.
    held_out:    share of the prompts to hold out for evaluation.
    held_out_folder: evaluate on these samples instead.
    cache:       folder that keeps what the target says about the text (about 4 bytes times its width a token and
                 feature layer); None computes it each time.
    cache_dtype: of it; `bfloat16` halves it.
    """

    folder: str
    more: tuple[str, ...] = ()
    held_out: float = 0.05
    held_out_folder: str | None = None
    cache: str | None = None
    cache_dtype: str = "float32"

    def __post_init__(self):
        if self.held_out_folder is None and not 0 < self.held_out < 1:
            raise ValueError(f"held_out {self.held_out} is not between 0 and 1")
        if self.cache_dtype not in ("float32", "bfloat16"):
            raise ValueError(f"cache_dtype {self.cache_dtype!r} is not float32 or bfloat16")


@dataclasses.dataclass(frozen=True)
class Train:
    """The config.

    target:     the model to speed up; frozen.
    recipe:     what is trained and by which loss.
    data:       what it learns from.
    training:   how.
    vocabulary: a reduced draft vocabulary: its size, or a file of ids; None means all tokens.
    run:        the run folder.
    """

    target: settings.TargetSettings
    recipe: objectives.Recipe
    data: Data
    training: train_lib.Settings = train_lib.Settings()
    vocabulary: NewVocabulary | draft_vocabulary.Vocabulary | None = None
    run: run_folder.RunSettings = run_folder.RunSettings()


CELL_KEYS = ("step",)


def registries() -> config_lib.Registries:
    """Those of every config, and the recipes."""
    return {**config_lib.default_registries(), objectives.Recipe: objectives.REGISTRY}


def main(config: Train) -> dict:
    """Train to the end, from the last checkpoint if there is one."""
    settings.check_references(config.target)
    folder = run_folder.open_folder(config.run.folder, config, cell_keys=CELL_KEYS, registries=registries())
    target = settings.load_target(config.target)
    train, held_out = _samples(config.data, target)
    ids = None
    if isinstance(config.vocabulary, NewVocabulary):
        ids = vocabulary.frequent(train, config.vocabulary.size, target)
    elif config.vocabulary is not None:
        ids = config.vocabulary.load(target)
    trainer = train_lib.Trainer(
        target,
        config.recipe,
        config.training,
        train,
        held_out,
        draft_ids=ids,
        cache=config.data.cache,
        cache_dtype=config.data.cache_dtype,
    )
    facts = _facts(trainer, ids, held_out)
    cli.show_values({name.replace("_", " "): value for name, value in facts.items()})
    with checkpoint.Checkpoints(folder.path / "checkpoints", trainer.about()) as checkpoints:
        _fit(trainer, checkpoints, folder)
    with checkpoint.Checkpoints(folder.path / "checkpoints", trainer.about()) as checkpoints:
        best = checkpoints.best
        state = checkpoints.restore(trainer.cold(), best)
    exported = _export(trainer, state, folder.path)
    document = {**folder.document(), **facts, "best_step": best, "draft": exported}
    _show(folder.records, best)
    return document


def _samples(config: Data, target: types.Target) -> tuple[list[data.Sample], list[data.Sample]]:
    samples = [sample for folder in (config.folder, *config.more) for sample in data.read(folder, target)]
    if config.held_out_folder is None:
        return data.split(samples, config.held_out)
    return samples, data.read(config.held_out_folder, target)


def _facts(trainer: train_lib.Trainer, ids: np.ndarray | None, held_out: list[data.Sample]) -> dict[str, Any]:
    settings = trainer.settings
    return {
        "training_rows": len(trainer.train),
        "training_answer_tokens": trainer.train.num_answer_tokens,
        "held_out_rows": len(trainer.held_out),
        "epochs": settings.steps * settings.rows / len(trainer.train),
        "vocabulary": None if ids is None else len(ids),
        "coverage_of_held_out_answers": None if ids is None else vocabulary.coverage(ids, held_out),
    }


def _fit(trainer: train_lib.Trainer, checkpoints: checkpoint.Checkpoints, folder: run_folder.RunFolder) -> None:
    losses_file, clock_file = folder.path / "loss.jsonl", folder.path / "clock.jsonl"
    done = checkpoints.latest or 0
    for path in (losses_file, clock_file):
        kept = [line for line in read_lines(path) if line["step"] <= done]
        files.replace(path, lambda file: file.writelines(_line(**line) for line in kept))
    steps = trainer.settings.steps - done
    per_step = trainer.train.num_answer_tokens / len(trainer.train) * trainer.settings.rows
    seen, seconds, text = 0.0, 0.0, ""
    with cli.progress(steps, "train") as advance, open(losses_file, "ab") as losses, open(clock_file, "ab") as clock:
        for progress in trainer.fit(checkpoints):
            losses.write(_line(step=progress.step, loss=progress.loss))
            losses.flush()
            clock.write(_line(step=progress.step, seconds=round(progress.seconds, 3)))
            clock.flush()
            if progress.evaluation is not None:
                text = _record(trainer, progress, folder)
                curves.draw(folder.path / "curves.png", read_lines(losses_file), folder.records)
            if progress.step > done + 1:  # the first step compiled
                seen, seconds = seen + per_step, seconds + progress.seconds
            speed = f", {seen / seconds:.0f} answer tokens/s" if seconds else ""
            advance(f"loss {progress.loss:.3f}{speed}{text}")


def _record(trainer: train_lib.Trainer, progress: train_lib.Progress, folder: run_folder.RunFolder) -> str:
    """Keep an evaluation. Returns what the progress bar says of it."""
    evaluation = progress.evaluation
    record = {
        "step": progress.step,
        "answer_tokens_seen": trainer.answer_tokens_seen(progress.step),
        "loss": evaluation.loss,
        "tau": evaluation.tau,
        **evaluation.depths.rates(),
    }
    if not folder.finished({"step": progress.step}):
        folder.append(record)
    return f", held-out chain {' '.join(f'{rate:.2f}' for rate in record['chain'])}"


def _line(**content: Any) -> bytes:
    return json.dumps(content).encode() + b"\n"


def read_lines(path: pathlib.Path) -> list[dict[str, Any]]:
    """What stands in a JSONL file, up to a line that a kill cut off; nothing if there is none."""
    if not path.exists():
        return []
    lines = []
    for line in path.read_text().split("\n"):
        try:
            lines.append(json.loads(line))
        except ValueError:
            break  # the last line, cut off by a kill
    return lines


def _export(trainer: train_lib.Trainer, state: train_lib.State, folder: pathlib.Path) -> str:
    place = folder / trainer.objective.file_name
    if not place.exists():
        trainer.objective.save(
            trainer.target, trainer.draft(state), place, base_model=trainer.target.provenance.reference
        )
    return str(place)


def _show(evaluations: list[dict[str, Any]], best: int) -> None:
    rows = [evaluations[0], next(record for record in evaluations if record["step"] == best), evaluations[-1]]
    for name, record in zip(("first", "best", "last"), rows):
        cli.show_values(
            {
                f"{name} evaluation, step": record["step"],
                "  loss": record["loss"],
                "  chain accepted to depth": record["chain"],
                "  tau of a greedy chain, teacher-forced": record["tau"],
            }
        )


if __name__ == "__main__":
    sys.exit(cli.run(main, Train, __doc__, registries=registries()))
