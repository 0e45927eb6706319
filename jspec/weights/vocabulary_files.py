"""The reduced vocabulary of a draft, in a file beside its weights, for the formats that have no place for one.

EAGLE-1 heads, Medusa heads that share the target's output matrix, and draft models: `draft_vocabulary.npy` holds the
target's ids that the draft was trained to propose, `[Vd]` (a GGUF file has them in its metadata). Other engines pass
over it and draft from all tokens, which is right and slower. EAGLE-3 says the same in d2t and t2d, vLLM's Medusa in
token_map.
"""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np

from jspec.models import heads

NAME = "draft_vocabulary.npy"
GGUF_KEY = "jspec.draft_vocabulary"


def read(folder: pathlib.Path, vocab_size: int) -> np.ndarray | None:
    """The ids that lie in a folder, `[Vd]`; None when none do, or when they are all of the target's.

    Args:
      folder: of the draft.
      vocab_size: of the target.

    Raises:
      ValueError: the file holds no list of ids, or ids that are none of the target's.
    """
    path = folder / NAME
    if not path.is_file():
        return None
    try:
        ids = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} cannot be read as an array of token ids: {error}") from error
    return reduced(ids, vocab_size, str(path))


def reduced(ids: Any, vocab_size: int, where: str) -> np.ndarray | None:
    """Ids of a draft vocabulary as int32, or None when there are none or they restrict nothing.

    Args:
      ids: `[Vd]`, or None.
      vocab_size: of the target.
      where: they stand, for errors.

    Raises:
      ValueError: no list of ids, an empty one, or ids that are none of the target's (`heads.check_draft_ids`).
    """
    if ids is None:
        return None
    ids = np.asarray(ids)
    if ids.ndim != 1 or not ids.size:
        raise ValueError(f"{where} has shape {ids.shape}, expected a list of token ids")
    heads.check_draft_ids(ids, vocab_size, where)
    return None if len(ids) == vocab_size else ids.astype(np.int32)


def same(found: Any, expected: Any, where: pathlib.Path) -> None:
    """Compare a vocabulary that was read back with the one to be written; None is none.

    Raises:
      ValueError: they differ.
    """
    if not np.array_equal(() if found is None else found, () if expected is None else expected):
        raise ValueError(f"{where}: the draft vocabulary reads back differently; nothing is kept")
