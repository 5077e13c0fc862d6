"""Expert loads and distances of pools counted again, one token after the other in plain Python, from kept choices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch

from longstrand.architecture import DSA, Architecture
from longstrand.data import Pack
from longstrand.memory import Levers, SideLosses
from longstrand.memory.protocol import Choices
from longstrand.memory.tiles import Tile
from longstrand.model import Model

Rows = list[list[int]]
Chosen = dict[tuple[int, str], Rows]
"""What each token chose, by layer and "experts" or "pools"."""


class Kept:
    """Keeps all choices of a small pass; a `ChoiceWatch`."""

    def __init__(self) -> None:
        self.rows: Chosen = {}

    def chosen(self, layer: int, tile: Tile, choices: Choices) -> None:
        for name, rows in choices.items():
            self.rows.setdefault((layer, name), []).extend(rows.tolist())


@torch.no_grad()
def kept_choices(model: Model, packs: Sequence[Pack], tile: int) -> list[Chosen]:
    """Of each pack."""
    kept = [Kept() for _ in packs]
    for pack, each in zip(packs, kept, strict=True):
        model.token_logprobs(pack, Levers(tile=tile), SideLosses(choice_watch=each))
    return [each.rows for each in kept]


def recount(
    shape: Architecture, packs: Sequence[Pack], kept: Sequence[Chosen], tile: int, ranks: int
) -> dict[str, Any]:
    """What a probe says of the same choices, in whole numbers and fractions.

    Returns:
        "experts": by layer, tokens per expert; "ratios": by layer, of each whole tile, the busiest rank's pairs over
        the mean; "pools": by layer, the distances of all selected pools, how often each; "uniform": the same as
        expected of a uniform choice.
    """
    experts, ratios, pools = {}, {}, {}
    longest = min(tile, max(map(len, packs)))
    for layer, kind in enumerate(shape.mlp_layer_types):
        if kind != "sparse":
            continue
        experts[layer], ratios[layer] = [0] * shape.n_routed_experts, list[Fraction]()
        for rows in (each[layer, "experts"] for each in kept):
            for start in range(0, len(rows), tile):
                _one_tile(rows[start : start + tile], experts[layer], ratios[layer], ranks, longest)
    for layer, kind in enumerate(shape.layer_types):
        if kind == DSA:
            pools[layer] = [
                _distances(shape, pack, each[layer, "pools"]) for pack, each in zip(packs, kept, strict=True)
            ]
    return {
        "experts": experts,
        "ratios": ratios,
        "pools": {layer: sum((one for one, _ in of), Counter()) for layer, of in pools.items()},
        "uniform": {layer: _sum([even for _, even in of]) for layer, of in pools.items()},
    }


def _one_tile(rows: Rows, experts: list[int], ratios: list[Fraction], ranks: int, longest: int) -> None:
    of_ranks, per_rank = [0] * ranks, len(experts) // ranks
    for row in rows:
        for expert in row:
            experts[expert] += 1
            of_ranks[expert // per_rank] += 1
    if 2 * len(rows) >= longest:
        ratios.append(Fraction(max(of_ranks) * ranks, sum(of_ranks)))


def _distances(shape: Architecture, pack: Pack, rows: Rows) -> tuple[Counter[int], dict[int, Fraction]]:
    """From the last token of each selected pool to the token that selects it; and of all visible pools."""
    kpool, found, even = shape.index_kpool, Counter[int](), dict[int, Fraction]()
    token = first_pool = 0
    for length in pack.lengths.tolist():
        for offset in range(length):
            chosen = [pool - first_pool for pool in rows[token] if pool != -1]
            visible = [pool for pool in range(length) if pool * kpool + kpool - 1 <= offset]
            for pool in chosen:
                found[offset - (pool * kpool + kpool - 1)] += 1
            for pool in visible:
                back = offset - (pool * kpool + kpool - 1)
                even[back] = even.get(back, Fraction(0)) + Fraction(len(chosen), len(visible))
            token += 1
        first_pool += -(-length // kpool)
    return found, even


def _sum(parts: Sequence[dict[int, Fraction]]) -> dict[int, Fraction]:
    total: dict[int, Fraction] = {}
    for part in parts:
        for back, share in part.items():
            total[back] = total.get(back, Fraction(0)) + share
    return total
