"""Speed and acceptance of several methods on the same prompts, beside autoregressive decoding.

    python -m experiments.benchmark configs/quickstart.yaml [dotted.key=value ...]

Every prompt is decoded by every method in turn, compilation outside the clocks. At temperature 0 the text of every
lossless method is compared with autoregressive decoding token by token. Results go to a run folder; the same command
resumes a run that was interrupted.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from experiments import cli, greedy_check, prompt_sets, records, run_folder, settings, tables
from jspec import costs, decode, drafters, generation, metrics, timing, types
from jspec import sampling as sampling_lib

BASELINE = "autoregressive"


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
    run:            the run folder.
    """

    target: settings.TargetSettings
    methods: tuple[settings.Method, ...]
    prompts: settings.PromptSettings = settings.PromptSettings()
    temperatures: tuple[float, ...] = (0.0, 1.0)
    filters: settings.Filters = settings.Filters()
    max_new_tokens: int = 128
    batch: int = 1
    seed: int = 0
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
        names = [method.name for method in self.methods]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(f"methods has two entries named {min(twice)!r}")
        _methods(self)


@dataclasses.dataclass(frozen=True)
class Group:
    """Prompts decoded together.

    prompts:    which.
    padded:     `[B, W]` ids.
    lengths:    `[B]`.
    keys:       `[B]` row keys; a prompt's key depends on its id alone.
    """

    prompts: tuple[prompt_sets.Prompt, ...]
    padded: jax.Array
    lengths: jax.Array
    keys: jax.Array


@dataclasses.dataclass(frozen=True)
class Decoded:
    """One group decoded by one method: result on the host, and seconds of prefill and of decoding."""

    output: types.DecodeOutput
    prefill_seconds: float
    decode_seconds: float

    def new_tokens(self, group: Group) -> np.ndarray:
        """`[B]` tokens generated."""
        return self.output.lengths - np.asarray(group.lengths)


def main(config: Benchmark) -> dict:
    """Run every cell that has no record yet."""
    settings.check_references(config.target, *(method.drafter for method in config.methods))
    prompts = settings.load_prompts(config.prompts)
    tasks = _tasks(prompts, config.batch)
    folder = run_folder.open_folder(config.run.folder, config)

    target = settings.load_target(config.target)
    encoded = dict(zip(prompts, settings.encode(target, prompts, config.prompts)))
    needed = max(map(len, encoded.values())) + config.max_new_tokens
    methods = _methods(config)
    programs, max_positions = {}, target.model.config.max_positions
    for method in methods:
        bound, draft = method.drafter.build(target)
        programs[method.name] = costs.Program(types.Params(target.model, draft), bound, method.verifier)
        max_positions = min(max_positions, getattr(bound, "max_positions", None) or max_positions)
    capacity = decode.capacity_for(needed, max_positions)

    identity = _Identity(config, target, methods)
    open_cells = [
        (temperature, task)
        for temperature in config.temperatures
        for task in tasks
        if not all(folder.finished(identity.cell(method.name, task, temperature)) for method in methods)
    ]
    if not open_cells:
        return _finish(folder)

    groups = {
        task: [_group(batch, encoded, capacity, config.seed) for batch in batches] for task, batches in tasks.items()
    }
    runner = _Runner(config, target, programs, capacity)
    steps = len(methods) + sum(len(groups[task]) * len(methods) for _, task in open_cells)
    with cli.progress(steps, "benchmark") as advance:
        first = groups[open_cells[0][1]][0]
        for method, _ in zip(methods, _in_threads(lambda method: runner.compile(method.name, first), methods)):
            advance(f"compiled {method.name}")
        measured = runner.costs(groups, sorted({temperature for temperature, _ in open_cells}))
        for temperature, task in open_cells:
            decoded = {method.name: [] for method in methods}
            for index, group in enumerate(groups[task]):
                for method in _in_turn(methods, index):
                    decoded[method.name].append(runner.decode(method.name, group, temperature))
                    advance(f"{task}, T = {temperature:g}, {method.name}")
            for method in methods:
                if not folder.finished(identity.cell(method.name, task, temperature)):
                    # Raises when a lossless method changed the text: such a cell is not finished.
                    record = _record(
                        config, identity, method, task, temperature, target, groups[task], decoded, measured
                    )
                    folder.append(record.to_json())
            folder.write_table(_table(folder))
    return _finish(folder)


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
            "device": f"{environment['device']} ({environment['cores']} cores)"
            if environment["platform"] == "cpu"
            else f"{environment['device']} x {environment['num_devices']}",
            "versions": environment["versions"],
            "config_hash": run_folder.config_hash(config),
        }

    def cell(self, method: str, task: str, temperature: float) -> dict:
        return {"method": method, "task": task, "temperature": temperature, **self.constant}


