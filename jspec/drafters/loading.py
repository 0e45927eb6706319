"""Whatever a reference holds, ready to draft."""

from __future__ import annotations

from jspec import types
from jspec.drafters import standard
from jspec.models import heads
from jspec.weights import eagle_files, head_files, load, medusa_files, references


def load_draft(
    reference: str, target: types.Target, *, sha256: str | None = None, force: bool = False
) -> types.Target | heads.EagleHead | heads.MedusaHeads:
    """Load a draft for a target: an EAGLE head, Medusa heads or a draft model, told apart by their tensors.

        Eagle().build(target, head=draft)
        Medusa().build(target, heads=draft)
        Standard().build(target, draft=draft)

    Args:
      reference: see `weights.references`, `pretrained:smollm2-135m/eagle3` for one.
      target: the model to speed up; the draft is loaded in its dtype.
      sha256: expected digest of the file that is read, or of a folder's shards in order.
      force: load it although it says that it was trained for another target.

    Raises:
      ValueError: the reference, a file or a tensor is not as expected, or the draft does not fit the target.
      weights.pairing.WrongTarget: it was trained for another target.
    """
    loader = {"eagle": eagle_files.load, "medusa": medusa_files.load, "standard": standard.load_draft}[kind(reference)]
    return loader(reference, target, sha256=sha256, force=force)


def kind(reference: str) -> str:
    """The drafter that takes what a reference holds: `eagle`, `medusa` or `standard`.

    Only names of tensors are read. What is none of the first two is taken for a model.

    Raises:
      ValueError: the reference is wrong, or there is no file that can be read.
    """
    if load.gguf_file(references.resolve(reference, also=medusa_files.FILES)) is not None:
        return "standard"
    names = set(head_files.open_source(reference, None, medusa_files.FILES).names())
    for name, holds in (("eagle", eagle_files.holds), ("medusa", medusa_files.holds)):
        if holds(names):
            return name
    return "standard"
