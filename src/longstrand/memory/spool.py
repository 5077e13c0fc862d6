"""A spool: one file of a pass for streams that no memory holds, read and written with direct I/O.

The file is preallocated, so that a full disk shows before the pass begins; it is named after the process, locked while
it is open, and removed when it is closed, at the latest when the process ends. A killed process leaves its file without
its lock: the next one that opens a spool in the folder removes it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import count
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longstrand.errors import RunFailed
from longstrand.memory.slots import PAGE, Transfer

THREADS = 3
_DIRECT = getattr(os, "O_DIRECT", 0)
_NAME = "longstrand-{}.spool"
_OWN = re.compile(r"longstrand-\d+-\d+\.spool")
_numbers = count()
_log = logging.getLogger(__name__)


class Spool:
    """A medium in a file. Host memory: the tiles under way, each in whole pages of its own.

    Args:
        folder: made if it is not there; it stays.
        num_bytes: allocated at once.
        device: where loaded tiles go.

    Raises:
        RunFailed: the folder cannot be used, or has no room.
    """

    def __init__(self, folder: Path, num_bytes: int, device: torch.device) -> None:
        self._device, self._num_bytes = device, num_bytes
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="spool")
        try:
            self.path, self._file = _create_in(folder, num_bytes)
        except OSError as error:
            raise RunFailed(
                f"memory.spool = {folder}: a spool cannot be made there ({error.strerror}); "
                "set memory.spool to a folder on a local disk"
            ) from error
        self._closed = weakref.finalize(self, _remove, self.path, self._file)
        try:
            _allocate(self._file, num_bytes)
            _require_direct(self._file, folder)
        except OSError as error:
            self.close()
            raise _failure(self.path, f"{num_bytes:,} bytes cannot be allocated", error) from error

    def save(self, at: int, value: Tensor, dtype: torch.dtype) -> Transfer:
        pages = _pages(value.numel() * dtype.itemsize)
        _as_tile(pages, tuple(value.shape), dtype).copy_(value)
        return self._threads.submit(self._move, os.pwritev, pages, at)

    def load(self, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> Transfer:
        pages = _pages(prod(shape) * dtype.itemsize)
        moving = self._threads.submit(self._move, os.preadv, pages, at)
        return _Load(moving, _as_tile(pages, shape, dtype), self._device)

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._closed()

    def _move(self, move: Callable[..., int], pages: Tensor, at: int) -> None:
        """Reads or writes all of the pages; both give up the interpreter's lock."""
        view, moved = _bytes_of(pages), 0
        try:
            while moved < len(view):
                step = move(self._file, [view[moved:]], at + moved)
                if step == 0:
                    raise OSError(errno.EIO, "the file ends too early")
                moved += step
        except OSError as error:
            verb = "written" if move is os.pwritev else "read"
            what = f"{len(view):,} bytes at {at:,} of {self._num_bytes:,} cannot be {verb}"
            raise _failure(self.path, what, error) from error


