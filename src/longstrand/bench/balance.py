"""The figure of balance: how evenly segments are dealt, and how evenly ranks then work.

    longstrand bench balance

Visible pairs of a query and a key, by rank: of one document, and of packs whose lengths are log-normal. Then the CPU
time of a step, forward and backward, of each of 4 processes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from longstrand.bench._arguments import command_line
from longstrand.bench._steps import architecture
from longstrand.bench.figures import show
from longstrand.data.pack import Pack
from longstrand.memory import Levers
from longstrand.model import Model, load_model
from longstrand.model.parallelize import parallelize
from longstrand.ops.native import use_native
from longstrand.parallel import deal, make_mesh, run_ranks
from longstrand.parallel.segments import BALANCED, SEGMENTS

RANKS = (2, 4, 8, 16, 32, 64)
TOKENS = 2**20  # of a pack that is dealt
SEEDS = 200
WORKING, WORKED_TOKENS, STEPS = 4, 32_768, 3
CPU_LIMIT = 1.10


@dataclass(frozen=True)
class Lengths:
    """How lengths of documents are drawn: log-normal.

    Attributes:
        mean: tokens.
        spread: standard deviation of the logarithm.
    """

    mean: int
    spread: float

    def __str__(self) -> str:
        return f"log-normal, mean {self.mean:,}, spread {self.spread:g}"

    def drawn(self, tokens: int, seed: int) -> list[int]:
        """Lengths that fill a pack; the last document is cut where the pack ends."""
        generator = np.random.default_rng(seed)
        lengths: list[int] = []
        while (left := tokens - sum(lengths)) > 0:
            drawn = generator.lognormal(np.log(self.mean) - self.spread**2 / 2, self.spread)
            lengths.append(min(left, max(1, round(drawn))))
        return lengths


ASKED = (Lengths(8_192, 1.0), Lengths(8_192, 1.5))
SHOWN = Lengths(2_048, 1.0)  # many short documents: hardest, with 16 segments per rank at most
WORKED = Lengths(2_048, 1.0)
COLUMNS = ("pack", "ranks", "segments per rank", "largest over mean: median", "worst")


def measure() -> list[dict[str, Any]]:
    """What is dealt, then what 4 processes take for it."""
    records = [
        one_document(RANKS, TOKENS),
        *(log_normal(each, RANKS, TOKENS, SEEDS) for each in ASKED),
        log_normal(SHOWN, RANKS, TOKENS, SEEDS, asked=False),
    ]
    rows = [row for record in records for row in record["detail"]["rows"]]
    records[0]["detail"]["table"] = {"columns": list(COLUMNS), "rows": rows}
    packs = {
        "one document": [WORKED_TOKENS],
        "a log-normal pack": WORKED.drawn(WORKED_TOKENS, seed=0),
    }
    return [*records, *(cpu_record(name, lengths, WORKING) for name, lengths in packs.items())]


def one_document(ranks: Sequence[int], tokens: int) -> dict[str, Any]:
    """Pairs of early and late segments are even to the pair."""
    found = {number: deal([0, tokens], number) for number in ranks}
    worst = max(each.imbalance for each in found.values())
    rows = [
        _row("one document", number, [len(each.owners) // number], [each.imbalance])
        for number, each in found.items()
    ]
    return {
        "name": f"largest over mean of visible pairs, one document, {ranks[0]} to {ranks[-1]} ranks",
        "asked": 1.0,
        "measured": worst,
        "pass": all(len(set(each.pairs)) == 1 for each in found.values()) and worst == 1.0,
        "detail": {"rows": rows},
    }


def log_normal(
    lengths: Lengths, ranks: Sequence[int], tokens: int, seeds: int, *, asked: bool = True
) -> dict[str, Any]:
    """The worst of several packs, by number of ranks, each with as few segments as balance it."""
    rows, worst, over, fewest = [], {}, {}, True
    packs = [starts(lengths.drawn(tokens, seed)) for seed in range(seeds)]
    for number in ranks:
        name, deals = f"{number} ranks", [deal(pack, number) for pack in packs]
        imbalances = [each.imbalance for each in deals]
        segments = [len(each.owners) // number for each in deals]
        fewest &= all(map(_no_fewer, packs, [number] * seeds, segments))
        worst[name], over[name] = max(imbalances), sum(value > BALANCED for value in imbalances)
        rows.append(_row(f"{seeds} of {lengths}", number, segments, imbalances))
    limit = f"<= {BALANCED:.2f}" if asked else "shown"
    return {
        "name": f"largest over mean of visible pairs, worst of {seeds} packs of {tokens:,} tokens, {lengths}",
        "asked": dict.fromkeys(worst, limit) | {"with the fewest segments": "yes"},
        "measured": {name: f"{value:.3f}" for name, value in worst.items()}
        | {"with the fewest segments": "yes" if fewest else "no"},
        "pass": fewest and (not asked or max(worst.values()) <= BALANCED),
        "detail": {"rows": rows, "worst": worst, "packs over": over},
    }


def _no_fewer(pack: Sequence[int], ranks: int, segments: int) -> bool:
    """Whether no smaller number of segments would have balanced a pack."""
    return all(deal(pack, ranks, fewer).imbalance > BALANCED for fewer in SEGMENTS if fewer < segments)


def starts(lengths: Sequence[int]) -> list[int]:
    """Where documents start, and the end."""
    return list(accumulate(lengths, initial=0))


def cpu_record(name: str, lengths: Sequence[int], ranks: int) -> dict[str, Any]:
    """CPU seconds of each rank; not wall time, since there are fewer cores than ranks."""
    model = load_model(architecture("toy"), torch.float32, seed=0)
    steps = run_ranks(ranks, cpu_seconds, model, list(lengths), STEPS)
    by_rank = [statistics.median(each) for each in steps]
    ratio = max(by_rank) / statistics.mean(by_rank)
    dealt = deal(starts(lengths), ranks)
    return {
        "name": f"CPU time, largest over mean of {ranks} ranks: {name} of {sum(lengths):,} tokens",
        "asked": f"<= {CPU_LIMIT:.2f}",
        "measured": f"{ratio:.3f}",
        "pass": ratio <= CPU_LIMIT,
        "detail": {
            "seconds": by_rank,
            "steps": steps,
            "documents": len(lengths),
            "segments": len(dealt.owners) // ranks,
            "pairs_largest_over_mean": dealt.imbalance,
        },
    }


def cpu_seconds(model: Model, lengths: Sequence[int], steps: int) -> list[float]:
    """Of one rank and each step, after one that is not counted; to be called on all ranks."""
    use_native("auto")
    parallelize(model, make_mesh(data=1, context=torch.distributed.get_world_size(), expert=1))
    generator = torch.Generator().manual_seed(0)
    pack = Pack.from_documents([torch.randint(256, (length,), generator=generator) for length in lengths])
    found = []
    for _ in range(steps + 1):
        torch.distributed.barrier()
        model.zero_grad(set_to_none=True)
        began = time.process_time()
        (-model.token_logprobs(pack, levers=Levers()).sum() / len(pack)).backward()
        found.append(time.process_time() - began)
    return found[1:]


def _row(name: str, ranks: int, segments: Sequence[int], imbalances: Sequence[float]) -> list[str]:
    least, most = min(segments), max(segments)
    return [
        name,
        str(ranks),
        str(least) if least == most else f"{least} to {most}",
        f"{statistics.median(imbalances):.3f}",
        f"{max(imbalances):.3f}",
    ]


def main(arguments: Sequence[str]) -> int:
    """`longstrand bench balance`."""
    command_line("balance", __doc__).parse_args(list(arguments))
    torch.set_num_threads(1)
    return show(measure())
