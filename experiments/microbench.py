"""What the pieces cost on this machine, as ratios inside one run.

    python -m experiments.microbench [configs/microbench.yaml] [dotted.key=value ...]

The unit is a jitted sum over all parameters: the time to read them once, below which no step can go. Quantities that
are compared are timed in turns in one process, best of many. The last line is JSON.

    autoregressive_over_read              one autoregressive step / that sum
    pass_ratio_8, pass_ratio_16           one target pass over 8 or 16 nodes / the one-node pass
    capacity_ratio_4096_over_512          one-node step, same length, cache of 4096 slots / 512
    verify_over_forward_64_greedy         pass over a 64-node tree with verdict and commit / the bare pass; T = 0
    verify_over_forward_64_sampled        the same at T = 1 with top-p 0.9
    draft_over_step_NAME                  propose and update of a drafter without weights, beyond those of plain
                                          decoding / one autoregressive step
    load_seconds                          weights on disk to arrays on the device
    first_token_seconds(_warm)            process start to exit after one token; warm: compiled programs kept
    peak_memory_over_weights              largest resident size of such a process / bytes of the parameters
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np

from experiments import cli, run_folder, settings
from jspec import config as config_lib
from jspec import costs, decode, drafters, generation, timing, types
from jspec import sampling as sampling_lib

WITHOUT_WEIGHTS = ("prompt_lookup", "lookahead")


@dataclasses.dataclass(frozen=True)
class Microbench:
    """The config.

    target:     the model.
    length:     tokens in the cache while the parts are timed.
    nodes:      sizes of the passes to compare with one node.
    capacities: slots; the last over the first gives the capacity ratio.
    rounds:     timed calls of each.
    processes:  also start processes that generate, for the time to the first token and the memory.
    """

    target: settings.TargetSettings
    length: int = 128
    nodes: tuple[int, ...] = (8, 16)
    capacities: tuple[int, int] = (512, 4096)
    rounds: int = 40
    processes: bool = True

    def __post_init__(self):
        if self.length < 1 or self.rounds < 1:
            raise ValueError(f"length {self.length} and rounds {self.rounds} must be at least 1")
        # Every timed pass commits a token or more.
        needed = self.length + (self.rounds + 2) * 2
        if min(self.capacities) < needed:
            raise ValueError(f"capacities {self.capacities}: length and rounds need at least {needed} slots")
        if min(self.nodes, default=2) < 2:
            raise ValueError(f"nodes {self.nodes}: sizes are compared with 1 and must be above it")


@jax.jit
def read_all(params) -> jax.Array:
    """Touch every parameter once."""
    return sum(jnp.sum(leaf, dtype=jnp.float32) for leaf in jax.tree.leaves(params))


def main(config: Microbench) -> dict:
    """Measure."""
    settings.check_references(config.target)
    # First, while this process is small: a child's peak counts what it shared with its parent when it was forked.
    processes = _processes(config.target) if config.processes else {}
    started = time.perf_counter()
    target = settings.load_target(config.target)
    jax.block_until_ready(target.model)
    load_seconds = time.perf_counter() - started

    ids = np.random.default_rng(0).integers(1, target.model.config.vocab_size, config.length)
    padded, lengths = generation.pad([ids])
    sampling = sampling_lib.make(1, max_new_tokens=max(config.capacities))

    def part(drafter, capacity, sampling=sampling):
        bound, draft = drafter.build(target)
        program = costs.Program(types.Params(target.model, draft), bound, decode.REJECTION)
        arrays = jnp.asarray(padded), jnp.asarray(lengths)
        return costs.Part(program, generation.row_keys(0, 1), *arrays, sampling=sampling, capacity=capacity)

    small, large = config.capacities
    steps = {1: part(drafters.Autoregressive(), small), "large": part(drafters.Autoregressive(), large)}
    # Nothing in the random text repeats, so these accept about as little as plain decoding and stay at its length.
    steps |= {nodes: part(drafters.PromptLookup(gamma=nodes - 1), small) for nodes in config.nodes}
    calls = {name: step.verify for name, step in steps.items()}
    calls["read"] = lambda: read_all(target.model.params)

    random_heads = drafters.Medusa(draft=drafters.MedusaDraft(random=drafters.RandomMedusa()))
    drawn = sampling_lib.make(1, max_new_tokens=max(config.capacities), temperature=1.0, top_p=0.9)
    for law, rows in (("greedy", sampling), ("sampled", drawn)):
        tree = part(random_heads, small, rows)
        calls |= {f"verify 64 {law}": tree.verify, f"forward 64 {law}": tree.forward}
    for name in ("autoregressive", *WITHOUT_WEIGHTS):
        drafting = part(drafters.REGISTRY[name](), small)
        drafting.forward()
        calls |= {f"propose {name}": drafting.draft, f"update {name}": drafting.update}
    with cli.progress(1, "microbench") as advance:
        best = timing.best(timing.interleave(calls, config.rounds))
        advance(f"{config.rounds} rounds")

    drafting_seconds = lambda name: best[f"propose {name}"] + best[f"update {name}"]
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(target.model.params))
    result = {
        "autoregressive_over_read": best[1] / best["read"],
        **{f"pass_ratio_{nodes}": best[nodes] / best[1] for nodes in config.nodes},
        f"capacity_ratio_{large}_over_{small}": best["large"] / best[1],
        **{
            f"verify_over_forward_64_{law}": best[f"verify 64 {law}"] / best[f"forward 64 {law}"]
            for law in ("greedy", "sampled")
        },
        **{
            f"draft_over_step_{name}": (drafting_seconds(name) - drafting_seconds("autoregressive")) / best[1]
            for name in WITHOUT_WEIGHTS
        },
        "load_seconds": load_seconds,
    }
    if processes:
        result |= {**processes, "peak_memory_over_weights": processes["peak_memory_over_weights"] / weights}
    milliseconds = {f"{name} ms": seconds * 1e3 for name, seconds in best.items()}
    cli.show_values({**milliseconds, **result})
    return {**result, "milliseconds": milliseconds, "length": config.length, "environment": run_folder.environment()}


def _processes(target: settings.TargetSettings) -> dict[str, float]:
    """Start fresh processes that answer with one token, and one that decodes on. The peak memory is in bytes."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": cache}

        def seconds(tokens: int) -> float:
            override = f"target={json.dumps(config_lib.as_mapping(target))}"
            command = [sys.executable, "-m", "experiments.generate", "configs/generate.yaml", override]
            start = time.perf_counter()
            done = subprocess.run(
                [*command, f"max_new_tokens={tokens}"],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            if done.returncode:
                raise ValueError(f"experiments.generate failed: {done.stderr.decode().strip()[-500:]}")
            return time.perf_counter() - start

        cold, warm = seconds(1), seconds(1)
        seconds(32)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "first_token_seconds": cold,
        "first_token_seconds_warm": warm,
        "peak_memory_over_weights": peak,
    }


if __name__ == "__main__":
    sys.exit(cli.run(main, Microbench, __doc__, default="configs/microbench.yaml"))
