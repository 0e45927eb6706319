"""Drafting algorithms, one file each. Importing a module registers its drafter under its config kind."""

from jspec.drafters.autoregressive import Autoregressive
from jspec.drafters.base import REGISTRY
from jspec.drafters.draft_vocabulary import Vocabulary
from jspec.drafters.eagle import Dynamic, Eagle, EagleDraft, RandomEagle
from jspec.drafters.lookahead import Lookahead
from jspec.drafters.medusa import Medusa, MedusaDraft, RandomMedusa
from jspec.drafters.ngram import Bigram, Unigram
from jspec.drafters.prompt_lookup import PromptLookup
from jspec.drafters.standard import Draft, EarlyExit, Standard

__all__ = [
    "REGISTRY",
    "Autoregressive",
    "Bigram",
    "Draft",
    "Dynamic",
    "Eagle",
    "EagleDraft",
    "EarlyExit",
    "Lookahead",
    "Medusa",
    "MedusaDraft",
    "PromptLookup",
    "RandomEagle",
    "RandomMedusa",
    "Standard",
    "Unigram",
    "Vocabulary",
]
