"""A model as a Hugging Face folder that transformers loads: weights, config and the other files."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from longstrand.architecture import Architecture
from longstrand.errors import RunFailed, UserError
from longstrand.model.hf.config import written_config
from longstrand.model.hf.files import DTYPES, FP8, INDEX, SINGLE, Entry, WeightFiles, computed, write_file
from longstrand.model.hf.fp8 import dequantise, scale_name
from longstrand.model.hf.names import PREFIX, Part, full_name, published_parts
from longstrand.model.hf.read import SourceInfo, named_tensors
from longstrand.plan.parameters import keeps_float32

SHARD_BYTES = 5 * 10**9
# What stands beside the weights and describes them no less after training: tokenizer, generation, licence.
_COPIED = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "LICENSE*", "NOTICE*")


def save_from(
    model: nn.Module,
    folder: Path,
    source: SourceInfo | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a model into a new folder, beside its final place first, renamed when whole.

    Names are the published ones, with the source's layout where it has another (fused experts, transformers'
    module names). Each tensor has the dtype that the source has for it (FP8: BF16, and the quantization entry
    goes), or without a source float32, or float64 for a float64 model. A number that loading rounded and nothing
    has moved since is written as the source has it.

    Args:
        model: has `architecture` and the parameters of `plan.parameters.parameter_shapes`.
        source: that of `FolderWeights`. Vision and multi-token-prediction tensors and the tokenizer's files
            are copied from its folder; without vision the config gets a vision tower of the smallest kind.
        dtype: writes this dtype instead; float32-kept tensors are not written narrower than float32.
        shard_bytes: above this size the weights are cut into shards.

    Raises:
        UserError: the folder exists and is not empty, or the source's files are gone.
        RunFailed: the disk is full or not writable, or a number overflows the dtype it is written in.
    """
    architecture: Architecture = model.architecture  # type: ignore[assignment]
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: exists already; name a new folder, or remove it")
    part_folder = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        part_folder = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".part", dir=folder.parent))
        part_folder.chmod(0o755)
        _fill(model, architecture, part_folder, source, dtype, shard_bytes)
        _sync(part_folder)
        os.replace(part_folder, folder)
        _sync(folder.parent)
    except OSError as error:
        raise RunFailed(f"{folder}: cannot write: {error.strerror}; nothing was left there") from error
    finally:
        if part_folder is not None:
            shutil.rmtree(part_folder, ignore_errors=True)


