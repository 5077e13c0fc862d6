"""The safetensors files of a folder: opened with checks, read tensor by tensor, written in a stream."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from longstrand.errors import UserError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
FP8 = "F8_E4M3"
_OTHER = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_COPY_BYTES = 1 << 24


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, as the file describes it."""

    file: Path
    dtype: str  # safetensors' name: "BF16", "F32", "F8_E4M3", ...
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """A tensor to be written: what the header says, and where the numbers come from when their turn comes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    source: Callable[[], Iterable[memoryview | bytes]]


class WeightFiles:
    """The tensors of a folder by name; a context manager that keeps its files open (mapped, not read)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stored: dict[str, Stored] = {}
        self._open: dict[Path, Any] = {}
        self._headers: dict[Path, tuple[Mapping[str, Any], int]] = {}
        self._stack = ExitStack()
        try:
            self._find()
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Gives its files back."""
        self._stack.close()

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """A tensor, or some of its rows, in the dtype of the file."""
        file = self._open[self.stored[name].file]
        try:
            return file.get_tensor(name) if rows is None else file.get_slice(name)[rows[0] : rows[1]]
        except (SafetensorError, OSError) as error:
            raise UserError(f"{self.stored[name].file}: {name} cannot be read: {error}") from error

    def copied(self, name: str, new_name: str) -> Entry:
        """A tensor to be passed on byte by byte, whatever its dtype."""
        stored = self.stored[name]
        if stored.file not in self._headers:
            self._headers[stored.file] = _header(stored.file)
        header, data_start = self._headers[stored.file]
        first, last = header[name]["data_offsets"]

        def source() -> Iterator[bytes]:
            with stored.file.open("rb") as file:
                file.seek(data_start + first)
                for start in range(first, last, _COPY_BYTES):
                    yield file.read(min(last - start, _COPY_BYTES))

        return Entry(new_name, stored.dtype, stored.shape, last - first, source)

    def _find(self) -> None:
        if not self.folder.is_dir():
            raise UserError(f"{self.folder}: no such folder; a checkpoint is a folder with safetensors files")
        index, single = self.folder / INDEX, self.folder / SINGLE
        if index.exists() and single.exists():
            raise UserError(f"{self.folder}: both {SINGLE} and {INDEX}; remove the one that does not belong")
        for path in (index, single):
            if path.is_symlink() and not path.exists():
                raise UserError(
                    f"{path}: links to {path.readlink()}, which is not there; copy the file itself"
                )
            if path.is_dir():
                raise UserError(f"{path}: a folder, must be a file; copy it again")
        if index.exists():
            self._add_shards(index)
        elif single.exists():
            self._add(single)
        else:
            others = sorted(file.name for pattern in _OTHER for file in self.folder.glob(pattern))
            found = f"only {others[0]}" if others else "no weights"
            raise UserError(f"{self.folder}: {found}; the weights must be {SINGLE}, or shards and {INDEX}")

    def _add_shards(self, index: Path) -> None:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{index}: weight_map is missing or empty; it must map tensors to shards")
        for name, file in weight_map.items():
            if not isinstance(file, str):
                raise UserError(f"{index}: weight_map has {file!r} for {name}; it must name a shard's file")
        for shard in sorted(set(weight_map.values())):
            example = next(name for name, file in weight_map.items() if file == shard)
            if not (self.folder / shard).is_file():
                raise UserError(
                    f"{self.folder / shard}: this shard is missing; {INDEX} keeps {example} in it"
                )
            self._add(self.folder / shard)
        for name, shard in weight_map.items():
            if name not in self.stored or self.stored[name].file != self.folder / shard:
                raise UserError(
                    f"{self.folder / shard}: {name} is not in this shard, although {INDEX} says so"
                )
        for name, stored in self.stored.items():
            if name not in weight_map:
                raise UserError(f"{stored.file}: {name} is in this shard, although {INDEX} does not say so")

    def _add(self, path: Path) -> None:
        try:
            file = self._stack.enter_context(safe_open(path, framework="pt"))
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                part = file.get_slice(name)
                self.stored[name] = Stored(path, part.get_dtype(), tuple(part.get_shape()))
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: not a whole safetensors file ({error}); copy it again") from error
        self._open[path] = file


def read_json(path: Path) -> dict[str, Any]:
    """An object from a JSON file.

    Raises:
        UserError: the file is missing, is not JSON, or holds something else than an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; check the path") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON: {error}; copy it again") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds {type(value).__name__}, must hold an object; copy it again")
    return value


def nearest(name: str, names: Iterable[str]) -> str:
    """ "; the nearest is ..." for a message, or nothing."""
    found = get_close_matches(name, list(names), n=1)
    return f"; the nearest name is {found[0]}" if found else ""


def computed(name: str, dtype: str, shape: tuple[int, ...], tensor: Callable[[], Tensor]) -> Entry:
    """A tensor made when its turn comes; `tensor` returns it in the dtype that the header says."""

    def source() -> Iterator[memoryview]:
        value = tensor().detach().contiguous().cpu()
        yield value.reshape(-1).view(torch.uint8).numpy().data

    return Entry(name, dtype, shape, math.prod(shape) * DTYPES[dtype].itemsize, source)


def write_file(path: Path, entries: list[Entry]) -> None:
    """A safetensors file, its tensors made and written one after the other, then synced to the disk.

    Wide dtypes come first: a reader maps the file, and needs each tensor aligned to the size of its numbers.
    Bytes of memory: one tensor at a time.
    """
    entries = sorted(entries, key=lambda entry: -entry.num_bytes / max(math.prod(entry.shape), 1))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        end = offset + entry.num_bytes
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            for block in entry.source():
                file.write(block)
        file.flush()
        os.fsync(file.fileno())


def _header(path: Path) -> tuple[Mapping[str, Any], int]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(length)), 8 + length
