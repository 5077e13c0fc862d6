"""The loss that teaches the indexer where attention looks."""

from longstrand.ops.indexer_loss.dense import dense_indexer_loss
from longstrand.ops.indexer_loss.reference import indexer_loss_reference
from longstrand.ops.indexer_loss.selected import selected_indexer_loss

__all__ = ["dense_indexer_loss", "indexer_loss_reference", "selected_indexer_loss"]
