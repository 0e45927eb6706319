"""The same file, prompts and machine in transformers, side by side.

    python -m experiments.peers [configs/peers.yaml] [dotted.key=value ...]

Greedy decoding in float32, batch 1, plainly and with prompt lookup, each prompt by each in turn; what compiles or warms
up runs before. Needs the `peers` extra. The last line is JSON.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

from experiments import cli, run_folder, settings
from jspec import decode, drafters, extras, generation, metrics, timing, types
from jspec import sampling as sampling_lib
from jspec.weights import references


@dataclasses.dataclass(frozen=True)
class Peers:
    """The config.

    target:         a GGUF file.
    prompts:        what is decoded.
    max_new_tokens: per prompt.
    gamma:          draft length of prompt lookup, here and there.
    max_ngram:      longest suffix it looks up, here and there.
    """

    target: settings.TargetSettings
    prompts: settings.PromptSettings = settings.PromptSettings(per_task=1)
    max_new_tokens: int = 64
    gamma: int = 7
    max_ngram: int = 3

    def __post_init__(self):
        if self.target.reference is None or not self.target.reference.endswith(".gguf"):
            raise ValueError("target must be a reference to a GGUF file, which both sides read")
        if self.target.dtype != "float32":
            raise ValueError(f"target.dtype {self.target.dtype}: the comparison is in float32")
        sampling_lib.make(1, max_new_tokens=self.max_new_tokens)
        drafters.PromptLookup(gamma=self.gamma, max_ngram=self.max_ngram)


def main(config: Peers) -> dict:
    """Time both sides."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
    torch, transformers = extras.require("torch", "peers"), extras.require("transformers", "peers")
    extras.require("accelerate", "peers")
    settings.check_references(config.target)
    prompts = settings.load_prompts(config.prompts)
    target = settings.load_target(config.target)
    encoded = settings.encode(target, prompts, config.prompts)
    path = pathlib.Path(references.resolve(config.target.reference, config.target.sha256))
    peer = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)

    width = generation.pad(encoded)[0].shape[1]
    capacity = decode.capacity_for(max(map(len, encoded)) + config.max_new_tokens, target.model.config.max_positions)
    lookup = drafters.PromptLookup(gamma=config.gamma, max_ngram=config.max_ngram)

    def ours(drafter):
        bound, draft = drafter.build(target)
        params = types.Params(target.model, draft)
        sampling = sampling_lib.make(1, max_new_tokens=config.max_new_tokens, stop_ids=target.stop_ids)

        def call(ids):
            padded, lengths = generation.pad([ids], width)
            output = decode.decode(
                params,
                generation.row_keys(0, 1),
                jnp.asarray(padded),
                jnp.asarray(lengths),
                drafter=bound,
                sampling=sampling,
                max_new_tokens=config.max_new_tokens,
                capacity=capacity,
            )
            output = jax.device_get(output)
            return output.tokens[0, len(ids) : output.lengths[0]].tolist()

        return call

    def theirs(**settings_):
        def call(ids):
            with torch.inference_mode():
                tokens = torch.tensor([ids])
                output = peer.generate(
                    tokens,
                    attention_mask=torch.ones_like(tokens),
                    max_new_tokens=config.max_new_tokens,
                    do_sample=False,
                    eos_token_id=list(target.stop_ids),
                    pad_token_id=target.stop_ids[0],
                    **settings_,
                )
            return output[0, len(ids) :].tolist()

        return call

    calls = {
        "autoregressive": ours(drafters.Autoregressive()),
        "prompt_lookup": ours(lookup),
        "transformers autoregressive": theirs(),
        "transformers prompt_lookup": theirs(
            prompt_lookup_num_tokens=config.gamma, max_matching_ngram_size=config.max_ngram
        ),
    }
    measured = {name: ([], []) for name in calls}
    texts = []
    with cli.progress(len(encoded) * len(calls), "peers") as advance:
        for call in calls.values():
            call(encoded[0])  # compile, warm up
        for index, ids in enumerate(encoded):
            answers = {}
            for name in list(calls)[:: -1 if index % 2 else 1]:
                answers[name], seconds = timing.timed(calls[name], ids)
                measured[name][0].append(len(answers[name]))
                measured[name][1].append(seconds)
                advance(f"{prompts[index].id}, {name}")
            texts.append(all(answer == answers["autoregressive"] for answer in answers.values()))

    measured = {name: metrics.Calls(*map(np.array, both)) for name, both in measured.items()}
    result = {
        f"{name}_over_transformers_float32": metrics.speedup(
            measured[f"transformers {name}"], measured[name], compiling_calls=0
        ).ratio_of_totals
        for name in ("autoregressive", "prompt_lookup")
    }
    result["texts_equal"] = f"{sum(texts)} of {len(texts)}"
    result["tokens_per_second"] = {
        name: metrics.tokens_per_second(calls, compiling_calls=0) for name, calls in measured.items()
    }
    speeds = {f"{name}, tokens/s": value for name, value in result["tokens_per_second"].items()}
    cli.show_values({**speeds, **{name: value for name, value in result.items() if name != "tokens_per_second"}})
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
    }
    return {**result, "peers": versions, "environment": run_folder.environment()}


if __name__ == "__main__":
    sys.exit(cli.run(main, Peers, __doc__, default="configs/peers.yaml"))