def _fill(
    model: nn.Module,
    architecture: Architecture,
    folder: Path,
    source: SourceInfo | None,
    dtype: torch.dtype | None,
    shard_bytes: int,
) -> None:
    tensors = named_tensors(model, architecture)
    if source is None:
        weights = _Weights(tensors, published_parts(architecture), None, None, dtype)
        _write_weights(folder, weights.entries(), shard_bytes)
    else:
        with WeightFiles(source.folder) as files:
            weights = _Weights(tensors, list(source.parts), source, files, dtype)
            aside = [_aside(files, name, source) for name in sorted(source.aside)]
            entries = weights.entries() + [entry for entry in aside if entry is not None]
            _write_weights(folder, entries, shard_bytes)
        _copy_files(source.folder, folder)
    drawn = torch.float64 if tensors["embed_tokens.weight"].dtype == torch.float64 else torch.float32
    config = written_config(architecture, None if source is None else source.config, dtype, drawn)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class _Weights:
    """The tensors of a model on their way to the files."""

    tensors: dict[str, Tensor]
    parts: list[Part]
    source: SourceInfo | None
    files: WeightFiles | None  # of the source, open
    asked: torch.dtype | None

    def entries(self) -> list[Entry]:
        """One entry per tensor of the files, a fused one gathered from its parameters."""
        gathered: dict[str, list[Part]] = {}
        for part in self.parts:
            gathered.setdefault(part.tensor, []).append(part)
        return [self._entry(name, parts) for name, parts in gathered.items()]

    def _entry(self, name: str, parts: list[Part]) -> Entry:
        ordered = sorted(parts, key=lambda part: part.rows or (0, 0))
        first = self.tensors[parts[0].parameter][parts[0].index]
        fused = parts[0].rows is not None
        shape = (len(parts) * first.shape[0], *first.shape[1:]) if fused else tuple(first.shape)
        kind = self._dtype(name, parts[0].parameter)

        def tensor() -> Tensor:
            pieces = [self.tensors[part.parameter].detach()[part.index] for part in ordered]
            value = self._unmoved(name, torch.cat(pieces) if fused else pieces[0]).to(DTYPES[kind])
            if not torch.isfinite(value).all():
                raise RunFailed(f"{full_name(name)}: holds numbers that {kind} cannot; nothing was saved")
            return value

        return computed(full_name(name), kind, shape, tensor)

    def _dtype(self, name: str, parameter: str) -> str:
        names = {dtype: name for name, dtype in DTYPES.items()}
        if self.asked is not None:
            narrow = keeps_float32(parameter) and self.asked.itemsize < torch.float32.itemsize
            return "F32" if narrow else names[self.asked]
        if self.source is not None:
            stored = self._stored(name)
            return "BF16" if stored == FP8 else stored
        return "F64" if self.tensors[parameter].dtype == torch.float64 else "F32"

    def _stored(self, name: str) -> str:
        assert self.source is not None
        return self.source.dtypes[full_name(name, self.source.prefix)]

    def _unmoved(self, name: str, value: Tensor) -> Tensor:
        """Numbers that loading rounded and nothing has moved since, as the source has them."""
        if self.files is None or self.source is None or self._stored(name) == FP8:
            return value
        stored = DTYPES[self._stored(name)]
        if torch.promote_types(stored, value.dtype) == value.dtype:
            return value
        value = value.cpu()
        original = self.files.read(full_name(name, self.source.prefix))
        return torch.where(original.to(value.dtype) == value, original, value.to(stored))


def _aside(files: WeightFiles, name: str, source: SourceInfo) -> Entry | None:
    """A tensor that is not ours, byte by byte; an FP8 one as BF16, since the quantization entry goes."""
    if name not in files.stored:
        raise UserError(f"{source.folder}: {name} was there when the model was loaded and is not there now")
    stored = files.stored[name]
    quantised = name.removesuffix("_scale_inv")
    if quantised != name and source.dtypes.get(quantised) == FP8:
        return None
    outer = source.prefix.removesuffix("language_model.")
    new_name = PREFIX + name.removeprefix(source.prefix)
    if not name.startswith(source.prefix + "layers."):
        new_name = "model." + name.removeprefix(outer) if name.startswith(outer + "visual.") else name
    if stored.dtype != FP8:
        return files.copied(name, new_name)
    return computed(new_name, "BF16", stored.shape, lambda: _widened(files, name))


def _widened(files: WeightFiles, name: str) -> Tensor:
    return dequantise(files.read(name), files.read(scale_name(name))).to(torch.bfloat16)


def _write_weights(folder: Path, entries: list[Entry], shard_bytes: int) -> None:
    total = sum(entry.num_bytes for entry in entries)
    free = shutil.disk_usage(folder).free
    if total > free:
        raise RunFailed(f"{folder.parent}: the weights need {total:,} bytes, and {free:,} are free")
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.num_bytes
    if len(shards) == 1:
        write_file(folder / SINGLE, shards[0])
    else:
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
        weight_map = {e.name: name for name, shard in zip(names, shards, strict=True) for e in shard}
        for name, shard in zip(names, shards, strict=True):
            write_file(folder / name, shard)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    with WeightFiles(folder) as written:
        expected = {entry.name: (entry.dtype, tuple(entry.shape)) for entry in entries}
        found = {name: (stored.dtype, stored.shape) for name, stored in written.stored.items()}
    if found != expected:
        raise RunFailed(f"{folder.parent}: what was written reads back otherwise; check the disk")


def _copy_files(source: Path, folder: Path) -> None:
    for pattern in _COPIED:
        for file in source.glob(pattern):
            if file.is_file() and file.name not in ("config.json", INDEX):
                shutil.copyfile(file, folder / file.name)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
