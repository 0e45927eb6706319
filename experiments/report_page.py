"""The report as one HTML page that needs no other file: tables, figures inline, and traces side by side."""

from __future__ import annotations

import dataclasses
import importlib.resources
from collections.abc import Sequence

import jinja2
import markupsafe

from experiments import figures, grids, reported, traces

TEMPLATE = "report.html"

# How a token came, in words, and what comes before a token's own place in a round.
LEGEND = {
    "prefill": "from prefill",
    "accepted": "accepted draft",
    "corrected": "the target's correction of a rejected draft",
    "bonus": "bonus token behind a fully accepted block",
    "undrafted": "plainly decoded, no draft was offered",
}


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of the report.

    anchor:   of links to it.
    title:    as shown.
    lines:    what to know first.
    grids:    its tables.
    pictures: its figures, above the tables.
    """

    anchor: str
    title: str
    lines: tuple[str, ...] = ()
    grids: tuple[grids.Grid, ...] = ()
    pictures: tuple[figures.Picture, ...] = ()

    def markdown(self) -> str:
        """Figures as links to the files beside it."""
        shown = [f"![{picture.title}]({picture.name}.svg)\n\n{picture.caption}" for picture in self.pictures]
        tables = [grid.markdown(titled=grid.title != self.title) for grid in self.grids]
        return "\n\n".join([f"## {self.title}", *self.lines, *shown, *tables])


@dataclasses.dataclass(frozen=True)
class Token:
    """One token of a trace: its text as shown, its origin, and what hovering says."""

    text: str
    origin: str
    says: str


@dataclasses.dataclass(frozen=True)
class Answer:
    """One method's answer.

    label:   of the method.
    rounds:  tokens round by round; the first holds prefill's.
    summary: one line.
    tau:     of this answer; 1 where it has no round.
    """

    label: str
    rounds: tuple[tuple[Token, ...], ...]
    summary: str
    tau: float


@dataclasses.dataclass(frozen=True)
class Example:
    """Answers of several methods to one prompt at one temperature, the largest tau first."""

    title: str
    prompt: str
    answers: tuple[Answer, ...]


def render(title: str, lines: Sequence[str], sections: Sequence[Section], examples: Sequence[Example]) -> str:
    """The page.

    Args:
      title: of the page.
      lines: below it.
      sections: in order.
      examples: traces; without any their section is left out.
    """
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["drawing"] = lambda picture: markupsafe.Markup(picture.inline())
    source = importlib.resources.files("experiments").joinpath("templates", TEMPLATE).read_text(encoding="utf-8")
    return environment.from_string(source).render(
        title=title,
        lines=lines,
        sections=sections,
        examples=examples,
        labels=list(dict.fromkeys(answer.label for example in examples for answer in example.answers)),
        legend=LEGEND,
    )


def examples(runs: Sequence[reported.Run], cells: Sequence[reported.Cell]) -> list[Example]:
    """The kept answers, by prompt and temperature."""
    found: dict[tuple, list[tuple[str, traces.Trace]]] = {}
    for run in runs:
        for trace, point in run.traces:
            place = (
                trace.cell["task"],
                trace.prompt_id,
                *(trace.cell[key] for key in ("temperature", *reported.SETTINGS)),
            )
            found.setdefault(place, []).append((reported.label_of(trace, point, run, cells), trace))
    groups = list(dict.fromkeys(place[2:] for place in found))
    return [
        Example(
            title=f"{place[0]}, prompt {place[1]}, {reported.group_name(place[2:], groups)}",
            prompt=members[0][1].prompt,
            answers=tuple(
                sorted((_answer(*member) for member in dict(members).items()), key=lambda answer: -answer.tau)
            ),
        )
        for place, members in found.items()
    ]


def _answer(label: str, trace: traces.Trace) -> Answer:
    numbers = traces.rounds(trace.origins)
    rounds: list[list[Token]] = [[] for _ in range(numbers[-1] + 1)]
    for i, (number, token, text, origin) in enumerate(zip(numbers, trace.tokens, trace.texts, trace.origins)):
        inside = len(rounds[number])  # drafts accepted before it in its round
        says = {
            "prefill": "from prefill, no round",
            "accepted": f"round {number}, draft {inside + 1} accepted",
            "corrected": f"round {number}, draft {inside + 1} rejected, this is its correction",
            "bonus": f"round {number}, bonus behind {inside} accepted",
            "undrafted": f"round {number}, no draft",
        }[origin]
        rounds[number].append(Token(_visible(text), origin, f"{says}; token {i + 1}, id {token}"))
    calls = len(rounds) - 1
    tau = (len(trace.tokens) - 1) / calls if calls else 1.0
    accepted = trace.origins.count("accepted")
    summary = f"{len(trace.tokens)} tokens in {calls} rounds, {accepted} of them accepted drafts; tau {tau:.2f}"
    return Answer(label, tuple(map(tuple, rounds)), summary, tau)


def _visible(text: str) -> str:
    """Control characters by their pictures, a mark for a token that completes no character."""
    shown = "".join(chr(0x2400 + ord(c)) if ord(c) < 0x20 and c not in "\n\t" else c for c in text)
    return shown.replace("\x7f", "\u2421").replace("\n", "\u21b5\n") or "\u00b7"
