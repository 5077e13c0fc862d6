"""What is planned: a model, a sequence, ranks and levers; all that bytes and seconds depend on."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Literal

from longstrand.architecture import Architecture
from longstrand.config import MemorySection, ParallelSection, Recipe
from longstrand.errors import UserError
from longstrand.plan.parameters import Shape, group_of, keeps_float32, parameter_shapes
from longstrand.plan.terms import Kind

Dtype = Literal["float32", "bfloat16", "float64"]
Form = Literal["native", "portable"]

SKEW_ROUNDING = 0.01
"""Of a skew as `probe` prints it: two digits."""

ITEMSIZE: dict[str, int] = {"bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Job:
    """One run, as far as a planner needs to know it.

    Attributes:
        length: tokens of a sequence, a single document.
        sequences_per_step: over all data ranks.
        trainable, indexer, balance: as in `[train]`.
        form: of the ops: compiled CPU kernels, or plain torch.
        data_skew: what the busiest expert rank receives, over the mean of all; see `skew`.
        threads: CPU threads of torch in one rank.
        kind: of the devices; a GPU's allocator and its communication take memory of their own.
    """

    shape: Architecture
    length: int
    sequences_per_step: int = 1
    dtype: Dtype = "bfloat16"
    trainable: tuple[str, ...] = ("all",)
    indexer: Literal["frozen", "warmup", "sparse"] = "frozen"
    balance: Literal["none", "bias", "aux"] = "none"
    memory: MemorySection = field(default_factory=MemorySection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    form: Form = "portable"
    data_skew: float = 1.0
    threads: int = 1
    kind: Kind = "cpu"

    def __post_init__(self) -> None:
        most, shape = most_skewed(self.shape), self.shape
        if 1 <= self.data_skew <= most + SKEW_ROUNDING:
            return
        rule = "must be 1: this model has no routed experts; remove it"
        if most > 1:
            rule = (
                f"must be from 1 to {most:.2f}: a token chooses {shape.num_experts_per_tok} of "
                f"{shape.n_routed_experts} experts, so that a rank receives no more than so many times the mean; take "
                "what longstrand probe measures"
            )
        raise UserError(f"--data-skew {self.data_skew:g}: {rule}")

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        shape: Architecture,
        form: Form,
        data_skew: float = 1.0,
        kind: Kind = "cpu",
        started_threads: int | None = None,
    ) -> Job:
        """A recipe's run of a model with this shape.

        Args:
            started_threads: as of `threads_of_a_rank`.
        """
        train, parallel = recipe.train, recipe.parallel
        own = threads_of_a_rank(recipe.run.threads, parallel.world, started_threads)
        return cls(
            shape=shape,
            length=recipe.data.length,
            sequences_per_step=train.sequences_per_step,
            dtype=recipe.run.dtype,
            trainable=tuple(train.trainable),
            indexer=train.indexer,
            balance=train.balance,
            memory=recipe.memory,
            parallel=parallel,
            form=form,
            data_skew=data_skew,
            threads=own if kind == "cpu" else recipe.run.threads or 1,
            kind=kind,
        )

    @property
    def skew(self) -> float:
        """`data_skew`, or less where these expert ranks cannot have as much: the busiest receives all rows at most."""
        return min(self.data_skew, self.parallel.expert, most_skewed(self.shape))

    @property
    def itemsize(self) -> int:
        """Bytes of a value of the model's dtype."""
        return ITEMSIZE[self.dtype]

    @property
    def wide(self) -> int:
        """Bytes of a value in float32 or wider: gradients, states, scores, moments."""
        return max(4, self.itemsize)

    @property
    def world(self) -> int:
        return self.parallel.world

    @property
    def segments(self) -> int:
        """Of one rank; of one document, whose early and late ones in pairs are balanced, the fewest."""
        if self.parallel.context == 1:
            return 1
        return self.parallel.segments_per_rank or 2

    @property
    def passes(self) -> int:
        """Sequences of a step that one rank computes a part of."""
        return -(-self.sequences_per_step // self.parallel.data)

    def shards(self, weight: Weight) -> bool:
        """Whether ranks hold parts of it: a buffer is whole on each, and so is what stays float32 beside bfloat16."""
        return not weight.is_buffer and weight.itemsize == self.itemsize

    def trains(self, parameter: str) -> bool:
        """Whether a parameter receives gradients."""
        if parameter.endswith("e_score_correction_bias"):
            return False
        return self.trains_group(group_of(parameter, self.shape))

    def trains_group(self, group: str) -> bool:
        """Whether the parameters of a group receive gradients."""
        if self.indexer == "warmup":
            return group == "indexer"
        return (self.trainable == ("all",) or group in self.trainable) and (
            group != "indexer" or self.indexer != "frozen"
        )

    def weights(self) -> list[Weight]:
        """Every parameter and buffer of the model."""
        return list(_weights(Job(self.shape, 1, 1, self.dtype, self.trainable, self.indexer)))


def threads_of_a_rank(given: int | None, ranks: int, started: int | None = None) -> int:
    """CPU threads of one rank: as the recipe says, or its share of those of this machine, as `train` deals them.

    Args:
        given: `run.threads`.
        ranks: on this machine.
        started: threads that torch starts with here; None: one for each core.
    """
    return given or max(1, (started or cores_here()) // ranks)


def cores_here() -> int:
    """Cores that this process may use; of each one torch takes one thread, whatever its hyperthreads."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    files = {number: Path(topology.format(number)) for number in os.sched_getaffinity(0)}
    return len({file.read_text() if file.is_file() else str(number) for number, file in files.items()})


def most_skewed(shape: Architecture) -> float:
    """The most that the busiest expert rank can receive, over the mean of any number of ranks; 1 without experts.

    A token chooses A different ones of E experts, so that a rank with k of them receives at most min(k, A) of its A
    rows, and k / E of them are the mean.
    """
    if "sparse" not in shape.mlp_layer_types:
        return 1.0
    return max(1.0, shape.n_routed_experts / shape.num_experts_per_tok)


@dataclass(frozen=True)
class Weight:
    """One parameter or buffer.

    Attributes:
        itemsize: bytes of a value.
        group: what a recipe trains or freezes it with.
    """

    name: str
    shape: Shape
    itemsize: int
    group: str
    trains: bool

    @cached_property
    def layer(self) -> int | None:
        """None: of embedding, last norm or head."""
        return int(self.name.split(".")[1]) if self.name.startswith("layers.") else None

    @cached_property
    def is_expert(self) -> bool:
        """Whether it is a routed expert's: the first dim counts experts."""
        return ".mlp.experts." in self.name

    @cached_property
    def is_buffer(self) -> bool:
        return self.name.endswith("e_score_correction_bias")

    @cached_property
    def num_values(self) -> int:
        total = 1
        for size in self.shape:
            total *= size
        return total

    @cached_property
    def num_bytes(self) -> int:
        return self.num_values * self.itemsize


@lru_cache(maxsize=64)
def _weights(job: Job) -> tuple[Weight, ...]:
    """Once for all lengths, ranks and levers: a search asks for hundreds of plans of one model."""
    return tuple(
        Weight(
            name,
            shape,
            job.wide if keeps_float32(name) else job.itemsize,
            group_of(name, job.shape),
            job.trains(name),
        )
        for name, shape in parameter_shapes(job.shape).items()
    )
