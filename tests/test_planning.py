"""Plans by hand, and against what JAX says of the same shapes."""

import jax
import jax.numpy as jnp
import pytest

from jspec import cache as kv
from jspec import drafters, planning, topology, types
from jspec.models import config as model_config
from jspec.weights import shapes

# 2 layers of width 8: attention 4 heads of 2 over 2 kv heads, feed-forward 6, 10 tokens.
CONFIG = model_config.TransformerConfig(
    vocab_size=10, num_layers=2, width=8, num_heads=4, num_kv_heads=2, head_size=2, ffn_size=6, max_positions=64
)
LAYER = (8 + 4 + 4) * 8 + 8 * 8 + 2 * 6 * 8 + 8 * 6  # qkv, output, gate and up, down


def target(config=CONFIG, dtype=jnp.float32):
    return types.Target(shapes.abstract(config, dtype))


def test_one_pass_by_hand():
    work = planning.model_pass(target().model, batch=3, tokens=5, length=20)
    head, kv_entries = 10 * 8, 2 * 2 * 2
    products = 2 * LAYER + head
    attention = 2 * 4 * 3 * 5 * (20 + 5) * 4 * 2  # layers; two products of two operations
    assert work.operations == 2 * products * 3 * 5 + attention
    assert work.bytes == 4 * products + 3 * 5 * 10 * 4 + 2 * 3 * (20 + 5) * kv_entries * 4
    # bfloat16 halves all but the logits, and logits that nobody wants are not made.
    half = planning.model_pass(target(dtype=jnp.bfloat16).model, batch=3, tokens=5, length=20)
    assert half.bytes - 3 * 5 * 10 * 4 == (work.bytes - 3 * 5 * 10 * 4) / 2
    first = planning.model_pass(target().model, batch=3, tokens=5, length=20, logits=1)
    assert work.operations - first.operations == 2 * head * 3 * 4


def test_a_window_bounds_what_is_read():
    windowed = model_config.TransformerConfig(**{**vars(CONFIG), "windows": (4, None)})
    full, cut = (
        planning.model_pass(target(config).model, batch=1, tokens=1, length=20) for config in (CONFIG, windowed)
    )
    assert full.bytes - cut.bytes == (20 - 4) * 2 * 2 * 2 * 4


def test_operations_agree_with_the_lowered_program():
    config = model_config.TransformerConfig(
        vocab_size=512, num_layers=2, width=128, num_heads=4, num_kv_heads=4, head_size=32, ffn_size=256,
        max_positions=64,
    )  # fmt: skip
    abstract = target(config)
    counted = planning.lowered_operations(abstract, batch=2, tokens=8, capacity=16)
    ours = planning.model_pass(abstract.model, batch=2, tokens=8, length=16).operations
    assert counted == pytest.approx(ours, rel=0.1)  # norms, rotations and softmax are theirs alone


def test_the_roofline_is_the_longer_of_moving_and_computing():
    device = planning.Device("slow", 1e9, bandwidth=100.0, peak={"float32": 1000.0}, source="made up")
    assert planning.Work(bytes=200, operations=100).seconds(device, "float32") == 2.0
    assert planning.Work(bytes=200, operations=5000).seconds(device, "float32") == 5.0
    total = planning.Work(1, 2) + planning.Work(10, 20) * 2
    assert (total.bytes, total.operations) == (21, 42)


def test_devices_by_name():
    assert planning.device("h200").bandwidth == 4.8e12 and planning.device("cpu2").peak["float32"] == 1.6e11
    with pytest.raises(ValueError, match="device 'h20' is not known; did you mean 'h200'"):
        planning.device("h20")


