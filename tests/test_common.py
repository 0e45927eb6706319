"""What holds for every drafter: each test runs on each row of the common table."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import decode, drafters, metrics, types, verify
from tests import common_table, laws, programs, reference, running, tiny, toy_drafters

pytestmark = pytest.mark.usefixtures("small_programs", "few_programs")

PROMPTS = list(tiny.PROMPTS)
TEXTS = [tiny.greedy(prompt) for prompt in PROMPTS]

# Sampled rows beside greedy ones, with and without filters.
MIXED = {
    "temperature": [0, 1.0, 0.7, 1.3, 0, 1.0, 2.0, 0.5],
    "top_k": [0, 0, 5, 0, 3, 0, 20, 0],
    "top_p": [1.0, 1.0, 0.8, 1.0, 0.9, 1.0, 1.0, 0.9],
    "min_p": [0, 0, 0, 0.1, 0, 0, 0, 0],
}
PLAIN = {"temperature": [0, 1.0, 0, 1.3, 0, 1.0, 2.0, 0.5]}


decoder = common_table.decoder


@functools.cache
def greedy_rows(name: str) -> list[running.Generated]:
    return decoder(name)(PROMPTS)


@functools.cache
def mixed_rows(name: str) -> list[running.Generated]:
    return decoder(name)(PROMPTS, **MIXED)


def alone(name: str) -> running.Decoder:
    return dataclasses.replace(decoder(name), batch=1)


@functools.cache
def lonely_row(name: str) -> running.Generated:
    """Prompt 5 at temperature 0.9, its mates out of the way."""
    return decoder(name)([PROMPTS[5]], seeds=[11], temperature=0.9)[0]


@pytest.fixture(
    params=[pytest.param(name, marks=() if row.quick else pytest.mark.slow) for name, row in common_table.ROWS.items()]
)
def name(request):
    return request.param


def pick(settings: dict, order) -> dict:
    return {name: [values[i] for i in order] for name, values in settings.items()}


def test_every_registered_drafter_has_a_row():
    assert {row.kind for row in common_table.ROWS.values()} - {None} == drafters.REGISTRY.keys()


def test_a_bound_drafter_keeps_the_protocol(name):
    row, target = common_table.ROWS[name], tiny.random_target()
    bound, _ = row.build(target, tiny.noisy_twin(), common_table.random_table())
    assert isinstance(bound, types.BoundDrafter)
    assert bound == decoder(name).bound and hash(bound) == hash(
        decoder(name).bound
    )  # by value: a second build is no trace
    if row.kind is not None:
        settings = drafters.REGISTRY[row.kind]
        assert (
            isinstance(settings(), types.Drafter) and settings() == settings() and hash(settings()) == hash(settings())
        )


def test_greedy_text_is_that_of_the_uncached_loop(name):
    # The longest prompt and its budget fill the cache to the last slot.
    assert max(map(len, PROMPTS)) + tiny.NUM_NEW == decoder(name).capacity
    assert [row.text for row in greedy_rows(name)] == TEXTS
    assert {row.finish for row in greedy_rows(name)} == {"length"}


def test_statistics_are_those_of_the_rounds_walked_by_hand(name):
    row = common_table.ROWS[name]
    if row.propose is None:
        pytest.skip("no reference for its proposals")
    propose = row.propose(tiny.noisy_twin(), common_table.random_table())
    for prompt, text, got in zip(PROMPTS, TEXTS, greedy_rows(name)):
        check_rounds(got, reference.speculate(prompt, text, propose, len(got.offered)))


def check_rounds(got: running.Generated, expected: reference.Rounds):
    assert got.accepted == expected.accepted
    for field in running.ACCEPTANCE:
        assert np.array_equal(getattr(got, field.name), getattr(expected, field.name)), field.name


@pytest.mark.parametrize("rows", [greedy_rows, mixed_rows], ids=["greedy", "mixed"])
def test_statistics_agree_with_the_text(name, rows):
    for got in rows(name):
        assert got.origins[0] == "prefill" and "prefill" not in got.origins[1:] and "prompt" not in got.origins
        # No stop ids: each round ends with one token that was not drafted.
        assert len(got.text) - 1 == sum(origin == "accepted" for origin in got.origins) + got.rounds
        assert got.histogram == np.bincount(got.accepted, minlength=len(got.histogram)).tolist()
        assert sum(got.histogram) == got.rounds == len(got.accepted)
        assert sum(i * n for i, n in enumerate(got.histogram)) <= sum(got.tested) <= sum(got.offered) <= got.drafted
        # A round that offered nothing is marked so.
        undrafted = sum(origin == "undrafted" for origin in got.origins)
        assert undrafted == got.rounds - (got.offered[0] if got.offered else 0)


def test_permuting_rows_permutes_results(name):
    order = [3, 7, 0, 5, 1, 6, 2, 4]
    permuted = decoder(name)([PROMPTS[i] for i in order], seeds=order, **pick(MIXED, order))
    assert permuted == [mixed_rows(name)[i] for i in order]


@pytest.mark.parametrize(
    "settings", [{"temperature": 0}, PLAIN, MIXED], ids=["greedy mates", "plain mates", "mixed mates"]
)
def test_a_row_does_not_depend_on_its_mates(name, settings):
    """DEV-12, DEV-14: the same row among greedy, sampled and filtered mates of other lengths that end elsewhere."""
    place = 2
    settings = {name: list(np.broadcast_to(values, 8)) for name, values in settings.items()}
    settings["temperature"][place] = 0.9
    for filter_name, neutral in (("top_k", 0), ("top_p", 1.0), ("min_p", 0)):
        settings.setdefault(filter_name, [neutral] * 8)[place] = neutral
    prompts = [PROMPTS[i] for i in (7, 0, 5, 6, 1, 4, 2, 3)]
    got = decoder(name)(
        prompts, seeds=[1, 2, 11, 3, 4, 5, 6, 7], max_new_tokens=[1, 24, 24, 3, 24, 9, 24, 2], **settings
    )
    assert got[place] == lonely_row(name)
    for i in (1, 4):  # greedy among sampled rows
        if settings["temperature"][i] == 0:
            assert got[i].text == tiny.greedy(prompts[i])


def slow(*names: str):
    """All rows, some of them left to the slow run."""
    marks = lambda name, row: [pytest.mark.slow] * (name in names or not row.quick)
    return [pytest.param(name, marks=marks(name, row)) for name, row in common_table.ROWS.items()]


TREES = [name for name, row in common_table.ROWS.items() if row.kind is None]


@pytest.mark.parametrize("name", slow("autoregressive", *TREES))
def test_streaming_a_row_alone_gives_what_the_batch_gave(name):
    """Tokens, counts and origins: `stream` at batch 1 equals `decode` at batch 8."""
    for i, prompt in enumerate(PROMPTS):
        for batched, settings in ((greedy_rows(name)[i], {}), (mixed_rows(name)[i], pick(MIXED, [i]))):
            (row,), (landed,) = alone(name).stream([prompt], seeds=[i], **settings)
            assert row == batched
            # What streams out is the text, block by block; prefill's token comes first.
            assert sum(landed, []) == row.text and len(landed[0]) == 1
            assert [len(block) - 1 for block in landed[1:]] == row.accepted


def truncate(text, stop_ids):
    """The right answer for stop ids: up to and including the first."""
    ends = [i for i, token in enumerate(text) if token in stop_ids]
    return (text[: ends[0] + 1], "stop") if ends else (text, "length")


def test_the_first_stop_id_ends_the_text_wherever_it_falls_in_a_block(name):
    """DEV-08: stop id G[j] at all places, alone or in a list with a later one and an id that never comes."""
    row = common_table.ROWS[name]
    for j in range(0, tiny.NUM_NEW, 3):
        places = [(j + 5 * i) % tiny.NUM_NEW for i in range(len(PROMPTS))]
        lists = [[text[k]] if k % 2 else [text[(k + 3) % 24], text[k], 62] for text, k in zip(TEXTS, places)]
        for got, text, prompt, stops in zip(decoder(name)(PROMPTS, stop_ids=lists), TEXTS, PROMPTS, lists):
            expected, finish = truncate(text, stops)
            assert (got.text, got.finish) == (expected, finish)
            if row.propose is not None and j < 8:
                propose = row.propose(tiny.noisy_twin(), common_table.random_table())
                check_rounds(got, reference.speculate(prompt, expected, propose, len(got.offered), tiny.NUM_NEW))
            counts = {field.name: np.array([getattr(got, field.name)]) for field in running.ACCEPTANCE}
            metrics.summarize(types.Acceptance(**counts), np.array([len(got.text)]))  # finds no contradiction


def test_a_stop_id_beats_the_budget_in_the_same_block(name):
    """DEV-09: with the budget at the stop token it is a stop, one token before it is the length."""
    places = [next(j for j in range(4, 24) if text[j] not in text[:j]) for text in TEXTS]
    stops = [[text[j]] for text, j in zip(TEXTS, places)]
    for slack, finish in ((3, "stop"), (1, "stop"), (0, "length")):
        rows = decoder(name)(PROMPTS, stop_ids=stops, max_new_tokens=[j + slack for j in places])
        assert [row.text for row in rows] == [text[: j + min(slack, 1)] for text, j in zip(TEXTS, places)]
        assert {row.finish for row in rows} == {finish}


def test_budgets_are_kept_to_the_token(name):
    """DEV-10: with r tokens of budget left at most r - 1 drafts are offered, and only those count."""
    for budgets in ([1, 2, 3, 4, 5, 6, 7, 8], [2, 1, 4, 3, 6, 5, 23, 24]):
        rows = decoder(name)(PROMPTS, max_new_tokens=budgets)
        assert [row.text for row in rows] == [text[:n] for text, n in zip(TEXTS, budgets)]
        assert {row.finish for row in rows} == {"length"}
        row = common_table.ROWS[name]
        for got, prompt, budget in zip(rows, PROMPTS, budgets):
            assert (budget > 1) or (got.rounds, got.drafted) == (0, 0)
            if row.propose is not None:
                propose = row.propose(tiny.noisy_twin(), common_table.random_table())
                check_rounds(got, reference.speculate(prompt, got.text, propose, len(got.offered)))


def test_what_stands_behind_a_prompt_is_ignored(name):
    """DEV-13: padding is known by the length, not by its value, even when the padding id ends the text."""
    random_padding = np.random.default_rng(0).integers(0, tiny.VOCAB, (8, decoder(name).width))
    for padding in (7, random_padding, -1, 10**6):
        rows = decoder(name)(PROMPTS, padding=padding, stop_ids=[7])
        assert [(row.text, row.finish) for row in rows] == [truncate(text, [7]) for text in TEXTS]


def test_other_values_compile_nothing(name):
    """DEV-18: prompts, lengths, temperatures, filters, stop ids, budgets and keys are data."""
    decoder(name)(PROMPTS)
    traces = lambda: (
        decode.prefill_jit._cache_size(),
        decode.run_jit._cache_size(),
        toy_drafters.TRACES[decoder(name).bound],  # Python calls of `propose`; a real drafter's are not counted
    )
    before = traces()
    decoder(name)(PROMPTS[::-1], seeds=range(50, 58), stop_ids=[[1, 2, 3], [5]] * 4, max_new_tokens=7, **MIXED)
    decoder(name)([(1, 2, 3, 4, 5), (1,) * 6, (2,) * 7], temperature=np.float64(0.3), top_k=np.int64(3))
    assert traces() == before


# What the compiled loop holds: two buffers per layer for the whole generation.


def test_a_round_changes_no_shape(name):
    args, kwargs = decoder(name).arguments(PROMPTS)
    common = {key: kwargs[key] for key in ("drafter", "sampling")}
    before = decode.prefill_jit.eval_shape(*args, **common, capacity=65, chunk=16)
    after = decode.step_jit.eval_shape(*args[:2], before, **common, verifier=kwargs["verifier"])
    assert jax.tree.structure(before) == jax.tree.structure(after)
    describe = lambda tree: [(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(tree)]
    assert describe(before) == describe(after)


def test_the_compiled_loop_holds_no_copy_of_a_cache(name):
    compiled, size = decoder(name).compiled_loop(PROMPTS)
    assert programs.copies(compiled, size) == ([], [])
    # The caches it is given are the ones it hands back.
    assert compiled.memory_analysis().alias_size_in_bytes >= programs.cache_bytes(size)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [8, 1])
@pytest.mark.parametrize("name", [name for name, row in common_table.ROWS.items() if row.kind is not None])
def test_the_loop_needs_no_room_for_a_second_cache(name, batch):
    """At a capacity that dwarfs all else: scratch memory is smaller than one buffer."""
    large = dataclasses.replace(decoder(name), batch=batch, capacity=2184 * 8 // batch)
    compiled, size = large.compiled_loop(PROMPTS[:batch])
    assert programs.copies(compiled, size) == ([], [])
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * size


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prompt_lookup"])
def test_what_small_programs_leave_out_changes_no_buffer(name):
    """Optimisation of the machine code comes when instructions and buffers are settled: what is read above holds."""
    fully = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
    (small, _), (full, _) = (decoder(name).compiled_loop(PROMPTS, options=options) for options in (None, fully))
    assert small is not full and small.as_text() == full.as_text()
    for field in ("temp_size_in_bytes", "alias_size_in_bytes"):
        assert getattr(small.memory_analysis(), field) == getattr(full.memory_analysis(), field)


@pytest.mark.slow
@pytest.mark.parametrize("name", common_table.ROWS)
def test_a_full_cache_gives_what_a_larger_one_gives(name):
    """DEV-16: the longest row fills 65 slots to the last; with 128 nothing changes, sampled rows included."""
    large = dataclasses.replace(decoder(name), capacity=128)
    assert large(PROMPTS, **MIXED) == mixed_rows(name)
    assert large(PROMPTS) == greedy_rows(name)


# The law of the text (DEV-06). Target and draft are Markov chains, so the law of the next three tokens is a product of
# (filtered) transition probabilities, whatever the drafter proposes. Every row of a large batch is one sample.

P = np.array([[0.1, 0.6, 0.2, 0.1], [0.3, 0.1, 0.3, 0.3], [0.25, 0.25, 0.25, 0.25], [0.7, 0.1, 0.1, 0.1]])
Q = np.array([[0.4, 0.2, 0.2, 0.2], [0.1, 0.4, 0.4, 0.1], [0.7, 0.1, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25]])
# The same draft with two more tokens that the target lacks, one of which it prefers by far (DEV-15): cut, it is Q.
WIDE_Q = np.block([[0.1 * Q, np.full((4, 1), 0.01), np.full((4, 1), 0.89)], [np.full((2, 6), 1 / 6)]])

# For drafters over a table: a second sibling that is judged by a wrong law shifts the text.
TABLE = np.array([[0.5, 0.3, 0.05, 0.15], [0.1, 0.6, 0.25, 0.05], [0.5, 0.3, 0.15, 0.05], [0.3, 0.5, 0.15, 0.05]])

# (prompt, settings) of each part of the batch.
PARTS = (
    ((0,), {"temperature": 1.0}),
    ((3,), {"temperature": 1.0}),
    ((0,), {"temperature": 0.7, "top_k": 3, "top_p": 0.8}),
    ((0,), {"temperature": 1.0, "min_p": 0.4}),
    ((0,), {"temperature": 0.0}),
)
SAMPLES = 3000  # rows of each part


def law_decoder(name: str, switch: str | None, verifier: types.Verifier) -> running.Decoder:
    """The row's decoder on fixture B; `switch` turns on a mistake of `toy_drafters.SampledTree`."""
    target, draft = tiny.bigram(np.log(P)), tiny.bigram(np.log(WIDE_Q))
    bound, params = common_table.ROWS[name].build(target, draft, np.log(TABLE))
    params = params | {switch: jnp.asarray(True)} if switch else params
    shapes = {"batch": SAMPLES * len(PARTS), "width": 1, "capacity": 6, "max_new": 5, "chunk": 1}
    return running.Decoder(target, bound, params, verifier=verifier, **shapes)


