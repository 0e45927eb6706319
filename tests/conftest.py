"""Fixtures for the core tests, and how this process compiles."""

from __future__ import annotations

import os
import pathlib

import jax
import pytest

from jspec.models import layers

if jax.__version_info__ < (0, 11):  # later versions have no such flag, and end the process when given it
    # Emitting fusions is half of the time that small programs take without optimisation; optimised ones take twice as
    # long without it. XLA reads this when the first device is asked for.
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")


@pytest.fixture
def few_programs():
    """For modules of several dozen decoders: forget compiled programs before there are too many.

    Each decoder compiled on a CPU takes about a thousand memory maps; Linux allows a process 65530, and beyond them the
    compiler crashes.
    """
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 45_000:
        jax.clear_caches()


@pytest.fixture(scope="module")
def small_programs():
    """For modules that compile many programs over tiny models.

    Compiling is most of their time, and it need not optimise. The cached prefix is read in steps of 16 slots, so that
    the loop over it runs several times and no capacity here is a multiple of the step.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "PREFIX_CHUNK", {jax.default_backend(): 16})
        before = jax.config.values["jax_disable_most_optimizations"]
        jax.config.update("jax_disable_most_optimizations", True)
        yield
        jax.config.update("jax_disable_most_optimizations", before)
        jax.clear_caches()  # they are of no use to a module without these settings
