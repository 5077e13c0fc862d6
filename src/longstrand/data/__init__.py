"""Readers, tokens, packs, the resumable loader and the ledger."""

from longstrand.data.dataset import Data, open_data, open_evaluation
from longstrand.data.ledger import Ledger
from longstrand.data.loader import DocumentPacks, Loader
from longstrand.data.pack import NO_TARGET, Pack

__all__ = ["NO_TARGET", "Data", "DocumentPacks", "Ledger", "Loader", "Pack", "open_data", "open_evaluation"]
