"""Make a trained draft ready to ship: its files in bfloat16, and a card that says what it is.

    python -m experiments.card training=RUN out=jspec/pretrained/smollm2-135m/eagle3 "benchmark=[RUN]" [data="..."]

RUN is the folder of a finished `experiments.train`; the other one that of `configs/drafts.yaml`, run with the files
that this script has written (several, where each has other temperatures). So it is called twice: without a benchmark,
and once there is one with it, which only replaces the card. The folder gets the draft's files, `card.json` and
`card.md`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

import jspec
from experiments import benchmark, card_text, cli, overall, records, run_folder, settings, train
from jspec import config as config_lib
from jspec import types
from jspec.drafters import draft_vocabulary
from jspec.models import heads
from jspec.training import data
from jspec.weights import (
    eagle_files,
    huggingface_export,
    medusa_files,
    references,
    shared_export,
    vocabulary_files,
)

CARD, TEXT = "card.json", "card.md"
DEFAULT = "configs/card.yaml"


@dataclasses.dataclass(frozen=True)
class Card:
    """The config.

    training:  run folder of `experiments.train`, finished.
    out:       the folder to write.
    reference: what configs call it; None means `pretrained:` and the last two parts of `out`.
    benchmark: run folders of `experiments.benchmark` whose methods use it under that name, on the same prompts.
    data:      what the training text is, in words.
    dtype:     of the written tensors.
    replace:   put these files in the place of others that are in `out`.
    """

    training: str
    out: str
    reference: str | None = None
    benchmark: tuple[str, ...] = ()
    data: str = ""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    replace: bool = False

    def __post_init__(self):
        for name in ("training", "out"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty")

    @property
    def name(self) -> str:
        """The reference."""
        return self.reference or f"pretrained:{'/'.join(pathlib.Path(self.out).absolute().parts[-2:])}"


def main(config: Card) -> dict:
    """Write the draft, or only its card when the draft is there already."""
    run = run_folder.read(config.training, train.CELL_KEYS)
    trained = config_lib.load(train.Train, run.path / "config.yaml", registries=train.registries())
    measured = [run_folder.read(path) for path in config.benchmark]
    place = _exported(run.path)
    settings.check_references(trained.target)
    settings.compile_as_wanted(trained.target)
    target = settings.load_target(trained.target)
    draft = _with_vocabulary(jspec.load_draft(str(place), target), target, run.path / vocabulary_files.NAME)

    out = pathlib.Path(config.out).absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    work = pathlib.Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        made = work / "draft"
        save(draft, target, made, config.dtype)
        card = _card(config, run, trained, measured, target, draft, made)
        run_folder.write_text_atomic(made / CARD, json.dumps(card, indent=2, allow_nan=False) + "\n")
        run_folder.write_text_atomic(made / TEXT, card_text.text(card))
        _put(made, out, config.replace)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(card_text.text(card))
    return {"folder": config.out, "card": card}


def save(
    draft: types.Target | heads.EagleHead | heads.MedusaHeads, target: types.Target, folder: pathlib.Path, dtype: Any
) -> None:
    """Write a draft of any kind in a dtype, as small as its form allows.

    Raises:
      ValueError, OSError: it cannot be written, or reads back differently.
    """
    base_model = target.provenance.reference
    if isinstance(draft, heads.EagleHead):
        eagle_files.save(draft, target, folder, base_model=base_model, dtype=jnp.dtype(dtype))
    elif isinstance(draft, heads.MedusaHeads):
        medusa_files.save(draft, target, folder, base_model=base_model, dtype=jnp.dtype(dtype))
    elif shared_export.shared_with(draft, target):
        shared_export.save_shared(draft, target, folder, dtype=jnp.dtype(dtype))
    else:
        huggingface_export.save_huggingface(
            draft, folder, dtype=jnp.dtype(dtype), target_sha256=target.provenance.sha256
        )


def _exported(folder: pathlib.Path) -> pathlib.Path:
    if (folder / "target").exists():
        raise ValueError(f"{folder} holds heads for a target that was trained with them (Medusa-2): ship both by hand")
    for name in ("draft", "draft.gguf"):
        if (folder / name).exists():
            return folder / name
    raise ValueError(f"{folder} holds no draft: the training has not ended")


def _with_vocabulary(draft: Any, target: types.Target, path: pathlib.Path) -> Any:
    """A draft that lacks the reduced vocabulary it was trained with gets it: version 0.3 kept it beside the draft."""
    if not path.is_file():
        return draft
    ids = draft_vocabulary.Vocabulary(str(path)).load(target)
    if isinstance(draft, types.Target):
        return draft if draft.draft_ids is not None else dataclasses.replace(draft, draft_ids=ids)
    if "draft_ids" in draft.params:
        return draft
    params, config = {**draft.params, "draft_ids": jnp.asarray(ids)}, draft.config
    if isinstance(draft, heads.EagleHead):
        config = dataclasses.replace(config, vocab_size=len(ids))
    return dataclasses.replace(draft, params=params, config=config)


def _put(made: pathlib.Path, out: pathlib.Path, replace: bool) -> None:
    """Give what was made its name. Where the same draft lies already, only the card is new."""
    if not out.exists():
        os.replace(made, out)
        return
    if inside := sorted(path.name for path in out.iterdir() if path.is_dir()):
        raise ValueError(f"{out} holds the folder {inside[0]}, so it is no draft's")
    held, new = _draft_files(out), _draft_files(made)
    if held == new:
        for name in (CARD, TEXT):
            os.replace(made / name, out / name)
        return
    if held and not replace:
        differing = ", ".join(sorted(name for name in {*held, *new} if held.get(name) != new.get(name)))
        raise ValueError(f"{out} holds something else than this draft ({differing}); set replace=true to overwrite it")
    os.replace(out, made.with_name("old"))
    os.replace(made, out)


def _draft_files(folder: pathlib.Path) -> dict[str, bytes]:
    """What is there beside the card."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in (CARD, TEXT)}


