"""The time figure: time per token by length, fitted as a + b T, against the matmuls that it cannot do without.

    longstrand bench curve [LENGTH ...] [settings of our side]

Only the scores of the visible pools grow with the length: b T. Their floor is the bare float32 product
[rows x H, D] x [D, P] at the depth of the causal mean, and that of a the products of everything else (with the
recompute of a scan) at the rate of a 1,024^3 product; both are measured in the same run.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from longstrand.bench._arguments import parsed_length
from longstrand.bench._results import publish
from longstrand.bench._steps import architecture, median_seconds
from longstrand.bench._trial import Trial, parser, run_apart, trial_from
from longstrand.bench.figures import show
from longstrand.plan.products import mean_pools, terms

LENGTHS = (16_384, 65_536, 262_144, 1_048_576)
ASKED = 2.5
ROWS = (64, 256, 1024)  # queries of one product; the fastest counts as the floor
POOL_BLOCKS = (4096, None)  # pools of one product; None: all at once
LARGEST_PRODUCT = 2**28  # entries: 1 GiB
COLUMNS = ("tokens", "tokens/s", "us/token", "fit", "scores of it", "peak MiB", "of matmul")


def measure() -> list[dict[str, Any]]:
    """16,384 to 1,048,576 tokens of the toy in float32, two threads, no lever."""
    return judge(Trial(0), LENGTHS)


def judge(settings: Trial, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Measures each length, and the floors between the last two of them."""
    torch.set_num_threads(settings.threads)
    runs = [run_apart(replace(settings, tokens=length)) for length in lengths[:-1]]
    floors = bare_scores(settings, lengths[-1])
    runs.append(run_apart(replace(settings, tokens=lengths[-1])))
    seconds = [1 / run["tokens_per_second"] for run in runs]
    a, b = fit(lengths, seconds)
    b_floor = min(floors.values()) / lengths[-1]
    rate = statistics.mean(run["matmul_flops_per_second"] for run in runs)
    shape = architecture(settings.config)
    a_floor = sum(term.walked for term in terms(shape, lengths[-1]) if not term.grows) / rate
    speed = [run["tokens_per_second"] for run in runs]
    detail = {
        "a, us per token": a * 1e6,
        "b, us per token and million tokens of length": b * 1e12,
        "bare product of the scores, the same": b_floor * 1e12,
        "bare products tried, us per token at the last length": {k: v * 1e6 for k, v in floors.items()},
        "matmul GFLOP/s": rate / 1e9,
        "settings": settings.settings(),
        "runs": runs,
        "table": table(lengths, runs, a, b),
    }
    return [
        {
            "name": "b, growth of the time per token, over that of the bare scores",
            "asked": f"at most {ASKED}",
            "measured": b / b_floor,
            "pass": 0 < b / b_floor <= ASKED,  # noise alone can make it negative
            "detail": detail,
        },
        {
            "name": "a, time per token without the scores, over its matmul floor",
            "asked": "shown",
            "measured": a / a_floor,
            "pass": True,
            "detail": {"a, us": a * 1e6, "floor, us": a_floor * 1e6},
        },
        {
            "name": f"tokens/s at {lengths[-1]:,} over our peak (published system: 55 %)",
            "asked": "shown",
            "measured": f"{speed[-1] / max(speed):.0%}",
            "pass": True,
        },
    ]


def fit(lengths: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Least squares of the relative error of a + b T: each length counts alike."""
    rows = torch.tensor(
        [[1 / s, length / s] for length, s in zip(lengths, seconds, strict=True)], dtype=torch.float64
    )
    scale = rows.abs().amax(dim=0)
    found = (
        torch.linalg.lstsq(rows / scale, torch.ones(len(rows), 1, dtype=torch.float64)).solution[:, 0] / scale
    )
    return float(found[0]), float(found[1])


def bare_scores(settings: Trial, length: int) -> dict[str, float]:
    """Seconds per token of the product of index queries and the mean number of visible pools, by block sizes."""
    shape = architecture(settings.config)
    pools, head = int(mean_pools(length, shape.index_kpool)), shape.index_head_dim
    layers = sum(kind == "indexed_attention" for kind in shape.layer_types)
    keys = torch.randn(pools, head).T.contiguous()
    found = {}
    for rows in ROWS:
        queries = torch.randn(rows * shape.index_n_heads, head)
        for block in POOL_BLOCKS:
            width = min(block or pools, pools)
            if len(queries) * width > LARGEST_PRODUCT:
                continue
            out = torch.empty(len(queries), width)

            def product(queries: torch.Tensor = queries, out: torch.Tensor = out, width: int = width) -> None:
                for start in range(0, pools - width + 1, width):
                    torch.mm(queries, keys[:, start : start + width], out=out)

            counted = pools // width * width
            seconds = median_seconds(product) * pools / counted
            found[f"{rows} rows, {width} pools at once"] = seconds * layers / rows
    return found


def table(lengths: Sequence[int], runs: Sequence[dict[str, Any]], a: float, b: float) -> dict[str, Any]:
    """One row per length."""
    rows = []
    for length, run in zip(lengths, runs, strict=True):
        fitted = a + b * length
        rows.append(
            [
                f"{length:,}",
                f"{run['tokens_per_second']:,.0f}",
                f"{1e6 / run['tokens_per_second']:,.0f}",
                f"{1e6 * fitted:,.0f}",
                f"{b * length / fitted:.0%}",
                f"{run['peak_bytes'] / 2**20:,.0f}",
                f"{run['share_of_matmul']:.1%}",
            ]
        )
    return {"columns": list(COLUMNS), "rows": rows}


def main(arguments: Sequence[str]) -> int:
    """`longstrand bench curve`."""
    options_of = parser("curve", __doc__)
    options_of.add_argument(
        "lengths",
        type=parsed_length,
        nargs="*",
        default=list(LENGTHS),
        metavar="LENGTH",
        help="the verdict is given at the defaults",
    )
    options = options_of.parse_args(list(arguments))
    records = judge(trial_from(options), options.lengths)
    publish("curve", records[0]["detail"]["table"], {"records": records})
    return show(records) if tuple(options.lengths) == LENGTHS else 0
