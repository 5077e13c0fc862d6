"""What bounds the memory of a step: the scan over tiles."""

from longstrand.memory.scan import Recomputed, ScanLayer, SideLosses, scan_layers

__all__ = ["Recomputed", "ScanLayer", "SideLosses", "scan_layers"]
