"""Weights of a Hugging Face folder into a model, every tensor accounted for."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from longstrand.architecture import Architecture
from longstrand.errors import UserError
from longstrand.model.hf.files import DTYPES, FP8, WeightFiles, nearest, read_json
from longstrand.model.hf.fp8 import dequantise, scale_name, scale_shape
from longstrand.model.hf.names import Part, find_prefix, full_name, kept_aside, spellings
from longstrand.plan.parameters import Shape, parameter_shapes

_log = logging.getLogger(__name__)
_WHOLE = "copy the folder again, or save the model again"
_OF_ONE_MODEL = "take config.json and weights of one model"
_TIED_HEAD = Part("lm_head.weight", "embed_tokens.weight")


@dataclass(frozen=True)
class SourceInfo:
    """Where a model's weights came from, and what it takes to write them back alike."""

    folder: Path
    config: dict[str, Any]
    prefix: str  # before the names of the text model
    parts: tuple[Part, ...]
    dtypes: dict[str, str]  # safetensors dtype of each tensor, by its name in the files
    aside: dict[str, Path]  # vision and multi-token-prediction tensors and their files
    casts: Counter[str] = field(default_factory=Counter)  # "F32 to bfloat16": tensors cast while loading


def read_config(folder: Path) -> dict[str, Any]:
    """The config of a folder, as it is.

    Raises:
        UserError: it is missing, not JSON, or not an object.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{path}: no such file; a checkpoint folder needs its config.json")
    return read_json(path)


def read_architecture(folder: Path) -> Architecture:
    """The shape of the model in a folder; its errors name the config file."""
    return Architecture.from_file(read_config(folder), where=str(folder / "config.json"))


class FolderWeights:
    """The weights of a folder, every tensor of it accounted for; a context manager that keeps its files open.

    Attributes:
        architecture: that its config describes.
        source: what the model needs to be written back alike; `casts` are complete at the end.

    Raises:
        UserError: a file or tensor is missing, extra, wrongly shaped or typed.
    """

    def __init__(self, folder: Path) -> None:
        self.architecture = read_architecture(folder)
        self._files = WeightFiles(folder)
        try:
            self.source = _resolve(self._files, self.architecture)
        except BaseException:
            self._files.close()
            raise
        self._parts: dict[str, list[Part]] = {}
        for part in self.source.parts:
            self._parts.setdefault(part.parameter, []).append(part)

    def __enter__(self) -> FolderWeights:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._files.close()
        if error is None:
            for cast, tensors in sorted(self.source.casts.items()):
                _log.info("%s: %d tensors were cast from %s", self._files.folder, tensors, cast)

    @torch.no_grad()
    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Reads parameters and buffers of a model by name, cast to the dtype that each has; casts are counted.

        Raises:
            UserError: a number is not finite, in the file or once it is cast, or a file is cut short.
        """
        for name, target in targets.items():
            for part in self._parts[name]:
                self._fill(target.data[part.index], part)

    def _fill(self, target: Tensor, part: Part) -> None:
        tensor = _read_part(self._files, self.source, part)
        if part == _TIED_HEAD:
            _check_tied(self._files, target, tensor)
            return
        if tensor.dtype != target.dtype:
            name, word = full_name(part.tensor, self.source.prefix), str(target.dtype).removeprefix("torch.")
            self.source.casts[f"{self.source.dtypes[name]} to {word}"] += 1
            if not torch.isfinite(tensor.to(target.dtype)).all():
                raise UserError(
                    f"{self._files.stored[name].file}: {name} holds numbers beyond {word}; load it as float64"
                )
        target.copy_(tensor)


def named_tensors(model: nn.Module, architecture: Architecture) -> dict[str, Tensor]:
    """The parameters and buffers that a checkpoint holds, by name; checked against the architecture."""
    found: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    found |= {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}
    if architecture.tie_word_embeddings:
        found.pop("lm_head.weight", None)
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    expected = parameter_shapes(architecture)
    if shapes != expected:
        raise ValueError(f"model and architecture disagree: {sorted(shapes.items() ^ expected.items())}")
    return found


