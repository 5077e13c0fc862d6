"""The folder of a run: opened once, by one process, for one recipe."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shlex
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch

from longstrand.atomic import write_atomic
from longstrand.config import Recipe, Source, dump_toml, load_recipe
from longstrand.errors import UserError
from longstrand.ops.native import use_native
from longstrand.parallel import Mesh, by_first, one_process, together

_log = logging.getLogger(__name__)
_BEFORE_A_RUN = re.compile(r"log(_rank[0-9]+)?\.txt|certificate\.json")
_MESH = {f"parallel.{name}" for name in ("data", "context", "expert", "segments", "receive")}
MAY_CHANGE = {"kernels.cpu", "kernels.require", "memory.spool", "run.out", "train.steps", *_MESH}
"""Settings that a resumed run may have otherwise than the run it goes on with; other kernels round otherwise, and so do
sums over other ranks."""


@dataclass(frozen=True)
class Started:
    """How the ranks of a run were started, so that messages name the command that goes on with it.

    Args:
        torchrun: its options that say how many there are, with {} for their number; None: not by torchrun.
        ray: what followed `--ray`; None: not by Ray.
        warnings: of what was found wrong then, for the run's log.
    """

    torchrun: str | None = None
    ray: str | None = None
    warnings: tuple[str, ...] = ()

    def resume_command(self, run: Path, ranks: int) -> str:
        """The command that goes on with a run of that many ranks."""
        train = f"longstrand train {shlex.quote(str(run / 'run.toml'))} --resume"
        if self.ray is not None:
            return f"{train} --ray {shlex.quote(self.ray)} --workers {ranks}"
        if ranks == 1:
            return train
        if self.torchrun is not None:
            return f"torchrun {self.torchrun.format(ranks)} -m {train}"
        return f"{train} --workers {ranks}"

    def log_warnings(self) -> None:
        """Says what was found wrong then; called once the log is open."""
        for each in self.warnings:
            _log.warning("%s", each)


@contextmanager
def open_run(
    recipe: Recipe, *, resume: bool, mesh: Mesh | None = None, started: Started = Started()
) -> Iterator[tuple[Path, Recipe]]:
    """Makes or reopens the run's folder and holds its lock; of several ranks the first does, for all.

    Yields:
        The folder, and the recipe with everything resolved: paths absolute, threads a number. A resumed run has
        the number of threads it began with, since another one could round sums otherwise.

    Raises:
        UserError: the folder cannot be made or is in use, is used and `resume` is not set, is no run folder, belongs
            to another recipe, or is not there for every rank.
    """
    mesh = mesh or one_process()
    with ExitStack() as held:
        run, resolved = by_first(
            mesh.world, lambda: held.enter_context(_opened(recipe, resume=resume, started=started))
        )
        with together(mesh.world):
            if not mesh.first:
                _join(run, resolved, mesh.world.rank)
        yield run, resolved


def write_recipe(run: Path, recipe: Recipe) -> None:
    """Writes run.toml, from which on the folder is used: only once the recipe is known to work."""
    write_atomic(run / "run.toml", dump_toml(recipe))


def check_unused(run: Path, *, resume: bool, started: Started = Started()) -> bool:
    """Whether the folder holds a run, which only `resume` may go on with.

    Raises:
        UserError: it holds one and `resume` is not set, or it holds something else.
    """
    try:
        names = (path.name for path in run.iterdir())
        found = sorted(
            name for name in names if not name.startswith(".") and not _BEFORE_A_RUN.fullmatch(name)
        )
    except FileNotFoundError:
        return False
    except OSError as error:
        raise UserError(
            f"run.out = {run}: not a folder ({error.strerror}); choose another run.out"
        ) from error
    if "run.toml" not in found and found:
        raise UserError(
            f"run.out = {run}: is not a run's folder (it holds {found[0]} and no run.toml); "
            "choose a new or empty folder"
        )
    if "run.toml" in found and not resume:
        raise UserError(
            f"run.out = {run}: holds a run already; go on with {_command_for(run, started)} (or choose another run.out)"
        )
    return bool(found)


def holds_run(recipe: Recipe) -> bool:
    """Whether `run.out` holds a run, for a command that goes on by itself with one that was stopped.

    Raises:
        UserError: it holds something else.
    """
    return check_unused(Path(recipe.run.out).expanduser(), resume=True)


def require_place(run: Path) -> None:
    """Checks that the folder can be made and written, or what a run wrote there before; leaves no file in it.

    What is not there of its path is made, and removed, below a folder of a passing name.

    Raises:
        UserError: naming what cannot be written.
    """
    run = run.expanduser().absolute()
    there = next(each for each in (run, *run.parents) if os.path.lexists(each))
    try:
        with TemporaryDirectory(prefix=".longstrand_dry_run_", dir=there) as passing:
            folder = Path(passing) / run.relative_to(there)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ".lock").write_bytes(b"1")
    except OSError as error:
        where = "" if there == run else f" in {there}"
        raise UserError(
            f"run.out = {run}: cannot be written{where} ({error.strerror}); choose another run.out"
        ) from error
    for path in (run / ".lock", log_file(run, 0), run / "metrics.jsonl"):
        if path.exists() and (path.is_dir() or not os.access(path, os.W_OK)):
            raise UserError(f"{path}: cannot be written; make it a writable file")


def log_file(run: Path, rank: int) -> Path:
    """Each rank has its own; the first one's is the log of the run."""
    return run / ("log.txt" if rank == 0 else f"log_rank{rank}.txt")


