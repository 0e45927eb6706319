"""Standard speculative sampling: the draft's cache, accepted lengths walked by hand, vocabularies that differ."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import decode, drafters, topology, types
from jspec.weights import shapes
from tests import checkpoints, common_table, laws, reference, running, tiny

pytestmark = pytest.mark.usefixtures("small_programs")

PROMPTS = list(tiny.PROMPTS)
TEXTS = [tiny.greedy(prompt) for prompt in PROMPTS]


def with_draft(draft: types.Target, gamma: int = common_table.GAMMA) -> running.Decoder:
    """Fixture R sped up by a draft."""
    target = tiny.random_target()
    return running.Decoder(target, *drafters.Standard(gamma=gamma).build(target, draft=draft))


def check_draft_cache(state: decode.DecodeState, draft: types.Target, row: int):
    """What the draft's cache holds is what an uncached pass over the committed tokens gives (DEV-02)."""
    length = int(state.draft.cache.length[row])
    expected = reference.forward(draft.model.config, draft.model.params, state.tokens[row, :length])
    for buffers, exact in ((state.draft.cache.keys, expected.keys), (state.draft.cache.values, expected.values)):
        for buffer, layer in zip(buffers, exact):
            assert np.abs(buffer[row, :, :length] - layer).max() < 1e-4
            assert not buffer[row, :, length:].any()


@pytest.mark.parametrize("gamma", [4, *(pytest.param(gamma, marks=pytest.mark.slow) for gamma in (1, 2, 6))])
def test_a_draft_that_is_the_target_is_always_right(gamma):
    """DEV-02: full acceptance in every round, which needs the last draft token fed in the round after."""
    decoder = with_draft(tiny.random_target(), gamma)
    state = decoder.last_state(PROMPTS)
    rows = running.split(decode.output(state), state.prompt_length)
    # Of 24 tokens prefill emits one; each round then gamma + 1, the last one what is left, the bonus included.
    rest = tiny.NUM_NEW - 1
    full, left = divmod(rest, gamma + 1)
    for row, got in enumerate(rows):
        assert got.text == TEXTS[row]
        assert got.accepted == [gamma] * full + [left - 1] * (left > 0)
        assert got.tested == got.offered and sum(got.tested) == got.drafted == sum(got.accepted)
        # The pending token is in no cache, and the draft's lacks the last accepted draft unless the budget cut the
        # round.
        assert state.cache.length[row] == state.length[row] - 1
        assert state.draft.cache.length[row] == state.length[row] - (2 if got.accepted[-1] == gamma else 1)
        check_draft_cache(state, tiny.random_target(), row)


def test_every_round_proposes_what_an_uncached_draft_would():
    """DEV-02, DEV-12: a noisy twin, rows that accept different numbers of tokens."""
    twin = tiny.noisy_twin()
    decoder = with_draft(twin)
    args, kwargs = decoder.arguments(PROMPTS)
    propose = jax.jit(decoder.bound.propose)
    by_hand = common_table.twin_chain(twin, common_table.GAMMA)
    missing_two = 0
    for state in decoder.states(PROMPTS):
        context = types.Context(state.tokens, state.length, state.features)
        tree, _ = propose(decoder.params, args[1], state.draft, context, kwargs["sampling"])
        for row in np.flatnonzero(state.live):
            tokens = state.tokens[row, : state.length[row]].tolist()
            assert tree.tokens[row].tolist() == [tokens[-1], *by_hand(tokens)[0]]
            assert tree.parents[row].tolist() == [-1, 0, 1, 2, 3]
            check_draft_cache(state, twin, row)
            missing = state.length[row] - state.draft.cache.length[row]
            assert missing in (1, 2)
            missing_two += missing == 2
    assert missing_two > 10


# The same with a static tree: what the cache lacks, the scratch places and the lines all differ from a chain's.


