"""Weights from files and into them: references, checkpoint formats, tokenizers."""

from jspec.weights.gguf_export import save_gguf
from jspec.weights.huggingface_export import save_huggingface
from jspec.weights.load import load_target
from jspec.weights.references import check, resolve
from jspec.weights.shared_export import save_shared
from jspec.weights.tokenizer import StreamDecoder, Tokenizer, same_vocabulary

__all__ = [
    "StreamDecoder",
    "Tokenizer",
    "check",
    "load_target",
    "resolve",
    "same_vocabulary",
    "save_gguf",
    "save_huggingface",
    "save_shared",
]
