"""How unevenly tokens choose experts, in whole steps and in single tiles; and the number that a plan takes of it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longstrand.parallel.dispatch import plan_rounds

COLLAPSED = 0.99
"""Where the busiest experts, as many as a token has, take this share of all, the router chooses nothing; where a single
one is among the experts of this share of the tokens, it takes one choice of them away."""


@dataclass
class LayerLoads:
    """What one layer's router has chosen so far; a few numbers per tile are kept, and nothing per token.

    Attributes:
        counts: int64[E], pairs of a token and one of its experts, by expert.
        ratios: busiest over mean of each whole tile, by the number of ranks that the experts lie on.
        rounds: receive rounds of each whole tile.
    """

    counts: np.ndarray
    ratios: dict[int, list[float]]
    rounds: list[int] = field(default_factory=list)

    def step(self, ranks: int) -> float:
        """Busiest over mean of all tokens together."""
        return busiest_over_mean(self.counts, ranks)

    def collapsed(self, num_active: int) -> bool:
        """Whether (nearly) all tokens go to the same experts, although there are others."""
        busiest = np.sort(self.counts)[::-1][:num_active].sum()
        return num_active < len(self.counts) and busiest > COLLAPSED * self.counts.sum()

    def always_chosen(self, num_active: int) -> bool:
        """Whether one expert is chosen by (nearly) every token, although there are others."""
        return (
            num_active < len(self.counts) and self.counts.max() * num_active > COLLAPSED * self.counts.sum()
        )

    def as_dict(self) -> dict[str, Any]:
        ranks = {
            str(n): {"step": self.step(n), "median_tile": statistics.median(of), "largest_tile": max(of)}
            for n, of in self.ratios.items()
        }
        return {"tokens_per_expert": self.counts.tolist(), "busiest_over_mean": ranks}


class ExpertLoads:
    """Counts tiles as they are chosen.

    A tile shorter than half of the longest one is counted in its step but not among the tiles: a handful of tokens is
    uneven by chance, and no buffer is sized by it.

    Args:
        num_experts, num_active: E and A.
        ranks: numbers of ranks to spread the experts over, each a divisor of E; rank r of n holds the experts
            [r E / n, (r + 1) E / n), as `parallel.dispatch` deals them. E itself stands for single experts.
        spread: the number of ranks whose receive rounds are counted; 1: none.
        receive: rows that a rank may receive in a round.
        longest: tokens of the longest tile.
    """

    def __init__(
        self, num_experts: int, num_active: int, ranks: Sequence[int], spread: int, receive: int, longest: int
    ) -> None:
        self.num_experts, self.num_active, self.ranks = num_experts, num_active, tuple(ranks)
        self.spread, self.receive, self.longest = spread, receive, longest
        self.layers: dict[int, LayerLoads] = {}

    def add(self, layer: int, ids: Tensor) -> None:
        """Counts one tile's choice of experts [T, A]."""
        counts = torch.bincount(ids.flatten().long(), minlength=self.num_experts).cpu().numpy()
        if layer not in self.layers:
            nothing = np.zeros(self.num_experts, np.int64)
            self.layers[layer] = LayerLoads(nothing, {n: [] for n in self.ranks})
        found = self.layers[layer]
        found.counts += counts
        if 2 * len(ids) < self.longest:
            return
        for n, ratios in found.ratios.items():
            ratios.append(busiest_over_mean(counts, n))
        if self.spread > 1:
            found.rounds.append(num_rounds(counts, self.spread, self.receive))

    def data_skew(self, ranks: int) -> float:
        """What `longstrand plan --data-skew S` takes: the busiest expert rank receives S times the mean.

        Over layers and whole tiles, the largest of

            (rows that the busiest of `ranks` expert ranks receives of a tile) / (mean per rank)

        A row is a pair of a token and one of its experts. The ranks of the expert axis exchange a tile of each at a
        time: of tiles joined, the ratio is a mean of theirs and cannot exceed the largest, so that S bounds what any
        rank receives of tiles like those seen. 1 with one rank, which receives everything whatever is chosen.
        """
        if ranks == 1:
            return 1.0
        return max(max(layer.ratios[ranks]) for layer in self.layers.values())

    def rounds(self) -> dict[str, float]:
        """Receive rounds per tile and layer: the median and the most."""
        every = [rounds for layer in self.layers.values() for rounds in layer.rounds]
        return {"median": statistics.median(every), "most": max(every)}


def sizes_of_axis(num_experts: int, spread: int) -> list[int]:
    """Numbers of expert ranks to show: the recipe's, powers of two that divide the experts, and single experts."""
    powers = [2**k for k in range(1, num_experts.bit_length()) if num_experts % 2**k == 0]
    return sorted({num_experts, *powers, *([spread] if spread > 1 else [])})


def busiest_over_mean(counts: np.ndarray, ranks: int) -> float:
    """Pairs of the busiest of n ranks that hold contiguous experts, over the mean of a rank."""
    of_ranks = counts.reshape(ranks, -1).sum(1)
    return int(of_ranks.max()) * ranks / int(of_ranks.sum())


def num_rounds(counts: np.ndarray, ranks: int, receive: int) -> int:
    """Rounds in which `ranks` ranks exchange a tile each, where all of them choose as this one does."""
    cells = np.tile(counts.reshape(ranks, -1).sum(1), (ranks, 1))
    return len(plan_rounds(cells, receive)) - 1
