"""Make training text by the target itself.

    python -m experiments.synthesize configs/synthesize.yaml [dotted.key=value ...]

Prompts are written by the target, or come from a JSONL file, or both; the answers are the target's, at a mix of
temperatures. Samples go to a folder of shards. The same command goes on where it was stopped, and with a larger
`num_samples` adds to what is there.
"""

from __future__ import annotations

import dataclasses
import sys
import time

from experiments import cli, run_folder, settings
from jspec import config as config_lib
from jspec import decode, drafters, types
from jspec.drafters import base
from jspec.training import data, synthesis


@dataclasses.dataclass(frozen=True)
class Synthesize:
    """The config.

    target:      who answers.
    data:        the folder of samples.
    num_samples: how many.
    synthesis:   what they are.
    prompts:     given prompts; None means the target's own alone.
    drafter:     what speeds it up.
    verifier:    what decides; lossless, or the answers would not be the target's.
    shard_size:  samples in a file.
    """

    target: settings.TargetSettings
    data: str
    num_samples: int
    synthesis: synthesis.Settings = synthesis.Settings()
    prompts: settings.PromptSettings | None = None
    drafter: types.Drafter = drafters.Autoregressive()
    verifier: types.Verifier = decode.REJECTION
    shard_size: int = 256

    def __post_init__(self):
        base.check_count("num_samples", self.num_samples, 1)
        base.check_count("shard_size", self.shard_size, 1)
        if not self.data:
            raise ValueError("data is empty")
        if not self.verifier.lossless:
            raise ValueError(f"verifier {self.verifier.kind!r} is not lossless: its text would not be the target's")
        if self.synthesis.own is None and self.prompts is None:
            raise ValueError("synthesis.own and prompts are both null: there is nothing to answer")


# What a folder's samples do not depend on.
NOT_HASHED = ("data", "num_samples", "drafter", "verifier", "shard_size")


def main(config: Synthesize) -> dict:
    """Make the samples that are not there yet."""
    settings.check_references(config.target, config.drafter)
    prompts = () if config.prompts is None else settings.load_prompts(config.prompts)
    target = settings.load_target(config.target)
    encoded = settings.encode(target, prompts, config.prompts) if prompts else ()
    source = synthesis.Synthesis(target, config.synthesis, encoded)
    made_by = config_lib.config_hash(config, ignore=NOT_HASHED)
    writer = data.open_writer(config.data, data.Origin.of(target, made_by), shard_size=config.shard_size)

    missing = [number for number in range(config.num_samples) if number not in writer.finished]
    started, tokens = time.perf_counter(), 0
    with cli.progress(len(missing), "synthesize") as advance:
        for samples in source.samples(missing, config.drafter, config.verifier) if missing else ():
            writer.add(samples)
            for sample in samples:
                tokens += int((sample.roles == data.ANSWER).sum())
                advance(f"{tokens / (time.perf_counter() - started):.0f} answer tokens/s")
    writer.close()
    samples = data.read(config.data, target)
    statistics = {
        "samples": len(samples),
        "empty": sum(not len(sample.tokens) for sample in samples),
        "prompts_left_out": source.left_out,
        "prompt_tokens": sum(int((sample.roles == data.PROMPT).sum()) for sample in samples),
        "answer_tokens": sum(int((sample.roles == data.ANSWER).sum()) for sample in samples),
        "answer_tokens_per_second": tokens / (time.perf_counter() - started) if tokens else None,
    }
    cli.show_values({name.replace("_", " "): value for name, value in statistics.items()})
    return {"data": config.data, **statistics, "versions": run_folder.environment()["versions"]}


if __name__ == "__main__":
    sys.exit(cli.run(main, Synthesize, __doc__))