@pytest.mark.slow
def test_a_tree_of_an_uncached_draft_and_the_cache_behind_accepted_branches():
    """Every round's proposals, and the draft's cache after rounds that accepted any branch, leaves among them."""
    twin, shape = tiny.noisy_twin(), topology.from_choices(common_table.CHOICES)
    decoder = common_table.decoder("standard tree")
    args, kwargs = decoder.arguments(PROMPTS)
    propose = jax.jit(decoder.bound.propose)
    by_hand = common_table.twin_tree(twin, shape)
    accepted, before = set(), [None] * len(PROMPTS)
    for state in decoder.states(PROMPTS):
        context = types.Context(state.tokens, state.length, state.features)
        tree, _ = propose(decoder.params, args[1], state.draft, context, kwargs["sampling"])
        for row in range(len(PROMPTS)):
            tokens = state.tokens[row, : state.length[row]].tolist()
            check_draft_cache(state, twin, row)
            if before[row] is not None and len(tokens) > len(before[row][0]):
                accepted.add(_path(*before[row], tokens))
            drafts, parents = by_hand(tokens)
            before[row] = (tokens, drafts, parents)
            if state.live[row]:
                assert tree.tokens[row].tolist() == [tokens[-1], *drafts]
                assert tree.parents[row].tolist() == [-1, *parents]
                # Behind an accepted leaf the draft has not read that leaf.
                assert state.length[row] - state.draft.cache.length[row] in (1, 2)
    leaves = {node for node in range(1, shape.num_nodes) if not shape.children(node)}
    ends = {path[-1] for path in accepted if path}
    # Second and third children of the root, leaves and inner nodes.
    assert {path[0] for path in accepted if path} >= {1, 2} and ends & leaves and ends - leaves


def _path(tokens, drafts, parents, longer):
    """Nodes of a tree behind `tokens` that the text went on along; its last token was not drafted."""
    path = []
    for token in longer[len(tokens) : -1]:
        above = path[-1] if path else 0
        path.append(next(i for i, (t, p) in enumerate(zip(drafts, parents), start=1) if (t, p) == (token, above)))
    return tuple(path)


@pytest.mark.slow
def test_a_tree_of_the_target_itself_is_accepted_down_its_best_line():
    """DEV-02 for trees: greedy rows accept the whole first line, which ends at a leaf, and no other."""
    target = tiny.random_target()
    bound, params = drafters.Standard(tree=topology.Tree(choices=common_table.CHOICES)).build(target, draft=target)
    rows = dataclasses.replace(common_table.decoder("standard tree"), draft=params, bound=bound)(PROMPTS)
    for row, text in zip(rows, TEXTS):
        assert row.text == text and row.accepted == [3] * 5 + [2]  # 23 = 5 * 4 + 3


# Fixture B: accepted lengths walked by hand. The draft is wrong behind 3 and 10.


@functools.cache
def chain_decoder(twin: bool) -> running.Decoder:
    target = tiny.bigram(tiny.successor(), checkpoints.RANDOM)  # shares fixture R's program
    draft = tiny.bigram(tiny.successor({3: 9, 10: 2}), checkpoints.RANDOM) if twin else target
    return running.Decoder(target, *drafters.Standard(gamma=4).build(target, draft=draft))


def test_the_bonus_token_is_kept():
    """DEV-01, DEV-09, DEV-10: draft = target, K = 4. Prefill emits the first token, each round then 5."""
    numbers = lambda start, count: [(start + i) % 16 for i in range(1, count + 1)]
    cases = [  # prompt, budget, stop ids, tokens, accepted per round, drafted
        ([0], 21, [], 21, [4, 4, 4, 4], 16),  # 1 + 4 * 5
        ([0], 22, [], 22, [4, 4, 4, 4, 0], 16),  # one token is left, so nothing is drafted for it
        ([8], 6, [11], 3, [2], 4),  # the block 10 .. 14 is cut behind 11, its second draft
        ([8], 3, [11], 3, [1], 1),  # 10 drafted, 11 the bonus: a stop at the end of the budget
        ([8], 2, [11], 2, [0], 0),  # the budget ends before 11
        ([5, 6], 1, [], 1, [], 0),
        ([5, 6, 7, 8], 4, [], 4, [2], 2),
        ([15], 8, [], 8, [4, 1], 5),
    ]
    prompts, budgets, stops, counts, accepted, drafted = zip(*cases)
    rows = chain_decoder(False)(prompts, max_new_tokens=budgets, stop_ids=list(stops))
    for row, case, prompt, count, a, d in zip(rows, cases, prompts, counts, accepted, drafted):
        assert row.text == numbers(prompt[-1], count), case
        assert (row.accepted, row.drafted) == (a, d), case
        assert row.finish == ("stop" if row.text[-1] == 11 and count == 3 else "length"), case
    # 20 tokens in 4 rounds: 5.0 a round, the bonus counted.
    assert (len(rows[0].text) - 1) / rows[0].rounds == 5.0
    assert rows[0].origins == ["prefill"] + (["accepted"] * 4 + ["bonus"]) * 4
    assert rows[1].origins == rows[0].origins + ["undrafted"]
    assert rows[2].origins == ["prefill", "accepted", "accepted"]


