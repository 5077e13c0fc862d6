"""The loss that teaches the indexer where attention looks."""

from longstrand.ops.indexer_loss.dense import DENSE_LOSS, dense_indexer_loss
from longstrand.ops.indexer_loss.reference import indexer_loss_reference
from longstrand.ops.indexer_loss.selected import SELECTED_LOSS, selected_indexer_loss

__all__ = [
    "DENSE_LOSS",
    "SELECTED_LOSS",
    "dense_indexer_loss",
    "indexer_loss_reference",
    "selected_indexer_loss",
]
