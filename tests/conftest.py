"""Fixtures for the core tests, how this process compiles, and what several processes share out among them."""

from __future__ import annotations

import os
import pathlib

import jax
import pytest

from jspec.models import layers
from tests import common_table

COMMON_TABLE = "tests/test_common.py"

if jax.__version_info__ < (0, 11):  # later versions have no such flag, and end the process when given it
    # Emitting fusions is half of the time that small programs take without optimisation; optimised ones take twice as
    # long without it. XLA reads this when the first device is asked for.
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")

if "PYTEST_XDIST_WORKER" in os.environ:  # several processes may share one GPU
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def unit(nodeid: str) -> str:
    """The tests that share compiled programs with this one: those of its file, or of its row of the common table."""
    file, _, name = nodeid.partition("::")
    row = common_table.row_named_in(name.partition("[")[2]) if file == COMMON_TABLE else None
    return f"{file}[{row}]" if row else file


def pytest_collection_modifyitems(items):
    """Units one after another, so that what a row of the common table compiles is used up before the next begins."""
    places = {}
    for item in items:
        places.setdefault(unit(item.nodeid), len(places))
    items.sort(key=lambda item: places[unit(item.nodeid)])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """`-n auto`: a process per core, up to the eight among which the longest unit is a small part of the whole."""
    return min(os.cpu_count() or 1, 8)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Hand out whole units, those with most tests first, unless another `--dist` than `load` is asked for."""
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return unit(nodeid)

    return Units(config, log)


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
