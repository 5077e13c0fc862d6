"""The comparisons that make a certificate, each as what is computed beside one plain process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from longstrand.checks.comparing import Difference, Names, compare
from longstrand.checks.computing import ONE_PROCESS, Dtype, Job, Start, compute
from longstrand.checks.coverage import not_checked
from longstrand.checks.resuming import Run, State, compare_states
from longstrand.checks.sample import Packs, alone, draw_packs, num_tokens
from longstrand.checks.watching import Found
from longstrand.config import KernelsSection, ParallelSection, Recipe
from longstrand.errors import UserError
from longstrand.memory import Levers, levers_of
from longstrand.memory.levers import Offload
from longstrand.model import Model
from longstrand.train.sft import prepare
from longstrand.trained import model_source

LIMIT = 1e-10
"""Of float64: what exceeds it is wrong arithmetic and not rounding."""

ROUNDING = {"float64": LIMIT, "float32": 1e-4, "bfloat16": 5e-2}
"""Of a way to compute that may round otherwise, in the recipe's own dtype."""

RESUMED = 1e-7
"""Of weights after a step of AdamW on other ranks: it divides by a root that is small where a gradient is."""


@dataclass(frozen=True)
class Planned:
    """A comparison that is to be made."""

    name: str
    settings: str
    limit: float
    measure: Callable[[], Difference]


