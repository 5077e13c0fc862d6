"""`longstrand probe`: how a recipe's model routes and selects on its real sequences, against random tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from longstrand.architecture import Architecture
from longstrand.checks.distance import PoolDistances
from longstrand.checks.probe_text import WIDTH, show
from longstrand.checks.probed import Pass, Probe, Subject
from longstrand.checks.sequences import Letters, real_packs
from longstrand.checks.skew import ExpertLoads, sizes_of_axis
from longstrand.config import Recipe, load_recipe
from longstrand.data import Pack
from longstrand.data.pack import NO_TARGET
from longstrand.errors import CheckFailed, UserError
from longstrand.memory import Levers, SideLosses
from longstrand.memory.protocol import Choices
from longstrand.memory.tiles import Tile
from longstrand.model import Model
from longstrand.state import latest_checkpoint
from longstrand.train.run_folder import resolve_recipe
from longstrand.train.sft import prepare
from longstrand.trained import CheckpointWeights, model_source


@dataclass(frozen=True)
class Asked:
    """What a probe was asked for.

    Attributes:
        sequences: real ones, and as many random ones.
        tokens: that each is cut to; None: whole ones.
        expert_ranks: in place of the recipe's `parallel.expert`.
    """

    sequences: int = 2
    tokens: int | None = None
    expert_ranks: int | None = None


def run_probe(recipe: Recipe, asked: Asked, *, as_json: bool = False, out: Path | None = None) -> Probe:
    """Probes a recipe, shows what was found, and writes it where asked for.

    Args:
        out: a file that must not exist yet; without one, nothing is written (but the cache of the data).

    Raises:
        UserError: the recipe, its inputs or an option cannot be used.
        CheckFailed: a log-probability is not finite.
    """
    if out is not None:
        _require_new(out)
    found = probe(recipe, asked)
    text = json.dumps(found.as_dict(), indent=1, allow_nan=False)
    if as_json:
        Console(soft_wrap=True).out(text, highlight=False)
    else:
        show(found, Console(width=WIDTH))
    if out is not None:
        _write_new(out, text + "\n")
    return found


def probe(recipe: Recipe, asked: Asked) -> Probe:
    """Runs real and random sequences forward, in this process, and counts what the layers choose.

    Beside the model and what an evaluation holds, E counts per MoE layer and a few numbers per tile are kept.

    Raises:
        UserError, CheckFailed: as `run_probe`.
    """
    resolved = resolve_recipe(recipe)
    prepared = prepare(resolved)
    model, shape = prepared.model, prepared.model.architecture
    weights, drawn = _weights(resolved, model)
    ranks = _expert_ranks(resolved, shape, asked)
    source = model_source(resolved.model)
    letters = Letters.of(resolved, prepared.data, shape, source if source.is_dir() else None)
    real = real_packs(prepared.data, asked.sequences, asked.tokens)
    generator = torch.Generator().manual_seed(resolved.run.seed)
    random = [letters.like(pack, generator) for pack in real]
    subject = Subject(
        model=source.name,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        dtype=resolved.run.dtype,
        weights=weights,
        drawn=drawn,
        tile=resolved.memory.tile,
        lengths=[len(pack) for pack in real],
        cut=asked.tokens,
        letters=letters.words,
        seed=resolved.run.seed,
        expert_ranks=ranks,
        receive=resolved.parallel.receive_rows(resolved.memory.tile),
    )
    passes = [through(model, packs, name, subject) for name, packs in (("real", real), ("random", random))]
    return Probe(subject, shape, *passes)


@torch.no_grad()
def through(model: Model, packs: Sequence[Pack], name: str, subject: Subject) -> Pass:
    """Runs sequences one after the other; each counts by itself, as it would in a step."""
    counts, progress = _Counts(model.architecture, subject), Console(stderr=True)
    nats = weight = 0.0
    for number, pack in enumerate(packs, start=1):
        progress.print(
            f"probe: {name} sequence {number} of {len(packs)}, {len(pack):,} tokens ...", highlight=False
        )
        logprobs = model.token_logprobs(
            pack, Levers(tile=subject.tile), SideLosses(choice_watch=counts)
        ).cpu()
        if not bool(torch.isfinite(logprobs[pack.targets != NO_TARGET]).all()):
            raise CheckFailed(
                f"probe: log-probabilities of {name} sequence {number} are not finite; the weights or run.dtype = "
                f"{subject.dtype} are at fault"
            )
        nats -= float((logprobs.double() * pack.weight).sum())
        weight += float(pack.weight.double().sum())
    return Pass(counts.loads, counts.distances, nats / weight if weight else None)


class _Counts:
    """Sees the choices of all passes over one kind of sequences; a `ChoiceWatch`."""

    def __init__(self, shape: Architecture, subject: Subject) -> None:
        longest = max(subject.lengths)
        self.loads = ExpertLoads(
            shape.n_routed_experts,
            shape.num_experts_per_tok,
            sizes_of_axis(shape.n_routed_experts, subject.expert_ranks),
            subject.expert_ranks,
            subject.receive,
            min(longest, subject.tile),
        )
        self.distances = PoolDistances(shape.index_kpool, shape.index_topk, longest)

    def chosen(self, layer: int, tile: Tile, choices: Choices) -> None:
        if "experts" in choices:
            self.loads.add(layer, choices["experts"])
        if "pools" in choices:
            self.distances.add(layer, tile, choices["pools"])


def _weights(recipe: Recipe, model: Model) -> tuple[str, bool]:
    """Takes the newest checkpoint of the recipe's own run where there is one; what the weights are, if just drawn.

    Raises:
        UserError: the run's checkpoint does not fit.
    """
    run = Path(recipe.run.out)
    if (run / "run.toml").exists() and load_recipe(run / "run.toml").model == recipe.model:
        newest = latest_checkpoint(run)
        if newest is not None:
            weights = CheckpointWeights(newest, model)
            weights.fill(model.state_dict())
            return f"step {weights.step:,} of {run}", False
    if recipe.model.path is not None:
        return f"of {recipe.model.path}", False
    return f"drawn (run.seed = {recipe.run.seed}), not trained", True


def _expert_ranks(recipe: Recipe, shape: Architecture, asked: Asked) -> int:
    """How many ranks the experts lie on: as asked, or as the recipe says.

    Raises:
        UserError: they cannot be dealt evenly, or a round has no row for each of them.
    """
    named = asked.expert_ranks is not None
    ranks = asked.expert_ranks or recipe.parallel.expert
    setting = f"--expert-ranks {ranks}" if named else f"parallel.expert = {ranks}"
    if "sparse" not in shape.mlp_layer_types:
        if named:
            raise UserError(f"{setting}: this model has no routed experts; leave it out")
        return 1
    if shape.n_routed_experts % ranks:
        raise UserError(
            f"{setting}: must divide the model's {shape.n_routed_experts} routed experts; choose a divisor"
        )
    receive = recipe.parallel.receive_rows(recipe.memory.tile)
    if receive < ranks:
        default = f" (it is not set, and 4 x memory.tile = {recipe.memory.tile})"
        raise UserError(
            f"{setting}: each of them sends a row at least, and parallel.receive = {receive}"
            f"{default if recipe.parallel.receive is None else ''} takes fewer at once; raise it to {ranks} or more, "
            "or take fewer ranks"
        )
    return ranks


def _require_new(out: Path) -> None:
    if out.exists():
        raise UserError(f"--out {out}: exists, and is never overwritten; remove it or choose another")
    if not out.absolute().parent.is_dir():
        raise UserError(f"--out {out}: its folder does not exist; make it first")


def _write_new(out: Path, text: str) -> None:
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"--out {out}: exists by now, and is never overwritten; choose another") from None
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written ({error.strerror}); choose another") from None
