"""The static tree that pays most for a draft, its target and this device, as Sequoia finds it.

    python -m experiments.optimal_tree configs/optimal_tree.yaml [dotted.key=value ...]

Three steps (Chen et al., arXiv:2402.12374): how often the draft's candidate of each rank is accepted is measured on
sample prompts (`rank_acceptance`); dynamic programming gives the tree of every size and depth that accepts most
(`jspec.optimal_trees`); of these the one with the largest `tokens / (depth * t_draft + t_target(size))` is chosen, with
times measured here. The tree comes as a line for a config: `tree: {acceptance: [...], num_nodes: ..., max_depth: ...}`.
`tree.json` in the run folder holds all of it, `table.md` the best tree of each size.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments import cli, rank_acceptance, run_folder, runner, sample_run, tables
from jspec import costs, decode, drafters, optimal_trees, types

NAME = "star"


@dataclasses.dataclass(frozen=True)
class OptimalTree(sample_run.SampleRun):
    """The config: `SampleRun`, whose drafter fills static trees (its own tree does not matter), and

    ranks:     candidates of a node.
    sizes:     of trees, the root included, among which to choose; 1 is added.
    max_depth: of the deepest tree, in draft calls.
    """

    temperature: float = 0.6
    ranks: int = 8
    sizes: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
    max_depth: int = 8

    def __post_init__(self):
        super().__post_init__()
        rank_acceptance.star(self.drafter, self.ranks)
        if not self.sizes or min(self.sizes) < 1:
            raise ValueError(f"sizes {list(self.sizes)}: at least one, each 1 or more")
        if self.max_depth < 1:
            raise ValueError(f"max_depth {self.max_depth} is below 1")


@dataclasses.dataclass(frozen=True)
class Measured:
    """What the loop and the clocks gave.

    acceptance: by rank, rounded down to four digits.
    rounds:     that it was counted over.
    passes:     seconds of a target pass by number of nodes.
    draft:      seconds of one draft call.
    """

    acceptance: tuple[float, ...]
    rounds: int
    passes: dict[int, float]
    draft: float


def main(config: OptimalTree) -> dict[str, Any]:
    """Measure, and find the tree."""
    opened = sample_run.open_run(config)
    folder, target = opened.folder, opened.target
    drafter = rank_acceptance.star(config.drafter, config.ranks)
    programs = {runner.BASELINE: _program(target, drafters.Autoregressive()), NAME: _program(target, drafter)}
    measured = _measure(config, programs[NAME], *sample_run.prepare(config, opened, programs))
    document = report(config, measured)
    headers = ("nodes", "depth", "tokens a round", "expected speedup")
    table = "\n".join(tables.markdown(headers, [[size[key] for key in _COLUMNS] for size in document["sizes"]])) + "\n"
    run_folder.write_text_atomic(folder.path / "tree.json", json.dumps(document, indent=2, allow_nan=False) + "\n")
    folder.write_table(f"{table}\n{document['verdict']}\n\n`{document['setting']}`\n")
    print(f"{table}\n{document['verdict']}\n\n{document['setting']}\n")
    return {"run": str(folder.path), **document}


_COLUMNS = ("num_nodes", "max_depth", "tokens", "speedup")


def _program(target: types.Target, drafter: types.Drafter) -> costs.Program:
    bound, draft = drafter.build(target)
    return costs.Program(types.Params(target.model, draft), bound, decode.REJECTION)


def _measure(
    config: OptimalTree, program: costs.Program, running: runner.Runner, groups: Sequence[runner.Group]
) -> Measured:
    accepted, rounds = np.zeros(config.ranks, int), 0
    with cli.progress(len(groups) + 1, "optimal tree") as advance:
        for number, group in enumerate(groups, start=1):
            state, sampling, _ = running.prefill(NAME, group, config.temperature)
            counts = rank_acceptance.count_jit(
                program.params, group.keys, state, drafter=program.drafter, verifier=program.verifier, sampling=sampling
            )
            accepted, rounds = accepted + np.asarray(counts.accepted), rounds + int(counts.rounds)
            advance(f"decoded {number} of {len(groups)} groups")
        if not rounds:
            raise ValueError("every answer ended before a draft was offered; use other prompts or more max_new_tokens")
        parts = running.middle(groups)(config.temperature)
        draft = costs.measure({NAME: parts[NAME]})[NAME].draft
        passes = costs.measure_passes(parts[runner.BASELINE], sorted({1, *config.sizes}))
        advance("measured the parts of a round")
    acceptance = tuple(math.floor(count / rounds * 1e4) / 1e4 for count in accepted)
    return Measured(acceptance, rounds, passes, draft)


def report(config: OptimalTree, measured: Measured) -> dict[str, Any]:
    """The best tree of each size, and the best of them, as plain data.

    Args:
      config: sizes and depth.
      measured: what they are judged by.
    """
    optimum = optimal_trees.Optimum(measured.acceptance, max(config.sizes), config.max_depth)
    sizes = [row for size in sorted({1, *config.sizes}) if (row := _best_of_size(optimum, measured, size)) is not None]
    best = optimal_trees.best(optimum, measured.passes, measured.draft)
    row = next(row for row in sizes if row["num_nodes"] == best.topology.num_nodes)
    step = measured.passes[1]
    ranks = " ".join(f"{value:.3f}" for value in measured.acceptance)
    verdict = (
        f"Acceptance by rank over {measured.rounds} rounds: {ranks}. A draft call costs {measured.draft / step:.2f} "
    )
    verdict += f"target passes, a pass over {max(config.sizes)} nodes {measured.passes[max(config.sizes)] / step:.2f}. "
    if row["num_nodes"] == 1:
        verdict += "No tree of these sizes pays here; its size and depth have to be chosen for another device."
    else:
        verdict += f"Best: {row['num_nodes']} nodes, depth {row['max_depth']}, expected speedup {row['speedup']:.2f}."
    setting = {"acceptance": list(measured.acceptance), "num_nodes": row["num_nodes"], "max_depth": row["max_depth"]}
    return {
        "acceptance": list(measured.acceptance),
        "rounds": measured.rounds,
        "target_ms": {str(size): seconds * 1e3 for size, seconds in measured.passes.items()},
        "draft_ms": measured.draft * 1e3,
        "sizes": sizes,
        "best": row,
        "setting": "tree: {" + ", ".join(f"{key}: {json.dumps(value)}" for key, value in setting.items()) + "}",
        "verdict": verdict,
    }


def _best_of_size(optimum: optimal_trees.Optimum, measured: Measured, size: int) -> dict[str, Any] | None:
    """The depth with the largest speedup; None where no tree has so many nodes."""
    step, found = measured.passes[1], []
    for depth in range(optimum.max_depth + 1):
        tokens = float(optimum.tokens(depth)[size])
        if math.isfinite(tokens):
            found.append((step * tokens / (depth * measured.draft + measured.passes[size]), depth, tokens))
    if not found:
        return None
    speedup, depth, tokens = max(found, key=lambda one: (one[0], -one[1]))
    return {"num_nodes": size, "max_depth": depth, "tokens": round(tokens, 4), "speedup": round(speedup, 4)}


if __name__ == "__main__":
    sys.exit(cli.run(main, OptimalTree, __doc__))
