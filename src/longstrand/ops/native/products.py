"""What oneDNN, which multiplies bfloat16 on a CPU, may keep of its products."""

from __future__ import annotations

import os

SHAPES = 128
"""Enough for one layer's products of each kind there and back, whatever numbers of rows its experts take."""

_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")  # oneDNN's own, and that of torch's layer above it


def bound_products() -> None:
    """Keeps the compiled code of `SHAPES` shapes, the last ones used, unless the environment says another number.

    Each takes about half a MiB, and 1,024 would be kept: numbers of rows ever change where experts choose tokens. Both
    variables are read at the first product of a process, so that a later call changes nothing.
    """
    for name in _CACHES:
        os.environ.setdefault(name, str(SHAPES))