@dataclass(frozen=True)
class Subject:
    """What is certified, and each way to compute it.

    Attributes:
        tile: the recipe's, or the longest pack where that is shorter.
        folder: for spools and checkpoints.
    """

    recipe: Recipe
    names: Names
    packs: Packs
    axes: ParallelSection
    tile: int
    tokens: int
    folder: str
    start: Start
    words: str
    not_checked: str

    @classmethod
    def open(cls, recipe: Recipe, axes: ParallelSection, tokens: int, folder: str, start: Start) -> Subject:
        source = model_source(recipe.model)
        prepared = prepare(_in_float64(recipe))
        model = prepared.model
        _require_experts(model, axes)
        packs = draw_packs(prepared.loader, tokens, _num_packs(recipe, axes, tokens))
        longest = max(sum(map(len, pack)) for pack in packs)
        size = sum(parameter.numel() for parameter in model.parameters())
        words = (
            f"{source.name}, {size:,} parameters in float64; {num_tokens(packs):,} tokens of the recipe's data, "
            f"{len(packs)} sequences of {', '.join(str(len(pack)) for pack in packs)} documents; equal is a relative "
            f"difference of {LIMIT:g} at most"
        )
        return cls(
            recipe, Names.of(model), packs, axes, min(recipe.memory.tile, longest), tokens, folder, start, words,
            not_checked(recipe, model.architecture, packs, axes),
        )  # fmt: skip

    def plan(self) -> Iterator[Planned]:
        """All comparisons, in the order in which they are shown."""
        if self.axes.world > 1:
            yield from self._on_ranks()
        yield self._planned("packs", f"{len(alone(self.packs))} documents alone", packs=alone(self.packs))
        for tile in self._tiles():
            yield self._planned("tiles", f"tile = {tile} for {self.tile}", levers=Levers(tile))
        for dtype in dict.fromkeys(("float64", self.recipe.run.dtype)):
            yield from self._levers(dtype)
        yield from self._resume()

    def job(self, **changes: Any) -> Job:
        return replace(Job(self.recipe, self.packs, Levers(self.tile)), **changes)

    @cached_property
    def truth(self) -> dict[Dtype, Found]:
        """One process, one tile after the other, no lever: by dtype, filled in when needed."""
        return {}

    def _truth(self, dtype: Dtype) -> Found:
        if dtype not in self.truth:
            self.truth[dtype] = compute(self.job(dtype=dtype))
        return self.truth[dtype]

    def _planned(self, name: str, settings: str, limit: float = LIMIT, **changes: Any) -> Planned:
        dtype = changes.get("dtype", "float64")

        def measure() -> Difference:
            return compare(compute(self.job(**changes), self.start), self._truth(dtype), self.names, limit)

        return Planned(name, settings, limit, measure)

    def _on_ranks(self) -> Iterator[Planned]:
        shown = axes_in_words(self.axes)
        levers = levers_of(self.recipe.memory, self.folder)
        offload: Offload = "disk" if levers.offload == "disk" else "none"
        levers = replace(levers, tile=self.tile, offload=offload, spool=self._spool(offload))
        yield self._planned("ranks", shown, axes=self.axes, levers=levers)
        if self.axes.context > 1 and levers.recompute:
            other = replace(levers, keep_fronts=not levers.keep_fronts)
            on = str(other.keep_fronts).lower()
            yield self._planned("ranks", f"{shown}, keep_fronts = {on}", axes=self.axes, levers=other)

    def _tiles(self) -> list[int]:
        longest = max(sum(map(len, pack)) for pack in self.packs)
        others = (-(-self.tile // 2), self.tile // 3 | 1, longest)
        return [tile for tile in dict.fromkeys(others) if tile != self.tile]

    def _levers(self, dtype: Dtype) -> Iterator[Planned]:
        train = self.recipe.train
        if train.indexer != "warmup" and train.balance != "aux":
            levers = Levers(self.tile, recompute=False)
            yield self._planned(
                "levers", f"recompute = false, {dtype}", ROUNDING[dtype], levers=levers, dtype=dtype
            )
        for shown, levers in (
            ("keep_every = 2", Levers(self.tile, keep_every=2)),
            ("offload = disk", Levers(self.tile, offload="disk", spool=self._spool("disk"))),
        ):
            yield self._planned("levers", f"{shown}, {dtype}", 0.0, levers=levers, dtype=dtype)

    def _resume(self) -> Iterator[Planned]:
        runs = {by: self._run(f"saved_by_{by}") for by in ("one", "many")}
        truth: list[State] = []

        def measure(by: str, on: ParallelSection, limit: float) -> Difference:
            run = runs[by]
            truth[:] = truth or [run.go("both steps", ONE_PROCESS, self.start)]
            if not Path(run.folder).exists():
                run.go("first step", ONE_PROCESS if by == "one" else self.axes, self.start)
            return compare_states(run.go("second step", on, self.start), truth[0], self.names, limit)

        yield Planned("resume", "save, load, next step", 0.0, lambda: measure("one", ONE_PROCESS, 0.0))
        if self.axes.world > 1:
            shown = f"{self.axes.world} ranks"
            yield Planned(
                "resume", f"saved by 1, on {shown}", RESUMED, lambda: measure("one", self.axes, RESUMED)
            )
            yield Planned(
                "resume", f"saved by {shown}, on 1", RESUMED, lambda: measure("many", ONE_PROCESS, RESUMED)
            )

    def _run(self, name: str) -> Run:
        train = self.recipe.train
        longer = train.model_copy(update={"steps": max(train.steps, 2)})
        recipe = _in_float64(self.recipe).model_copy(update={"train": longer})
        return Run(recipe, str(Path(self.folder) / name), self.tokens, len(self.packs))

    def _spool(self, offload: str) -> str | None:
        return str(Path(self.folder) / "spool") if offload == "disk" else None


def axes_in_words(axes: ParallelSection) -> str:
    sizes = {"data": axes.data, "context": axes.context, "expert": axes.expert}
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "1 process"


def _in_float64(recipe: Recipe) -> Recipe:
    """On this machine, and with room for the tokens that are taken: not what a lever needs for whole sequences."""
    return recipe.model_copy(
        update={
            "run": recipe.run.model_copy(update={"dtype": "float64"}),
            "kernels": KernelsSection(cpu="portable"),
            "memory": recipe.memory.model_copy(
                update={"offload": "none", "spool": None, "optimizer": "device"}
            ),
        }
    )


def _require_experts(model: Model, axes: ParallelSection) -> None:
    """Said here, before a rank says it."""
    if axes.world % axes.expert:
        raise UserError(
            f"parallel.expert = {axes.expert}: must divide the number of processes, {axes.world}; choose a divisor"
        )
    if axes.expert > 1 and model.architecture.n_routed_experts % axes.expert:
        raise UserError(
            f"parallel.expert = {axes.expert}: must divide the model's {model.architecture.n_routed_experts} routed "
            "experts; choose a divisor"
        )


def _num_packs(recipe: Recipe, axes: ParallelSection, tokens: int) -> int:
    """Two; one more than data ranks, so that some have none at last; more where sequences are short."""
    return max(2, axes.data + 1, -(-tokens // recipe.data.length))
