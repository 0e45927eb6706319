"""The version, alone in a file so that packaging can read it without importing jax."""

__version__ = "0.5.1"
