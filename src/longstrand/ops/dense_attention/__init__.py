"""Dense causal attention in latent space: what the indexer learns from."""

from longstrand.ops.dense_attention.blockwise import DENSE, DenseAttention, dense_attention, pool_masses
from longstrand.ops.dense_attention.reference import dense_attention_reference

__all__ = ["DENSE", "DenseAttention", "dense_attention", "dense_attention_reference", "pool_masses"]
