"""The figure of `longstrand probe`: human X against random tokens, on three small models.

    longstrand bench probed [--data DIR]

The shipped model, whose routers were trained without balance; the toy as it is drawn; and the toy after a short run on
human X with its routers balanced (about a minute). What is judged: that a loop over tokens in plain Python counts the
same from the kept choices, and that real and random tokens are both reported, as many of each. How uneven they are is
shown, whatever it is.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from longstrand.bench._arguments import command_line
from longstrand.bench._recount import kept_choices, recount
from longstrand.bench._small_models import documents, model
from longstrand.bench._steps import TRAINED_REGION
from longstrand.bench._trial import human_x, skipped
from longstrand.bench.figures import show
from longstrand.checks.probe import Asked, run_probe, through
from longstrand.checks.probed import Pass, Probe, Subject
from longstrand.config import Recipe
from longstrand.data import Pack
from longstrand.demo.pretrain import SHIPPED
from longstrand.model import Model
from longstrand.train.sft import train

LENGTH, SEQUENCES, RANKS = 65_536, 2, 4
TILE = 1024
SMALL = (
    ((1, 2, 3, 33, 64, 65, 5), (17,)),
    ((50,), (49, 3)),
    ((130,), (5, 6)),
)  # lengths of documents, pack by pack
SMALL_TILE, SMALL_RANKS = 16, 3
MODELS: dict[str, tuple[dict[str, str], int]] = {  # what a recipe says of the model, and steps to train it
    "shipped model": ({"path": str(SHIPPED / "checkpoint")}, 0),
    "drawn toy": ({"config": "toy"}, 0),
    "toy, 30 steps on human X": ({"config": "toy"}, 30),
}
TRAINING = {"lr": 3e-3, "warmup_steps": 4, "indexer": "sparse", "balance": "bias", "balance_rate": 0.02}
TRAINED_LENGTH = 8192
ASKED = "real and random tokens counted alike"
COLUMNS = (
    "model",
    "layer",
    "busiest expert / mean, real",
    "random",
    "busiest of 4 ranks / mean, real",
    "random",
    "of the worst tile, real",
    "random",
)


def measure(data: Path | None) -> list[dict[str, Any]]:
    """A record of the recount, and one per model."""
    records, rows = [_recounted()], list[list[str]]()
    fasta = human_x(data)
    for name, (weights, steps) in MODELS.items():
        title = f"{name}: human X against random tokens"
        if fasta is None:
            records.append(skipped(title, ASKED, issue="D"))
            continue
        found, text = _probe(fasta, weights, steps)
        records.append(_record(title, found, text))
        rows += _rows(name, found)
    if rows:
        records[0]["detail"] = {"table": {"columns": list(COLUMNS), "rows": rows}}
    return records


def _recounted() -> dict[str, Any]:
    """How many numbers of small passes a loop over tokens gives otherwise."""
    differ = compared = 0
    for kinds in ("KDDK", "DKD"):
        given = model(kinds)
        for lengths in SMALL:
            packs = [Pack.from_documents(documents(each, seed=at)) for at, each in enumerate(lengths)]
            theirs = recount(
                given.architecture, packs, kept_choices(given, packs, SMALL_TILE), SMALL_TILE, SMALL_RANKS
            )
            for one, other in _compared(_small_probe(given, packs), theirs, given.architecture.index_topk):
                compared += 1
                differ += one != other
    return {
        "name": "counts against a loop over tokens",
        "asked": "0 differ",
        "measured": f"{differ} of {compared} differ",
        "pass": differ == 0 and compared > 0,
    }


def _small_probe(given: Model, packs: Sequence[Pack]) -> Pass:
    return through(given, packs, "small", _subject([len(pack) for pack in packs]))


def _subject(lengths: list[int]) -> Subject:
    ranks, receive = SMALL_RANKS, 4 * SMALL_TILE
    return Subject("small", 0, "float64", "drawn", True, SMALL_TILE, lengths, None, "", 0, ranks, receive)


def _compared(ours: Pass, theirs: dict[str, Any], topk: int) -> list[tuple[Any, Any]]:
    """Pairs that must be equal: whole numbers, and ratios of whole numbers; expected shares as far as doubles go."""
    pairs: list[tuple[Any, Any]] = []
    for layer, of in ours.loads.layers.items():
        pairs += zip(of.counts.tolist(), theirs["experts"][layer], strict=True)
        pairs += zip(of.ratios[SMALL_RANKS], map(float, theirs["ratios"][layer]), strict=True)
    edges = ours.distances.edges
    for layer, found in ours.distances.layers.items():
        back, even = theirs["pools"][layer], theirs["uniform"][layer]
        pairs += zip(found.selected.tolist(), _by_bucket(back, edges), strict=True)
        pairs.append((found.beyond, sum(n for distance, n in back.items() if distance >= topk)))
        expected = [round(float(share), 9) for share in _by_bucket(even, edges)]
        pairs += zip([round(share, 9) for share in found.uniform.tolist()], expected, strict=True)
    return pairs


def _by_bucket(distances: dict[int, Any], edges: Sequence[int]) -> list[Any]:
    return [
        sum((n for back, n in distances.items() if start <= back < end), 0) for start, end in pairwise(edges)
    ]


def _probe(fasta: Path, weights: dict[str, str], steps: int) -> tuple[Probe, str]:
    """What was found, and what the command prints of it."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = _recipe(fasta, weights, steps, Path(folder))
        if steps:
            train(recipe)
        whole = recipe.model_copy(update={"data": recipe.data.model_copy(update={"length": LENGTH})})
        with redirect_stdout(StringIO()) as text:
            found = run_probe(whole, Asked(SEQUENCES, None, RANKS))
        return found, text.getvalue()


