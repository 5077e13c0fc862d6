"""A model from a folder or a config, and back to a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from longstrand.architecture import Architecture
from longstrand.errors import UserError
from longstrand.model.hf import load_into, read_architecture, read_json, save_from
from longstrand.model.hf.files import DTYPES
from longstrand.model.init import Init, draw_weights
from longstrand.model.model import Model


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
        seed, init: for drawn weights; see `draw_weights`.

    Raises:
        UserError: a missing, extra or wrongly shaped tensor, or an unsupported config field, by name.
    """
    if dtype not in DTYPES.values():
        raise ValueError(f"dtype = {dtype}: must be one of {', '.join(map(str, DTYPES.values()))}")
    if isinstance(folder_or_config, str | Path) and Path(folder_or_config).is_dir():
        return _read_folder(Path(folder_or_config), dtype, torch.device(device))
    model = Model(_architecture(folder_or_config)).float()
    draw_weights(model, seed, init, model.architecture.initializer_range)
    return model.convert(dtype).to(device)


def save_model(model: Model, folder: str | Path) -> Path:
    """Writes a Hugging Face folder that transformers loads too; see `hf.save_from`."""
    save_from(model, Path(folder), model.source)
    return Path(folder)


def _read_folder(folder: Path, dtype: torch.dtype, device: torch.device) -> Model:
    model = Model(read_architecture(folder)).convert(dtype)
    model.source = load_into(model, folder)
    return model.to(device)


def _architecture(config: str | Path | dict[str, Any] | Architecture) -> Architecture:
    if isinstance(config, Architecture):
        return config
    if isinstance(config, dict):
        return Architecture.from_hf(config)
    path = Path(config)
    if not path.is_file():
        raise UserError(
            f"model {path}: no such folder or config file; give a Hugging Face folder or a config.json"
        )
    return Architecture.from_file(read_json(path), where=str(path))
