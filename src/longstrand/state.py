"""Checkpoints: written to a temporary name, checked, renamed last; a half-written one is never picked.

RUN/checkpoints/step_000010/
  state/          tensors, in the format of PyTorch Distributed Checkpoint: every rank writes its parts; they fit any
                  number of ranks
  trainer.json    step, position in the data, random number generators
  manifest.json   size and SHA-256 of every other file; written last
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from longstrand.errors import RunFailed, UserError
from longstrand.parallel import Axis, by_first, said_once, together

FOLDER = "checkpoints"
VERSION = 1
_NAME = re.compile(r"step_(\d{6,})")
_SAVING, _DELETING = ".saving_", ".deleting_"
_REFUSALS: tuple[type[BaseException], ...] = (OSError, RuntimeError, CheckpointException)
_ALONE = Axis("world")
_log = logging.getLogger(__name__)


class BrokenCheckpoint(UserError):
    """A checkpoint folder is not whole."""


def save_checkpoint(
    run: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    trainer: Mapping[str, Any],
    world: Axis = _ALONE,
) -> Path:
    """Writes a checkpoint and returns its folder, which appears only once it is whole and on the disk.

    All ranks call it; each writes its parts, and the first one what is left.

    Args:
        run: the run's folder, on a file system that all ranks share.
        step: optimizer steps taken.
        tensors: everything to keep, by a unique name; sharded ones, or those that every rank holds whole.
        trainer: the rest, as JSON allows it; that of the first rank counts.

    Raises:
        RunFailed: on all ranks: the disk has not the space, or does not take a file of one of them. Older checkpoints
            are untouched.
    """
    checkpoints = run / FOLDER
    target = checkpoints / f"step_{step:06d}"
    temporary = checkpoints / f"{_SAVING}{target.name}"

    @_written(checkpoints, step, _REFUSALS)
    def begin() -> None:
        checkpoints.mkdir(parents=True, exist_ok=True)
        require_space(run, tensors, step)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()

    @_written(checkpoints, step, _REFUSALS)
    def finish() -> None:
        _write_rest(temporary, step, trainer)
        check_checkpoint(temporary)
        _delete(target)
        temporary.rename(target)
        _sync(checkpoints)

    # Of several ranks all meet a CheckpointException; a RuntimeError in an exchange says that another rank is gone.
    of_all: tuple[type[BaseException], ...] = (CheckpointException,)
    try:
        by_first(world, begin)
        with (
            said_once(world, RunFailed),
            _written(checkpoints, step, of_all if world.size > 1 else _REFUSALS),
        ):
            _write_tensors(temporary / "state", tensors, world)
        by_first(world, finish)
    except RunFailed:
        if world.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return target


def load_checkpoint(folder: Path, tensors: Mapping[str, Tensor], *, world: Axis = _ALONE) -> dict[str, Any]:
    """Fills tensors in place and returns what was saved as `trainer`.

    All ranks of `world` call it, whatever the number of ranks that wrote the checkpoint; each reads its own rows.

    Args:
        folder: a checkpoint.
        tensors: names, shapes and dtypes must be those of the checkpoint's tensors.

    Raises:
        BrokenCheckpoint: the checkpoint is not whole.
        UserError: it holds other tensors.
    """
    trainer = by_first(world, lambda: check_checkpoint(folder))
    with together(world):
        require_same(folder, tensors)
        read_tensors(folder, tensors)
    return trainer


def require_same(folder: Path, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
    """Compares names, shapes and dtypes with those of a checkpoint's tensors that start with the prefix.

    Raises:
        UserError: what differs.
    """
    held = FileSystemReader(folder / "state").read_metadata().state_dict_metadata
    _compare(folder, {name: value for name, value in held.items() if name.startswith(prefix)}, tensors)


def read_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fills tensors of a checkpoint in place, without a word to other ranks: each rank knows what it wants."""
    with _one_process():
        load(dict(tensors), storage_reader=FileSystemReader(folder / "state"), no_dist=True)


