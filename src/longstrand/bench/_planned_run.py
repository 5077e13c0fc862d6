"""One configuration of the planner's memory figure, run on 1, 2 or 4 ranks: what lives, and what is resident."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from longstrand.architecture import Architecture
from longstrand.bench._steps import architecture, random_pack
from longstrand.config import MemorySection, ParallelSection, TrainSection
from longstrand.data.pack import Pack
from longstrand.memory import levers_of
from longstrand.memory.counted import CountedMemory
from longstrand.model import load_model
from longstrand.model.parallelize import parallelize
from longstrand.ops.native import use_native
from longstrand.parallel import make_mesh
from longstrand.parallel.processes import run_ranks
from longstrand.peak_memory import PeakMemory, resident_bytes
from longstrand.plan.job import Dtype, Form, Job
from longstrand.train.optimizer import Optimizer, freeze_all_but, trained_names
from longstrand.train.step import take_step

Indexer = Literal["frozen", "sparse", "warmup"]
Balance = Literal["none", "bias", "aux"]

STEPS = 2
LONG_TOKENS = 65_536  # beyond, one step has to do, after two of fewer tokens
WARM_TOKENS = 32_768  # of a sequence that is longer than that: experts meet most numbers of rows


@dataclass(frozen=True)
class Case:
    """A configuration.

    Attributes:
        width: of the toy made wider in all its parts.
        layers: of its kinds in turn.
    """

    length: int
    width: int = 128
    layers: int = 4
    dtype: Dtype = "float32"
    form: Form = "native"
    sequences: int = 1
    trainable: tuple[str, ...] = ("all",)
    indexer: Indexer = "frozen"
    balance: Balance = "none"
    memory: dict[str, Any] = field(default_factory=dict)
    parallel: dict[str, int] = field(default_factory=dict)

    @property
    def shape(self) -> Architecture:
        """The toy's layers (K K K D, one dense), each part as much wider as the width is."""
        toy, factor = architecture("toy"), self.width // 128
        kinds = range(self.layers)
        return replace(
            toy,
            num_hidden_layers=self.layers,
            layer_types=tuple(toy.layer_types[index % 4] for index in kinds),
            mlp_layer_types=tuple(toy.mlp_layer_types[min(index, 3)] for index in kinds),
            indexer_types=("full",) * self.layers,
            hidden_size=self.width,
            intermediate_size=toy.intermediate_size * factor,
            moe_intermediate_size=toy.moe_intermediate_size * factor,
            linear_num_heads=toy.linear_num_heads * factor,
            num_attention_heads=toy.num_attention_heads * factor,
            q_lora_rank=toy.q_lora_rank * factor,
        )

    @property
    def job(self) -> Job:
        return Job(
            self.shape,
            self.length,
            self.sequences,
            self.dtype,
            self.trainable,
            self.indexer,
            self.balance,
            memory=MemorySection(**self.memory),
            parallel=ParallelSection(**self.parallel),
            form=self.form,
        )

    @property
    def ranks(self) -> int:
        return self.job.world

    def named(self) -> str:
        """In a few words."""
        parts = [f"{self.length // 1024}k", f"width {self.width}", self.dtype]
        parts += [f"{self.layers} layers"] * (self.layers != 4) + [self.form] * (self.form != "native")
        parts += [f"{self.sequences} sequences"] * (self.sequences > 1)
        parts += [" ".join(self.trainable)] * (self.trainable != ("all",))
        parts += [f"indexer {self.indexer}"] * (self.indexer != "frozen")
        parts += [f"balance {self.balance}"] * (self.balance != "none")
        parts += [f"{name} {value}" for name, value in (self.memory | self.parallel).items()]
        return ", ".join(parts)


@dataclass(frozen=True)
class Found:
    """What one rank measured, in bytes.

    Attributes:
        counted: most living tensor bytes of a step.
        resident: most resident memory of a step above the process's own.
        baseline: the process's own resident memory, measured once it has trained steps of the case, or of its first
            tokens, and no tensor lives: libraries, their scratch, what oneDNN keeps for each bfloat16 shape.
        phases: `counted` by phase.
        before: living tensor bytes while the model is made whole and cut, which training does layer by layer and no
            plan of a step has.
    """

    counted: int
    resident: int
    baseline: int
    phases: dict[str, int]
    before: int


def run_case(case: Case, timeout: float | int | None = None) -> Found:
    """The rank with most living bytes, of a step and one more in processes of their own."""
    found: list[Found] = run_ranks(case.ranks, _measure, asdict(case), timeout=timeout)
    return max(found, key=lambda each: each.counted)


def _measure(values: dict[str, Any]) -> Found:
    torch.set_num_threads(1)
    case, counted = Case(**values), CountedMemory(torch.device("cpu"))
    assert counted.why_not is None, counted.why_not
    warm = replace(case, length=WARM_TOKENS) if case.length > LONG_TOKENS else case
    with PeakMemory() as memory:
        _steps(warm, STEPS)
        gc.collect()
        living, held = dict[str, int](), dict[str, int]()

        def ended(phase: str) -> None:
            living[phase] = max(living.get(phase, 0), counted.take() or 0)
            held[phase] = max(held.get(phase, 0), memory.take())

        ended("before")
        baseline = resident_bytes() - (counted.live() or 0)
        _steps(case, 1 if case.length > LONG_TOKENS else STEPS, ended)
        before, _ = living.pop("before"), held.pop("before")
        return Found(max(living.values()), max(held.values()) - baseline, baseline, living, before)


def _steps(case: Case, steps: int, ended: Callable[[str], None] = lambda phase: None) -> None:
    """Model, optimizer and steps as training takes them; what comes before a step ends as "before"."""
    use_native(case.form)
    sizes, settings = case.job.parallel, _settings(case, steps)
    model = load_model(case.shape, getattr(torch, case.dtype), seed=0)
    names = trained_names(model.groups(), settings)
    freeze_all_but(model, names)
    mesh = make_mesh(data=sizes.data, context=sizes.context, expert=sizes.expert)
    tile = case.job.memory.tile
    parallelize(model, mesh, segments=sizes.segments_per_rank, receive=sizes.receive_rows(tile))
    optimizer = Optimizer(model, names, settings, mesh=mesh)
    packs: list[Pack] = [random_pack(case.length) for _ in range(case.sequences)]
    with tempfile.TemporaryDirectory() as folder:
        levers = levers_of(case.job.memory, Path(folder))
        for step in range(1, steps + 1):
            ended("before")
            take_step(model, packs, optimizer, settings, step=step, levers=levers, ended=ended)


def _settings(case: Case, steps: int) -> TrainSection:
    learns = {"trainable": [*case.trainable], "indexer": case.indexer, "balance": case.balance}
    return TrainSection.model_validate({"steps": steps, "lr": 1e-4} | learns)
