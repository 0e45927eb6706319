"""Training text, under one name: samples, their folders on disk, and the rows and batches they are packed into."""

from __future__ import annotations

from jspec.training.rows import Batch, Rows, places, shift
from jspec.training.sample_folders import Writer, open_writer, read
from jspec.training.samples import ANSWER, PROMPT, Origin, Sample, check_disjoint, fingerprint, split

__all__ = [
    "ANSWER",
    "PROMPT",
    "Batch",
    "Origin",
    "Rows",
    "Sample",
    "Writer",
    "check_disjoint",
    "fingerprint",
    "open_writer",
    "places",
    "read",
    "shift",
    "split",
]
