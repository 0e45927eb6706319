"""Answer one prompt, as it streams.

    python -m experiments.generate configs/generate.yaml prompt="Why is the sky blue?"

Each token is coloured by how it came: an accepted draft, the correction of a rejected one, the bonus behind a fully
accepted block, or plainly decoded. The statistics follow; the last line is JSON.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Iterator

import jax.numpy as jnp

from experiments import cli, settings
from jspec import config as config_lib
from jspec import decode, drafters, generation, types
from jspec import sampling as sampling_lib

STYLES = {"accepted": "green", "corrected": "red", "bonus": "cyan", "prefill": "dim", "undrafted": "default"}


@dataclasses.dataclass(frozen=True)
class Generate:
    """The config.

    target:         the model.
    prompt:         the user's message.
    system:         the system message.
    chat:           put them into the target's chat template.
    drafter:        what proposes.
    verifier:       what decides.
    temperature:    0 is greedy.
    filters:        cuts of the law.
    max_new_tokens: token budget.
    seed:           of the sampling.
    """

    target: settings.TargetSettings
    prompt: str
    system: str | None = None
    chat: bool = True
    drafter: types.Drafter = drafters.PromptLookup()
    verifier: types.Verifier = decode.REJECTION
    temperature: float = 0.0
    filters: settings.Filters = settings.Filters()
    max_new_tokens: int = 128
    seed: int = 0

    def __post_init__(self):
        sampling_lib.make(1, max_new_tokens=self.max_new_tokens, temperature=self.temperature)
        generation.row_keys(self.seed, 1)
        if not self.prompt:
            raise ValueError("prompt is empty; it needs at least one character")


def main(config: Generate) -> dict:
    """Stream one answer."""
    settings.check_references(config.target, config.drafter)
    target = settings.load_target(config.target)
    bound, draft = config.drafter.build(target)
    padded, lengths = generation.pad(generation.encode(target, [config.prompt], chat=config.chat, system=config.system))
    sampling = sampling_lib.make(
        1,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        stop_ids=target.stop_ids,
        **vars(config.filters),
    )
    blocks = decode.stream(
        types.Params(target.model, draft),
        generation.row_keys(config.seed, 1),
        jnp.asarray(padded),
        jnp.asarray(lengths),
        drafter=bound,
        verifier=config.verifier,
        sampling=sampling,
        max_new_tokens=config.max_new_tokens,
    )
    output, first, speed = _show(target, blocks)
    result = generation.collect(target, lengths, output)
    statistics = {key: _plain(value) for key, value in dataclasses.asdict(result.statistics).items()}
    statistics |= {
        "first_token_seconds": first,
        "tokens_per_second": speed,
        "finish_reason": result.finish_reasons[0],
        "lossless": config.verifier.lossless,
    }
    _print_statistics(statistics)
    return {"prompt": config.prompt, "text": result.texts[0], "statistics": statistics}


def _show(target: types.Target, blocks: Iterator) -> tuple[types.DecodeOutput, float, float | None]:
    """Print tokens as they come.

    Returns:
      The output, seconds to the first token with compiling, and tokens per second after the second block, whose step
      was compiled (None if there is none).
    """
    console = config_lib.require("rich.console").Console(highlight=False, soft_wrap=True)
    text = config_lib.require("rich.text").Text
    decoder = target.tokenizer.stream_decoder()
    start = time.perf_counter()
    landed, counts = [], []
    for block in blocks:
        if isinstance(block, types.DecodeOutput):
            console.print(decoder.finish())
            timed, seconds = sum(counts[2:]), landed[-1] - landed[min(1, len(landed) - 1)]
            return block, landed[0] - start, timed / seconds if timed else None
        for emitted in block:
            for token, origin in zip(emitted.tokens, emitted.origins):
                console.print(text(decoder.push([token]), style=STYLES[origin]), end="")
        landed.append(time.perf_counter())
        counts.append(sum(len(emitted.tokens) for emitted in block))
    raise AssertionError("a stream ends with its output")


def _plain(value):
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _print_statistics(statistics: dict) -> None:
    rich_table = config_lib.require("rich.table")
    console = config_lib.require("rich.console").Console(highlight=False)
    legend = ", ".join(f"[{style}]{origin}[/]" for origin, style in STYLES.items())
    console.print(f"\ntokens: {legend}")
    table = rich_table.Table(show_header=False, box=None)
    for key, value in statistics.items():
        values = value if isinstance(value, list) else [value]
        shown = [f"{item:.3g}" if isinstance(item, float) else "-" if item is None else str(item) for item in values]
        table.add_row(key.replace("_", " "), " ".join(shown))
    console.print(table)


if __name__ == "__main__":
    sys.exit(cli.run(main, Generate, __doc__))
