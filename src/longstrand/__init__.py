"""Longstrand: train open hybrid language models on sequences of a million tokens and more."""

__version__ = "0.1.0"
