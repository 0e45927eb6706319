"""Reading compiled programs: which instructions produce a whole buffer of a given size."""

from __future__ import annotations

import math
import re

import jax

from tests import checkpoints

# What may hand a whole cache on without making another one: a scatter writes in place, alone or in a fusion around it,
# whose own instructions are looked at too.
IN_PLACE = {"parameter", "get-tuple-element", "bitcast", "scatter", "dynamic-update-slice", "fusion", "while", "call"}

INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (\w+)\[([\d,]*)\]\S* ([\w\-]+)\(")


def computations(text: str) -> dict[str, list[str]]:
    """The lines of each computation of an HLO module, by name; the entry's name starts with `ENTRY`."""
    found, name = {}, None
    for line in text.splitlines():
        head = re.match(r"^(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if head:
            name = (head[1] or "") + head[2]
            found[name] = []
        elif name is not None:
            found[name].append(line)
    return found


def reachable(text: str, roots: list[str]) -> list[str]:
    """Lines of the computations that `roots` call, their own included."""
    all_computations, seen, lines = computations(text), set(), []
    while roots:
        name = roots.pop()
        if name in seen:
            continue
        seen.add(name)
        lines += all_computations[name]
        for line in all_computations[name]:
            for called in re.findall(
                r"(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)", line
            ):
                roots.append(called)
            for several in re.findall(r"(?:branch_computations|called_computations)=\{([^}]*)\}", line):
                roots += [called.strip().lstrip("%") for called in several.split(",")]
    return lines


def loop_bodies(text: str) -> list[str]:
    """Bodies of the loops that stand in the entry computation."""
    entry = next(lines for name, lines in computations(text).items() if name.startswith("ENTRY "))
    return [body for line in entry for body in re.findall(r" while\(.*body=%?([\w.\-]+)", line)]


def _whole(lines: list[str], size: int) -> list[tuple[str, str]]:
    """Opcode and text of the instructions that produce `size` elements."""
    matches = [(INSTRUCTION.match(line), line.strip()) for line in lines]
    return [(m[3], line) for m, line in matches if m and m[2] and math.prod(map(int, m[2].split(","))) == size]


def writes(lines: list[str], size: int) -> list[str]:
    """Instructions that write into a buffer of `size` elements."""
    return [line for opcode, line in _whole(lines, size) if opcode in ("scatter", "dynamic-update-slice")]


def whole_buffers(lines: list[str], size: int) -> list[str]:
    """Instructions that produce `size` elements in another way than `IN_PLACE`, copies above all."""
    return [line for opcode, line in _whole(lines, size) if opcode not in IN_PLACE]


def copies(compiled: jax.stages.Compiled, size: int) -> tuple[list[str], list[str]]:
    """Instructions that make a whole cache buffer of `size` elements, inside the loop and anywhere."""
    text = compiled.as_text()
    inside = reachable(text, loop_bodies(text))
    # The search sees what it should: the loop's writes to the target's cache.
    assert len(writes(inside, size)) >= 2 * checkpoints.RANDOM.num_layers
    everywhere = [line for lines in computations(text).values() for line in lines]
    return whole_buffers(inside, size), whole_buffers(everywhere, size)


def cache_bytes(size: int) -> int:
    """What the target's cache takes, of which one buffer has `size` elements."""
    return 2 * checkpoints.RANDOM.num_layers * size * 4
