"""Fixtures for the core tests."""

from __future__ import annotations

import jax
import pytest

from jspec.models import layers


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
