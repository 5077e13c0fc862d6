"""Inputs for the selection of pools: fewer pools than slots, ties, negative scores, several documents."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SelectCase:
    """Rows of documents of the given lengths, whose pools lie one after the other; `kind` is that of the scores."""

    name: str
    lengths: tuple[int, ...]
    kind: str = "random"
    kpool: int = 4
    num_selected: int = 4
    heads: int = 3
    width: int = 5


CASES = (
    *(SelectCase(f"{length} tokens", (length,)) for length in (1, 2, 3, 4, 5, 15, 16, 17, 20, 67)),
    *(
        SelectCase(f"{kind} scores", (67,), kind)
        for kind in ("equal", "tied", "negative", "rising", "falling")
    ),
    SelectCase("documents", (1, 2, 3, 31, 32, 33, 5)),
    SelectCase("tied documents", (37, 3, 41), "tied"),
    SelectCase("pools of one token", (29, 12), kpool=1),
    SelectCase("pools of sixteen", (101,), kpool=16, num_selected=2),
    SelectCase("one slot", (45,), "tied", num_selected=1),
)


def draw(case: SelectCase, seed: int = 0) -> dict[str, Tensor]:
    """Tensor arguments of `select_pools` in float64.

    Tied scores take one of three values (small integers, so that they are exact in any order of summation).
    """
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.arange(length) for length in case.lengths]
    pools = [-(-length // case.kpool) for length in case.lengths]
    starts = torch.tensor([sum(pools[:i]) for i in range(len(pools))])
    lengths = torch.tensor(case.lengths)
    num_rows, num_pools = sum(case.lengths), sum(pools)
    q = torch.randn(num_rows, case.heads, case.width, generator=generator, dtype=torch.float64)
    keys = torch.randn(num_pools, case.width, generator=generator, dtype=torch.float64)
    weights = torch.randn(num_rows, case.heads, generator=generator, dtype=torch.float64)
    if case.kind != "random":  # score = weights[:, 0] x keys[:, 0] up to a factor
        q, keys, weights = torch.zeros_like(q), torch.zeros_like(keys), torch.zeros_like(weights)
        q[:, 0, 0], weights[:, 0] = 1, -1 if case.kind == "negative" else 1
        index = torch.arange(num_pools)
        keys[:, 0] = {
            "equal": torch.ones_like(index),
            "tied": torch.randint(3, (num_pools,), generator=generator),
            "negative": 1 + torch.randint(3, (num_pools,), generator=generator),
            "rising": index,
            "falling": num_pools - index,
        }[case.kind].double()
    return {
        "q": q,
        "weights": weights,
        "keys": keys,
        "first_pool": starts.repeat_interleave(lengths),
        "num_visible": (torch.cat(rows) + 1) // case.kpool,
    }
