"""Scripts, one per kind of run, and what they share."""

import contextlib
import ctypes


def _use_one_heap() -> None:
    """Let all threads allocate from one heap, where glibc is the allocator. Has to come before jax starts threads.

    Each thread would get a heap of its own, and what a compiling thread freed in one serves no other: 100 MiB for
    SmolLM2.
    """
    arena_max = -8  # M_ARENA_MAX of <malloc.h>
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(arena_max, 1)


_use_one_heap()
