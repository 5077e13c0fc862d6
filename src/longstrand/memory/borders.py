"""The carries of a layer at its tile borders, from the walk forward to the walk back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Borders:
    """A stack of equal tensors in one block per part.

    Kept one by one, such small tensors would lie scattered between the large ones of a tile, and the holes around them
    would not be used again: 2 to 3 kB per token of the toy (resident memory, measured at a tile of 1,024).
    """

    def __init__(self, num_tiles: int) -> None:
        self._num_tiles, self._count = num_tiles, 0
        self._blocks: list[Tensor] = []

    @torch.no_grad()
    def push(self, parts: Sequence[Tensor]) -> None:
        """Copies the parts of a tile's carry; those of all tiles have the same shapes."""
        if not self._blocks:
            self._blocks = [part.new_empty(self._num_tiles, *part.shape) for part in parts]
        for block, part in zip(self._blocks, parts, strict=True):
            block[self._count] = part
        self._count += 1

    def at(self, index: int) -> tuple[Tensor, ...]:
        """The parts of the carry that was pushed at this place."""
        return tuple(block[index] for block in self._blocks)

    def pop(self) -> tuple[Tensor, ...]:
        """The parts of the last carry that was pushed and not yet popped."""
        self._count -= 1
        return tuple(block[self._count] for block in self._blocks)
