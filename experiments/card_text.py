"""The card of a draft in words; what it says is in `card.json`, which `experiments.card` makes."""

from __future__ import annotations

from typing import Any

from experiments import tables


def text(card: dict[str, Any]) -> str:
    """Markdown of a card."""
    file, target, training = card["file"], card["target"], card["training"]
    lines = [f"# {card['reference']}", ""]
    lines += [f"A draft ({card['kind']}) for {target['reference']}.", ""]
    vocabulary = "all tokens" if card["vocabulary"] is None else f"{_count(card['vocabulary'])} tokens"
    lines += tables.markdown(
        ["", ""],
        [
            ["file", f"{file['name']}, {file['bytes'] / 1e6:.1f} MB, {file['dtype']}"],
            ["sha256", f"`{file['sha256']}`"],
            ["target's sha256", f"`{target['sha256']}`"],
            ["proposes", vocabulary],
            ["data", card["data"]["recipe"] or "-"],
            ["", "; ".join(_folder(each) for each in card["data"]["folders"])],
            ["steps", f"{_count(training['best']['step'])} of {_count(training['steps'])} (the best on held-out text)"],
            ["answer tokens seen", _count(training["best"]["answer_tokens_seen"])],
            ["wall time of the run", _time(training["last"]["seconds"])],
            ["seed", str(training["seed"])],
            ["trained on", training["device"]],
        ],
    )
    held_out = card["held_out"]
    lines += ["", "On held-out answers, a greedy chain from every place:", ""]
    chain = held_out.get("chain", [])
    lines += tables.markdown(
        ["loss", "tau", *(f"accepted to depth {depth}" for depth in range(1, len(chain) + 1))],
        [[_rate(held_out["loss"]), _rate(held_out["tau"]), *map(_rate, chain)]],
    )
    if card["benchmark"] is not None:
        lines += ["", *_benchmark_lines(card["benchmark"])]
    lines += ["", "The config it was trained with is in card.json; `python -m experiments.card` made both.", ""]
    return "\n".join(lines)


def _benchmark_lines(benchmark: dict[str, Any]) -> list[str]:
    told = f"Up to {benchmark['max_new_tokens']} new tokens"
    if benchmark["prompts"] is not None:
        prompts = benchmark["prompts"]
        tasks = ", ".join(f"{task} {number}" for task, number in prompts["tasks"].items())
        told += f" for each of {sum(prompts['tasks'].values())} prompts of {prompts['file']} ({tasks})"
        if prompts["skipped"]:
            told += f"; {sum(prompts['skipped'].values())} longer ones skipped"
    headers = ["T", "method", "tau", "alpha", "accepted at depth", "tau before repeats", "accepted at depth"]
    rows = []
    for each in benchmark["methods"]:
        before = each["before_repeat"] or {"tau": None, "acceptance_by_position": []}
        rows.append(
            [
                f"{each['temperature']:g}",
                each["method"],
                _rate(each["tau"]),
                _rate(each["alpha"]),
                " ".join(map(_rate, each["acceptance_by_position"])),
                _rate(before["tau"]),
                " ".join(map(_rate, before["acceptance_by_position"])) or "-",
            ]
        )
    definition = (
        "tau: tokens emitted per target call, the corrected or bonus token included, prefill's first not counted. "
        "before repeats: over the tokens before each answer's first repeated 8-gram."
    )
    return [f"{told}:", "", *tables.markdown(headers, rows), "", definition]


def _folder(folder: dict[str, Any]) -> str:
    if folder["samples"] is None:
        return folder["name"]
    return f"{folder['name']}: {_count(folder['samples'])} samples, {_count(folder['answer_tokens'])} answer tokens"


def _count(value: int | None) -> str:
    return "not recorded" if value is None else f"{value:,}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "not recorded"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
