"""Draft models that borrow from their target: a folder that holds only what is the draft's own.

A draft that started as the target's first layers still has its embedding and output matrix, which are most of its
bytes: in bfloat16, two layers of SmolLM2-135M take 14 MB and its embedding 57 MB. Such a folder is a Hugging Face one
without these tensors, and without a tokenizer, which is the target's too. Its config.json names the tensors under a key
of our own,

    "jspec": {"target_sha256": "...", "borrows": ["embed", "head"]}

and no other engine reads it. `shared_export` writes it; the other exports write whole models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jspec import types
from jspec.models import config as model_config
from jspec.models import transformer
from jspec.weights import pairing

_BORROWS = "borrows"
LENT = ("embed", "head")  # the parameters that a target can lend


def record(names: Sequence[str], target_sha256: str | None) -> dict[str, Any]:
    """What config.json says of the target that a draft borrows these parameters from."""
    return {pairing.KEY: {**pairing.record(target_sha256).get(pairing.KEY, {}), _BORROWS: list(names)}}


def borrowed(content: Mapping[str, Any], where: Any) -> tuple[str, ...]:
    """The parameters that a config.json says are the target's; none for a whole model.

    Args:
      content: the parsed file.
      where: its name, for messages.

    Raises:
      ValueError: what stands there is no list of `LENT`.
    """
    names = pairing.own_part(content, where).get(_BORROWS, [])
    if not isinstance(names, list) or not all(name in LENT for name in names) or len(set(names)) < len(names):
        raise ValueError(f"{where}: {pairing.KEY}.{_BORROWS} is {names!r}, expected some of {', '.join(LENT)}")
    return tuple(names)


def lend(
    names: Sequence[str],
    config: model_config.TransformerConfig,
    target: types.Target | None,
    dtype: Any,
    where: Any,
) -> dict[str, jax.Array]:
    """What a draft borrows, by name.

    Args:
      names: as `borrowed` gives them.
      config: of the draft.
      target: lends; None when the draft is loaded as a model of its own.
      dtype: of the draft.
      where: the draft, for messages.

    Raises:
      ValueError: there is nobody to lend, the target has another width or vocabulary, or the draft's head is tied and
        borrowed.
    """
    if not names:
        return {}
    if target is None:
        raise ValueError(
            f"{where}: this draft borrows {' and '.join(names)} from its target and is no model without it; load it "
            "with jspec.load_draft(reference, target), or name it as a drafter's draft"
        )
    model = target.model.config
    for what, own, theirs in (
        ("width", config.width, model.width),
        ("vocabulary of size", config.vocab_size, model.vocab_size),
    ):
        if own != theirs:
            raise ValueError(
                f"{where}: the draft borrows {' and '.join(names)} and has {what} {own}; its target "
                f"{target.provenance.reference} has {theirs}"
            )
    if config.tied_head and "head" in names:
        raise ValueError(f"{where}: the draft borrows head although tie_word_embeddings is true")
    matrices = {"embed": target.model.params["embed"], "head": transformer.output_matrix(target.model)}
    return {name: matrices[name].astype(dtype) for name in names}