def _recipe(fasta: Path, weights: dict[str, str], steps: int, folder: Path) -> Recipe:
    source = {"path": str(fasta.resolve()), "regions": [TRAINED_REGION]}
    return Recipe.model_validate(
        {
            "run": {"out": str(folder / "run"), "threads": 1},
            "model": weights,
            "data": {"sources": [source], "length": TRAINED_LENGTH, "cache": str(folder / "cache")},
            "train": {"steps": steps or 30, **TRAINING},
            "memory": {"tile": TILE, "recompute": False},
        }
    )


def _record(title: str, probe: Probe, text: str) -> dict[str, Any]:
    found = probe.as_dict()
    skew, pools = found["data_skew"], found["pools"]["all"]
    numbers = [skew["data_skew"], skew["random"], *found["loss_nats"].values()]
    totals = [_pairs(each.loads.layers.values()) for each in (probe.real, probe.random)]
    expected = [2 * SEQUENCES * LENGTH] * len(probe.real.loads.layers)
    beyond = {kind: pools[kind]["beyond_index_topk"]["share"] for kind in ("real", "random")}
    return {
        "name": title,
        "asked": ASKED,
        "measured": (
            f"data_skew {skew['data_skew']:.2f} and {skew['random']:.2f}; pools beyond index_topk "
            f"{beyond['real']:.1%} and {beyond['random']:.1%}"
        ),
        "pass": all(map(math.isfinite, numbers)) and totals == [expected, expected],
        "detail": {
            "subject": asdict(probe.subject) | {"weights": title.partition(":")[0]},
            "loss_nats": found["loss_nats"],
            "data_skew": skew,
            "largest": found["experts"]["largest"],
            "pools": pools,
            "warnings": found["warnings"],
            "text": text[
                text.index("Loss:") :
            ].splitlines(),  # what stands before it names folders of this machine
        },
    }


def _pairs(layers: Any) -> list[int]:
    return [int(of.counts.sum()) for of in layers]


def _rows(name: str, probe: Probe) -> list[list[str]]:
    rows = []
    for layer in probe.experts()["layers"]:
        of = [layer[kind]["busiest_over_mean"] for kind in ("real", "random")]
        singles = str(probe.shape.n_routed_experts)
        cells = [
            each[n][key]
            for n, key in ((singles, "step"), (str(RANKS), "step"), (str(RANKS), "largest_tile"))
            for each in of
        ]
        rows.append([name, str(layer["layer"]), *(f"{cell:.2f}" for cell in cells)])
    return rows


def main(arguments: Sequence[str]) -> int:
    """`longstrand bench probed`."""
    options_of = command_line("probed", __doc__)
    options_of.add_argument("--data", type=Path, help="folder of the FASTA of human X")
    torch.set_num_threads(1)
    return show(measure(options_of.parse_args(list(arguments)).data))