def check_checkpoint(folder: Path) -> dict[str, Any]:
    """Reads every file of a checkpoint against its manifest and returns what was saved as `trainer`.

    Raises:
        BrokenCheckpoint: saying what is wrong.
    """
    manifest = _read_json(folder / "manifest.json")
    if manifest.get("version") != VERSION:
        raise BrokenCheckpoint(
            f"{folder}: manifest.json has version {manifest.get('version')}, this longstrand reads {VERSION}"
        )
    listed = manifest.get("files")
    if not isinstance(listed, dict) or "trainer.json" not in listed:
        raise BrokenCheckpoint(f"{folder}: manifest.json lists no files; it was not written by longstrand")
    for name, expected in listed.items():
        _check_file(folder, name, expected)
    if extra := sorted(_names(folder) - set(listed) - {"manifest.json"}):
        raise BrokenCheckpoint(f"{folder}: {extra[0]} is not in manifest.json; remove it")
    trainer = _read_json(folder / "trainer.json")
    named = _NAME.fullmatch(folder.name.removeprefix(_SAVING))
    if named is None or trainer.get("step") != int(named[1]):
        raise BrokenCheckpoint(f"{folder}: holds step {trainer.get('step')}, which is not what its name says")
    return trainer


def latest_checkpoint(run: Path) -> Path | None:
    """The newest whole checkpoint of a run, or None; each broken one passed over is named in a warning."""
    for folder in _checkpoints(run):
        try:
            check_checkpoint(folder)
        except BrokenCheckpoint as error:
            _log.warning("skipped a broken checkpoint: %s", error)
            continue
        return folder
    return None


def has_checkpoint(run: Path) -> bool:
    """Whether a run has a folder with the name of a checkpoint, whole or not."""
    return bool(_checkpoints(run))


def prune_checkpoints(run: Path, keep: int) -> None:
    """Deletes all but the newest `keep` checkpoints; call it only once the newest is whole."""
    for folder in _checkpoints(run)[keep:]:
        _delete(folder)


def set_broken_aside(run: Path, newest: Path) -> None:
    """Renames what is newer than the newest whole checkpoint to `broken_step_...`; a new one may take its name."""
    for folder in _checkpoints(run):
        if folder.name == newest.name:
            return
        aside = folder.with_name(f"broken_{folder.name}")
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
        _log.warning("%s is kept as %s", folder.name, aside.name)


def remove_unfinished(run: Path) -> int:
    """Removes what a killed run left while it saved or deleted; returns how many folders."""
    checkpoints = run / FOLDER
    stale = [path for start in (_SAVING, _DELETING) for path in checkpoints.glob(f"{start}*")]
    for path in stale:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return len(stale)


