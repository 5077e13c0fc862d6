"""The options of `longstrand plan` as a job, and the room that it may take."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import typer

from longstrand.cli.arguments import tokens_of
from longstrand.cli.plan import Options
from longstrand.cli.plan_options import Question
from longstrand.config import GROUPS, MemorySection, ParallelSection, Recipe, load_recipe, shipped_recipes
from longstrand.errors import UserError
from longstrand.omp_threads import flaw_of_told_threads, told_threads
from longstrand.plan.calibrated import load_calibrated
from longstrand.plan.devices import GIB, Device, find_device
from longstrand.plan.host import (
    HostNeeds,
    Machine,
    checkpoint_bytes,
    existing,
    file_shortages,
    free_bytes,
    host_needs,
    shortages,
    this_machine,
)
from longstrand.plan.job import Form, Job, cores_here, threads_of_a_rank
from longstrand.plan.room import Room
from longstrand.plan.rules import require_possible
from longstrand.plan.shapes import FoundShape, built_in_shapes, find_shape

_DTYPES = {"gpu": "bfloat16", "cpu": "float32"}


@dataclass(frozen=True)
class Place:
    """The machine that is judged as the host of a run, and where the run's files will be.

    Attributes:
        machine: this one, with the memory that --host-memory says.
        out, spool: folders; None: --host-disk says their room.
        keep: checkpoints kept.
        num_sources: files of data.
    """

    machine: Machine
    out: Path | None
    spool: Path | None
    keep: int
    num_sources: int

    def judge(self, job: Job, room: Room) -> tuple[HostNeeds, list[str]]:
        """What the ranks of this host need, and what it lacks for them."""
        needs = host_needs(job, room, self.num_sources)
        found = shortages(needs, self.machine)
        if self.out is not None and self.spool is not None:
            found += file_shortages(needs, self.spool, self.out, self.keep)
        return needs, found


@dataclass(frozen=True)
class Asked:
    """What is to be planned.

    Attributes:
        recipe: with its settings; None: of a model alone.
        here: this machine, where it will run it; None: another one will.
    """

    job: Job
    room: Room
    found: FoundShape
    recipe: Recipe | None
    here: Place | None


def of_recipe(options: Options, question: Question) -> Asked:
    """A recipe's run, as it says.

    Raises:
        UserError: the recipe, its model or an option cannot be used, or an option says what the recipe says.
    """
    name = str(options.recipe)
    if options.more:
        raise UserError(
            f"plan {name} {options.more[0]}: one recipe at a time; several runs belong to --calibrate"
        )
    for option, given, key in (
        ("--model", options.model, "model.config"),
        ("--length", options.length, "data.length"),
        ("--dtype", options.dtype, "run.dtype"),
        ("--trainable", options.trainable, "train.trainable"),
        ("--sequences", options.sequences, "train.sequences_per_step"),
        ("--optimizer", options.optimizer, "memory.optimizer"),
    ):
        if given is not None:
            raise UserError(f"{option}: the recipe {name} says it; change it there with --set {key}=...")
    recipe, device = _recipe(options), _device(options)
    found = _shape_of(recipe, name)
    job = Job.of(recipe, found.shape, _form(device, recipe.kernels.cpu, recipe.run.dtype), kind=device.kind)
    most_ranks = recipe.parallel.expert if question == "a plan" else found.shape.n_routed_experts
    if question in ("--fit length", "--sweep"):
        most_ranks = min(most_ranks, options.devices or job.world)
    threads = _threads(recipe.run.threads, device, options.devices or job.world)
    job = replace(job, data_skew=_data_skew(options, most_ranks), threads=threads)
    # Any other question chooses ranks and levers itself.
    require_possible(
        job if question == "a plan" else replace(job, memory=MemorySection(), parallel=ParallelSection())
    )
    here = _place(options, recipe) if device.kind == "cpu" or options.this_host else None
    return Asked(job, _room(options, device, job, here), found, recipe, here)


def of_model(options: Options, question: Question) -> Asked:
    """A model without a recipe.

    Raises:
        UserError: an option is missing or cannot be used.
    """
    if options.model is None:
        raise UserError(
            f"plan: needs a recipe (a file, or one of {', '.join(shipped_recipes())}), or --model with --device, "
            "--devices and --length; give one of them"
        )
    if options.overrides:
        raise UserError(
            f"--set {options.overrides[0]}: overrides a recipe, and none is given; give one, or use options"
        )
    if options.length is None and question in ("a plan", "--fit devices"):
        raise UserError("--length: missing; give the tokens of a sequence, such as 1M, or --fit length")
    found, device = find_shape(options.model), _device(options)
    dtype = _DTYPES[device.kind] if options.dtype is None else options.dtype
    if dtype not in ("float32", "bfloat16", "float64"):
        raise UserError(f"--dtype {dtype}: must be float32, bfloat16 or float64")
    groups = _groups("all" if options.trainable is None else options.trainable)
    num_devices = options.devices or 1
    job = Job(
        shape=found.shape,
        length=1024 if options.length is None else tokens_of("--length", options.length),
        sequences_per_step=options.sequences or 1,
        dtype=dtype,  # type: ignore[arg-type]
        trainable=groups,
        indexer=_indexer(groups),
        form=_form(device, "auto", dtype),
        threads=_threads(None, device, num_devices),
        kind=device.kind,
    )
    require_possible(job)
    most_ranks = found.shape.n_routed_experts
    most_ranks = most_ranks if question == "--fit devices" else min(most_ranks, num_devices)
    job = replace(job, data_skew=_data_skew(options, most_ranks))
    here = _place(options, None) if device.kind == "cpu" or options.this_host else None
    return Asked(job, _room(options, device, job, here), found, None, here if options.this_host else None)


def _recipe(options: Options) -> Recipe:
    name = str(options.recipe)
    if name in built_in_shapes() and not Path(name).exists() and name not in shipped_recipes():
        raise UserError(f"{name}: no recipe, but the name of a model's shape; give --model {name}")
    return load_recipe(name, list(options.overrides or ()))


def _shape_of(recipe: Recipe, name: str) -> FoundShape:
    """A shipped recipe may name a model that one command alone fills in."""
    setting = "path" if recipe.model.path else "config"
    value = str(recipe.model.path or recipe.model.config)
    if value in built_in_shapes() or Path(value).expanduser().exists():
        return find_shape(value)
    others = ", ".join(each for each in shipped_recipes() if each != name)
    raise UserError(
        f"{name}: model.{setting} = {value}: no such file or folder here; give a config.json or a model folder with "
        f"--set model.{setting}=..., plan another recipe ({others} or a file), or a model alone: --model NAME "
        f"({', '.join(built_in_shapes())})"
    )


def _device(options: Options) -> Device:
    device = find_device("CPU" if options.device is None else options.device)
    optimizer = "auto" if options.optimizer is None else options.optimizer
    if optimizer not in ("auto", "device", "host"):
        raise UserError(f"--optimizer {optimizer}: must be auto, device or host")
    if device.kind == "cpu" and optimizer == "host":
        raise UserError(
            "--optimizer host: a CPU's memory is the host's, so that nothing would leave it; remove it"
        )
    return device


def _data_skew(options: Options, most_ranks: int) -> float:
    """At most all tokens go to one of the ranks that share the experts."""
    skew = options.data_skew
    if skew is None:
        return 1.0
    if not 1 <= skew <= most_ranks:  # NaN is in no range
        rule = f"must be from 1 to {most_ranks}, where one of the ranks that share the experts has all tokens"
        remedy = "take it from longstrand probe"
        if most_ranks == 1:
            rule, remedy = "must be 1, since no ranks share the experts (parallel.expert = 1)", "remove it"
        raise UserError(f"--data-skew {skew}: {rule}; {remedy}")
    return skew


def _room(options: Options, device: Device, job: Job, here: Place | None) -> Room:
    """What is given, and on this machine what it has: on one disk beside the checkpoints of the run."""
    host, disk = (None if g is None else int(g * GIB) for g in (options.host_memory, options.host_disk))
    if here is not None:
        host = here.machine.memory_bytes
        if here.out is not None and here.spool is not None and (disk := free_bytes(here.spool)) is not None:
            one_disk = existing(here.spool).stat().st_dev == existing(here.out).stat().st_dev
            disk = max(0, disk - one_disk * (here.keep + 1) * checkpoint_bytes(job))
    fitted = None if options.calibrated is None else load_calibrated(options.calibrated)
    if fitted is not None:
        fitted.require_same(job, device)
    return Room(
        device=device,
        num_devices=options.devices or job.world,
        host_bytes=host,
        file_bytes=disk,
        spool_bytes=None if here is None else here.machine.file_bytes,
        optimizer=options.optimizer or "auto",  # type: ignore[arg-type]
        fitted=fitted,
    )


def _place(options: Options, recipe: Recipe | None) -> Place:
    """This machine; files stand in the working directory where no recipe says where."""
    machine = this_machine()
    if options.host_memory is not None:
        num_bytes = int(options.host_memory * GIB)
        machine = replace(machine, memory_bytes=num_bytes, memory_rule="what --host-memory says")
    keep, num_sources = (recipe.train.keep, len(recipe.data.sources)) if recipe else (2, 1)
    if options.host_disk is not None:
        return Place(machine, None, None, keep, num_sources)
    out = Path(recipe.run.out if recipe else ".").expanduser()
    spool = Path(recipe.memory.spool).expanduser() if recipe and recipe.memory.spool else out
    return Place(machine, out, spool, keep, num_sources)


def _indexer(groups: tuple[str, ...]) -> Literal["frozen", "warmup", "sparse"]:
    """As a recipe must say where the indexer is named: it learns by a loss of its own."""
    if "indexer" not in groups:
        return "frozen"
    return "warmup" if groups == ("indexer",) else "sparse"


def _threads(given: int | None, device: Device, num_ranks: int) -> int:
    """Of a rank: on this machine its share of those that torch starts with, one for each core or fewer if told."""
    if not device.is_this_cpu:
        return given or 1
    flaw = flaw_of_told_threads(os.environ)
    if given is None and flaw is not None:
        typer.echo(f"warning: {flaw}", err=True)
    told = told_threads(os.environ)
    started = min(told, cores_here()) if told is not None else None
    return threads_of_a_rank(given, num_ranks, started)


def _groups(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in ("all", *GROUPS):
            raise UserError(f"--trainable {name}: must be all, or groups among {', '.join(GROUPS)}")
    if ("all" in names and len(names) > 1) or len(set(names)) < len(names):
        raise UserError(f"--trainable {text}: must be all, or name groups once")
    return names


def _form(device: Device, asked: Literal["auto", "native", "portable"], dtype: str) -> Form:
    """As a run would choose: compiled kernels on a CPU where there is a compiler and the dtype has them."""
    if device.kind != "cpu" or asked == "portable" or dtype == "float64":
        return "portable"
    return "native" if asked == "native" or shutil.which("g++") else "portable"
