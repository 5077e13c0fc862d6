"""What bounds the memory of a step: the scan over tiles and its levers."""

from longstrand.memory.levers import Levers, levers_of
from longstrand.memory.prefix import prefix_of
from longstrand.memory.protocol import ChoiceWatch, ScanEnd, ScanLayer, SideLosses, TileGraph, Watch
from longstrand.memory.scan import scan_layers
from longstrand.memory.tile_walk import TileWalk

__all__ = [
    "ChoiceWatch",
    "Levers",
    "ScanEnd",
    "ScanLayer",
    "SideLosses",
    "TileGraph",
    "TileWalk",
    "Watch",
    "levers_of",
    "prefix_of",
    "scan_layers",
]