def resolve_recipe(recipe: Recipe) -> Recipe:
    """The same recipe, independent of the working directory, of torch's settings and of a compiler's absence.

    From here on this process runs the kernels that the recipe names.
    """
    data, evaluate, model = recipe.data, recipe.evaluate, recipe.model
    return recipe.model_copy(
        update={
            "run": recipe.run.model_copy(
                update={
                    "out": _absolute(recipe.run.out),
                    "threads": recipe.run.threads or torch.get_num_threads(),
                }
            ),
            "kernels": recipe.kernels.model_copy(update={"cpu": _kernels_taken(recipe)}),
            "model": model.model_copy(
                update={"path": _absolute(model.path), "config": _if_there(model.config)}
            ),
            "data": data.model_copy(
                update={
                    "sources": [_resolve_source(source) for source in data.sources],
                    "tokenizer": _if_there(data.tokenizer),
                    "cache": _absolute(data.cache),
                }
            ),
            "memory": recipe.memory.model_copy(update={"spool": _absolute(recipe.memory.spool)}),
            "evaluate": evaluate.model_copy(
                update={"sources": [_resolve_source(source) for source in evaluate.sources]}
            ),
        }
    )


@contextmanager
def _opened(recipe: Recipe, *, resume: bool, started: Started) -> Iterator[tuple[Path, Recipe]]:
    run = Path(recipe.run.out).expanduser()
    check_unused(run, resume=resume, started=started)
    make_folder(run)
    with _lock(run):
        used = check_unused(run, resume=resume, started=started)
        resolved = resolve_recipe(recipe)
        if used:
            resolved = _same_recipe(run, recipe, resolved, started)
        yield run, resolved


def _join(run: Path, recipe: Recipe, rank: int) -> None:
    """What opening the folder means for a rank that did not."""
    if not run.is_dir():
        raise UserError(
            f"run.out = {run}: rank {rank} on {socket.gethostname()} does not find the folder that rank 0 made; choose "
            "one on a file system that all machines share"
        )
    use_native(recipe.kernels.cpu)


def _kernels_taken(recipe: Recipe) -> Literal["native", "portable"]:
    """float64 is the reference's dtype: it has no kernels."""
    choice = "portable" if recipe.run.dtype == "float64" else recipe.kernels.cpu
    return "native" if use_native(choice).used else "portable"


def _resolve_source(source: Source) -> Source:
    return source.model_copy(update={"path": _absolute(source.path), "bed": _absolute(source.bed)})


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).expanduser().absolute())


def _if_there(name: str | None) -> str | None:
    """A path becomes absolute, the name of something shipped stays."""
    return _absolute(name) if name is not None and Path(name).expanduser().exists() else name


def make_folder(run: Path) -> None:
    """Makes it where it is not there.

    Raises:
        UserError: it cannot be made.
    """
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"run.out = {run}: cannot be made a folder ({error.strerror}); choose another run.out"
        ) from error


@contextmanager
def _lock(run: Path) -> Iterator[None]:
    """One process per folder; the system releases the lock of a killed one."""
    try:
        file = (run / ".lock").open("w")
    except OSError as error:
        raise UserError(
            f"run.out = {run}: cannot be written ({error.strerror}); choose another run.out"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(
                f"run.out = {run}: another process is training in it; wait for it, or stop it"
            ) from error
        yield


def _command_for(run: Path, started: Started) -> str:
    """Goes on with a run on as many ranks as it had."""
    ranks = 1
    with suppress(UserError):  # run.toml is broken, which going on will say
        ranks = load_recipe(run / "run.toml").parallel.world
    return started.resume_command(run, ranks)


def _same_recipe(run: Path, given: Recipe, resolved: Recipe, started: Started) -> Recipe:
    began = load_recipe(run / "run.toml")
    if given.run.threads is None:
        resolved = resolved.model_copy(
            update={"run": resolved.run.model_copy(update={"threads": began.run.threads})}
        )
    if given.kernels.cpu == "auto" and began.kernels.cpu != resolved.kernels.cpu:
        use_native(began.kernels.cpu)
        kernels = resolved.kernels.model_copy(update={"cpu": began.kernels.cpu})
        resolved = resolved.model_copy(update={"kernels": kernels})
    old, new = _flat(began.model_dump()), _flat(resolved.model_dump())
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name) and name not in MAY_CHANGE:
            raise UserError(
                f"{name} = {new.get(name)}: this run began with {old.get(name)}, and a resumed run may change only "
                f"{', '.join(sorted(MAY_CHANGE - _MESH))} and [parallel]; go on as it began with "
                f"{started.resume_command(run, began.parallel.world)}, or choose another run.out"
            )
    return resolved


def _flat(values: Any, name: str = "") -> dict[str, Any]:
    """Nested records as one level: {"data.sources.0.path": ...}."""
    if isinstance(values, list):
        values = dict(enumerate(values))
    if not isinstance(values, dict) or not values:
        return {name: values}
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{name}.{key}" if name else str(key))
    return flat
