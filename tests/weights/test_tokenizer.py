"""Tokenizers: against goldens, from folders and GGUF metadata, chats and streaming."""

from __future__ import annotations

import json
import pathlib

import pytest

from jspec import weights
from jspec.weights import gguf_files, gguf_tokenizers

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "tokenizer.json"

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = (int(kind) for kind in gguf_tokenizers.TokenType)


def byte_alphabet() -> list[str]:
    """The 256 characters that GPT-2 spells bytes with."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level_metadata(pre: str | None = "gpt-2", **changes) -> dict:
    """A byte-level vocabulary: 256 bytes, a few merges, specials."""
    merges = ["h e", "l l", "he ll", "Ġ w", "1 2", "12 3", "Ġ Ġ"]
    tokens = byte_alphabet() + [merge.replace(" ", "") for merge in merges]
    kinds = [NORMAL] * len(tokens)
    tokens += ["<s>", "<end>", "<think>", "[PAD266]"]
    kinds += [CONTROL, CONTROL, USER_DEFINED, UNUSED]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<end>"),
    }
    if pre is not None:
        metadata["tokenizer.ggml.pre"] = pre
    return metadata | changes


def sentencepiece_metadata(**changes) -> dict:
    """A SentencePiece vocabulary with byte fallback; a higher score merges earlier."""
    tokens, kinds, scores = ["<unk>", "<s>", "</s>"], [UNKNOWN, CONTROL, CONTROL], [0.0, 0.0, 0.0]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    kinds += [BYTE] * 256
    scores += [0.0] * 256
    for score, piece in enumerate(["▁t", "he", "▁the", "in", "▁c", "at", "▁cat", "ca", "▁▁", *"▁thecainsé."]):
        tokens.append(piece)
        kinds.append(NORMAL)
        scores.append(-float(score))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | changes


def strings(tokenizer: weights.Tokenizer, text: str) -> list[str]:
    vocabulary = tokenizer.vocab()
    return [vocabulary[index] for index in tokenizer.encode(text, add_bos=False)]


@pytest.fixture(scope="session")
def smollm2(smollm2_path):
    return weights.Tokenizer.from_gguf(gguf_files.GgufFile(smollm2_path).metadata, smollm2_path)


@pytest.fixture(scope="session")
def golden():
    return json.loads(GOLDEN.read_text())


@pytest.mark.real_model
def test_smollm2_ids_and_texts(smollm2, golden):
    for case in golden["texts"]:
        ids = smollm2.encode(case["text"])
        assert ids == case["ids"], case["text"]
        assert smollm2.decode(ids) == case["decoded"]
        assert smollm2.decode(ids, skip_special=False) == case["decoded_with_special"] == case["text"]


@pytest.mark.real_model
def test_smollm2_known_ids(smollm2):
    """Ids that others publish for this tokenizer; a run of spaces before digits shows the digit rule."""
    assert smollm2.encode("Hello world! 123") == [19556, 905, 17, 216, 33, 34, 35]
    assert smollm2.encode("  multiple   spaces") == [216, 2701, 256, 5600]
    assert strings(smollm2, "a  12") == ["a", "ĠĠ", "1", "2"]


@pytest.mark.real_model
def test_smollm2_chats(smollm2, golden):
    for case in golden["chats"]:
        prompt = case["add_generation_prompt"]
        assert smollm2.chat_text(case["messages"], add_generation_prompt=prompt) == case["text"]
        assert smollm2.chat(case["messages"], add_generation_prompt=prompt) == case["ids"]
    assert smollm2.chat("Hi", system="Be brief.") == golden["chats"][2]["ids"]
    assert smollm2.vocab()[2] == "<|im_end|>" and smollm2.vocab_size == 49152 and smollm2.stop_ids == (2,)


@pytest.mark.real_model
def test_smollm2_streaming(smollm2, golden):
    for case in golden["texts"]:
        for step in (1, 3):
            stream = smollm2.stream_decoder()
            pieces = [stream.push(case["ids"][start : start + step]) for start in range(0, len(case["ids"]), step)]
            assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in case["text"]
            assert "".join([*pieces, stream.finish()]) == case["decoded"]


# What each kind of cut does to one text; worked out by hand from the patterns.
TEXT = "I'LL we've 12345  x_y\n\nfooBar  "
PIECES = {
    "gpt-2": ["I", "'", "LL", " we", "'ve", " 12345", " ", " x", "_", "y", "\n", "\n", "fooBar", "  "],
    "smollm": ["I", "'", "LL", " we", "'ve", " ", *"12345", " ", " x", "_", "y", "\n", "\n", "fooBar", "  "],
    "llama-bpe": ["I", "'LL", " we", "'ve", " ", "123", "45", " ", " x", "_y", "\n\n", "fooBar", "  "],
    "qwen2": ["I", "'LL", " we", "'ve", " ", *"12345", " ", " x", "_y", "\n\n", "fooBar", "  "],
    "tekken": ["I", "'LL", " we", "'ve", " ", *"12345", " ", " x", "_y", "\n\n", "foo", "Bar", "  "],
    "gpt-4o": ["I'LL", " we've", " ", "123", "45", " ", " x", "_y", "\n\n", "foo", "Bar", "  "],
}


@pytest.mark.parametrize("pre", PIECES)
def test_pre_tokenizers_cut_where_they_should(pre):
    backend = gguf_tokenizers.describe(byte_level_metadata(pre), "test").backend
    cut = backend.pre_tokenizer.pre_tokenize_str(TEXT)
    assert [TEXT[start:stop] for _, (start, stop) in cut] == PIECES[pre]


def test_byte_level_vocabulary():
    tokenizer = weights.Tokenizer.from_gguf(byte_level_metadata())
    assert strings(tokenizer, "hello w<think>12345") == ["hell", "o", "Ġw", "<think>", "123", "4", "5"]
    assert strings(tokenizer, "<s>a<end>") == ["<s>", "a", "<end>"]
    ids = tokenizer.encode("<s>hé<think>\n🙂<end>")
    assert tokenizer.decode(ids) == "hé<think>\n🙂"
    assert tokenizer.decode(ids, skip_special=False) == "<s>hé<think>\n🙂<end>"
    assert tokenizer.vocab()[-1] == "" and tokenizer.vocab_size == 267
    assert tokenizer.decode([10_000]) == ""


def test_pieces_that_are_tokens_are_kept_whole_by_llama3():
    """`ignore_merges`: the merges alone would never reach "wxy"."""
    metadata = byte_level_metadata("llama-bpe")
    metadata["tokenizer.ggml.tokens"][-1] = "wxy"
    metadata["tokenizer.ggml.token_type"][-1] = NORMAL
    assert strings(weights.Tokenizer.from_gguf(metadata), "wxy") == ["wxy"]
    assert strings(weights.Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": "gpt-2"}), "wxy") == ["w", "x", "y"]


def test_beginning_of_sequence_once():
    plain = weights.Tokenizer.from_gguf(byte_level_metadata())
    wanted = weights.Tokenizer.from_gguf(byte_level_metadata(**{"tokenizer.ggml.add_bos_token": True}))
    llama3 = weights.Tokenizer.from_gguf(byte_level_metadata("llama-bpe"))
    bos = plain.bos_id
    assert not plain.add_bos and wanted.add_bos and llama3.add_bos
    assert plain.encode("a") == wanted.encode("a", add_bos=False)
    for tokenizer in (wanted, llama3):
        assert tokenizer.encode("a") == tokenizer.encode("<s>a") == [bos, *plain.encode("a")]
        assert tokenizer.encode("") == [bos]
    assert plain.encode("a", add_bos=True)[0] == bos
    metadata = byte_level_metadata()
    del metadata["tokenizer.ggml.bos_token_id"]
    with pytest.raises(ValueError, match="names no BOS token"):
        weights.Tokenizer.from_gguf(metadata).encode("a", add_bos=True)


def test_chat_writes_beginning_of_sequence_once():
    template = "{{ bos_token if messages[0].content == 'with' }}{{ messages[0].content }}"
    metadata = byte_level_metadata("llama-bpe", **{"tokenizer.chat_template": template})
    tokenizer = weights.Tokenizer.from_gguf(metadata)
    for text in ("with", "none"):
        ids = tokenizer.chat(text)
        assert ids[0] == tokenizer.bos_id and ids.count(tokenizer.bos_id) == 1


def test_stop_ids_of_older_files():
    """A file that names only the end of the text still ends at the end of a turn."""
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"][-4:] = ["<s>", "<end>", "<|eot_id|>", "[PAD266]"]
    metadata["tokenizer.ggml.token_type"][-2] = CONTROL
    end = metadata["tokenizer.ggml.tokens"].index("<end>")
    assert weights.Tokenizer.from_gguf(metadata).stop_ids == (end, end + 1)
    stated = metadata | {"tokenizer.ggml.eot_token_id": 5}
    assert weights.Tokenizer.from_gguf(stated).stop_ids == (5, end)


def test_sentencepiece_by_scores():
    tokenizer = weights.Tokenizer.from_gguf(sentencepiece_metadata())
    assert tokenizer.add_bos and tokenizer.encode("the")[0] == 1
    assert strings(tokenizer, "the cat in") == ["▁the", "▁cat", "▁", "in"]
    # "▁c" outranks "at", which outranks "ca".
    assert strings(tokenizer, "cacat") == ["▁c", "a", "c", "at"]
    assert strings(tokenizer, "é") == ["▁", "é"]
    # Bytes for what the vocabulary lacks, spaces in front kept.
    assert strings(tokenizer, "你") == ["▁", "<0xE4>", "<0xBD>", "<0xA0>"]
    assert strings(tokenizer, " the") == ["▁", "▁the"]
    for text in ("the cat 你好.\n", " the", "", "in 🙂 cat"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    bare = weights.Tokenizer.from_gguf(sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": False}))
    assert strings(bare, "the cat") == ["t", "he", "▁cat"]
    assert bare.decode(bare.encode(" the")) == " the"


def test_streaming_holds_back_what_may_change():
    tokenizer = weights.Tokenizer.from_gguf(byte_level_metadata())
    ids = tokenizer.encode("a🙂b")
    stream = tokenizer.stream_decoder()
    assert [stream.push([index]) for index in ids] == ["a", "", "", "", "🙂", "b"]
    assert stream.finish() == ""
    stream = tokenizer.stream_decoder()
    assert stream.push([]) == "" and stream.push(ids[:3]) == "" and stream.finish() == tokenizer.decode(ids[:3])
    # A run of byte tokens that ends badly is bad as a whole; the good beginning must not be given out.
    pieces = weights.Tokenizer.from_gguf(sentencepiece_metadata())
    for text, cut in (("the 你好.", 0), ("你好", 1), ("你好", 2)):
        ids = pieces.encode(text)
        ids = ids[: len(ids) - cut]
        stream = pieces.stream_decoder()
        assert "".join([*(stream.push([index]) for index in ids), stream.finish()]) == pieces.decode(ids)


def test_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match="pre-tokenizer 'klingon'.*known are default, gpt-2"):
        weights.Tokenizer.from_gguf(byte_level_metadata("klingon"))
    with pytest.raises(ValueError, match="tokenizer model 'bert' is not supported"):
        weights.Tokenizer.from_gguf(byte_level_metadata(**{"tokenizer.ggml.model": "bert"}))
    with pytest.raises(ValueError, match="tokenizer.ggml.tokens is missing"):
        weights.Tokenizer.from_gguf({})
    with pytest.raises(ValueError, match="token_type has 1 entries"):
        weights.Tokenizer.from_gguf(byte_level_metadata(**{"tokenizer.ggml.token_type": [1]}))
    with pytest.raises(ValueError, match="merges do not fit"):
        weights.Tokenizer.from_gguf(byte_level_metadata(**{"tokenizer.ggml.merges": ["zz zz"]}))
    with pytest.raises(ValueError, match="scores has 0 entries"):
        weights.Tokenizer.from_gguf(sentencepiece_metadata(**{"tokenizer.ggml.scores": []}))
    with pytest.warns(UserWarning, match="names no pre-tokenizer"):
        weights.Tokenizer.from_gguf(byte_level_metadata(None))
    with pytest.raises(ValueError, match="has no chat template"):
        weights.Tokenizer.from_gguf(byte_level_metadata()).chat("Hi")


def chat_tokenizer(template: str) -> weights.Tokenizer:
    return weights.Tokenizer.from_gguf(byte_level_metadata(**{"tokenizer.chat_template": template}))


def test_templates_see_what_transformers_shows_them():
    loop = "{% for m in messages %}\n  {% if m.role == 'x' %}{% continue %}{% endif %}\n{{ m.content }}\n{% endfor %}\n"
    tokenizer = chat_tokenizer(loop + "{{ bos_token }}|{{ tools }}|{{ {'a': '<é>'} | tojson }}|{{ extra }}")
    messages = [{"role": "x", "content": "no"}, {"role": "user", "content": "yes"}]
    assert tokenizer.chat_text(messages, extra=3) == 'yes\n<s>|None|{"a": "<é>"}|3'
    assert len(chat_tokenizer("{{ strftime_now('%Y') }}").chat_text("Hi")) == 4
    marked = "{% generation %}{{ messages[0].content }}{% endgeneration %}{{ 'A:' if add_generation_prompt }}"
    assert chat_tokenizer(marked).chat_text("Hi") == "HiA:"
    assert chat_tokenizer(marked).chat_text("Hi", add_generation_prompt=False) == "Hi"


def test_templates_that_fail():
    with pytest.raises(ValueError, match="does not take these messages: only users"):
        chat_tokenizer("{{ raise_exception('only users') }}").chat_text("Hi")
    with pytest.raises(ValueError, match="does not parse"):
        chat_tokenizer("{% if %}").chat_text("Hi")
    with pytest.raises(ValueError, match="does not take these messages"):
        chat_tokenizer("{{ messages.__class__.__mro__ }}").chat_text("Hi")
    with pytest.raises(ValueError, match="a system prompt is given"):
        chat_tokenizer("{{ messages }}").chat([{"role": "system", "content": "a"}], system="b")


def write_folder(folder: pathlib.Path, **settings) -> pathlib.Path:
    """A Hugging Face tokenizer folder made from the byte-level vocabulary."""
    backend = gguf_tokenizers.describe(byte_level_metadata("qwen2"), "test").backend
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_folder(tmp_path):
    write_folder(
        tmp_path,
        bos_token="<s>",
        eos_token={"content": "<end>", "special": True},
        chat_template=[{"name": "tools", "template": "x"}, {"name": "default", "template": "{{ eos_token }}hello"}],
    )
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    tokenizer = weights.Tokenizer.from_folder(tmp_path)
    reference = weights.Tokenizer.from_gguf(byte_level_metadata("qwen2"))
    weights.same_vocabulary(tokenizer, reference)
    for text in ("hello 123 wé", "<s>x<think>"):
        assert tokenizer.encode(text) == reference.encode(text)  # neither cut off nor padded
    end = reference.vocab().index("<end>")
    assert tokenizer.stop_ids == (7, 9, end) and tokenizer.bos_id == reference.bos_id and not tokenizer.add_bos
    assert tokenizer.chat_text("Hi") == "<end>hello"
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert weights.Tokenizer.from_folder(tmp_path).chat_text("Hi") == "Hi!"


def test_folder_that_adds_bos_in_its_post_processor(tmp_path):
    import tokenizers

    write_folder(tmp_path, bos_token="<s>")
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    assert weights.Tokenizer.from_folder(tmp_path).add_bos
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "add_bos_token": False}))
    assert not weights.Tokenizer.from_folder(tmp_path).add_bos


def test_folder_errors(tmp_path):
    with pytest.raises(ValueError, match="tokenizer.json is missing"):
        weights.Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a tokenizer"):
        weights.Tokenizer.from_folder(tmp_path)
    write_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ValueError, match="tokenizer_config.json holds a JSON list"):
        weights.Tokenizer.from_folder(tmp_path)


def test_dev15c_same_size_other_spelling():
    target = weights.Tokenizer.from_gguf(byte_level_metadata())
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"][5], metadata["tokenizer.ggml.tokens"][7] = "%%", "&&"
    with pytest.raises(ValueError, match="differ at id 5: .* in the target, '%%' in the draft"):
        weights.same_vocabulary(target, weights.Tokenizer.from_gguf(metadata | {"tokenizer.ggml.merges": []}))


def test_dev15_padding_and_longer_vocabularies():
    target = byte_level_metadata()
    padded = byte_level_metadata()
    padded["tokenizer.ggml.tokens"] += ["[PAD267]", "[PAD268]"]
    padded["tokenizer.ggml.token_type"] += [UNUSED, UNUSED]
    longer = byte_level_metadata()
    longer["tokenizer.ggml.tokens"] += ["more"]
    longer["tokenizer.ggml.token_type"] += [NORMAL]
    target, padded, longer = (weights.Tokenizer.from_gguf(each) for each in (target, padded, longer))
    weights.same_vocabulary(target, padded)
    weights.same_vocabulary(padded, target)
    assert target.fingerprint() == padded.fingerprint() != longer.fingerprint()
    weights.same_vocabulary(longer, target)  # the draft cannot propose "more", and need not
    with pytest.raises(ValueError, match="differ at id 267: '' in the target, 'more' in the draft"):
        weights.same_vocabulary(target, longer)
