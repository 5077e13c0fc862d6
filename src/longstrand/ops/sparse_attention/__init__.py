"""Attention of each query to the tokens of its selected pools, in latent space."""

from longstrand.ops.sparse_attention.gathered import SPARSE, sparse_attention
from longstrand.ops.sparse_attention.reference import sparse_attention_reference

__all__ = ["SPARSE", "sparse_attention", "sparse_attention_reference"]
