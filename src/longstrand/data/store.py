"""The memory-mapped store of a file's letters or tokens, and the cache that keeps it by content."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from longstrand.data.letters import reverse_complement
from longstrand.errors import UserError

_log = logging.getLogger(__name__)

VERSION = 2
HAS_N, HAS_LOWER, NOT_SUPERVISED = 1, 2, 4
"""Bits of a mark: a token spans an N, spans a lower-case letter, is no target of the loss (prompt, loss_mask)."""

_BLOCK = 1 << 24
_STALE_SECONDS = 86_400
_ONE_SPELLING = bytes.maketrans(b"acgturyswkmbdhvnxU", b"ACGTTRYSWKMBDHVNXT")


@dataclass(frozen=True)
class Store:
    """The records of one file, in its order, without gaps: record r is `values[starts[r]:starts[r + 1]]`.

    Attributes:
        source: the file it was built from.
        digest: of what it was built from and how; equal digests are equal stores.
        values: memory-mapped uint8 letters as they stand in the file (case kept), or uint32 tokens.
        marks: uint8 per value (see HAS_N), or None where all are 0.
        starts: int64[R+1].
        lines: int64[R], the line of each record in the file, from 1.
        names: of each record.
        content: uint8[R, 16], a hash of each record's letters that is the same for both strands (U as T, any
            case), or of its tokens.
        flipped: bool[R], whether that hash was taken on the other strand.
        facts: what the reader counted on the way; `max_value` is the largest token.
    """

    source: Path
    digest: str
    values: np.ndarray
    marks: np.ndarray | None
    starts: np.ndarray
    lines: np.ndarray
    names: list[str]
    content: np.ndarray
    flipped: np.ndarray
    facts: dict[str, Any]

    @property
    def holds_letters(self) -> bool:
        return self.values.dtype == np.uint8

    @property
    def num_records(self) -> int:
        return len(self.starts) - 1

    def record_at(self, position: int) -> int:
        """The record that holds the value at `position`."""
        return int(np.searchsorted(self.starts, position, side="right")) - 1

    def place(self, record: int) -> str:
        """How a message names a record: file, line and name."""
        return f"{self.source}:{self.lines[record]}: record {self.names[record]!r}"


def content_digest(path: Path) -> str:
    """SHA-256 of the file's bytes (about 1 GB/s)."""
    try:
        if not path.is_file():
            raise UserError(
                f"{path}: {'not a regular file' if path.exists() else 'no such file'}; give a file"
            )
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def open_store(
    cache: Path, source: Path, key: str, dtype: type[np.generic], build: Callable[[Writer], dict[str, Any]]
) -> Store:
    """The store under `key`, built where the cache lacks it or holds a damaged one.

    It is built in a folder of its own and renamed into place when complete, so a killed build leaves nothing that
    counts; of two processes at once one builds and the other waits for it. Opening checks every byte's CRC.

    Args:
        key: everything the store's content depends on: the source's digest, the reader, its policies.
        build: writes the records and returns the facts to keep with them.

    Raises:
        UserError: the cache folder cannot be written (full disk, no permission); or what `build` raises.
    """
    digest = hashlib.sha256(f"longstrand {VERSION} {key}".encode()).hexdigest()[:32]
    folder = cache.expanduser() / digest
    if (store := _open(folder, source, digest, dtype)) is not None:
        return store
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.parent / f".{digest}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _open(folder, source, digest, dtype) is None:  # no other process was first
                _log.info("reading %s; it is kept in %s", source, folder)
                _build(folder, dtype, build)
    except OSError as error:
        raise UserError(
            f"{cache}: the cache of encoded inputs cannot be written: {error.strerror}; "
            "free space there or set data.cache to another folder"
        ) from error
    if (store := _open(folder, source, digest, dtype)) is None:
        raise UserError(f"{folder}: what was just written reads back differently; check the disk")
    return store


