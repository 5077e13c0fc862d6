"""A model as a Hugging Face folder that transformers loads: weights, config and the other files."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from longstrand.architecture import Architecture
from longstrand.errors import RunFailed, UserError
from longstrand.hf_config_keys import OUTER
from longstrand.model.hf.files import (
    DTYPES,
    FP8,
    INDEX,
    SINGLE,
    Entry,
    WeightFiles,
    computed,
    write_file,
)
from longstrand.model.hf.fp8 import dequantise, scale_name
from longstrand.model.hf.names import (
    PREFIX,
    Part,
    full_name,
    keeps_float32,
    published_parts,
)
from longstrand.model.hf.read import SourceInfo, named_tensors

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
    goes), or without a source float32, or float64 for a float64 model.

    Args:
        model: has `architecture` and the parameters of `names.parameter_shapes`.
        source: what `load_into` returned. Vision and multi-token-prediction tensors and the tokenizer's files
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
    entries = _ours(tensors, architecture, source, dtype)
    if source is None:
        _write_weights(folder, entries, shard_bytes)
    else:
        with WeightFiles(source.folder) as files:
            aside = [_aside(files, name, source) for name in sorted(source.aside)]
            entries += [entry for entry in aside if entry is not None]
            _write_weights(folder, entries, shard_bytes)
        _copy_files(source.folder, folder)
    config = _config(architecture, source, _drawn_dtype(tensors, dtype))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _ours(
    tensors: dict[str, Tensor],
    architecture: Architecture,
    source: SourceInfo | None,
    dtype: torch.dtype | None,
) -> list[Entry]:
    """The tensors of the model under the names of the files, a fused one gathered from its parameters."""
    gathered: dict[str, list[Part]] = {}
    for part in published_parts(architecture) if source is None else source.parts:
        gathered.setdefault(part.tensor, []).append(part)
    entries = []
    for name, parts in gathered.items():
        stored = None if source is None else source.dtypes[full_name(name, source.prefix)]
        kind = _written_dtype(tensors[parts[0].parameter], parts[0].parameter, stored, dtype)
        first = tensors[parts[0].parameter][parts[0].index]
        shape = (
            tuple(first.shape) if parts[0].rows is None else (len(parts) * first.shape[0], *first.shape[1:])
        )
        entries.append(computed(full_name(name), kind, shape, _gather(tensors, parts, full_name(name), kind)))
    return entries


def _gather(tensors: dict[str, Tensor], parts: list[Part], name: str, kind: str) -> Callable[[], Tensor]:
    def gather() -> Tensor:
        ordered = sorted(parts, key=lambda part: part.rows or (0, 0))
        whole = parts[0].rows is None
        pieces = [tensors[part.parameter].detach()[part.index] for part in ordered]
        value = (pieces[0] if whole else torch.cat(pieces)).to(DTYPES[kind])
        if not torch.isfinite(value).all():
            raise RunFailed(f"{name}: holds numbers that {kind} cannot; nothing was saved")
        return value

    return gather


def _written_dtype(tensor: Tensor, parameter: str, stored: str | None, asked: torch.dtype | None) -> str:
    names = {dtype: name for name, dtype in DTYPES.items()}
    if asked is not None:
        narrow = keeps_float32(parameter) and asked.itemsize < torch.float32.itemsize
        return "F32" if narrow else names[asked]
    if stored is not None:
        return "BF16" if stored == FP8 else stored
    return "F64" if tensor.dtype == torch.float64 else "F32"


def _drawn_dtype(tensors: dict[str, Tensor], asked: torch.dtype | None) -> torch.dtype:
    double = tensors["embed_tokens.weight"].dtype == torch.float64
    return asked or (torch.float64 if double else torch.float32)


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


def _config(architecture: Architecture, source: SourceInfo | None, drawn: torch.dtype) -> dict[str, Any]:
    """The source's config without its quantization, or a new one; always around a text config."""
    dtype = str(drawn).removeprefix("torch.")
    if source is None:
        config = _around({**architecture.to_hf(), "dtype": dtype}, architecture) | {"dtype": dtype}
    elif source.config.get("text_config") is None:
        text = {key: value for key, value in source.config.items() if key not in _NOT_TEXT}
        config = _around(text | architecture.to_hf(), architecture)
        config |= {key: source.config[key] for key in (*OUTER, "dtype") if source.config.get(key) is not None}
        config["model_type"] = "glm5_next"
    else:
        config = {"vision_config": _smallest_vision(architecture)} | source.config
        config["text_config"] = dict(config["text_config"])
        config["text_config"].pop("quantization_config", None)
    config.pop("quantization_config", None)
    return config


_NOT_TEXT = {*OUTER, "architectures"} - {
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "tie_word_embeddings",
}


def _around(text: dict[str, Any], architecture: Architecture) -> dict[str, Any]:
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "text_config": text,
        "tie_word_embeddings": architecture.tie_word_embeddings,
        "vision_config": _smallest_vision(architecture),
    }


def _smallest_vision(architecture: Architecture) -> dict[str, Any]:
    """A tower that transformers can build when a text model is loaded; its weights are not in the folder."""
    return {
        "model_type": "glm5_next_vision",
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 1,
        "out_hidden_size": architecture.hidden_size,
        "projection_intermediate_size": 16,
    }


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
