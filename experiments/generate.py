"""Answer one prompt, as it streams.

    python -m experiments.generate configs/generate.yaml prompt="Why is the sky blue?"

Each token is coloured by how it came: an accepted draft, the correction of a rejected one, the bonus behind a fully
accepted block, or plainly decoded. The statistics follow; the last line is JSON.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator

import numpy as np
import rich.console
import rich.text

from experiments import cli, records, settings
from jspec import decode, drafters, generation, metrics, types
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
        generation.check_seed(self.seed)
        if not self.prompt:
            raise ValueError("prompt is empty; it needs at least one character")


def main(config: Generate) -> dict:
    """Stream one answer."""
    settings.check_references(config.target, config.drafter)
    target = settings.load_target(config.target)
    pieces = generation.stream(
        target,
        [config.prompt],
        drafter=config.drafter,
        verifier=config.verifier,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        seed=config.seed,
        chat=config.chat,
        system=config.system,
        **vars(config.filters),
    )
    result, first, speed, latency = _show(pieces)
    statistics = records.plain(dataclasses.asdict(result.statistics))
    statistics |= {
        "first_token_seconds": first,
        "tokens_per_second": speed,
        "inter_token_ms": None if latency is None else latency._asdict(),
        "finish_reason": result.finish_reasons[0],
        "lossless": config.verifier.lossless,
    }
    cli.show_values({key.replace("_", " "): value for key, value in statistics.items()})
    return {"prompt": config.prompt, "text": result.texts[0], "statistics": statistics}


def _show(
    blocks: Iterator,
) -> tuple[generation.Generation, float, float | None, metrics.LatencyPercentiles | None]:
    """Print tokens as they come, and what their colours mean.

    Returns:
      The result, seconds to the first token with compiling, and of what came after the second block, whose step was
      compiled, tokens per second and the time between deliveries (None if nothing came).
    """
    console = rich.console.Console(highlight=False, soft_wrap=True)
    start = time.perf_counter()
    landed, counts = [], []
    for block in blocks:
        if isinstance(block, generation.Generation):
            break
        for piece in block:
            console.print(rich.text.Text(piece.text, style=STYLES[piece.origin]), end="")
        if block:
            landed.append(time.perf_counter())
            counts.append(len(block))
    legend = ", ".join(f"[{style}]{origin}[/]" for origin, style in STYLES.items())
    console.print(f"\n\ntokens: {legend}")
    timed, seconds = sum(counts[2:]), landed[-1] - landed[min(1, len(landed) - 1)]
    first = landed[0] - start
    return (
        (block, first, timed / seconds, metrics.inter_token_latency(np.diff(landed[1:])))
        if timed
        else (block, first, None, None)
    )


if __name__ == "__main__":
    sys.exit(cli.run(main, Generate, __doc__))
