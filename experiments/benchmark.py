"""Speed and acceptance of several methods on the same prompts, beside autoregressive decoding.

    python -m experiments.benchmark configs/quickstart.yaml [dotted.key=value ...]

Every prompt is decoded by every method in turn, compilation outside the clocks. At temperature 0 the text of every
lossless method is compared with autoregressive decoding token by token. Results go to a run folder, task by task; the
tables and the last line also tell all tasks together (`overall`); `prompts.json` and the last line tell which prompts
were chosen and how many were skipped. The same command resumes a run that was interrupted.

    python -m experiments.benchmark CONFIG --plan [device=NAME] [dotted.key=value ...]

says what the run would read, hold and take on a device, without weights and without computing (`experiments.plan`).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from experiments import (
    cli,
    greedy_check,
    overall,
    papers,
    plan,
    prompt_sets,
    records,
    run_folder,
    runner,
    settings,
    tables,
    traces,
)
from jspec import costs, drafters, metrics, types
from jspec import sampling as sampling_lib

BASELINE = runner.BASELINE


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """The config.

    target:         the model to speed up.
    methods:        lines of the table; the baseline `autoregressive` is added in front when it is not among them.
    prompts:        what is decoded.
    temperatures:   each prompt is decoded at each.
    filters:        cuts of the law at temperatures above 0.
    max_new_tokens: per prompt.
    batch:          prompts decoded together; the prompts of each task must divide by it.
    seed:           of the sampling.
    traces:         answers kept token by token, of the first so many prompts of each task (`traces.jsonl`).
    paper:          the published table that is reproduced, and whose numbers are whose.
    scale, model:   names under which a config offers alternatives (`jspec.config`); they change nothing by themselves.
    define:         names for what other values interpolate: `${define.eagle}`.
    not_runnable:   why this can be planned but not run; None if it can.
    run:            the run folder.
    """

    target: settings.TargetSettings
    methods: tuple[settings.Method, ...]
    prompts: settings.PromptSubset = settings.PromptSubset()
    temperatures: tuple[float, ...] = (0.0, 1.0)
    filters: settings.Filters = settings.Filters()
    max_new_tokens: int = 128
    batch: int = 1
    seed: int = 0
    traces: int = 1
    paper: papers.PaperSettings | None = None
    scale: str | None = None
    model: str | None = None
    define: dict[str, str | int | float | tuple[int, ...]] = dataclasses.field(default_factory=dict)
    not_runnable: str | None = None
    run: run_folder.RunSettings = run_folder.RunSettings()

    def __post_init__(self):
        if not self.temperatures:
            raise ValueError("temperatures is empty")
        if len(set(self.temperatures)) < len(self.temperatures):
            raise ValueError(f"temperatures {self.temperatures} holds one twice")
        for temperature in self.temperatures:
            sampling_lib.make(1, max_new_tokens=self.max_new_tokens, temperature=temperature)
        if self.batch < 1:
            raise ValueError(f"batch {self.batch} is below 1")
        if self.seed < 0:
            raise ValueError(f"seed {self.seed} is below 0")
        if self.traces < 0:
            raise ValueError(f"traces {self.traces} is below 0")
        names = [method.name for method in self.methods]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(f"methods has two entries named {min(twice)!r}")
        _methods(self)


def main(config: Benchmark) -> dict:
    """Run every cell that has no record yet."""
    check(config)
    folder = run_folder.open_folder(config.run.folder, config)
    return _finish(folder, fill(config, folder, settings.load_target(config.target)))


def check(config: Benchmark) -> None:
    """Refuse what cannot run before anything is loaded or downloaded.

    Raises:
      ValueError, OSError, ImportError: what is wrong.
    """
    if config.not_runnable is not None:
        raise ValueError(f"this can be planned (--plan) but not run: {config.not_runnable}")
    settings.check_references(config.target, *(method.drafter for method in config.methods))
    _tasks(prompt_sets.first_of_each(_given(config), config.prompts.per_task), config.batch)


def _given(config: Benchmark) -> tuple[prompt_sets.Prompt, ...]:
    return prompt_sets.load_prompts(config.prompts.file, config.prompts.tasks, choose=config.prompts.choose)


def fill(config: Benchmark, folder: run_folder.RunFolder, target: types.Target) -> settings.Chosen:
    """Run the cells that have no record in the folder. A process compiles each program once, however often it calls.

    Returns:
      The prompts.
    """
    chosen = settings.choose_prompts(target, _given(config), config.prompts)
    tasks, methods = _tasks(chosen.prompts, config.batch), _methods(config)
    identity = _Identity(config, target, methods)
    todo = [
        (temperature, task)
        for temperature in config.temperatures
        for task in tasks
        if not all(folder.finished(identity.cell(method.name, task, temperature)) for method in methods)
    ]
    if not todo:
        print(chosen.describe(), flush=True)
        return chosen

    running, groups = _prepare(config, target, methods, tasks, chosen.encoded)
    print(chosen.describe(), flush=True)
    run_folder.write_text_atomic(folder.path / "prompts.json", json.dumps(chosen.to_json(), indent=2) + "\n")
    steps = len(methods) + sum(len(groups[task]) * len(methods) for _, task in todo)
    with cli.progress(steps, "benchmark") as advance:
        for name in running.compile(groups[todo[0][1]][0]):
            advance(f"compiled {name}")
        parts = functools.cache(lambda task: running.middle(groups[task]))  # each task has prompts of its own length
        for temperature, task in todo:
            meter = costs.Meter(parts(task)(temperature))
            decoded, measured = _decode(running, meter, groups[task], task, temperature, advance)
            _keep(config, folder, identity, methods, task, temperature, target, groups[task], decoded, measured)
    return chosen


def _prepare(
    config: Benchmark,
    target: types.Target,
    methods: Sequence[settings.Method],
    tasks: Mapping[str, Sequence[tuple[prompt_sets.Prompt, ...]]],
    encoded: Mapping[prompt_sets.Prompt, list[int]],
) -> tuple[runner.Runner, dict[str, list[runner.Group]]]:
    """All methods ready to run, and each task's batches as arrays: of one capacity, so that each method compiles once.

    Raises:
      ValueError: a draft cannot be had, or the target or a draft cannot follow the longest prompt and its answer.
    """
    programs = {}
    for method in methods:
        bound, draft = method.drafter.build(target)
        programs[method.name] = costs.Program(types.Params(target.model, draft), bound, method.verifier)
    needed = max(map(len, encoded.values())) + config.max_new_tokens
    capacity = runner.capacity(target, [program.drafter for program in programs.values()], needed)
    groups = {
        task: [runner.group(batch, encoded, capacity, config.seed) for batch in batches]
        for task, batches in tasks.items()
    }
    running = runner.Runner(
        target, programs, capacity, batch=config.batch, filters=config.filters, max_new_tokens=config.max_new_tokens
    )
    return running, groups


def _decode(
    running: runner.Runner,
    meter: costs.Meter,
    groups: Sequence[runner.Group],
    task: str,
    temperature: float,
    advance: Callable[[str], None],
) -> tuple[dict[str, list[runner.Decoded]], dict[str, costs.Costs]]:
    """A task's batches by every method, in turn, and what the parts of their rounds cost meanwhile."""
    decoded = collections.defaultdict(list)
    for index, group in enumerate(groups):
        meter.turn()
        for name in running.in_turn(index):
            decoded[name].append(running.decode(name, group, temperature))
            advance(f"{task}, T = {temperature:g}, {name}")
    meter.turn()
    return decoded, meter.costs()


