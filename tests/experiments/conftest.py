import dataclasses

import jax
import pytest

from experiments import records, reported
from tests.experiments import run_folders


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """An empty working folder and cache; whatever a script tells jax is taken back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path / "cache"))
    names = ("jax_compilation_cache_dir", "jax_disable_most_optimizations")
    before = {name: jax.config.values[name] for name in names}
    jax.config.update("jax_disable_most_optimizations", True)  # compiling is most of the time
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="session")
def make_record():
    """A function that makes a plausible record; keywords change its fields."""

    def make(**changes):
        values = dict(
            method="standard",
            drafter="standard",
            verifier="rejection",
            lossless=True,
            target="t.gguf",
            draft="d.gguf",
            task="chat",
            temperature=0.0,
            batch=1,
            num_prompts=2,
            new_tokens=117,
            target_calls=50,
            tau=2.3,
            alpha=0.61,
            acceptance_histogram=(10, 20, 15, 5),
            acceptance_by_position=(0.8, 0.4, 0.1),
            tokens_per_second=61.5,
            ttft_ms=210.4,
            tpot_ms=15.2,
            speedup=1.71,
            speedup_ci=(1.6, 1.8),
            expected_speedup=1.75,
            cost=records.Cost(autoregressive_ms=26.0, verify_ms=30.0, draft_ms=7.5, c=0.1),
            greedy_check=records.GreedyCheck(prompts=2, equal=2, near_ties=0),
            published=records.Published("leviathan2023", "2", "T5", speedup=3.4),
            device="cpu",
            dtype="float32",
            versions={"python": "3.11.7", "jax": "0.10.2"},
            seed=0,
            config_hash="0123456789",
            draft_sha256="d" * 64,
            offered=(50, 50, 50),
            tested=(50, 40, 20),
            before_repeat=records.BeforeRepeat(
                new_tokens=62,
                target_calls=30,
                tau=2.0,
                alpha=0.5,
                acceptance_histogram=(10, 10, 10, 0),
                acceptance_by_position=(0.67, 0.33, 0.0),
                offered=(30, 30, 30),
                tested=(30, 20, 10),
            ),
        )
        assert not changes.keys() - {field.name for field in dataclasses.fields(records.Record)}
        return records.Record(**{**values, **changes})

    return make


@pytest.fixture
def cells(tmp_path, make_record):
    """A function from records to cells, by way of a run folder."""

    def make(*results):
        return reported.cells(
            [reported.load(run_folders.joined(tmp_path / f"run{len(list(tmp_path.iterdir()))}", *results))]
        )

    return make
