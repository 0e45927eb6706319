"""Weights from files: references, checkpoint formats, tokenizers."""

from jspec.weights.load import load_target
from jspec.weights.references import check, resolve
from jspec.weights.tokenizer import StreamDecoder, Tokenizer, same_vocabulary

__all__ = ["StreamDecoder", "Tokenizer", "check", "load_target", "resolve", "same_vocabulary"]
