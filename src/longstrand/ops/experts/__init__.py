"""The routed experts: grouped by expert, nothing dropped."""

from longstrand.ops.experts.grouped import experts
from longstrand.ops.experts.reference import experts_reference

__all__ = ["experts", "experts_reference"]
