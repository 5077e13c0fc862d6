"""The tiles figure: the size of a tile changes nothing, and a packed document gives what it gives alone."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from longstrand.bench._arguments import command_line
from longstrand.bench._small_models import (
    LENGTHS,
    MODES,
    Mode,
    documents,
    gradients,
    largest_difference,
    losses,
    model,
    train_only,
    upstream,
)
from longstrand.bench.figures import show
from longstrand.data.pack import Pack
from longstrand.memory import Levers, SideLosses
from longstrand.model import Model

LIMIT = 1e-10
TILES = (1, 3, 64, 100)
KINDS = ("KDKD", "KDDK")  # DD: the second shares the first one's pools
BFLOAT16_TOKENS, BFLOAT16_TILES = 1024, 256
# Documents whose edges lie off and on the borders of tiles of 64 and 100.
PACKS: tuple[tuple[int, ...], ...] = (LENGTHS, (64, 1, 63, 72, 3))


def tile_error(kinds: str, mode: Mode, tile: int, lengths: Sequence[int] = LENGTHS) -> tuple[float, str]:
    """Largest relative difference of log-probabilities, side losses and gradients between a tile and one tile."""
    trained = train_only(model(kinds), *(["indexer"] if mode == "warmup" else []))
    given = Pack.from_documents(documents(tuple(lengths)))
    found = []
    for size in (tile, len(given)):
        side = losses(given, mode)
        logprobs, grads = gradients(trained, given, size, side)
        sums = {"indexer's loss": _value(side.indexer_kl), "router's loss": _value(side.aux)}
        found.append(grads | {"log-probabilities": logprobs} | sums)
    return largest_difference(found[0], found[1])


def alone_error(kinds: str, mode: Mode, tile: int, lengths: Sequence[int] = LENGTHS) -> tuple[float, str]:
    """The same between a pack and each of its documents alone, gradients summed over the documents.

    The auxiliary loss couples all tokens of a step, so each document alone gets the pack's counts.
    """
    trained = train_only(model(kinds), *(["indexer"] if mode == "warmup" else []))
    each = documents(tuple(lengths))
    given = Pack.from_documents(each)
    side = losses(given, mode)
    logprobs, grads = gradients(trained, given, tile, side)
    together = grads | {
        "log-probabilities": logprobs,
        "indexer's loss": torch.tensor([side.indexer_kl], dtype=torch.float64),
    }
    counts, weight = side.expert_counts, upstream(len(given))
    apart, kl, total = [], 0.0, dict[str, Tensor]()
    for document, (start, stop) in zip(each, pairwise(given.starts.tolist()), strict=True):
        scores = losses(given, mode)
        values, part = _one(trained, document, scores, weight[start:stop], counts)
        apart.append(values)
        kl += scores.indexer_kl
        total = {name: value + total.get(name, torch.zeros_like(value)) for name, value in part.items()}
    truth = total | {
        "log-probabilities": torch.cat(apart),
        "indexer's loss": _value(kl),
    }
    return largest_difference(together, truth)


def bfloat16_errors(
    tokens: int = BFLOAT16_TOKENS, num_tiles: int = BFLOAT16_TILES, dtype: torch.dtype = torch.bfloat16
) -> dict[str, tuple[float, float, float]]:
    """By parameter group: relative error of the gradient of one tile and of many, against float64, and their distance.

    No choice can flip (both experts are active, all pools are selected), so that only rounding is compared.
    """
    sizes: dict[str, Any] = {"n_routed_experts": 2, "num_experts_per_tok": 2, "index_topk": tokens}
    narrow, truth = model("KD", dtype=dtype, **sizes), model("KD", **sizes)
    truth.load_state_dict(narrow.state_dict())
    given = Pack.from_documents(documents((tokens,)))
    weight = torch.ones(tokens)
    _, exact = gradients(truth, given, tokens, weight=weight)
    _, one = gradients(narrow, given, tokens, weight=weight)
    _, many = gradients(narrow, given, tokens // num_tiles, weight=weight)
    assert all(value.dtype == torch.float32 for value in [*one.values(), *many.values()])

    def distance(found: dict[str, Tensor], other: dict[str, Tensor], names: list[str]) -> float:
        square = sum(float((found[name].double() - other[name].double()).square().sum()) for name in names)
        return (square / sum(float(exact[name].square().sum()) for name in names)) ** 0.5

    groups = {group: [name for name in names if name in exact] for group, names in truth.groups().items()}
    return {
        group: (distance(one, exact, names), distance(many, exact, names), distance(many, one, names))
        for group, names in groups.items()
        if any(float(exact[name].norm()) > 0 for name in names)
    }


def measure() -> list[dict[str, Any]]:
    """One record per mode and kind of comparison: the worst over tiles, layer orders and packs."""
    records = []
    for mode in MODES:
        found = []
        for kinds in KINDS:
            for tile in TILES:
                found.append((*tile_error(kinds, mode, tile), f"{kinds}, tile {tile}"))
        records.append(_record(f"tiles, indexer {mode}", found))
        found = []
        for kinds in KINDS:
            for lengths in PACKS:
                for tile in (64, sum(lengths)):
                    found.append(
                        (*alone_error(kinds, mode, tile, lengths), f"{kinds}, {lengths}, tile {tile}")
                    )
        records.append(_record(f"packed = alone, indexer {mode}", found))
    errors = bfloat16_errors()
    ratio = max(many / one for one, many, _ in errors.values())
    records.append(
        {
            "name": f"bfloat16: error of {BFLOAT16_TILES} tiles over that of one",
            "asked": 2.0,
            "measured": ratio,
            "pass": ratio <= 2,
            "detail": {"one tile, many tiles, distance by group": errors},
        }
    )
    return records


def main(arguments: list[str]) -> int:
    """`longstrand bench tiles`."""
    command_line("tiles", __doc__).parse_args(arguments)
    return show(measure())


def _one(
    trained: Model, document: Tensor, side: SideLosses, weight: Tensor, counts: dict[int, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    trained.zero_grad(set_to_none=True)
    logprobs = trained.token_logprobs(
        Pack.from_documents([document]), levers=Levers(tile=len(document)), side=side
    )
    side.expert_counts = counts
    (logprobs * weight).sum().backward()
    return logprobs.detach(), {n: p.grad for n, p in trained.named_parameters() if p.grad is not None}


def _value(number: float) -> Tensor:
    return torch.tensor([number], dtype=torch.float64)


def _record(name: str, found: list[tuple[float, str, str]]) -> dict[str, Any]:
    worst = max(found)
    detail = {"cases": len(found), "worst": worst[1], "case": worst[2]}
    return {"name": name, "asked": LIMIT, "measured": worst[0], "pass": worst[0] <= LIMIT, "detail": detail}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
