"""Trees grown level by level: every node sees its own line only, and states the law it was drawn from."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import drafters, sampling, topology, types
from jspec.drafters import eagle, growth
from jspec.models import heads
from tests import common_table, hand_heads, laws, tiny

pytestmark = pytest.mark.usefixtures("small_programs")

# Two levels of siblings, a lone node below the second of them, and ranks left out.
SHAPE = topology.Tree(choices=((0,), (2,), (0, 0), (0, 1), (2, 0), (2, 1), (0, 1, 0), (2, 0, 0), (2, 0, 1)))
DRAFT_IDS = np.array([1, 4, 5, 9, 17, 22, 23, 30, 41, 50, 63])
LENGTHS = (6, 4, 2, 5)
SETTINGS = {
    "temperature": [0, 1.0, 0.8, 1.2],
    "top_k": [0, 0, 2, 0],
    "top_p": [1.0, 0.9, 1.0, 0.02],
}


@functools.cache
def fixture():
    """A random EAGLE-1 head over 11 tokens, features out of the blue, rows of different lengths."""
    target = tiny.random_target()
    config = eagle.like_target(target, 1, len(DRAFT_IDS))
    head = heads.init_eagle(jax.random.key(4), config)
    params = head.params | {"draft_ids": jnp.asarray(DRAFT_IDS, jnp.int32), "head": 3 * head.params["head"]}
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, tiny.VOCAB, (len(LENGTHS), 8))
    features = rng.normal(size=(len(LENGTHS), 8, 1, target.model.config.width))
    return target, heads.EagleHead(params, config), tokens, features


def proposed(settings: drafters.Eagle, **filters) -> types.TokenTree:
    target, head, tokens, features = fixture()
    bound, head = settings.build(target, head=head)
    params, batch = types.Params(target.model, head), len(LENGTHS)
    length = np.array(LENGTHS)
    keys = jax.vmap(jax.random.key)(jnp.arange(batch))

    @jax.jit
    def propose(params, tokens, features, row_sampling):
        read = types.Outputs(jnp.zeros((batch, 0, tiny.VOCAB)), features)  # all but the pending token
        state = bound.init(params, batch, 16)
        state = bound.extend(params, state, tokens, read, jnp.arange(8) < length[:, None] - 1)
        last = jnp.take_along_axis(features, jnp.asarray(length - 2)[:, None, None, None], axis=1)[:, 0]
        return bound.propose(params, keys, state, types.Context(tokens, length, last), row_sampling)[0]

    args = params, jnp.asarray(tokens), jnp.asarray(features, jnp.float32)
    return jax.tree.map(np.asarray, propose(*args, sampling.make(batch, max_new_tokens=9, **filters)))


def line(tree: types.TokenTree, row: int, node: int) -> list[int]:
    """Tokens from the root's child to a node."""
    found = []
    while node > 0:
        found.insert(0, int(tree.tokens[row, node]))
        node = tree.parents[row, node]
    return found


@functools.cache
def behind(row: int, drafts: tuple[int, ...]) -> np.ndarray:
    """Logits `[Vd]` behind a line of drafts, without cache or mask."""
    target, head, tokens, features = fixture()
    length = LENGTHS[row]
    return hand_heads.eagle_behind(head, target, tokens[row, :length], features[row, : length - 1], drafts)


def test_a_static_tree_holds_the_best_candidates_of_every_line():
    tree = proposed(drafters.Eagle(tree=SHAPE, law="one_hot"))
    shape = SHAPE.topology
    assert tree.draft_probs is None and tree.draft_ids is None
    for row, length in enumerate(LENGTHS):
        assert tree.parents[row].tolist() == list(shape.parents) and tree.depth[row].tolist() == list(shape.depth)
        assert tree.tokens[row, 0] == fixture()[2][row, length - 1]
        for node in range(1, shape.num_nodes):
            logits = behind(row, tuple(line(tree, row, shape.parents[node])))
            assert tree.tokens[row, node] == DRAFT_IDS[np.argsort(-logits)[shape.ranks[node]]]


def test_a_dynamic_tree_holds_the_likeliest_nodes():
    """EAGLE-2, expanded and reranked in plain Python over laws that depend on the whole line."""
    depth, top_k, num_nodes = 4, 3, 26
    tree = proposed(drafters.Eagle(dynamic=drafters.Dynamic(depth, top_k, num_nodes)))

    def children(row, drafts):
        logits = behind(row, drafts)
        values = logits - np.log(np.exp(logits).sum())
        return [((*drafts, int(DRAFT_IDS[i])), values[i]) for i in np.argsort(-logits)[:top_k]]

    for row in range(len(LENGTHS)):
        level = dict(children(row, ()))
        pool = dict(level)
        for _ in range(depth - 1):
            frontier = sorted(level, key=level.get, reverse=True)[:top_k]
            level = {child: pool[node] + value for node in frontier for child, value in children(row, node)}
            pool |= level
        best = sorted(pool, key=pool.get, reverse=True)
        assert pool[best[num_nodes - 2]] - pool[best[num_nodes - 1]] > 1e-3  # no near-tie at the border
        got = [tuple(line(tree, row, node)) for node in range(1, num_nodes)]
        assert set(got) == set(best[: num_nodes - 1]) and len(set(got)) == num_nodes - 1
        assert (tree.parents[row, 1:] < np.arange(1, num_nodes)).all()


