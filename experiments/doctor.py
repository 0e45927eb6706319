"""Do this draft and this target belong together, and does speculation pay on this device?

    python -m experiments.doctor configs/doctor.yaml [dotted.key=value ...]

A draft for another target, or for an older one, changes no text and only costs time, so that nothing else tells. Looked
at are vocabularies, the sha256 of the target that a draft records, whether greedy answers equal autoregressive ones,
acceptance by depth on sample prompts, and what the parts of a round cost; then it says what to expect of every gamma,
or of the tree cut at every depth. Mismatches are reported as faults where decoding can go on, and make the exit code 1;
that speculation does not pay is a finding and no error. The report goes to `doctor.json` and `doctor.md` in the run
folder. The last line is JSON.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments import cli, diagnosis, greedy_check, records, run_folder, runner, sample_run, settings, tables
from jspec import costs, decode, drafters, rounds, types
from jspec.drafters import standard
from jspec.weights import head_files, load, medusa_files, pairing

PASS_SIZES = (1, 2, 4, 8, 16)
NAME = "speculation"


@dataclasses.dataclass(frozen=True)
class Doctor(sample_run.SampleRun):
    """The config: `SampleRun`, and

    verifier: what decides.
    """

    prompts: settings.PromptSettings = settings.PromptSettings(per_task=1)
    verifier: types.Verifier = decode.REJECTION


def main(config: Doctor) -> dict:
    """Examine."""
    opened = sample_run.open_run(config)
    folder, target = opened.folder, opened.target
    pair = pair_up(config.drafter, target)
    programs = {
        name: costs.Program(types.Params(target.model, draft), bound, verifier)
        for name, (bound, draft), verifier in (
            (runner.BASELINE, drafters.Autoregressive().build(target), decode.REJECTION),
            (NAME, (pair.bound, pair.draft), config.verifier),
        )
    }
    running, groups = sample_run.prepare(config, opened, programs)
    measured = _measure(config, running, groups, pair)
    report = _report(config, target, pair, groups, measured)
    run_folder.write_text_atomic(folder.path / "doctor.json", json.dumps(report, indent=2, allow_nan=False) + "\n")
    run_folder.write_text_atomic(folder.path / "doctor.md", _markdown(report))
    for finding in report["findings"]:
        print(f"{finding['status']:8}{finding['name']}: {finding['text']}")
    print()
    for row in report["table"]:
        print("  ".join(f"{cell:>8}" for cell in row))
    print(f"\n{report['verdict']}\n")
    document = {"run": str(folder.path), **report}
    faults = [finding["name"] for finding in report["findings"] if finding["status"] == "fault"]
    if faults:
        raise cli.RunFailed(f"draft and target do not fit: {', '.join(faults)}", document)
    return document


# Before anything runs.


@dataclasses.dataclass(frozen=True)
class Pair:
    """A drafter bound to its target.

    bound, draft: as `build` returns them.
    method:       what the forecast needs to know of it.
    findings:     of the two files.
    """

    bound: types.BoundDrafter
    draft: Any
    method: diagnosis.Method
    findings: tuple[diagnosis.Finding, ...]

    def draft_ids(self, vocab_size: int) -> np.ndarray | None:
        """Target ids that the draft can propose; None when it is all of them."""
        params = getattr(self.draft, "params", self.draft)
        if not isinstance(params, dict):
            return None
        if "draft_ids" in params:
            return np.asarray(params["draft_ids"])
        known = params["model"].config.vocab_size if "model" in params else vocab_size
        return np.arange(known) if known < vocab_size else None


def pair_up(drafter: types.Drafter, target: types.Target) -> Pair:
    """Build a drafter whatever target its draft was trained for, and say what the files say.

    Raises:
      ValueError: the draft cannot be loaded, its sizes do not fit the target, or the drafter proposes nothing.
    """
    draft = getattr(drafter, "draft", None)
    reference = getattr(draft, "reference", None)
    if reference is None:
        bound, params = drafter.build(target)
        words = "it has no draft weights" if draft is None else f"its draft is {settings.describe_draft(draft)}"
        findings = [diagnosis.Finding(name, "ok", f"{words}: nothing to compare") for name in ("vocabulary", "target")]
    else:
        # A draft model is loaded here, and not by `build`, so that one of another vocabulary can be looked at.
        if isinstance(drafter, standard.Standard):
            loaded = load.load_target(reference, sha256=draft.sha256, dtype=target.model.dtype, lender=target)
            vocabulary, recorded = _vocabulary(target, loaded), loaded.provenance.trained_for
            ids = standard.draft_ids(loaded, target, drafter.vocabulary)
            bound, params = standard.bind(drafter.topology, target, loaded.model, ids)
        else:
            forced = dataclasses.replace(drafter, draft=dataclasses.replace(draft, force=True))
            bound, params = forced.build(target)
            recorded = head_files.trained_for(reference, medusa_files.FILES)
            vocabulary = diagnosis.Finding("vocabulary", "ok", "a head reads and proposes the target's token ids")
        findings = [vocabulary, _trained_for(recorded, target, reference, draft.force)]
    if bound.max_depth == 0:
        raise ValueError(f"drafter {drafter.kind} proposes nothing with these settings; there is nothing to examine")
    words = drafter.kind if draft is None else f"the draft ({settings.describe_draft(draft)})"
    if draft is not None and reference is None:
        words += ", which nobody trained to draft,"
    by_depth = settings.drafts_by_depth(drafter)
    method = diagnosis.Method(by_depth, bound.proposes_chains, reference is not None, words)
    return Pair(bound, params, method, tuple(findings))


def _vocabulary(target: types.Target, draft: types.Target) -> diagnosis.Finding:
    sizes = f"{target.model.config.vocab_size} and {draft.model.config.vocab_size} ids"
    if target.tokenizer is None or draft.tokenizer is None:
        which = "target" if target.tokenizer is None else "draft"
        return diagnosis.Finding(
            "vocabulary", "warning", f"the {which} has no tokenizer, so only the sizes can be compared: {sizes}"
        )
    try:
        standard.check_vocabulary(target, draft)
    except ValueError as error:
        return diagnosis.Finding("vocabulary", "fault", str(error))
    return diagnosis.Finding("vocabulary", "ok", f"target and draft mean the same tokens ({sizes})")


def _trained_for(recorded: str | None, target: types.Target, where: str, force: bool) -> diagnosis.Finding:
    if target.provenance.sha256 is None:
        return diagnosis.Finding(
            "target", "warning", "the target is no file: nothing to compare the draft's record with"
        )
    if recorded is None:
        return diagnosis.Finding("target", "warning", "the draft does not record the sha256 of its target")
    try:
        pairing.check_trained_for(recorded, target, where, force=False)
    except pairing.WrongTarget as error:
        return diagnosis.Finding("target", "warning" if force else "fault", f"{'forced: ' if force else ''}{error}")
    return diagnosis.Finding("target", "ok", f"the draft was trained for this target (sha256 {recorded[:8]}..)")


# Running.


@dataclasses.dataclass(frozen=True)
class Measured:
    """What the clocks and the answers gave.

    decoded:  by method, group by group.
    greedy:   the same at temperature 0, of as many groups as were decoded so.
    costs:    by method.
    passes:   seconds of the bare target pass by number of nodes.
    nodes:    `[D + 1]` nodes of the proposals cut at each depth.
    """

    decoded: dict[str, list[runner.Decoded]]
    greedy: dict[str, list[runner.Decoded]]
    costs: dict[str, costs.Costs]
    passes: dict[int, float]
    nodes: list[float]


def _measure(config: Doctor, running: runner.Runner, groups: Sequence[runner.Group], pair: Pair) -> Measured:
    names = running.in_turn(0)
    with cli.progress(len(names) * (1 + len(groups)) + 1, "doctor") as advance:
        for name in running.compile(groups[0]):
            advance(f"compiled {name}")
        parts = running.middle(groups)(config.temperature)
        nodes = _nodes_by_depth(pair.bound, parts[NAME].draft())
        times = costs.measure(parts)
        sizes = {size for size in PASS_SIZES if size < pair.bound.num_nodes} | {1, pair.bound.num_nodes}
        passes = costs.measure_passes(parts[runner.BASELINE], sorted(sizes))
        advance("measured the parts of a round")
        decoded: dict[str, list[runner.Decoded]] = {name: [] for name in names}
        for index, group in enumerate(groups):
            for name in running.in_turn(index):
                decoded[name].append(running.decode(name, group, config.temperature))
                advance(f"decoded {index + 1} of {len(groups)} groups, {name}")
        # Sampled answers cannot be compared token by token, so the first group is decoded greedily as well.
        greedy = decoded
        if config.temperature > 0:
            greedy = {name: [running.decode(name, groups[0], 0.0)] for name in names}
    return Measured(decoded, greedy, times, passes, nodes)


def _nodes_by_depth(bound: types.BoundDrafter, tree: types.TokenTree) -> list[float]:
    """Nodes of a target pass when nothing deeper is proposed. What is never verified is scored all the same."""
    if bound.proposes_chains:
        return [depth + 1.0 for depth in range(bound.max_depth + 1)]
    parents, depth = np.asarray(tree.parents), np.asarray(tree.depth)
    kept = lambda limit: ((parents < 0) | (depth <= limit)).sum(axis=1).mean()
    return [1.0, *(float(kept(limit)) for limit in range(1, bound.max_depth + 1))]


def _greedy(
    config: Doctor, target: types.Target, groups: Sequence[runner.Group], measured: Measured
) -> diagnosis.Finding:
    name = "greedy text"
    if not config.verifier.lossless:
        return diagnosis.Finding(name, "warning", f"verifier {config.verifier.kind} is lossy: texts may differ")
    if config.target.dtype != "float32":
        return diagnosis.Finding(name, "ok", f"not compared: near-ties are frequent in {config.target.dtype}")
    try:
        own, baseline = measured.greedy[NAME], measured.greedy[runner.BASELINE]
        check = greedy_check.compare(target, groups, own, baseline)
    except greedy_check.OutputsDiffer as error:
        return diagnosis.Finding(name, "fault", str(error))
    return diagnosis.Finding(name, "ok", tables.greedy_text(check))


def _accepted_by_round(decoded: runner.Decoded, group: runner.Group) -> list[list[int]]:
    """Of each row, accepted drafts by round."""
    output = decoded.output
    return [
        rounds.of_answer(origin[start:end]).accepted.tolist()
        for origin, start, end in zip(output.origin, np.asarray(group.lengths), output.lengths)
    ]


# The report.


def _report(config: Doctor, target, pair: Pair, groups, measured: Measured) -> dict[str, Any]:
    summary = runner.summarize(measured.decoded[NAME], groups)
    step = sum(measured.costs[runner.BASELINE])
    expected = diagnosis.forecast(pair.method, summary, step, measured.costs[NAME], measured.passes, measured.nodes)
    answers = [
        row[start:end]
        for run, group in zip(measured.decoded[runner.BASELINE], groups)
        for row, start, end in zip(run.output.tokens, np.asarray(group.lengths), run.output.lengths)
    ]
    calls = [runner.decoding_calls(measured.decoded[name], groups) for name in (NAME, runner.BASELINE)]
    vocab_size = target.model.config.vocab_size
    speed = runner.speedup(*calls)
    findings = [
        *pair.findings,
        diagnosis.coverage(pair.draft_ids(vocab_size), np.concatenate(answers), vocab_size),
        _greedy(config, target, groups, measured),
        diagnosis.acceptance(pair.method, summary, expected),
    ]
    if pair.method.by_call:  # others find more or less from text to text
        accepted = map(_accepted_by_round, measured.decoded[NAME], groups)
        findings.append(diagnosis.decay([row for rows in accepted for row in rows]))
    findings.append(diagnosis.prices(pair.method, expected, step, measured.passes))
    findings.append(diagnosis.speed(expected, speed))
    environment = run_folder.environment()
    device = run_folder.device_name(environment)
    return records.plain(
        {
            "pays": diagnosis.pays(expected, speed),
            "verdict": diagnosis.verdict(pair.method, expected, speed, device, findings),
            "best": {pair.method.unit: expected.best, "speedup": expected.speedups[expected.best]},
            "findings": [dataclasses.asdict(finding) for finding in findings],
            "acceptance": dataclasses.asdict(summary),
            "costs": {
                "step_ms": step * 1e3,
                "verify_ms": measured.costs[NAME].verify * 1e3,
                "draft_ms": measured.costs[NAME].draft * 1e3,
                "pass_ms": {str(size): seconds * 1e3 for size, seconds in measured.passes.items()},
            },
            "forecast": dataclasses.asdict(expected),
            "speedup": dataclasses.asdict(speed) if speed else None,
            "table": diagnosis.table(pair.method, expected),
            "target": target.provenance.reference,
            "drafter": config.drafter.kind,
            "device": device,
            "versions": environment["versions"],
            "seed": config.seed,
            "config_hash": run_folder.config_hash(config),
        }
    )


def _markdown(report: dict[str, Any]) -> str:
    header, *rows = report["table"]
    found = [(finding["status"], finding["name"], finding["text"]) for finding in report["findings"]]
    lines = [f"# {report['drafter']} on {report['target']}", "", report["verdict"], ""]
    lines += [*tables.markdown(("", "", ""), found), "", *tables.markdown(header, rows), ""]
    lines += [
        "Predicted, cut at each depth; 0 is autoregressive decoding. accepted: share of rounds that accept a draft "
        "there. tokens: emitted per round. verify, draft: in autoregressive steps. speedup: tokens / (verify + draft)."
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(cli.run(main, Doctor, __doc__))