@pytest.mark.parametrize(
    ("drafter", "passes", "own"),
    [
        (drafters.Autoregressive(), 0, 0),
        (drafters.PromptLookup(gamma=3), 0, 0),
        (drafters.Lookahead(window=2, ngram=3, guesses=2), 0, 0),
        (drafters.Standard(gamma=3, draft=drafters.Draft(layers=1)), 3, 0),  # all of it is the target's
        (drafters.EarlyExit(gamma=2, layers=1), 2, 0),
        (drafters.Unigram(gamma=2), 0, 10),
        (drafters.Medusa(topology.Tree(widths=(2, 1)), drafters.MedusaDraft(random=drafters.RandomMedusa(2))), 1, 144),
        (drafters.Eagle(gamma=4, draft=drafters.EagleDraft(random=drafters.RandomEagle(1))), 4, LAYER + 8 + 2 * 64),
        (
            drafters.Eagle(
                dynamic=drafters.Dynamic(depth=3, top_k=2, num_nodes=5),
                draft=drafters.EagleDraft(random=drafters.RandomEagle(3, vocab_size=4)),
                feature_layers=(0, 1, 1),
            ),
            None,
            "collide",
        ),
    ],
)
def test_a_drafter_is_bound_to_shapes(drafter, passes, own):
    abstract = target()
    if own == "collide":  # what `build` refuses is refused here too
        with pytest.raises(ValueError, match="collide"):
            planning.bind(drafter, abstract)
        return
    bound = planning.bind(drafter, abstract)
    planning.check_proposal(bound, abstract, batch=2, capacity=16)
    found, work = planning.draft_work(bound, abstract, batch=1, length=10)
    assert found == passes and (work.bytes > 0) == (passes > 0)
    assert planning.num_parameters(bound.own) == own
    cache, state = planning.state_bytes(bound, abstract, batch=2, capacity=16)
    assert cache == planning.num_bytes(jax.eval_shape(lambda: kv.init(CONFIG, 2, 16)))
    assert (state > 0) == isinstance(
        drafter, drafters.Lookahead | drafters.Standard | drafters.Eagle | drafters.EarlyExit
    )


def test_work_of_a_draft_by_hand():
    # A chain of 2 by a draft of one layer: two passes of one token each.
    abstract = target()
    bound = planning.bind(drafters.Standard(gamma=2, draft=drafters.Draft(layers=1)), abstract)
    _, work = planning.draft_work(bound, abstract, batch=1, length=10)
    assert work.bytes == 2 * (4 * (LAYER + 80) + 10 * 4 + (10 + 1) * 8 * 4)
    # EAGLE-1 reads its layer, fc and the target's output matrix at every depth.
    head = drafters.EagleDraft(random=drafters.RandomEagle(1))
    _, work = planning.draft_work(
        planning.bind(drafters.Eagle(gamma=2, draft=head), abstract), abstract, batch=1, length=10
    )
    assert work.bytes == 2 * (4 * (LAYER + 2 * 64 + 80) + 10 * 4 + (10 + 1) * 8 * 4)
    # A reduced vocabulary reads fewer rows; which they are does not matter, so a file that has a size is not opened.
    reduced = drafters.Eagle(gamma=2, draft=head, vocabulary=drafters.Vocabulary("nowhere.json", size=3))
    _, less = planning.draft_work(planning.bind(reduced, abstract), abstract, batch=1, length=10)
    assert work.bytes - less.bytes == 2 * (4 * 7 * 8 + 7 * 4)
    # Medusa: two heads of one block, and the target's matrix for both.
    medusa = drafters.Medusa(topology.Tree(widths=(2, 1)), drafters.MedusaDraft(random=drafters.RandomMedusa(2)))
    _, work = planning.draft_work(planning.bind(medusa, abstract), abstract, batch=1, length=10)
    assert work.bytes == 4 * (2 * 64 + 80) + 2 * 10 * 4


def test_drafts_that_would_be_downloaded_have_their_known_shapes():
    vicuna = target(shapes.model("hf:lmsys/vicuna-7b-v1.3"), jnp.bfloat16)
    eagle = planning.bind(drafters.Eagle(gamma=2, draft=drafters.EagleDraft("hf:yuhuili/EAGLE-Vicuna-7B-v1.3")), vicuna)
    assert planning.num_parameters(eagle.own) == pytest.approx(0.24e9, rel=0.03)
    standard = planning.bind(drafters.Standard(draft=drafters.Draft(reference="hf:double7/vicuna-68m")), vicuna)
    assert planning.num_parameters(standard.own) == pytest.approx(68e6, rel=0.01)
    medusa = drafters.MedusaDraft("hf:FasterDecoding/medusa-vicuna-7b-v1.3")
    heads = planning.bind(drafters.Medusa(draft=medusa), vicuna)
    assert planning.num_parameters(heads.own) == 4 * (4096 * 4097 + 32000 * 4096)  # the tree uses four of them
    with pytest.raises(ValueError, match="hf:somebody/head: what this EAGLE head looks like is not known"):
        planning.bind(drafters.Eagle(draft=drafters.EagleDraft("hf:somebody/head")), vicuna)
    with pytest.raises(ValueError, match="the head reads features of width 5120; the target's have 4096"):
        planning.bind(drafters.Eagle(draft=drafters.EagleDraft("hf:yuhuili/EAGLE-Vicuna-13B-v1.3")), vicuna)