def test_sampled_siblings_carry_their_conditional_laws():
    """Under each row's filters: the law behind the parent without the elder siblings; padding where that is empty."""
    tree = proposed(drafters.Eagle(tree=SHAPE), **SETTINGS)
    shape = SHAPE.topology
    assert tree.draft_ids.tolist() == DRAFT_IDS.tolist()
    padded = np.zeros(len(LENGTHS), int)
    for row in range(len(LENGTHS)):
        settings = {name: values[row] for name, values in SETTINGS.items()}
        for parent in range(shape.num_nodes):
            if tree.parents[row, parent] == -2:
                assert all(tree.parents[row, child] == -2 for child in shape.children(parent))
                continue
            logits = behind(row, tuple(line(tree, row, parent)))
            law = laws.filtered(np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum(), **settings)
            ranked = np.argsort(-logits)
            for order, child in enumerate(shape.children(parent)):
                greedy = settings["temperature"] == 0
                expected = np.eye(len(DRAFT_IDS))[ranked[order]] if greedy else law
                if not expected.any():
                    assert tree.parents[row, child] == -2
                    padded[row] += 1
                    continue
                token = DRAFT_IDS.tolist().index(tree.tokens[row, child])
                assert tree.parents[row, child] == parent and expected[token] > 0
                assert np.allclose(tree.draft_probs[row, child], expected / expected.sum(), atol=1e-4)
                law = np.where(np.arange(len(law)) == token, 0, law)
    # Top-k 2 leaves enough for two siblings; a top-p that only one token meets does not.
    assert padded[[0, 2]].tolist() == [0, 0] and padded[3] > 0


@pytest.mark.slow
def test_siblings_are_drawn_in_the_order_of_a_draw_without_replacement():
    """First and second child of the root: the law of each ordered pair."""
    law = np.array([0.4, 0.3, 0.2, 0.1])
    target, table = tiny.bigram(np.zeros((4, 4))), np.tile(np.log(law), (4, 1))
    settings = drafters.Eagle(tree=topology.Tree(widths=(2,)))
    bound, head = settings.build(target, head=hand_heads.eagle3(target, table, (0,)))
    count = 20000
    context = types.Context(
        jnp.zeros((count, 4), jnp.int32), jnp.full(count, 2), jnp.zeros((count, 1, target.model.config.width))
    )
    params = types.Params(target.model, head)
    rows = sampling.make(count, max_new_tokens=2, temperature=1.0)
    state = bound.init(params, count, 4)
    keys = jax.vmap(jax.random.key)(jnp.arange(count))
    tree, _ = jax.jit(bound.propose)(params, keys, state, context, rows)
    exact = np.array([[0 if a == b else law[a] * law[b] / (1 - law[a]) for b in range(4)] for a in range(4)])
    counts = laws.count(tree.tokens[:, 1:], 4)
    assert laws.follows(counts, exact)
    assert not laws.follows(counts, exact.T)
    with_replacement = np.outer(law, law)
    assert not laws.follows(counts, with_replacement)


@pytest.mark.slow
def test_a_row_with_padding_children_does_not_depend_on_its_mates():
    """A top-p so tight that fewer tokens than children are left, among mates with and without filters."""
    decoder, prompts = common_table.decoder("eagle tree"), list(tiny.PROMPTS)
    nodes = decoder.bound.num_nodes - 1
    mixed = {"temperature": [1.0, 0, 1.0, 2.0] * 2, "top_p": [0.05, 1.0, 1.0, 0.6, 0.3, 1.0, 0.02, 0.1]}
    batch = decoder(prompts, **mixed)
    tight = (0, 4, 6, 7)
    # Padding is not drafted: such rows draft less than full trees, of which the budget cuts at most the last three.
    for row in tight:
        assert batch[row].drafted < nodes * (batch[row].rounds - 3)
        one = {name: values[row] for name, values in mixed.items()}
        assert decoder([prompts[row]], seeds=[row], **one) == [batch[row]]
    order = [6, 1, 0, 3, 7, 5, 4, 2]
    permuted = {name: [values[i] for i in order] for name, values in mixed.items()}
    assert decoder([prompts[i] for i in order], seeds=order, **permuted) == [batch[i] for i in order]


def test_inner_nodes_are_those_that_are_fed_back():
    """(0,) (2,) at depth 1, (0, 1) and (2, 0) at depth 2: the leaves never run through the draft."""
    shape = SHAPE.topology
    inner = growth.inner_nodes(shape)
    assert inner == [node for node in range(1, shape.num_nodes) if shape.children(node)] and len(inner) == 4
    assert growth.inner_nodes(topology.chain(4)) == [1, 2, 3] and growth.inner_nodes(topology.chain(1)) == []
    assert growth.inner_nodes(topology.cartesian((2, 3, 1))) == list(range(1, 1 + 2 + 6))