def _keep(config, folder, identity, methods, task, temperature, target, groups, decoded, measured) -> None:
    """Write the cells of a task that were open, their answers before their records, and the table.

    Raises:
      OutputsDiffer: a lossless method changed the text; its cell is not finished.
    """
    for method in methods:
        cell = identity.cell(method.name, task, temperature)
        if not folder.finished(cell):
            record = _record(config, identity, method, task, temperature, target, groups, decoded, measured)
            traces.append(folder.path, traces.take(cell, target, groups, decoded[method.name], config.traces))
            folder.append(record.to_json())
    folder.write_table(_table(folder))


class _Identity:
    """What names a cell and its circumstances."""

    def __init__(self, config: Benchmark, target: types.Target, methods: Sequence[settings.Method]):
        environment = run_folder.environment()
        self.constant = {
            "target": target.provenance.reference,
            "batch": config.batch,
            "dtype": config.target.dtype,
            "seed": config.seed,
        }
        self.circumstances = {
            "device": run_folder.device_name(environment),
            "versions": environment["versions"],
            "config_hash": run_folder.config_hash(config),
        }
        self.draft_sha256 = {
            method.name: settings.draft_digest(getattr(method.drafter, "draft", None)) for method in methods
        }

    def cell(self, method: str, task: str, temperature: float) -> dict:
        return {"method": method, "task": task, "temperature": temperature, **self.constant}