@functools.cache
def law_output(name: str, switch: str | None, verifier: types.Verifier = decode.REJECTION):
    """`[rows, 5]` new tokens and their origins."""
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0}
    settings = {
        key: [value for _, part in PARTS for value in [part.get(key, neutral)] * SAMPLES]
        for key, neutral in settings.items()
    }
    args, kwargs = law_decoder(name, switch, verifier).arguments(
        [prompt for prompt, _ in PARTS for _ in range(SAMPLES)], **settings
    )
    output = decode.decode(*args, **kwargs)
    assert (np.asarray(output.lengths) == 6).all()
    return np.asarray(output.tokens)[:, 1:], np.asarray(output.origin)[:, 1:]


def law_p_values(name: str, switch: str | None = None, verifier: types.Verifier = decode.REJECTION) -> list[float]:
    """How well the first three new tokens of each part follow their exact law."""
    tokens, _ = law_output(name, switch, verifier)
    values = []
    for part, ((start,), settings) in enumerate(PARTS):
        transitions = np.stack([laws.filtered(row, **settings) for row in P])
        got = tokens[part * SAMPLES : (part + 1) * SAMPLES, :3]
        values.append(laws.p_value(laws.count(got, 4), laws.joint(transitions, start, 3)))
    return values


@pytest.mark.parametrize("name", slow(*(common_table.ROWS.keys() - {"standard"})))
def test_the_text_follows_the_targets_law(name):
    """T = 1; T = 0.7 with top-k and top-p; min-p; greedy rows beside them. See `laws.FALSE_ALARM`."""
    assert min(law_p_values(name)) > laws.FALSE_ALARM


