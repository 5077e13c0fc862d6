"""The routed experts: grouped by expert, nothing dropped."""

from longstrand.ops.experts.grouped import EXPERTS, experts
from longstrand.ops.experts.reference import experts_reference

__all__ = ["EXPERTS", "experts", "experts_reference"]
