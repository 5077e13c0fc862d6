"""Manifold-constrained hyper-connections: the wide residual stream."""

from longstrand.ops.mhc.fused import GATHER, UPDATE, mhc_gather, mhc_update
from longstrand.ops.mhc.reference import mhc_gather_reference, mhc_update_reference

__all__ = ["GATHER", "UPDATE", "mhc_gather", "mhc_gather_reference", "mhc_update", "mhc_update_reference"]
