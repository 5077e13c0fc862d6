"""What bounds the memory of a step: the scan over tiles and its levers."""

from longstrand.memory.levers import Levers, levers_of
from longstrand.memory.protocol import Recomputed, ScanEnd, ScanLayer, SideLosses
from longstrand.memory.scan import scan_layers
from longstrand.memory.tile_walk import TileWalk

__all__ = [
    "Levers",
    "Recomputed",
    "ScanEnd",
    "ScanLayer",
    "SideLosses",
    "TileWalk",
    "levers_of",
    "scan_layers",
]
