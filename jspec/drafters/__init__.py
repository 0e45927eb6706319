"""Drafting algorithms, one file each. Importing a module registers its drafter under its config kind."""

from jspec.drafters.autoregressive import Autoregressive
from jspec.drafters.base import REGISTRY
from jspec.drafters.prompt_lookup import PromptLookup
from jspec.drafters.standard import Draft, Standard

__all__ = ["REGISTRY", "Autoregressive", "Draft", "PromptLookup", "Standard"]