# Every verifier that applies to a row.

CHAINS = ("autoregressive", "standard", "prompt_lookup", "eagle chain", "unigram", "bigram", "early exit")
LENIENT = verify.Rejection(lenience=0.1)
VERIFIERS = {"block": verify.Block(), "typical": verify.Typical(), "lenient": LENIENT}
QUICK_PAIRS = {("prompt_lookup", "block"), ("token tree", "typical"), ("token tree", "lenient")}


def pairs(*kinds: str):
    """Rows and verifiers; all but a few are left to the slow run."""
    applies = lambda name, kind: name in CHAINS or not VERIFIERS[kind].chains_only
    marks = lambda pair: [] if pair in QUICK_PAIRS else [pytest.mark.slow]
    every = [(name, kind) for kind in kinds for name in common_table.ROWS if applies(name, kind)]
    return pytest.mark.parametrize("row,kind", [pytest.param(*pair, marks=marks(pair)) for pair in every])


def under(row: str, kind: str) -> running.Decoder:
    return dataclasses.replace(decoder(row), verifier=VERIFIERS[kind])


def test_a_verifier_that_cannot_judge_the_trees_is_refused(name):
    """All rows are judged by all verifiers, but for block verification, which wants chains."""
    for kind, verifier in VERIFIERS.items():
        if kind == "block" and name not in CHAINS:
            with pytest.raises(ValueError, match="verifier 'block' judges chains"):
                under(name, kind)([PROMPTS[0]])
        else:
            verify.check(verifier, decoder(name).bound)