def _methods(config: Benchmark) -> list[settings.Method]:
    baseline = settings.Method(BASELINE, drafters.Autoregressive())
    for method in config.methods:
        if method.name == BASELINE and method != baseline:
            raise ValueError(f"methods: the name {BASELINE!r} is the baseline's; give {method.drafter} another")
    return [baseline, *(method for method in config.methods if method.name != BASELINE)]


def _tasks(prompts: Sequence[prompt_sets.Prompt], batch: int) -> dict[str, list[tuple[prompt_sets.Prompt, ...]]]:
    """Each task's prompts in batches."""
    tasks: dict[str, list[prompt_sets.Prompt]] = {}
    for prompt in prompts:
        tasks.setdefault(prompt.task, []).append(prompt)
    return {task: runner.in_batches(members, batch, f"task {task!r}") for task, members in tasks.items()}


def _record(config, identity, method, task, temperature, target, groups, decoded, measured) -> records.Record:
    own, baseline = decoded[method.name], decoded[BASELINE]
    summary = runner.summarize(own, groups)
    own_calls = runner.decoding_calls(own, groups)
    sure = runner.acceptance_intervals(own, groups)
    speed = runner.speedup(own_calls, runner.decoding_calls(baseline, groups))
    cost, autoregressive = measured[method.name], measured[BASELINE]
    ar_seconds = autoregressive.verify + autoregressive.draft
    check = None
    if temperature == 0 and method.verifier.lossless and method.name != BASELINE and config.target.dtype == "float32":
        check = greedy_check.compare(target, groups, own, baseline)
    depth = len(summary.acceptance_histogram) - 1
    draft = getattr(method.drafter, "draft", None)
    by_depth = settings.drafts_by_depth(method.drafter)
    calls = depth and (depth if by_depth else int(draft is not None))
    per_call = cost.draft / calls / ar_seconds if calls else None
    before = runner.before_repeat(own, groups, depth, config.max_new_tokens)
    gaps = runner.landing_gaps(own)
    return records.Record(
        method=method.name,
        drafter=method.drafter.kind,
        verifier=method.verifier.kind,
        lossless=method.verifier.lossless,
        task=task,
        temperature=temperature,
        **identity.constant,
        draft=None if draft is None else settings.describe_draft(draft),
        num_prompts=sum(len(group.prompts) for group in groups),
        new_tokens=summary.new_tokens,
        target_calls=summary.target_calls,
        tau=summary.tau,
        alpha=summary.alpha,
        acceptance_histogram=summary.acceptance_histogram,
        acceptance_by_position=summary.acceptance_by_position,
        tokens_per_second=own_calls.tokens.sum() / own_calls.seconds.sum(),
        ttft_ms=float(np.median([run.prefill_seconds for run in own])) * 1e3,
        tpot_ms=metrics.time_per_token(gaps, own_calls.tokens),
        speedup=speed.ratio_of_totals if speed else float("nan"),
        speedup_ci=speed.interval if speed else None,
        expected_speedup=metrics.expected_speedup(summary.tau, ar_seconds * 1e3, cost.verify * 1e3, cost.draft * 1e3),
        cost=records.Cost(ar_seconds * 1e3, cost.verify * 1e3, cost.draft * 1e3, per_call),
        greedy_check=check,
        published=papers.find(config.paper, method.name, task=task, temperature=temperature, batch=config.batch),
        **identity.circumstances,
        draft_sha256=identity.draft_sha256[method.name],
        offered=summary.offered,
        tested=summary.tested,
        before_repeat=records.BeforeRepeat(
            **{field.name: getattr(before, field.name) for field in dataclasses.fields(records.BeforeRepeat)}
        ),
        tau_ci=sure.tau,
        alpha_ci=sure.alpha,
        mean_accepted=summary.mean_accepted,
        conditional_acceptance_by_position=summary.conditional_acceptance_by_position,
        inter_token_ms=records.Latency(*metrics.inter_token_latency(gaps)),
    )


def _table(folder: run_folder.RunFolder) -> str:
    return tables.report([records.Record.from_json(record) for record in folder.records])


def _finish(folder: run_folder.RunFolder, chosen: settings.Chosen) -> dict:
    """Table on the disk and in the terminal. Too many near-ties fail the run."""
    results = [records.Record.from_json(record) for record in folder.records]
    folder.write_table(_table(folder))
    cli.show(results)
    greedy_check.limit_near_ties(results)
    return {
        **folder.document(),
        "overall": [each.to_json() for each in overall.overall(results)],
        "prompts": chosen.to_json(),
    }


if __name__ == "__main__":
    sys.exit(cli.run(main, Benchmark, __doc__, plan=plan.main))
