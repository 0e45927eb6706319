"""Reduced draft vocabularies: their files, what is refused, and that the text stays the target's (FR-Spec)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import drafters, topology, types
from jspec.drafters import draft_vocabulary
from jspec.models import heads, transformer
from tests import hand_heads, running, tiny

pytestmark = pytest.mark.usefixtures("small_programs")


def with_stops(target: types.Target, *stop_ids: int) -> types.Target:
    return types.Target(target.model, stop_ids=stop_ids)


def test_a_vocabulary_file(tmp_path):
    target = with_stops(tiny.random_target(), 7)
    path = tmp_path / "ids.json"
    path.write_text("[9, 3, 11, 0]")
    assert drafters.Vocabulary(str(path)).load(target).tolist() == [0, 3, 7, 9, 11]
    assert drafters.Vocabulary(str(path), size=2).load(target).tolist() == [3, 7, 9]
    np.save(tmp_path / "ids.npy", np.array([4, 2]))
    assert drafters.Vocabulary(str(tmp_path / "ids.npy")).load(target).tolist() == [2, 4, 7]
    with pytest.raises(ValueError, match="size 5 is more than its 4 ids"):
        drafters.Vocabulary(str(path), size=5).load(target)
    for content in ('{"ids": 1}', "[[1, 2], [3, 4]]", "[1.5]", "[true]"):
        path.write_text(content)
        with pytest.raises(ValueError, match="expected a list of token ids"):
            drafters.Vocabulary(str(path)).load(target)
    path.write_text("[3, 9, 3]")
    with pytest.raises(ValueError, match="ids.json: id 3 stands twice"):
        drafters.Vocabulary(str(path)).load(target)
    assert drafters.Vocabulary(str(path), size=2).load(target).tolist() == [3, 7, 9]
    path.write_text("[1,")
    with pytest.raises(ValueError, match="draft vocabulary .*ids.json"):
        drafters.Vocabulary(str(path)).load(target)
    with pytest.raises(ValueError, match="vocabulary size 0 is below 1"):
        drafters.Vocabulary(str(path), size=0)


def test_a_vocabulary_without_a_file_is_the_lowest_ids():
    target = with_stops(tiny.random_target(), 7)
    assert drafters.Vocabulary(size=3).load(target).tolist() == [0, 1, 2, 7]
    with pytest.raises(ValueError, match="vocabulary needs a file or a size"):
        drafters.Vocabulary()
    with pytest.raises(ValueError, match="of the first 999 ids"):
        drafters.Vocabulary(size=999).load(target)


@pytest.mark.parametrize(
    "ids,words",
    [
        ([1, 64], "id 64 is outside the target's 64 tokens"),
        ([1, -1], "id -1 is outside the target's 64 tokens"),
        ([1, 2, 1], "id 1 stands twice"),
        ([], "draft vocabulary draft_ids is empty"),
    ],
)
def test_ids_that_make_no_vocabulary(ids, words):
    with pytest.raises(ValueError, match=words):
        draft_vocabulary.check(ids, tiny.random_target())


@pytest.fixture
def vocabulary(tmp_path):
    """Every third token."""
    path = tmp_path / "ids.json"
    path.write_text(str(list(range(0, 64, 3))))
    return drafters.Vocabulary(str(path))


def test_drafts_that_do_not_fit_a_vocabulary(vocabulary):
    target = tiny.random_target()
    wide = topology.Tree(widths=(23,))
    with pytest.raises(ValueError, match="the tree asks for 23 candidates of 22 draft tokens"):
        drafters.Standard(tree=wide, vocabulary=vocabulary).build(target, draft=tiny.noisy_twin())
    with pytest.raises(ValueError, match="draft vocabulary: the draft has no id 63, only 16"):
        drafters.Standard(vocabulary=vocabulary).build(target, draft=tiny.bigram(tiny.successor()))
    reduced = hand_heads.eagle3(target, np.eye(64), (0, 1), np.arange(20))
    with pytest.raises(
        ValueError, match="vocabulary: the head has a reduced vocabulary of its own, and no output rows"
    ):
        drafters.Eagle(vocabulary=vocabulary).build(target, head=reduced)
    random = drafters.EagleDraft(random=drafters.RandomEagle(version=1, vocab_size=65))
    with pytest.raises(ValueError, match="vocab_size 65 is not between 1 and 64"):
        drafters.Eagle(draft=random).build(target)


def test_a_head_that_borrows_output_rows_can_be_given_other_tokens(vocabulary):
    """FR-Spec needs no training: the tokens that a head was trained to propose do not bind it."""
    target = tiny.random_target()
    config = drafters.eagle.like_target(target, 1)
    borrowing = heads.init_eagle(jax.random.key(0), config, target.model.dtype)
    reduced = heads.EagleHead(
        {**borrowing.params, "draft_ids": jnp.arange(20)}, dataclasses.replace(config, vocab_size=20)
    )
    _, own = drafters.Eagle().build(target, head=reduced)
    _, other = drafters.Eagle(vocabulary=vocabulary).build(target, head=reduced)
    rows = np.asarray(transformer.output_matrix(target.model))
    assert np.array_equal(own.params["head"], rows[:20]) and own.config.vocab_size == 20
    assert np.array_equal(other.params["head"], rows[::3]) and other.config.vocab_size == 22
    assert other.params["draft_ids"].tolist() == list(range(0, 64, 3))


def built(kind: str, target: types.Target, vocabulary: drafters.Vocabulary):
    """A drafter of every kind that takes a vocabulary."""
    if kind == "standard":
        return drafters.Standard(gamma=3, vocabulary=vocabulary).build(target, draft=tiny.noisy_twin())
    if kind == "medusa":
        draft = drafters.MedusaDraft(random=drafters.RandomMedusa())
        return drafters.Medusa(tree=topology.Tree(widths=(3, 2)), vocabulary=vocabulary, draft=draft).build(target)
    tree = topology.Tree(widths=(3, 2)) if kind == "eagle tree" else None
    dynamic = drafters.Dynamic(depth=2, top_k=3, num_nodes=8) if kind == "eagle dynamic" else None
    draft = drafters.EagleDraft(random=drafters.RandomEagle(version=1))
    return drafters.Eagle(tree=tree, dynamic=dynamic, vocabulary=vocabulary, draft=draft).build(target)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["standard", "medusa", "eagle tree", "eagle dynamic"])
def test_a_reduced_vocabulary_changes_no_text(kind, vocabulary):
    """Only listed tokens and stop ids are ever proposed, to greedy and sampled rows; greedy text is the target's."""
    target = with_stops(tiny.random_target(), 7)
    ids = {*range(0, 64, 3), 7}
    bound, params = built(kind, target, vocabulary)
    ours = params.params if kind.startswith("eagle") else params
    assert ours["draft_ids"].tolist() == sorted(ids)
    decoder = running.Decoder(target, bound, params)
    rows = decoder(tiny.PROMPTS)
    assert [row.text for row in rows] == [tiny.greedy(prompt) for prompt in tiny.PROMPTS]
    drafted = {token for row in rows for token, origin in zip(row.text, row.origins) if origin == "accepted"}
    assert drafted <= ids and (kind != "standard" or drafted)

    args, kwargs = decoder.arguments(tiny.PROMPTS, temperature=[0, 1.0] * 4)
    propose = jax.jit(bound.propose)
    seen = set()
    for state in decoder.states(tiny.PROMPTS):
        context = types.Context(state.tokens, state.length, state.features)
        tree, _ = propose(decoder.params, args[1], state.draft, context, kwargs["sampling"])
        seen |= set(np.asarray(tree.tokens)[np.asarray(state.live), 1:].flat)
        assert tree.draft_probs is None or tree.draft_probs.shape[-1] == len(ids)
    assert seen <= ids and len(seen) > len(ids) / 2


@pytest.mark.slow
def test_a_stop_id_is_drafted_though_the_list_lacks_it(tmp_path):
    """Draft = target on the cycle: without the stop id 11 among its tokens, no draft could end a text."""
    path = tmp_path / "ids.npy"
    np.save(path, np.arange(1, 11))
    target = with_stops(tiny.bigram(tiny.successor()), 11)
    settings = drafters.Standard(gamma=3, vocabulary=drafters.Vocabulary(str(path)))
    bound, params = settings.build(target, draft=target)
    decoder = running.Decoder(target, bound, params, batch=2, width=2, capacity=16, max_new=14)
    ends, wraps = decoder([(7,), (13,)], stop_ids=[[11], []])
    # 8 | 9 10 11
    assert ends.text == [8, 9, 10, 11] and ends.finish == "stop"
    assert ends.origins == ["prefill", "accepted", "accepted", "accepted"]
    # 14 | 15 and 0 are no drafts, each comes as a correction | 1 2 3, 4 | 5 6 7, 8 | three left, two drafts: 9 10, 11
    assert wraps.text == [(14 + i) % 16 for i in range(14)]
    assert wraps.accepted == [0, 0, 3, 3, 2]