def test_rows_accept_different_numbers_of_tokens():
    """DEV-12. The first token is prefill's, so each walk starts one token later than a loop without it would."""
    cases = [
        # 1 | drafts 2 3 9, 9 is wrong: 2 3, then 4 corrected | 5 6 7 8 and 9 the bonus.
        (
            [0],
            list(range(1, 10)),
            [2, 4],
            ["prefill", "accepted", "accepted", "corrected"] + ["accepted"] * 4 + ["bonus"],
        ),
        # 9 | 10, then 2 is wrong: 11 | 12 13 14 15 and 0 | one token left: 1.
        ([5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 0, 1], [1, 4, 0], None),
        # 3 | 9 is wrong: 4 | 5 6 7 8 and 9 | two left, so one draft: 10, then 11 the bonus.
        ([12, 2], list(range(3, 12)), [0, 4, 1], None),
        # 10 | 2 is wrong: 11 | 12 13 14 15, 0 | 1, and 2 the bonus of one draft.
        ([9], [10, 11, 12, 13, 14, 15, 0, 1, 2], [0, 4, 1], None),
    ]
    prompts, texts, accepted, _ = zip(*cases)
    decoder = chain_decoder(True)
    rows = decoder(prompts, max_new_tokens=9)
    assert [row.text for row in rows] == list(texts)
    assert [row.accepted for row in rows] == list(accepted)
    assert rows[0].origins == cases[0][3]
    # Offered: 4 and 4 of 8 left and 5 left; the other rows likewise.
    assert [row.drafted for row in rows] == [4 + 4, 4 + 4, 4 + 4 + 1, 4 + 4 + 1]
    # Tested: the accepted ones and the rejected one of each round.
    assert [sum(row.tested) for row in rows] == [3 + 4, 2 + 4, 1 + 4 + 1, 1 + 4 + 1]
    assert decoder([prompts[i] for i in (2, 0, 3, 1)], max_new_tokens=9) == [rows[i] for i in (2, 0, 3, 1)]
    for prompt, row in zip(prompts, rows):
        assert decoder([prompt], max_new_tokens=9) == [row]


# DEV-15: vocabularies of different sizes.


@pytest.mark.slow
def test_a_draft_with_fewer_tokens_leaves_the_law_alone():
    """DEV-15 (a): the draft has 4 tokens of 6. It never proposes the others; they still come, from the residual."""
    target_law, draft_law = np.array([0.1, 0.2, 0.3, 0.2, 0.15, 0.05]), np.array([0.4, 0.3, 0.2, 0.1])
    target = tiny.bigram(np.tile(np.log(target_law), (6, 1)))
    draft = tiny.bigram(np.tile(np.log(draft_law), (4, 1)))
    bound, params = drafters.Standard(gamma=2).build(target, draft=draft)
    decoder = running.Decoder(target, bound, params, batch=20_000, width=1, capacity=6, max_new=4, chunk=1)
    args, kwargs = decoder.arguments([(5,)] * 20_000, temperature=1.0)
    output = jax.tree.map(np.asarray, decode.decode(*args, **kwargs))
    exact = np.einsum("i,j,k->ijk", *[target_law] * 3)
    assert laws.follows(laws.count(output.tokens[:, 2:5], 6), exact)
    # The first draft passes with probability sum(min(p, q)) = 0.6.
    first = output.origin[:, 2] == decode.ACCEPTED
    assert abs(first.mean() - 0.6) < 5 * np.sqrt(0.6 * 0.4 / 20_000)


@pytest.mark.slow
@pytest.mark.parametrize("draft_size", [4, 9])
def test_proposals_stay_inside_the_targets_vocabulary(draft_size):
    """DEV-15 (a), (b): a draft that prefers a token the target lacks proposes the others, by the renormalised law.

    The text of such drafts is checked in the common table, too.
    """
    size = 6
    weights = np.r_[[0.4, 0.3, 0.2, 0.1], np.full(draft_size - 4, 0.01)]
    weights[-1] = 9.0 if draft_size > size else 0.1
    target = tiny.bigram(np.zeros((size, size)))
    draft = tiny.bigram(np.tile(np.log(weights), (draft_size, 1)))
    bound, params = drafters.Standard(gamma=2).build(target, draft=draft)
    decoder = running.Decoder(target, bound, params, width=2, capacity=8, max_new=4)
    args, kwargs = decoder.arguments([(5, i % 6) for i in range(8)], temperature=[1.0] * 7 + [0.0])
    model = types.Params(target.model, params)
    state = bound.init(model, 8, 8)
    tokens = jnp.pad(args[2], ((0, 0), (0, 6)))
    context = types.Context(tokens, jnp.full(8, 2), jnp.zeros((8, 0, size)))
    # The first prompt token is in no cache yet either: the draft catches up on both.
    tree, _ = jax.jit(bound.propose)(model, args[1], state, context, kwargs["sampling"])
    known = weights[:size] / weights[:size].sum()
    expected = np.pad(known, (0, size - len(known)))
    assert (tree.tokens < size).all() and (tree.tokens[:, 1:] < draft_size).all()
    assert tree.draft_probs.shape == (8, 3, size)
    assert np.allclose(tree.draft_probs[:7, 1:], expected, atol=1e-5)
    assert np.allclose(tree.draft_probs[7, 1:], np.eye(size)[0])