@pytest.mark.slow
@pytest.mark.parametrize("row", CHAINS)
def test_block_verification_follows_the_targets_law(row):
    assert min(law_p_values(row, verifier=verify.Block())) > laws.FALSE_ALARM


@pairs("block", "typical")
def test_other_verifiers_give_the_same_greedy_text(row, kind):
    """In a greedy batch, and beside sampled rows, where the walk itself decides; also cut at stop ids and budgets."""
    decode_rows = under(row, kind)
    assert decode_rows(PROMPTS) == greedy_rows(row)
    beside = decode_rows(PROMPTS, **MIXED)
    for i in (0, 4):  # the greedy rows of MIXED
        # Of two siblings with one token typical acceptance takes the one that leads further, rejection the first.
        if kind == "block":
            assert beside[i] == mixed_rows(row)[i]
        assert beside[i].text == TEXTS[i]
    cut = decode_rows(PROMPTS, stop_ids=[7], max_new_tokens=5, **MIXED)
    assert [cut[i].text for i in (0, 4)] == [truncate(TEXTS[i][:5], [7])[0] for i in (0, 4)]


@pairs("lenient")
def test_argmax_lenience_never_strays_further_than_it_says(row, kind):
    """At temperature 0 accepted drafts have at least l of the best token's probability, all others are the argmax; and
    a row's text does not depend on its mates."""
    lenient = under(row, kind)
    rows = lenient(PROMPTS)
    model = tiny.random_target().model
    strays = 0
    for prompt, got in zip(PROMPTS, rows):
        logits = reference.forward(model.config, model.params, [*prompt, *got.text]).logits
        for place, (token, origin) in enumerate(zip(got.text, got.origins), start=len(prompt) - 1):
            behind = logits[place].max() - logits[place, token]
            assert behind <= (-np.log(LENIENT.lenience) if origin == "accepted" else 0) + 1e-3
            strays += behind > 1e-3
    if row in ("token tree", "standard", "bigram"):  # their drafts are often near
        assert strays > 0
    beside = lenient(PROMPTS, **MIXED)
    assert [beside[i] for i in (0, 4)] == [rows[i] for i in (0, 4)]
    with_sampled = lenient(PROMPTS, temperature=[1.0, 0, 0, 0, 0, 0, 0, 0])
    assert with_sampled[1:] == rows[1:]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sampled without replacement"])
