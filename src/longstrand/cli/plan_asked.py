"""The options of `longstrand plan` as a job, and the room that it may take."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from longstrand.cli.arguments import tokens_of
from longstrand.cli.plan import Values
from longstrand.config import GROUPS, Recipe, load_recipe
from longstrand.errors import UserError
from longstrand.plan.devices import GIB, Device, find_device
from longstrand.plan.host import free_bytes, this_machine
from longstrand.plan.job import Form, Job, cores_here, threads_of_a_rank
from longstrand.plan.room import Room
from longstrand.plan.shapes import FoundShape, find_shape

_DTYPES = {"gpu": "bfloat16", "cpu": "float32"}


@dataclass(frozen=True)
class Asked:
    """What is to be planned.

    Attributes:
        recipe: with its settings; None: of a model alone.
        here: whether this machine will run it, and is looked at.
    """

    job: Job
    room: Room
    found: FoundShape
    recipe: Recipe | None
    here: bool


MOST_GIB = 2**30


def of_recipe(values: Values) -> Asked:
    """A recipe's run, as it says.

    Raises:
        UserError: the recipe, its model or an option cannot be used, or an option says what the recipe says.
    """
    name = str(values.recipe)
    if values.more:
        raise UserError(
            f"plan {name} {values.more[0]}: one recipe at a time; several runs belong to --calibrate"
        )
    for option, given, key in (
        ("--model", values.model, "model.config"),
        ("--length", values.length, "data.length"),
        ("--dtype", values.dtype, "run.dtype"),
        ("--trainable", values.trainable != "all", "train.trainable"),
        ("--sequences", values.sequences != 1, "train.sequences_per_step"),
        ("--optimizer", values.optimizer != "auto", "memory.optimizer"),
    ):
        if given:
            raise UserError(f"{option}: the recipe {name} says it; change it there with --set {key}=...")
    recipe = load_recipe(name, list(values.overrides))
    found = find_shape(str(recipe.model.path or recipe.model.config))
    room = _room(values, recipe.parallel.world, Path(recipe.memory.spool or recipe.run.out))
    form = _form(room, recipe.kernels.cpu, recipe.run.dtype)
    threads = _threads_here(room.device)
    job = Job.of(recipe, found.shape, form, values.data_skew, room.device.kind, threads)
    return Asked(job, room, found, recipe, room.is_cpu or values.this_host)


def of_model(values: Values, *, needs_length: bool) -> Asked:
    """A model without a recipe.

    Raises:
        UserError: an option is missing or cannot be used.
    """
    if values.model is None:
        raise UserError(
            "plan: needs a recipe, or --model with --device, --devices and --length; give one of them"
        )
    if values.overrides:
        raise UserError(
            f"--set {values.overrides[0]}: overrides a recipe, and none is given; give one, or use options"
        )
    if values.length is None and needs_length:
        raise UserError("--length: missing; give the tokens of a sequence, such as 1M, or --fit length")
    model = values.model
    found, room = find_shape(model), _room(values, 1, Path.cwd())
    dtype = values.dtype or _DTYPES[room.device.kind]
    if dtype not in ("float32", "bfloat16", "float64"):
        raise UserError(f"--dtype {dtype}: must be float32, bfloat16 or float64")
    groups = _groups(values.trainable)
    job = Job(
        shape=found.shape,
        length=1024 if values.length is None else tokens_of("--length", values.length),
        sequences_per_step=values.sequences,
        dtype=dtype,  # type: ignore[arg-type]
        trainable=groups,
        indexer=_indexer(groups),
        form=_form(room, "auto", dtype),
        data_skew=values.data_skew,
        threads=threads_of_a_rank(None, room.num_devices, _threads_here(room.device)) if room.is_cpu else 1,
        kind=room.device.kind,
    )
    return Asked(job, room, found, None, values.this_host)


def _threads_here(device: Device) -> int | None:
    """Threads that torch starts with on this machine, where it is the device: one for each core, or fewer if told."""
    if not device.is_this_cpu:
        return 1
    number = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return min(int(number), cores_here()) if number.isdigit() and int(number) else None


def _indexer(groups: tuple[str, ...]) -> Literal["frozen", "warmup", "sparse"]:
    """As a recipe must say where the indexer is named: it learns by a loss of its own."""
    if "indexer" not in groups:
        return "frozen"
    return "warmup" if groups == ("indexer",) else "sparse"


def _room(values: Values, world: int, spool: Path) -> Room:
    device = find_device(values.device)
    if values.optimizer not in ("auto", "device", "host"):
        raise UserError(f"--optimizer {values.optimizer}: must be auto, device or host")
    if device.kind == "cpu" and values.optimizer == "host":
        raise UserError(
            "--optimizer host: a CPU's memory is the host's, so that nothing would leave it; remove it"
        )
    here = values.this_host or device.kind == "cpu"
    for option, gib in (("--host-memory", values.host_memory), ("--host-disk", values.host_disk)):
        if gib is not None and not 0 <= gib < MOST_GIB:
            raise UserError(f"{option} {gib}: must be GiB of one host, from 0 to below 2**30")
    host, disk = (None if gib is None else int(gib * GIB) for gib in (values.host_memory, values.host_disk))
    return Room(
        device=device,
        num_devices=values.devices or world,
        host_bytes=this_machine().memory_bytes if host is None and here else host,
        file_bytes=free_bytes(spool) if disk is None and here else disk,
        optimizer=values.optimizer,  # type: ignore[arg-type]
        fitted=_factors(values.calibrated),
    )


def _factors(calibrated: Path | None) -> tuple[tuple[str, float], ...]:
    if calibrated is None:
        return ()
    from longstrand.plan.calibrate import load_factors

    return tuple(load_factors(calibrated).items())


def _groups(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in ("all", *GROUPS):
            raise UserError(f"--trainable {name}: must be all, or groups among {', '.join(GROUPS)}")
    if ("all" in names and len(names) > 1) or len(set(names)) < len(names):
        raise UserError(f"--trainable {text}: must be all, or name groups once")
    return names


def _form(room: Room, asked: Literal["auto", "native", "portable"], dtype: str) -> Form:
    """As a run would choose: compiled kernels on a CPU where there is a compiler and the dtype has them."""
    if not room.is_cpu or asked == "portable" or dtype == "float64":
        return "portable"
    return "native" if asked == "native" or shutil.which("g++") else "portable"
