"""A model from a folder or a config, and back to a folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from longstrand.architecture import Architecture
from longstrand.errors import UserError
from longstrand.model.hf import FolderWeights, read_architecture, read_json, save_from
from longstrand.model.hf.files import DTYPES
from longstrand.model.init import DrawnWeights, Init
from longstrand.model.model import Model
from longstrand.ops.precision import wide_dtype


@runtime_checkable
class Weights(Protocol):
    """Where a model's numbers come from."""

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Writes those of a part of it, by name; one part after the other, in the order of the names."""


def load_model(
    folder_or_config: str | Path | dict[str, Any] | Architecture,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
    init: Init = "fan_in",
) -> Model:
    """Loads a Hugging Face folder, or draws random weights for a config.

    Args:
        folder_or_config: a folder with `config.json` and safetensors; or a config file, its contents, or an
            `Architecture`, for which weights are drawn (the same for every dtype).
        dtype: float64 makes every tensor float64; otherwise some small tensors stay float32 (`keeps_float32`).
        seed, init: for drawn weights; see `DrawnWeights`.

    Raises:
        UserError: a missing, extra or wrongly shaped tensor, or an unsupported config field, by name.
    """
    model = outline_model(folder_or_config, dtype)
    with open_weights(folder_or_config, model, seed, init) as weights:
        weights.fill(make_room(model, torch.device(device)))
    return model


def outline_model(
    folder_or_config: str | Path | dict[str, Any] | Architecture, dtype: torch.dtype = torch.float32
) -> Model:
    """The model of `load_model` without numbers: shapes and dtypes on torch's meta device.

    `parallelize` fills it from `open_weights` part by part, so that no rank ever holds the whole.
    """
    if dtype not in DTYPES.values():
        raise ValueError(f"dtype = {dtype}: must be one of {', '.join(map(str, DTYPES.values()))}")
    with torch.device("meta"):
        return Model(_architecture(folder_or_config)).convert(dtype)


@contextmanager
def open_weights(
    folder_or_config: str | Path | dict[str, Any] | Architecture,
    model: Model,
    seed: int = 0,
    init: Init = "fan_in",
) -> Iterator[Weights]:
    """The numbers for a model of this folder or config; the model will know the folder as its source.

    Raises:
        UserError: as `load_model`.
    """
    if not _is_folder(folder_or_config):
        yield DrawnWeights(seed, init, model.architecture.initializer_range)
        return
    with FolderWeights(Path(str(folder_or_config))) as weights:
        model.source = weights.source
        yield weights


def make_room(module: nn.Module, device: torch.device, prefix: str = "") -> dict[str, Tensor]:
    """Memory for what has only a shape so far; parameters stay the objects that they are, and tied.

    Args:
        prefix: of the module's name in its model, with its dot.

    Returns: the tensors to be filled, by their name in the model; a tied one once.
    """
    made: dict[str, Tensor] = {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if not tensor.is_meta:
            continue
        room = torch.empty_like(tensor, device=device)
        if isinstance(tensor, nn.Parameter):
            room = nn.Parameter(room, requires_grad=tensor.requires_grad)
            room.grad_dtype = wide_dtype(tensor.dtype)
        torch.utils.swap_tensors(tensor, room)
        made[prefix + name] = tensor
    return made


def save_model(model: Model, folder: str | Path) -> Path:
    """Writes a Hugging Face folder that transformers loads too; see `hf.save_from`."""
    save_from(model, Path(folder), model.source)
    return Path(folder)


def _is_folder(folder_or_config: str | Path | dict[str, Any] | Architecture) -> bool:
    return isinstance(folder_or_config, str | Path) and Path(folder_or_config).is_dir()


def _architecture(config: str | Path | dict[str, Any] | Architecture) -> Architecture:
    if isinstance(config, Architecture):
        return config
    if _is_folder(config):
        return read_architecture(Path(str(config)))
    if isinstance(config, dict):
        return Architecture.from_hf(config)
    path = Path(config)
    if not path.is_file():
        raise UserError(
            f"model {path}: no such folder or config file; give a Hugging Face folder or a config.json"
        )
    return Architecture.from_file(read_json(path), where=str(path))