@pytest.mark.parametrize(
    "mistake,parts",
    [
        ("argmax", [0, 1, 2, 3]),  # DEV-05: likeliest token, judged as if it had been drawn
        ("raw", [2, 3]),  # DEV-06: drawn under the filters, judged without; only filtered rows can show it
        ("joint", [0, 1, 2, 3]),  # drawn without replacement, judged as if drawn with it
    ],
)
def test_wrong_draft_laws_are_noticed(name, mistake, parts):
    values = law_p_values(name, mistake)
    assert [i for i in range(4) if values[i] < laws.FALSE_ALARM] == parts, values
    assert values[4] == 1.0  # greedy rows forgive every draft law


@pytest.mark.parametrize("name", ["standard"])
def test_token_laws_and_acceptance_of_a_known_chain(name):
    """DEV-06. Prefill emits the first token, so the round that starts at 0 is the first where 0 follows prompt 3."""
    assert np.allclose(np.linalg.matrix_power(P, 2)[0], [0.31, 0.18, 0.26, 0.25])
    assert np.allclose(np.linalg.matrix_power(P, 3)[0], [0.325, 0.294, 0.206, 0.175])
    assert np.isclose(laws.accepted_law(P, Q, 0, 3) @ np.arange(4), 1.1435)

    tokens, origins = law_output(name, None)
    accepted = np.logical_and.accumulate(origins[:, 1:] == decode.ACCEPTED, axis=1)[:, :3].sum(axis=1)
    # With 5 tokens of budget the first round offers 3 drafts of 4.
    after_zero = slice(0, SAMPLES)
    for place, law in enumerate(([0.1, 0.6, 0.2, 0.1], [0.31, 0.18, 0.26, 0.25], [0.325, 0.294, 0.206, 0.175])):
        assert laws.follows(np.bincount(tokens[after_zero, place], minlength=4), law)
    shifted = P[0] @ [laws.accepted_law(P, Q, x, 3) for x in range(4)]
    assert laws.follows(np.bincount(accepted[after_zero], minlength=4), shifted)
    after_three = slice(SAMPLES, 2 * SAMPLES)
    starts_at_zero = accepted[after_three][tokens[after_three, 0] == 0]
    assert laws.follows(np.bincount(starts_at_zero, minlength=4), laws.accepted_law(P, Q, 0, 3))