class Writer:
    """Writes a store's files into a folder; records come one after the other, their values in pieces."""

    def __init__(self, folder: Path, dtype: type[np.generic]) -> None:
        self.folder, self.dtype = folder, np.dtype(dtype)
        self._open_files = ExitStack()
        self._files: dict[str, BinaryIO] = {}
        self._starts: list[int] = []
        self._lines: list[int] = []
        self._names: list[str] = []
        self._size = 0
        self._max = 0
        self._marked = False

    def __enter__(self) -> Writer:
        for name in ("values", "marks"):
            self._files[name] = self._open_files.enter_context(open(self.folder / name, "wb"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open_files.close()

    def begin(self, name: str, line: int) -> None:
        """Opens the next record; one that gets no value is left out."""
        if self._starts and self._starts[-1] == self._size:
            for entries in (self._starts, self._lines, self._names):
                entries.pop()
        self._starts.append(self._size)
        self._lines.append(line)
        self._names.append(name)

    def add(self, values: bytes | np.ndarray, marks: np.ndarray | None = None) -> None:
        """Appends values to the open record, with a mark each (0 where none are given)."""
        data = values if isinstance(values, bytes) else np.ascontiguousarray(values, self.dtype).tobytes()
        count = len(data) // self.dtype.itemsize
        if isinstance(values, np.ndarray):
            self._max = max(self._max, int(values.max(initial=0)))
        self._files["values"].write(data)
        if marks is not None and not self._marked and marks.any():
            self._marked = True
            for start in range(0, self._size, _BLOCK):
                self._files["marks"].write(bytes(min(_BLOCK, self._size - start)))
        if self._marked:
            given = np.zeros(count, np.uint8) if marks is None else np.ascontiguousarray(marks, np.uint8)
            self._files["marks"].write(given.tobytes())
        self._size += count

    def finish(self, facts: dict[str, Any]) -> None:
        """Writes the index: where records start, their names, what they contain, and every file's CRC."""
        self.begin("", 0)
        starts = np.array(self._starts, np.int64)
        self._open_files.close()
        values = np.memmap(self.folder / "values", self.dtype, "r") if self._size else np.empty(0, self.dtype)
        content, flipped = _contents(values, starts)
        lines = np.array(self._lines[:-1], np.int64)
        with open(self.folder / "index.npz", "wb") as file:
            np.savez(file, starts=starts, lines=lines, content=content, flipped=flipped)
        crcs = {name: _crc(self.folder / name) for name in ("values", "marks", "index.npz")}
        body = json.dumps(
            {"crc": crcs, "facts": {**facts, "max_value": self._max}, "names": self._names[:-1]}
        )
        text = json.dumps({"crc": zlib.crc32(body.encode()), "body": body})
        (self.folder / "store.json").write_text(text, encoding="utf-8")


def _open(folder: Path, source: Path, digest: str, dtype: type[np.generic]) -> Store | None:
    """The store in `folder`, or None where it is absent or any byte of it is not what was written."""
    try:
        text = json.loads((folder / "store.json").read_bytes())
        if zlib.crc32(text["body"].encode()) != text["crc"]:
            return None
        body = json.loads(text["body"])
        if any(_crc(folder / name) != crc for name, crc in body["crc"].items()):
            return None
        with np.load(folder / "index.npz") as index:
            arrays = {name: index[name] for name in index.files}
        marked = (folder / "marks").stat().st_size > 0
        values = np.memmap(folder / "values", dtype, "r") if arrays["starts"][-1] else np.empty(0, dtype)
        marks = np.memmap(folder / "marks", np.uint8, "r") if marked else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Store(source, digest, values, marks, names=body["names"], facts=body["facts"], **arrays)


def _build(folder: Path, dtype: type[np.generic], build: Callable[[Writer], dict[str, Any]]) -> None:
    """Writes `folder` by way of a folder of its own; the caller holds the lock."""
    _remove_stale(folder.parent)
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".part", dir=folder.parent))
    part.chmod(0o755)  # a cache may serve several users
    try:
        with Writer(part, dtype) as writer:
            writer.finish(build(writer))
        if folder.exists():  # damaged; who still reads it keeps its mapping
            shutil.rmtree(folder)
        os.rename(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _remove_stale(cache: Path) -> None:
    """Removes what killed builds left more than a day ago."""
    for part in cache.glob(".*.part"):
        try:
            old = time.time() - part.stat().st_mtime > _STALE_SECONDS
        except FileNotFoundError:
            continue
        if old:
            shutil.rmtree(part, ignore_errors=True)


def _crc(path: Path) -> int:
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return crc


def _contents(values: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`Store.content` and `Store.flipped`; marks are left out, since a mask does not make the same text another."""
    content = np.zeros((len(starts) - 1, 16), np.uint8)
    flipped = np.zeros(len(starts) - 1, bool)
    for record in range(len(starts) - 1):
        start, end = int(starts[record]), int(starts[record + 1])
        hashes = [hashlib.blake2b(digest_size=16)]
        if values.dtype == np.uint8:
            hashes.append(hashlib.blake2b(digest_size=16))
            for at in range(start, end, _BLOCK):
                hashes[0].update(values[at : min(at + _BLOCK, end)].tobytes().translate(_ONE_SPELLING))
            for at in range(end, start, -_BLOCK):
                block = reverse_complement(values[max(at - _BLOCK, start) : at])
                hashes[1].update(block.tobytes().translate(_ONE_SPELLING))
        else:
            hashes[0].update(values[start:end].tobytes())
        digests = [hash_.digest() for hash_ in hashes]
        content[record] = np.frombuffer(min(digests), np.uint8)
        flipped[record] = min(digests) != digests[0]
    return content, flipped