class Words:
    """A tokenizer as far as the comparison of vocabularies looks."""

    def __init__(self, *words: str):
        self.words = words

    def vocab(self) -> list[str]:
        return list(self.words)


def test_vocabularies_that_mean_other_strings_are_refused():
    """DEV-15 (c): before any decoding, naming the first id that differs."""
    target = dataclasses.replace(tiny.random_target(), tokenizer=Words(*"abcdefgh"))
    draft = dataclasses.replace(tiny.noisy_twin(), tokenizer=Words(*"abcdeFgH"))
    with pytest.raises(ValueError, match="id 5.*'f'.*'F'"):
        drafters.Standard().build(target, draft=draft)
    drafters.Standard().build(target, draft=dataclasses.replace(draft, tokenizer=target.tokenizer))


# Settings.


@pytest.mark.parametrize(
    "make,words",
    [
        (lambda: drafters.Standard(gamma=-2), "gamma -2"),
        (lambda: drafters.Draft(), "exactly one of layers, reference and shape"),
        (lambda: drafters.Draft(layers=2, reference="somewhere"), "exactly one of layers, reference and shape"),
        (lambda: drafters.Draft(layers=0), "layers 0"),
        (lambda: drafters.Standard(draft=drafters.Draft(layers=3)).build(tiny.random_target()), "layers 3 .* 2"),
    ],
)
def test_bad_settings_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_draft_of_random_weights_has_a_known_models_shape_and_the_targets_vocabulary():
    target = tiny.random_target()
    shape = shapes.Shape("hf:double7/vicuna-68m", width=32, num_heads=2, num_kv_heads=2, head_size=16, ffn_size=48)
    bound, params = drafters.Standard(gamma=2, draft=drafters.Draft(shape=shape)).build(target)
    config = params["model"].config
    assert (config.num_layers, config.width, config.ffn_size) == (2, 32, 48)
    assert config.vocab_size == target.model.config.vocab_size == bound.vocab_size


def test_settings_hash_by_value():
    assert (
        drafters.Standard(gamma=3) == drafters.Standard(gamma=3)
        and len({drafters.Standard(), drafters.Standard()}) == 1
    )
    target = tiny.random_target()
    bound = [drafters.Standard(gamma=3, draft=drafters.Draft(layers=1)).build(target)[0] for _ in range(2)]
    assert bound[0] == bound[1] and hash(bound[0]) == hash(bound[1])
    assert (bound[0].num_nodes, bound[0].max_depth) == (4, 3)


@pytest.mark.slow
@pytest.mark.parametrize("gamma", [3, 8])
def test_the_first_layers_of_the_target_draft_for_it(gamma):
    """DEV-08, DEV-17: prompts of length 1, a budget below gamma, stops inside long blocks."""
    target = tiny.random_target()
    bound, params = drafters.Standard(gamma=gamma, draft=drafters.Draft(layers=1)).build(target)
    assert len(params["model"].params["layers"]) == 1
    decoder = running.Decoder(target, bound, params)
    assert [row.text for row in decoder(PROMPTS)] == TEXTS
    (got,) = decoder([(1,)], max_new_tokens=10)
    assert got.text == tiny.greedy((1,))[:10]


@pytest.mark.slow
@pytest.mark.parametrize(
    "drafter", [drafters.Standard(gamma=0, draft=drafters.Draft(layers=1)), drafters.PromptLookup(gamma=0)]
)
def test_no_drafts_is_plain_decoding(drafter):
    """DEV-17: K = 0."""
    target = tiny.random_target()
    plain = common_table.decoder("autoregressive")
    settings = {"temperature": [0, 1.0] * 4}
    assert running.Decoder(target, *drafter.build(target))(PROMPTS, **settings) == plain(PROMPTS, **settings)
