"""Which pools of tokens a query attends to."""

from longstrand.ops.select.blockwise import SELECT, pool_scores, select_pools, unseen
from longstrand.ops.select.own import select_own_pools
from longstrand.ops.select.reference import pool_scores_reference, select_pools_reference

__all__ = [
    "SELECT",
    "pool_scores",
    "pool_scores_reference",
    "select_own_pools",
    "select_pools",
    "select_pools_reference",
    "unseen",
]
