"""The figure of a checkpoint that reshards: what four ranks saved goes on, to the same losses, on any number of ranks.

    longstrand bench reshard

A tiny model in float64 takes 12 sequences per step of a FASTA file. Four ranks, data 2 x context 2, take four steps and
save after the second; others go on from there, data and all, and their losses of steps 3 and 4 are compared.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from longstrand.bench import _small_models as small
from longstrand.bench._arguments import command_line
from longstrand.bench.equal import Axes
from longstrand.bench.figures import show
from longstrand.config import DataSection, TrainSection
from longstrand.data import open_data
from longstrand.memory import Levers
from longstrand.model.parallelize import parallelize
from longstrand.parallel import Mesh, by_first, make_mesh, run_ranks
from longstrand.train.optimizer import Optimizer, freeze_all_but, trained_names
from longstrand.train.saving import Training, restore, save
from longstrand.train.step import take_step

LIMIT = 1e-10
KINDS, TILE = "KDKD", 8
SEQUENCES, LENGTH, RECORDS = 12, 48, 400
SAVED_AT, STEPS = 2, 4
SAVED_BY: Axes = (2, 2, 1)
RESUMED_BY: tuple[Axes, ...] = ((1, 1, 1), (1, 2, 1), (2, 1, 2), (1, 3, 1), (3, 1, 3))
TRAIN = TrainSection(
    steps=STEPS, sequences_per_step=SEQUENCES, lr=1e-2, schedule="constant", indexer="sparse", balance="bias"
)
COLUMNS = ("ranks", "data x context x expert", *(f"loss of step {step}" for step in (3, 4)), "difference")


def measure() -> list[dict[str, Any]]:
    """A record per mesh that goes on."""
    return judge(RESUMED_BY)


def judge(meshes: Sequence[Axes]) -> list[dict[str, Any]]:
    """Trains once without a stop, then goes on with each mesh from the checkpoint of step 2."""
    with tempfile.TemporaryDirectory(prefix="longstrand-bench-") as folder:
        fasta = write_fasta(Path(folder) / "records.fa")
        run = Path(folder) / "run"
        run.mkdir()
        losses = on(SAVED_BY, run, fasta, save_it=True)
        resumed = {axes: on(axes, run, fasta) for axes in meshes}
    expected = losses[SAVED_AT:]
    if not losses[-1] < losses[0]:
        raise AssertionError(f"nothing was learnt: {losses}")
    records = [_record(axes, found, expected) for axes, found in resumed.items()]
    rows = [_row(SAVED_BY, expected, "never stopped")]
    rows += [
        _row(axes, resumed[axes], f"{record['measured']:.1e}")
        for axes, record in zip(meshes, records, strict=True)
    ]
    records[0]["detail"] |= {
        "losses never stopped": losses,
        "table": {"columns": list(COLUMNS), "rows": rows},
    }
    return records


def on(axes: Axes, run: Path, fasta: Path, *, save_it: bool = False) -> list[float]:
    """Losses of the steps that the ranks of a mesh take, from the run's newest checkpoint."""
    found = run_ranks(axes[0] * axes[1], losses_of, axes, run, fasta, save_it, start="fork", timeout=300)
    if any(each != found[0] for each in found):
        raise AssertionError(f"ranks disagree about the loss of a step: {found}")
    losses: list[float] = found[0]
    return losses


def losses_of(axes: Axes, run: Path, fasta: Path, save_it: bool) -> list[float]:
    """Of one rank; to be called on all."""
    mesh = make_mesh(data=axes[0], context=axes[1], expert=axes[2])
    training = opened(mesh, fasta, run.parent)
    restore(run, training, STEPS)
    losses = []
    while training.step < STEPS:
        training.step += 1
        packs = training.loader.next_step()
        result = take_step(
            training.model, packs, training.optimizer, TRAIN, step=training.step, levers=Levers(tile=TILE)
        )
        assert result.loss is not None
        losses.append(result.loss)
        if mesh.first:
            with (run / "metrics.jsonl").open("a") as lines:
                lines.write(json.dumps({"step": training.step, "loss": result.loss}) + "\n")
        if save_it and training.step == SAVED_AT:
            save(run, training, keep=1)
    return losses


def opened(mesh: Mesh, fasta: Path, cache: Path) -> Training:
    """Data, model and optimizer at step 0; the first rank encodes the data, the others read what it made."""
    section = DataSection.model_validate({"sources": [{"path": str(fasta)}], "length": LENGTH})

    def encode() -> None:
        open_data(section, cache_dir=cache)

    by_first(mesh.world, encode)
    data = open_data(section, cache_dir=cache)
    model = small.model(KINDS, vocab_size=256)
    names = trained_names(model.groups(), TRAIN)
    freeze_all_but(model, names)
    parallelize(model, mesh, receive=16)
    optimizer = Optimizer(model, names, TRAIN, mesh=mesh)
    return Training(model, optimizer, data, data.train_loader(SEQUENCES))


def write_fasta(path: Path) -> Path:
    """Records of 20 to 90 random letters, more A than others, so that there is something to learn."""
    generator = torch.Generator().manual_seed(0)
    lines = []
    for number in range(RECORDS):
        length = int(torch.randint(20, 91, (1,), generator=generator))
        letters = torch.multinomial(torch.tensor([5.0, 2, 2, 1]), length, True, generator=generator).tolist()
        lines += [f">{number}", "".join("ACGT"[letter] for letter in letters)]
    path.write_text("\n".join(lines) + "\n")
    return path


def _record(axes: Axes, found: Sequence[float], expected: Sequence[float]) -> dict[str, Any]:
    whole = len(found) == len(expected)
    difference = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=whole))
    return {
        "name": f"resumed on {_named(axes)}: losses of steps 3 and 4 against never stopped on 4",
        "asked": LIMIT,
        "measured": difference,
        "pass": whole and difference <= LIMIT,
        "detail": {"losses": list(found), "never stopped": list(expected)},
    }


def _row(axes: Axes, losses: Sequence[float], difference: str) -> list[str]:
    where = " x ".join(map(str, axes))
    return [str(axes[0] * axes[1]), where, *(f"{loss:.12f}" for loss in losses), difference]


def _named(axes: Axes) -> str:
    ranks = axes[0] * axes[1]
    words = [
        f"{name} {size}" for name, size in zip(("data", "context", "expert"), axes, strict=True) if size > 1
    ]
    return f"{ranks} ranks ({', '.join(words)})" if words else "1 process"


def main(arguments: Sequence[str]) -> int:
    """`longstrand bench reshard`."""
    command_line("reshard", __doc__).parse_args(list(arguments))
    torch.set_num_threads(1)
    return show(measure())
