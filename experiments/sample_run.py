"""One drafter on sample prompts: what the doctor and the search for a tree set, check and prepare alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from experiments import prompt_sets, run_folder, runner, settings
from jspec import costs, generation, types
from jspec import sampling as sampling_lib


@dataclasses.dataclass(frozen=True)
class SampleRun:
    """The config.

    target:         the model to speed up.
    drafter:        what proposes, with its draft.
    prompts:        samples.
    temperature:    0 is greedy.
    filters:        cuts of the law.
    max_new_tokens: per prompt.
    batch:          prompts decoded together; their number must divide by it.
    seed:           of the sampling.
    run:            the run folder.
    """

    target: settings.TargetSettings
    drafter: types.Drafter
    prompts: settings.PromptSettings = settings.PromptSettings()
    temperature: float = 0.0
    filters: settings.Filters = settings.Filters()
    max_new_tokens: int = 64
    batch: int = 1
    seed: int = 0
    run: run_folder.RunSettings = run_folder.RunSettings()

    def __post_init__(self):
        sampling_lib.make(1, max_new_tokens=self.max_new_tokens, temperature=self.temperature)
        generation.check_seed(self.seed)
        if self.batch < 1:
            raise ValueError(f"batch {self.batch} is below 1")


@dataclasses.dataclass(frozen=True)
class Opened:
    """Where a run writes, its target, and the prompts in batches."""

    folder: run_folder.RunFolder
    target: types.Target
    batches: list[tuple[prompt_sets.Prompt, ...]]


def open_run(config: SampleRun) -> Opened:
    """Check what can be checked, open the folder, and only then load the target.

    Raises:
      ValueError, OSError, ImportError: what is wrong.
    """
    settings.check_references(config.target, config.drafter)
    batches = runner.in_batches(settings.load_prompts(config.prompts), config.batch, "the set")
    folder = run_folder.open_folder(config.run.folder, config, cell_keys=())
    return Opened(folder, settings.load_target(config.target), batches)


def prepare(
    config: SampleRun, opened: Opened, programs: Mapping[str, costs.Program]
) -> tuple[runner.Runner, Sequence[runner.Group]]:
    """The programs ready to run on the prompts; `runner.BASELINE` among them.

    Raises:
      ValueError: the target or a draft cannot follow the longest prompt and its answer.
    """
    target, prompts = opened.target, [prompt for batch in opened.batches for prompt in batch]
    encoded = dict(zip(prompts, settings.encode(target, prompts, config.prompts)))
    needed = max(map(len, encoded.values())) + config.max_new_tokens
    capacity = runner.capacity(target, [program.drafter for program in programs.values()], needed)
    groups = [runner.group(batch, encoded, capacity, config.seed) for batch in opened.batches]
    running = runner.Runner(
        target, programs, capacity, batch=config.batch, filters=config.filters, max_new_tokens=config.max_new_tokens
    )
    return running, groups