class _Runner:
    """Runs and times methods; one capacity and width for all prompts, so that each method compiles once."""

    def __init__(self, config: Benchmark, target: types.Target, programs: dict[str, costs.Program], capacity: int):
        self._config, self._target, self._programs, self._capacity = config, target, programs, capacity

    def _sampling(self, temperature: float, max_new_tokens: int) -> types.Sampling:
        return sampling_lib.make(
            self._config.batch,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            stop_ids=self._target.stop_ids,
            **vars(self._config.filters),
        )

    def decode(self, name: str, group: Group, temperature: float, max_new_tokens: int | None = None) -> Decoded:
        program = self._programs[name]
        sampling = self._sampling(temperature, max_new_tokens or self._config.max_new_tokens)
        state, prefill_seconds = timing.timed(
            decode.prefill_jit,
            program.params,
            group.keys,
            group.padded,
            group.lengths,
            drafter=program.drafter,
            sampling=sampling,
            capacity=self._capacity,
        )
        state, decode_seconds = timing.timed(
            decode.run_jit,
            program.params,
            group.keys,
            state,
            drafter=program.drafter,
            verifier=program.verifier,
            sampling=sampling,
        )
        return Decoded(jax.device_get(decode.output(state)), prefill_seconds, decode_seconds)

    def compile(self, name: str, group: Group) -> None:
        """Compile all that `decode` and `costs` call."""
        self.decode(name, group, 0.0, max_new_tokens=2)
        self._part(name, group.keys, group.padded, group.lengths, 0.0).verify()

    def _part(self, name: str, keys, padded, lengths, temperature: float) -> costs.Part:
        # A budget that cannot run out: it would leave nothing to draft.
        sampling = self._sampling(temperature, self._capacity)
        return costs.Part(self._programs[name], keys, padded, lengths, sampling=sampling, capacity=self._capacity)

    def costs(
        self, groups: dict[str, list[Group]], temperatures: Sequence[float]
    ) -> dict[float, dict[str, costs.Costs]]:
        """Parts of every method in the middle of a typical run: a prompt of median length, and half its answer."""
        every = sorted(
            (group for batch in groups.values() for group in batch), key=lambda group: int(group.lengths.sum())
        )
        first = every[len(every) // 2]
        half = self.decode(BASELINE, first, 0.0, max_new_tokens=max(1, self._config.max_new_tokens // 2)).output
        padded, lengths = generation.pad(
            [row[:length] for row, length in zip(half.tokens, half.lengths)],
            self._capacity,
        )
        arrays = first.keys, jnp.asarray(padded), jnp.asarray(lengths)
        measured = {}
        for temperature in temperatures:
            measured[temperature] = costs.measure(
                {name: self._part(name, *arrays, temperature) for name in self._programs}
            )
        return measured


def _in_threads(function: Callable, items: Iterable) -> Iterator:
    """Call for every item, two at a time: much of compiling keeps one core busy. Results in order."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        yield from pool.map(function, items)


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
    for task, members in tasks.items():
        if len(members) % batch:
            raise ValueError(f"batch {batch} does not divide the {len(members)} prompts of task {task!r}")
    return {
        task: [tuple(members[i : i + batch]) for i in range(0, len(members), batch)] for task, members in tasks.items()
    }


def _group(prompts, encoded, width: int, seed: int) -> Group:
    padded, lengths = generation.pad([encoded[prompt] for prompt in prompts], width)
    seeds = [zlib.crc32(f"{seed}/{prompt.id}".encode()) for prompt in prompts]
    return Group(prompts, jnp.asarray(padded), jnp.asarray(lengths), generation.row_keys(seeds, len(prompts)))


def _in_turn(methods: Sequence[settings.Method], index: int) -> Sequence[settings.Method]:
    """Every other group backwards, so that no method always follows the same one."""
    return methods[::-1] if index % 2 else methods


def _record(config, identity, method, task, temperature, target, groups, decoded, measured) -> records.Record:
    own, baseline = decoded[method.name], decoded[BASELINE]
    acceptance = jax.tree.map(lambda *rows: np.concatenate(rows), *(run.output.acceptance for run in own))
    new_tokens = np.concatenate([run.new_tokens(group) for run, group in zip(own, groups)])
    summary = metrics.summarize(acceptance, new_tokens)

    def calls(runs):  # decoding alone: prefill emitted each row's first token
        tokens = [int((run.new_tokens(group) - 1).sum()) for run, group in zip(runs, groups)]
        return metrics.Calls(np.array(tokens), np.array([run.decode_seconds for run in runs]))

    def kept(calls, keep):
        return metrics.Calls(calls.tokens[keep], calls.seconds[keep])

    own_calls, baseline_calls = calls(own), calls(baseline)
    keep = (own_calls.tokens > 0) & (baseline_calls.tokens > 0)  # an answer may end with its first token
    cost = measured[temperature][method.name]
    autoregressive = measured[temperature][BASELINE]
    ar_seconds = autoregressive.verify + autoregressive.draft
    speed = (
        metrics.speedup(kept(baseline_calls, keep), kept(own_calls, keep), compiling_calls=0) if keep.any() else None
    )
    check = None
    if temperature == 0 and method.verifier.lossless and method.name != BASELINE and config.target.dtype == "float32":
        check = greedy_check.compare(target, groups, own, baseline)
    depth = len(summary.acceptance_histogram) - 1
    draft = getattr(method.drafter, "draft", None)
    per_call = cost.draft / depth / ar_seconds if draft is not None and depth else None
    _, tpot = metrics.latency(np.zeros(len(own)), metrics.Calls(own_calls.tokens + 1, own_calls.seconds))
    return records.Record(
        method=method.name,
        drafter=method.drafter.kind,
        verifier=method.verifier.kind,
        lossless=method.verifier.lossless,
        task=task,
        temperature=temperature,
        **identity.constant,
        draft=None if draft is None else _describe(draft),
        num_prompts=len(new_tokens),
        new_tokens=summary.new_tokens,
        target_calls=summary.target_calls,
        tau=summary.tau,
        alpha=summary.alpha,
        acceptance_histogram=summary.acceptance_histogram,
        acceptance_by_position=summary.acceptance_by_position,
        tokens_per_second=own_calls.tokens.sum() / own_calls.seconds.sum(),
        ttft_ms=float(np.median([run.prefill_seconds for run in own])) * 1e3,
        tpot_ms=tpot,
        speedup=speed.ratio_of_totals if speed else float("nan"),
        speedup_ci=speed.interval if speed else None,
        expected_speedup=metrics.expected_speedup(summary.tau, ar_seconds * 1e3, cost.verify * 1e3, cost.draft * 1e3),
        cost=records.Cost(ar_seconds * 1e3, cost.verify * 1e3, cost.draft * 1e3, per_call),
        greedy_check=check,
        published=None,
        **identity.circumstances,
    )


def _describe(draft) -> str:
    """Where a draft comes from; drafters have their own settings for that."""
    if getattr(draft, "layers", None) is not None:
        return f"first {draft.layers} layers of the target"
    return draft.reference if draft.reference is not None else "random weights"


def _table(folder: run_folder.RunFolder) -> str:
    return tables.results_table([records.Record.from_json(record) for record in folder.records])


def _finish(folder: run_folder.RunFolder) -> dict:
    """Table on the disk and in the terminal. Too many near-ties fail the run."""
    results = [records.Record.from_json(record) for record in folder.records]
    folder.write_table(_table(folder))
    cli.show(results)
    greedy_check.limit_near_ties(results)
    return folder.document()


if __name__ == "__main__":
    sys.exit(cli.run(main, Benchmark, __doc__))