# The card.


def _card(
    config: Card,
    run: run_folder.PastRun,
    trained: train.Train,
    measured: Sequence[run_folder.PastRun],
    target: types.Target,
    draft: Any,
    folder: pathlib.Path,
) -> dict[str, Any]:
    (file,) = references.weight_files(folder)
    sha256 = references.digest(file)
    best = max(
        run.records, key=lambda record: (record["tau"], (run.path / "checkpoints" / str(record["step"])).exists())
    )
    clock = train.read_lines(run.path / "clock.jsonl")
    seconds = lambda step: round(sum(line["seconds"] for line in clock if line["step"] <= step), 1) if clock else None
    seen = lambda record: {
        "step": record["step"],
        "answer_tokens_seen": record.get("answer_tokens_seen"),
        "seconds": seconds(record["step"]),
    }
    ids = draft.draft_ids if isinstance(draft, types.Target) else draft.params.get("draft_ids")
    held_out = {key: value for key, value in best.items() if key not in seen(best)}
    return records.plain(
        {
            "reference": config.name,
            "kind": _kind(trained.recipe),
            "file": {"name": file.name, "sha256": sha256, "bytes": file.stat().st_size, "dtype": config.dtype},
            "target": {"reference": target.provenance.reference, "sha256": target.provenance.sha256},
            "vocabulary": None if ids is None else len(ids),
            "data": {"recipe": config.data, "folders": _folders(trained.data, target)},
            "training": {
                "best": seen(best),
                "last": seen(run.records[-1]),
                "steps": trained.training.steps,
                "seed": trained.training.seed,
                "device": run_folder.device_name(run.environment),
                "versions": run.environment["versions"],
                "config_hash": run.environment["config_hash"],
            },
            "held_out": held_out,
            "benchmark": _benchmark(measured, config.name, sha256) if measured else None,
            "config": _shown(config_lib.as_mapping(trained, train.registries())),
        }
    )


