"""Readers, tokens, packs, the resumable loader and the ledger."""

from longstrand.data.pack import NO_TARGET, Pack

__all__ = ["NO_TARGET", "Pack"]