def existing(folder: Path) -> Path:
    """The folder, or where it will be made."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def require_room(folder: Path, num_bytes: int, num_ranks: int = 1) -> None:
    """Refuses spools that the folder's disk has no room for; writes nothing.

    Args:
        num_bytes: of all spools together.
        num_ranks: how many ranks write one there.

    Raises:
        RunFailed: naming both numbers.
    """
    disk = os.statvfs(existing(folder))
    free = disk.f_bavail * disk.f_frsize
    if num_bytes > free and disk.f_blocks:  # a file system without blocks has a reason of its own
        who = "a pass needs" if num_ranks == 1 else f"the {num_ranks} ranks here need"
        raise RunFailed(
            f"memory.spool = {folder}: {who} {num_bytes:,} bytes there, and {free:,} are free; make room, "
            "set memory.spool to a folder on another disk, raise memory.keep_every, or lower data.length"
        )


def remove_stale_spools(folder: Path) -> int:
    """Removes spools that killed processes left, says so in one line, and returns the bytes freed.

    A spool that a living process has open is locked and stays.
    """
    removed, freed = 0, 0
    for path in sorted(folder.glob(_NAME.format("*"))):
        if not _OWN.fullmatch(path.name) or path.is_symlink() or not path.is_file():
            continue
        try:
            file = os.open(path, os.O_RDWR)
        except OSError:  # removed meanwhile, or another user's
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            size = os.fstat(file).st_blocks * 512
            path.unlink()
            removed, freed = removed + 1, freed + size
        except OSError:  # locked
            pass
        finally:
            os.close(file)
    if removed:
        spools = "1 spool" if removed == 1 else f"{removed} spools"
        _log.warning("%s: removed %s of killed runs and freed %s bytes", folder, spools, f"{freed:,}")
    return freed


def _create_in(folder: Path, num_bytes: int) -> tuple[Path, int]:
    """A new file in a folder, made if need be; again where a rank that ends has just removed the empty folder."""
    for last in (False, False, True):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            remove_stale_spools(folder)
            require_room(folder, num_bytes)
            return _create(folder)
        except FileNotFoundError:
            if last:
                raise
    raise AssertionError("the last try returns or raises")


def _create(folder: Path) -> tuple[Path, int]:
    """A new file, open and locked; direct where the file system allows it.

    Raises:
        OSError: the file cannot be made or locked; none is left.
    """
    while True:
        path = folder / _NAME.format(f"{os.getpid()}-{next(_numbers)}")
        file = _open_new(path)
        if file is None:
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.stat(path), os.fstat(file)):
                return path, file
        except BlockingIOError:
            # Another process takes it for stale: it came between the opening and the lock.
            pass
        except OSError:
            _remove(path, file)
            raise
        os.close(file)


def _open_new(path: Path) -> int | None:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags | _DIRECT, 0o600)
    except FileExistsError:
        return None
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    path.unlink(missing_ok=True)  # some systems have made the file when they refuse direct I/O
    return os.open(path, flags, 0o600)


def _allocate(file: int, num_bytes: int) -> None:
    """Where the file system cannot allocate, the C library writes single bytes, which direct I/O refuses."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    fcntl.fcntl(file, fcntl.F_SETFL, flags & ~_DIRECT)
    if num_bytes:
        os.posix_fallocate(file, 0, num_bytes)
    fcntl.fcntl(file, fcntl.F_SETFL, flags)


def _require_direct(file: int, folder: Path) -> None:
    """Tries one page; where direct I/O is refused, the spool goes through the page cache, and that is said."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        os.pwritev(file, [_bytes_of(_pages(PAGE).zero_())], 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(file, fcntl.F_SETFL, flags & ~_DIRECT)
    if not fcntl.fcntl(file, fcntl.F_GETFL) & _DIRECT:
        _say_buffered(folder)
    if _file_system(folder) in ("tmpfs", "ramfs"):
        _say_in_memory(folder)


def _file_system(folder: Path) -> str:
    """The kind of the file system that a folder is on; "" where the system does not say."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return ""
    inside = [(len(at), kind) for _, at, kind, *_ in mounts if folder.resolve().is_relative_to(at)]
    return max(inside, default=(0, ""))[1]


@cache
def _say_in_memory(folder: Path) -> None:
    """Once for each folder."""
    _log.warning(
        "memory.spool = %s: this file system lives in memory, so that nothing is saved; name a folder on a disk",
        folder,
    )


@cache
def _say_buffered(folder: Path) -> None:
    """Once for each folder."""
    _log.warning(
        "memory.spool = %s: this file system refuses direct I/O; the spool goes through the page cache, about a third "
        "as fast",
        folder,
    )


def _remove(path: Path, file: int) -> None:
    try:
        path.unlink(missing_ok=True)
    finally:
        os.close(file)


def _pages(num_bytes: int) -> Tensor:
    """Whole pages, aligned as direct I/O asks; the allocator gives warm ones again, where fresh ones fault."""
    size = -(-num_bytes // PAGE) * PAGE
    block = torch.empty(size + PAGE, dtype=torch.uint8)
    start = -block.data_ptr() % PAGE
    return block[start : start + size]


def _bytes_of(pages: Tensor) -> memoryview:
    return memoryview(pages.numpy())  # type: ignore[arg-type]  # numpy's stubs do not say that arrays are buffers


def _as_tile(pages: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return pages[: prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _failure(path: Path, what: str, error: OSError) -> RunFailed:
    return RunFailed(
        f"{path}: {what} ({error.strerror}); make room, or set memory.spool to a folder on another disk, and start "
        "again (a run goes on with --resume)"
    )


@dataclass(frozen=True)
class _Load:
    moving: Future[None]
    tile: Tensor
    device: torch.device

    def result(self) -> Any:
        self.moving.result()
        return self.tile.to(self.device)