def _kind(recipe: Any) -> str:
    """The drafter that takes it."""
    return (
        f"eagle {recipe.version}" if recipe.kind == "eagle" else {"distill": "standard"}.get(recipe.kind, recipe.kind)
    )


def _folders(given: train.Data, target: types.Target) -> list[dict[str, Any]]:
    """What each folder of samples holds; no counts of one that is not there any more."""
    found = []
    for name in (given.folder, *given.more):
        folder = pathlib.Path(name)
        counts = {"samples": None, "answer_tokens": None}
        if folder.is_dir():
            samples = data.read(folder, target)
            answers = sum(int(np.sum(sample.roles == data.ANSWER)) for sample in samples)
            counts = {"samples": len(samples), "answer_tokens": answers}
        found.append({"name": folder.name, **counts})
    return found


def _shown(content: dict[str, Any]) -> dict[str, Any]:
    """A config without the places of its run on somebody's disk: only the names of folders and files stay."""
    content = {key: value for key, value in content.items() if key not in run_folder.NOT_HASHED}
    name = lambda path: path if path is None else pathlib.PurePath(path).name
    given = dict(content["data"])
    given |= {key: name(given[key]) for key in ("folder", "held_out_folder", "cache")}
    content["data"] = given | {"more": [name(path) for path in given["more"]]}
    if content["vocabulary"] and "file" in content["vocabulary"]:
        content["vocabulary"] = {**content["vocabulary"], "file": name(content["vocabulary"]["file"])}
    return content


def _benchmark(runs: Sequence[run_folder.PastRun], reference: str, sha256: str) -> dict[str, Any]:
    """The methods of benchmarks that use the draft, all tasks together.

    Raises:
      ValueError: there are none, they used another file under the same name, or the runs had other prompts.
    """
    everything, circumstances = [], {}
    for run in runs:
        own, among = _methods(run, reference, sha256), _circumstances(run)
        everything += own
        circumstances = circumstances or among
        for key, value in among.items():
            if value != circumstances[key]:
                raise ValueError(f"{runs[0].path} and {run.path} differ in {key}: {circumstances[key]} and {value}")
    return {
        "config_hashes": [run.environment["config_hash"] for run in runs],
        "device": run_folder.device_name(runs[0].environment),
        **circumstances,
        "methods": [each.to_json() for each in everything],
    }


def _methods(run: run_folder.PastRun, reference: str, sha256: str) -> list[overall.Overall]:
    everything = overall.overall([records.Record.from_json(record) for record in run.records])
    own = [each for each in everything if each.draft == reference]
    if not own:
        known = sorted({each.draft for each in everything if each.draft is not None})
        raise ValueError(f"{run.path} has no method with draft {reference}; known: {', '.join(known) or 'none'}")
    for each in own:
        if each.draft_sha256 != sha256:
            raise ValueError(
                f"{run.path} measured another {reference}, with sha256 {each.draft_sha256}; this one has {sha256}"
            )
    return own


def _circumstances(run: run_folder.PastRun) -> dict[str, Any]:
    """What runs have to have in common to stand on one card."""
    prompts, config = None, config_lib.load(benchmark.Benchmark, run.path / "config.yaml")
    if (run.path / "prompts.json").is_file():
        chosen = references.read_json(run.path / "prompts.json")
        prompts = {
            "file": pathlib.PurePath(config.prompts.file or "the project's own").name,
            "tasks": {task: len(ids) for task, ids in chosen["ids"].items()},
            "skipped": chosen["skipped"],
        }
    return {"max_new_tokens": config.max_new_tokens, "prompts": prompts}


if __name__ == "__main__":
    sys.exit(cli.run(main, Card, __doc__, default=DEFAULT))
