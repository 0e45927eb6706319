"""EAGLE: rounds worked out by hand, the head's cache, laws of its trees, what is refused."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import cache as kv
from jspec import decode, drafters, topology, types
from jspec.drafters import eagle
from jspec.models import heads
from tests import checkpoints, hand_heads, laws, reference, running, tiny

pytestmark = pytest.mark.usefixtures("small_programs")

SUCCESSOR = tiny.successor()


def texts(target: types.Target, settings: drafters.Eagle, head: heads.EagleHead, max_new: int = 16):
    decoder = running.Decoder(
        target, *settings.build(target, head=head), batch=3, width=5, capacity=32, max_new=max_new
    )
    return decoder([(0,), (3, 4, 5), (9, 2)])


@pytest.mark.parametrize(
    "settings,depth",
    [
        pytest.param(drafters.Eagle(gamma=4), 4, marks=pytest.mark.slow),
        pytest.param(drafters.Eagle(tree=topology.Tree(name="eagle_25")), 5, marks=pytest.mark.slow),
        pytest.param(
            drafters.Eagle(dynamic=drafters.Dynamic(depth=3, top_k=2, num_nodes=7)), 3, marks=pytest.mark.slow
        ),
    ],
    ids=["chain", "static", "dynamic"],
)
def test_a_perfect_head_is_accepted_in_full(settings, depth):
    target = tiny.bigram(SUCCESSOR)
    for row, start in zip(texts(target, settings, hand_heads.eagle1(target)), (0, 5, 2)):
        assert row.text == [(start + 1 + i) % 16 for i in range(16)]
        left, rounds = 15, []  # prefill emits the first token; the last round is cut to its budget
        while left:
            rounds.append(min(depth, left - 1))
            left -= rounds[-1] + 1
        assert row.accepted == rounds


@pytest.mark.slow
def test_a_head_that_is_wrong_in_places_is_accepted_up_to_there():
    """The head thinks 7 follows 3, and everything else right: a chain of 4 behind x stands until it has passed 3."""
    target = tiny.bigram(SUCCESSOR)
    head = hand_heads.eagle3(target, tiny.successor({3: 7}), (0,))
    for row, start in zip(texts(target, drafters.Eagle(gamma=4), head), (0, 5, 2)):
        assert row.text == [(start + 1 + i) % 16 for i in range(16)]
        emitted, rounds = 1, []
        while emitted < 16:
            pending = (start + emitted) % 16
            allowed = min(4, 16 - emitted - 1)
            rounds.append(min(allowed, (3 - pending) % 16))
            emitted += rounds[-1] + 1
        assert row.accepted == rounds


def test_the_table_head_says_its_table():
    target = tiny.random_target()
    table = np.random.default_rng(0).normal(size=(64, 64))
    head = hand_heads.eagle3(target, table, (0, 1))
    rng = np.random.default_rng(1)
    tokens = jnp.asarray(rng.integers(0, 64, (2, 6)))
    states = jnp.asarray(rng.normal(size=(2, 6, 64)), jnp.float32)
    out, _ = heads.eagle_forward(
        head, target.model, tokens, states, jnp.broadcast_to(jnp.arange(6), (2, 6)),
        kv.init(head.config.layer, 2, 8), jnp.broadcast_to(jnp.tril(jnp.ones((6, 6), bool)), (2, 6, 6)),
    )  # fmt: skip
    assert np.allclose(heads.eagle_logits(head, target.model, out), table[np.asarray(tokens)], atol=1e-3)


def random_head(version: int) -> heads.EagleHead:
    return heads.init_eagle(jax.random.key(1), eagle.like_target(tiny.random_target(), version))


@pytest.mark.slow
def test_the_cache_does_not_depend_on_how_the_text_came():
    """Chunks of any size, ragged rows, and rounds that accepted a branch other than the first: the same pairs."""
    target = tiny.random_target()
    bound, head = drafters.Eagle(tree=topology.Tree(widths=(3, 2))).build(target, head=random_head(1))
    params = types.Params(target.model, head)
    prompts = [tiny.PROMPTS[3], tiny.PROMPTS[2], tiny.PROMPTS[0]]
    rng = np.random.default_rng(0)
    tokens = np.zeros((3, 12), int)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in prompts])
    features = jnp.asarray(rng.normal(size=(3, 12, 1, target.model.config.width)), jnp.float32)

    def fed(sizes):
        state, start = bound.init(params, 3, 16), 0
        for size in sizes:
            part = slice(start, start + size)
            outputs = types.Outputs(jnp.zeros((3, 0, 64)), features[:, part])
            valid = jnp.asarray(np.arange(start, start + size) < lengths[:, None])
            state = bound.extend(params, state, jnp.asarray(tokens[:, part]), outputs, valid)
            start += size
        return state

    whole = fed([12])
    assert whole.seen.tolist() == lengths.tolist() and whole.cache.length.tolist() == (lengths - 1).tolist()
    for sizes in ([5, 7], [1] * 12, [4, 4, 4]):
        state = fed(sizes)
        assert state.cache.length.tolist() == whole.cache.length.tolist()
        assert np.allclose(state.feature, whole.feature)
        for got, expected in zip((*state.cache.keys, *state.cache.values), (*whole.cache.keys, *whole.cache.values)):
            for row, length in enumerate(lengths - 1):
                assert np.allclose(got[row, :, :length], expected[row, :, :length], atol=1e-5)


@pytest.mark.slow
def test_decoding_leaves_the_cache_of_a_plain_reading():
    """After rounds that accepted second and third children, target's and head's caches equal a fresh prefill."""
    target = tiny.random_target()
    table = np.random.default_rng(2).standard_normal((64, 64))
    for prompt in tiny.PROMPTS:
        text = [prompt[-1], *tiny.greedy(prompt)]
        np.add.at(table, (text[:-1], text[1:]), 2.5)
    # The right child comes second: the best candidate of each token is a wrong one.
    table[np.arange(64), (table.argmax(axis=1) + 1) % 64] = table.max(axis=1) + 1
    settings = drafters.Eagle(tree=topology.Tree(widths=(3, 2)), law="one_hot")
    head = hand_heads.eagle3(target, table, (0, 1))
    bound, _ = settings.build(target, head=head)
    decoder = running.Decoder(target, bound, head, batch=4)
    args, kwargs = decoder.arguments(tiny.PROMPTS[1:5])
    rest = {key: kwargs[key] for key in ("drafter", "sampling")}
    prefill = lambda prompts, lengths: decode.prefill_jit(
        args[0], args[1], prompts, lengths, capacity=decoder.capacity, chunk=16, **rest
    )
    state = decode.run_jit(args[0], args[1], prefill(*args[2:4]), verifier=kwargs["verifier"], **rest)
    assert np.asarray(state.acceptance.histogram)[:, 1:].sum() > 5
    again = prefill(state.tokens[:, :64], state.length - 1)
    for got, expected in ((state.cache, again.cache), (state.draft.cache, again.draft.cache)):
        assert got.length.tolist() == expected.length.tolist()
        for one, other in zip((*got.keys, *got.values), (*expected.keys, *expected.values)):
            for row, length in enumerate(np.asarray(got.length)):
                assert np.allclose(one[row, :, :length], other[row, :, :length], atol=1e-5)


@pytest.mark.slow
def test_siblings_are_drawn_without_replacement():
    """How often each child of a static tree passes: the enumerated walk with conditional laws, and not that with
    replacement."""
    p, q = np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.4, 0.3, 0.2, 0.1])
    accepted = 0.0  # without replacement, by enumeration
    for first, second in itertools.permutations(range(4), 2):
        drawn = q[first] * q[second] / (1 - q[first])
        conditional = np.where(np.arange(4) == first, 0, q) / (1 - q[first])
        outcomes = reference.walk_law([0, first, second], [-1, 0, 0], [None, q, conditional], [p, p, p])
        accepted += drawn * sum(weight for text, weight in outcomes.items() if len(text) == 2)
    target, table = tiny.bigram(np.log(np.tile(p, (4, 1)))), np.log(np.tile(q, (4, 1)))
    settings = drafters.Eagle(tree=topology.Tree(widths=(2,)))
    bound, head = settings.build(target, head=hand_heads.eagle3(target, table, (0,)))
    count = 20000
    decoder = running.Decoder(target, bound, head, batch=count, width=1, capacity=4, max_new=3, chunk=1)
    args, kwargs = decoder.arguments([(0,)] * count, temperature=1.0)
    output = decode.decode(*args, **kwargs)
    first_round = np.asarray(output.origin)[:, 2] == decode.ACCEPTED
    counts = np.array([(~first_round).sum(), first_round.sum()])
    assert laws.follows(counts, np.array([1 - accepted, accepted]))
    with_replacement = 1 - (1 - np.minimum(p, q).sum()) ** 2
    assert not laws.follows(counts, np.array([1 - with_replacement, with_replacement]))


def test_sampled_children_that_are_pruned_by_score_shift_the_law():
    """Why a dynamic tree is one-hot: three children drawn without replacement, the best two by q kept and judged by
    their conditional laws, give another law than p."""
    p, q = np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.4, 0.3, 0.2, 0.1])
    emitted = np.zeros(4)
    for drawn in itertools.permutations(range(4), 3):
        weight, left = 1.0, q.copy()
        for token in drawn:
            weight *= left[token] / left.sum()
            left[token] = 0
        first, second = sorted(sorted(drawn, key=lambda token: -q[token])[:2], key=drawn.index)
        conditional = np.where(np.arange(4) == first, 0, q) / (1 - q[first])
        outcomes = reference.walk_law([0, first, second], [-1, 0, 0], [None, q, conditional], [p, p, p])
        for text, chance in outcomes.items():
            emitted[text[0]] += weight * chance
    assert np.allclose(emitted, [0.130, 0.262, 0.143, 0.465], atol=1e-3)
    with pytest.raises(ValueError, match="law 'sampled' with a dynamic tree is not lossless"):
        drafters.Eagle(dynamic=drafters.Dynamic(), law="sampled")


DEEP = tiny.target(
    dataclasses.replace(checkpoints.RANDOM, num_layers=8),
    checkpoints.random_params(dataclasses.replace(checkpoints.RANDOM, num_layers=8)),
)


def two_features() -> heads.EagleHead:
    """A head that names no layers and fuses other than the default three."""
    config = dataclasses.replace(eagle.like_target(DEEP, 3), num_features=2)
    return heads.init_eagle(jax.random.key(0), config)


def other_vocabulary() -> heads.EagleHead:
    config = eagle.like_target(tiny.random_target(), 3)
    layer = dataclasses.replace(config.layer, vocab_size=60)
    return heads.init_eagle(jax.random.key(0), dataclasses.replace(config, layer=layer, vocab_size=60))


def test_feature_layers():
    bound, _ = drafters.Eagle().build(DEEP, head=heads.init_eagle(jax.random.key(0), eagle.like_target(DEEP, 3)))
    assert bound.feature_layers == (2, 4, 5)
    bound, _ = drafters.Eagle(feature_layers=(0, 1, 7)).build(
        DEEP, head=heads.init_eagle(jax.random.key(0), eagle.like_target(DEEP, 3))
    )
    assert bound.feature_layers == (0, 1, 7)
    # Those the head names stand above the default, those given above both.
    named = hand_heads.eagle3(DEEP, np.eye(64), (1, 3))
    assert drafters.Eagle().build(DEEP, head=named)[0].feature_layers == (1, 3)
    assert drafters.Eagle(feature_layers=(0, 6)).build(DEEP, head=named)[0].feature_layers == (0, 6)


@pytest.mark.parametrize(
    "build,words",
    [
        (lambda: drafters.Eagle().build(tiny.random_target()), "draft is not given"),
        (
            lambda: drafters.Eagle().build(tiny.random_target(), head=random_head(3)),
            "feature layers 2, 1, -1 of a target of 2 layers collide",
        ),
        (
            lambda: drafters.Eagle(feature_layers=(0, 1, 1)).build(tiny.random_target(), head=random_head(3)),
            r"feature_layers \(0, 1, 1\) collide",
        ),
        (
            lambda: drafters.Eagle(feature_layers=(0, 1, 2)).build(tiny.random_target(), head=random_head(3)),
            "2 is not between 0 and 1",
        ),
        (
            lambda: drafters.Eagle(feature_layers=(0, 1)).build(DEEP, head=random_head(3)),
            r"feature_layers \(0, 1\): the head fuses 3",
        ),
        (
            lambda: drafters.Eagle().build(DEEP, head=two_features()),
            r"feature_layers \(2, 4, 5\): the head fuses 2",
        ),
        (
            lambda: drafters.Eagle().build(tiny.random_target(), head=other_vocabulary()),
            "the head was made for 60 tokens; the target has 64",
        ),
        (
            lambda: drafters.Eagle(feature_layers=(0,)).build(tiny.random_target(), head=random_head(1)),
            "an EAGLE-1 head reads the last feature",
        ),
        (
            lambda: drafters.Eagle().build(tiny.bigram(SUCCESSOR), head=random_head(1)),
            "the head reads features of width 32; the target's have 16",
        ),
        (lambda: drafters.Eagle(gamma=0), "gamma 0 is below 1"),
        (
            lambda: drafters.Eagle(tree=topology.Tree(widths=(2,)), dynamic=drafters.Dynamic()),
            "tree and dynamic exclude each other",
        ),
        (lambda: drafters.Dynamic(depth=2, top_k=2, num_nodes=8), "num_nodes 8 is more than the root and a pool of 6"),
        (
            lambda: drafters.Eagle(tree=topology.Tree(widths=(3,))).build(
                tiny.random_target(), head=hand_heads.eagle3(tiny.random_target(), np.eye(64), (0, 1), np.array([1, 5]))
            ),
            "the tree asks for 3 candidates of 2 draft tokens",
        ),
        (
            lambda: drafters.Eagle().build(
                tiny.random_target(), head=hand_heads.eagle3(tiny.random_target(), np.eye(64), (0, 1), np.array([1, 1]))
            ),
            "draft vocabulary of the head: id 1 stands twice",
        ),
    ],
)
def test_bad_settings(build, words):
    with pytest.raises(ValueError, match=words):
        build()