def _resolve(files: WeightFiles, architecture: Architecture) -> SourceInfo:
    """Which tensor holds what; every tensor of the files has exactly one use."""
    config = read_config(files.folder)
    prefix = find_prefix(files.stored)
    if prefix is None:
        name = full_name("embed_tokens.weight")
        raise UserError(f"{files.folder}: {name} is missing{nearest(name, files.stored)}; {_WHOLE}")
    shapes = parameter_shapes(architecture)
    ways = {parameter: list(spellings(parameter, shape)) for parameter, shape in shapes.items()}
    parts = [part for each in ways.values() for part in _find_spelling(files, prefix, each, ways.values())]
    if architecture.tie_word_embeddings and "lm_head.weight" in files.stored:
        parts.append(_TIED_HEAD)
    used = {full_name(part.tensor, prefix) for part in parts}
    _check_tensors(files, prefix, parts, architecture, quantised=bool(_quantization(config)))
    scales = {scale_name(name) for name in used if files.stored[name].dtype == FP8}
    aside = kept_aside(files.stored, prefix, architecture.num_hidden_layers) - used - scales
    for name, stored in files.stored.items():
        if name not in used | scales | aside:
            hint = nearest(name, used)
            raise UserError(f"{stored.file}: {name} is not a tensor of this model{hint}; {_OF_ONE_MODEL}")
    dtypes = {name: stored.dtype for name, stored in files.stored.items()}
    return SourceInfo(
        files.folder, config, prefix, tuple(parts), dtypes, {name: files.stored[name].file for name in aside}
    )


def _quantization(config: dict[str, Any]) -> object:
    return config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")


def _find_spelling(
    files: WeightFiles, prefix: str, ways: list[list[Part]], all_ways: Iterable[list[list[Part]]]
) -> list[Part]:
    """The first way to hold a parameter of which every tensor is there."""
    missing = [[p for p in way if full_name(p.tensor, prefix) not in files.stored] for way in ways]
    for way, absent in zip(ways, missing, strict=True):
        if not absent:
            return way
    started = next((i for i, way in enumerate(ways) if len(missing[i]) < len(way)), 0)
    name = full_name(missing[started][0].tensor, prefix)
    known = {full_name(part.tensor, prefix) for each in all_ways for way in each for part in way}
    hint = nearest(name, files.stored.keys() - known)
    raise UserError(f"{files.folder}: {name} is missing{hint}; {_WHOLE}")


def _check_tensors(
    files: WeightFiles, prefix: str, parts: list[Part], architecture: Architecture, quantised: bool
) -> None:
    shapes = parameter_shapes(architecture)
    for part in parts:
        name = full_name(part.tensor, prefix)
        stored = files.stored[name]
        shape = _part_shape(shapes[part.parameter], part)
        if part.rows is not None:
            shape = (3 * shape[0], *shape[1:])  # the convolutions of q, k and v in one tensor
        if stored.shape != shape:
            found = f"{name} has shape {list(stored.shape)}"
            raise UserError(f"{stored.file}: {found}, but config.json means {list(shape)}; {_OF_ONE_MODEL}")
        if stored.dtype == FP8 and part.rows is None:
            _check_scale(files, name, quantised)
        elif stored.dtype not in DTYPES:
            raise UserError(
                f"{stored.file}: {name} is {stored.dtype}; it must be {', '.join(DTYPES)} or {FP8}"
            )


def _part_shape(shape: Shape, part: Part) -> Shape:
    return tuple(torch.empty(shape, device="meta")[part.index].shape)


def _check_scale(files: WeightFiles, name: str, quantised: bool) -> None:
    stored, scale = files.stored[name], scale_name(name)
    if not quantised:
        raise UserError(f"{stored.file}: {name} is {FP8}, but config.json has no quantization_config")
    if scale not in files.stored:
        hint = nearest(scale, files.stored)
        raise UserError(f"{files.folder}: {scale} is missing{hint}; {name} is {FP8}; {_WHOLE}")
    found, shape = files.stored[scale], scale_shape(stored.shape)
    if (found.dtype, found.shape) != ("F32", shape):
        rule = f"it must be F32 {list(shape)}, one factor per block of 128 x 128"
        raise UserError(f"{found.file}: {scale} is {found.dtype} {list(found.shape)}; {rule}")


def _read_part(files: WeightFiles, source: SourceInfo, part: Part) -> Tensor:
    """A part of a parameter, in the dtype of the file (FP8 as float32)."""
    name = full_name(part.tensor, source.prefix)
    tensor = files.read(name, part.rows)
    if source.dtypes[name] == FP8:
        tensor = dequantise(tensor, files.read(scale_name(name)))
    if not torch.isfinite(tensor).all():
        raise UserError(f"{files.stored[name].file}: {name} holds numbers that are not finite; {_WHOLE}")
    return tensor


def _check_tied(files: WeightFiles, target: Tensor, tensor: Tensor) -> None:
    if not torch.equal(target, tensor.to(target)):
        stored = files.stored[_TIED_HEAD.tensor]
        rule = "but tie_word_embeddings is true; set it to false to have both"
        raise UserError(f"{stored.file}: {_TIED_HEAD.tensor} differs from {_TIED_HEAD.parameter}, {rule}")
