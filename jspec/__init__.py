"""Speculative decoding in pure JAX: one cache, one verify step, one loop, every method a file.

Scripts need `load_target`, `generate` and `stream`; the loop itself is `decode.decode` and `decode.stream`.
"""

from jspec import cache, decode, drafters, metrics, sampling, topology, tree, types, verify
from jspec.drafters import (
    Autoregressive,
    Bigram,
    Draft,
    Eagle,
    EarlyExit,
    Lookahead,
    Medusa,
    PromptLookup,
    Standard,
    Unigram,
)
from jspec.drafters.loading import load_draft
from jspec.generation import Generation, generate, stream
from jspec.models.config import RopeScaling, TransformerConfig
from jspec.models.transformer import Model, forward
from jspec.types import Params, Target
from jspec.verify import Block, Rejection, Synthetic, Typical
from jspec.version import __version__
from jspec.weights.load import load_target

__all__ = [
    "Autoregressive",
    "Bigram",
    "Block",
    "Draft",
    "Eagle",
    "EarlyExit",
    "Generation",
    "Lookahead",
    "Medusa",
    "Model",
    "Params",
    "PromptLookup",
    "Rejection",
    "RopeScaling",
    "Standard",
    "Synthetic",
    "Target",
    "TransformerConfig",
    "Typical",
    "Unigram",
    "__version__",
    "cache",
    "decode",
    "drafters",
    "forward",
    "generate",
    "load_draft",
    "load_target",
    "metrics",
    "sampling",
    "stream",
    "topology",
    "tree",
    "types",
    "verify",
]