def checkpoint_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of a checkpoint on disk, at most: the tensors, 2 KiB around each part, and 1 MiB for the rest."""
    return sum(tensor.nbytes + 2048 * _num_parts(tensor) for tensor in tensors.values()) + 2**20


def require_space(run: Path, tensors: Mapping[str, Tensor], step: int) -> None:
    """Checks that the disk has room for one more checkpoint; old ones go only once a new one is whole.

    Raises:
        RunFailed: with the bytes needed and free.
    """
    needed, free = checkpoint_bytes(tensors), shutil.disk_usage(run).free
    if free < needed:
        raise RunFailed(
            f"{run / FOLDER}: the checkpoint of step {step} needs {needed / 1e6:,.1f} MB and "
            f"{free / 1e6:,.1f} MB are free; make room, then go on with --resume"
        )


@contextmanager
def _written(checkpoints: Path, step: int, kinds: tuple[type[BaseException], ...]) -> Iterator[None]:
    """Says of such an error which checkpoint is not written, and what is left."""
    try:
        yield
    except kinds as error:
        raise RunFailed(
            f"{checkpoints}: the checkpoint of step {step} cannot be written ({_reason(error)}); "
            "older checkpoints are untouched; make room or choose another disk, then go on with --resume"
        ) from error


def _write_tensors(folder: Path, tensors: Mapping[str, Tensor], world: Axis) -> None:
    """Every rank writes and syncs a file; torch gathers the errors, and the first rank lists what is where."""
    writer = FileSystemWriter(folder)
    if world.size > 1:
        save(dict(tensors), storage_writer=writer)
        return
    with _one_process():
        save(dict(tensors), storage_writer=writer, no_dist=True)


def _num_parts(tensor: Tensor) -> int:
    return tensor.device_mesh.size() if isinstance(tensor, DTensor) else 1


def _write_rest(folder: Path, step: int, trainer: Mapping[str, Any]) -> None:
    (folder / "trainer.json").write_text(json.dumps({"step": step, **trainer}), encoding="utf-8")
    files = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": _sha256(folder / name)}
        for name in _names(folder)
    }
    manifest = {"version": VERSION, "files": files}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for path in (*(folder / name for name in files), folder / "manifest.json", folder / "state", folder):
        _sync(path)


@contextmanager
def _one_process() -> Iterator[None]:
    """Without the notice that this is one process, which torch gives although it was told so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _compare(folder: Path, held: Mapping[str, Any], wanted: Mapping[str, Tensor]) -> None:
    if absent := sorted(wanted.keys() - held.keys()):
        raise UserError(f"{folder}: has no {absent[0]} ({len(absent)} absent); it belongs to another recipe")
    if extra := sorted(held.keys() - wanted.keys()):
        raise UserError(
            f"{folder}: holds {extra[0]}, unknown here ({len(extra)} such); it belongs to another recipe"
        )
    for name, tensor in wanted.items():
        found = held[name]
        if not isinstance(found, TensorStorageMetadata):
            raise UserError(f"{folder}: {name} is not a tensor; it belongs to another recipe")
        if found.size != tensor.shape:
            raise UserError(
                f"{folder}: {name} has shape {list(found.size)}, this model needs {list(tensor.shape)}; "
                "it belongs to another recipe"
            )
        if found.properties.dtype != tensor.dtype:
            raise UserError(
                f"{folder}: {name} is {_word(found.properties.dtype)}, this run needs {_word(tensor.dtype)}; "
                "use the run.dtype it was trained with"
            )


def _check_file(folder: Path, name: str, expected: object) -> None:
    if not isinstance(expected, dict) or not {"bytes", "sha256"} <= set(expected):
        raise BrokenCheckpoint(f"{folder}: manifest.json has no size and SHA-256 of {name}; it was damaged")
    path = folder / name
    if not path.is_file():
        raise BrokenCheckpoint(f"{folder}: {name} is absent; it was cut or a file was removed")
    if path.stat().st_size != expected["bytes"]:
        raise BrokenCheckpoint(
            f"{folder}: {name} has {path.stat().st_size} bytes, must have {expected['bytes']}; it was cut"
        )
    if _sha256(path) != expected["sha256"]:
        raise BrokenCheckpoint(
            f"{folder}: {name} has another SHA-256 than manifest.json says; it was damaged"
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BrokenCheckpoint(f"{path.parent}: {path.name} is absent; the save never finished") from error
    except (ValueError, RecursionError, OSError) as error:
        raise BrokenCheckpoint(f"{path.parent}: {path.name} is not JSON; it was damaged") from error
    if not isinstance(value, dict):
        raise BrokenCheckpoint(f"{path.parent}: {path.name} is not a JSON object; it was damaged")
    return value


def _checkpoints(run: Path) -> list[Path]:
    """Folders with the name of a checkpoint, newest first."""
    found = [
        (int(name[1]), path) for path in (run / FOLDER).glob("step_*") if (name := _NAME.fullmatch(path.name))
    ]
    return [path for _, path in sorted(found, reverse=True)]


def _delete(folder: Path) -> None:
    """Deletes a checkpoint; its name goes first: a kill in between leaves nothing that looks whole."""
    if not folder.exists():
        return
    doomed = folder.with_name(_DELETING + folder.name)
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def _names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _word(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
