"""Model shapes by name, or from a config of one's own, for `plan --model`."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from longstrand.architecture import Architecture
from longstrand.config.base import has_its_home
from longstrand.errors import UserError

_CONFIGS = Path(__file__).parent.parent / "configs"
_SLICES = {"glm-5.3-flash-4-layers": ("glm-5.3-flash", 4)}
"""Name: of which shipped config, its first so many layers."""


@dataclass(frozen=True)
class FoundShape:
    """A shape and where it is from.

    Attributes:
        setting: what `[model] config` or `path` of a recipe says to get it; None: a config has to be written for it.
        is_folder: of weights, so that the setting is `path`.
    """

    name: str
    shape: Architecture
    source: str
    setting: str | None
    is_folder: bool = False


def built_in_shapes() -> tuple[str, ...]:
    """Names that need no file."""
    return (*sorted(path.stem for path in _CONFIGS.glob("*.json")), *_SLICES)


def find_shape(name_or_config: str) -> FoundShape:
    """A built-in shape, a config.json, or the shape of a Hugging Face folder.

    Raises:
        UserError: none of these, or the config says what is not supported.
    """
    if name_or_config in _SLICES:
        return _slice(name_or_config)
    if name_or_config in built_in_shapes():
        return FoundShape(
            name_or_config, _shipped(name_or_config), f"shipped config {name_or_config}", name_or_config
        )
    if not name_or_config or not has_its_home(name_or_config) or "\0" in name_or_config:
        raise UserError(f"--model {name_or_config!r}: no valid path; write it in full")
    path = Path(name_or_config).expanduser()
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError as error:
        raise UserError(f"--model {path}: {error.strerror}; check the path") from error
    if is_folder:
        if not (path / "config.json").is_file():
            raise UserError(
                f"--model {path}: a folder without config.json; give a folder of weights, or a config"
            )
        return FoundShape(str(path), _read(path / "config.json"), str(path), name_or_config, is_folder=True)
    if is_file:
        return FoundShape(str(path), _read(path), str(path), name_or_config)
    text, names = name_or_config.lower(), built_in_shapes()
    near = [name for name in names if text in name] or get_close_matches(text, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UserError(
        f"--model {name_or_config}: no such shape or file. {hint}Built in are {', '.join(names)}; otherwise give a "
        "config.json or its folder"
    )


def _slice(name: str) -> FoundShape:
    whole_name, layers = _SLICES[name]
    whole = _shipped(whole_name)
    shape = replace(
        whole,
        num_hidden_layers=layers,
        layer_types=whole.layer_types[:layers],
        mlp_layer_types=whole.mlp_layer_types[:layers],
        indexer_types=whole.indexer_types[:layers],
    )
    kinds = ", ".join(
        f"{'KDA' if kind == 'linear_attention' else 'DSA'} + {'experts' if mlp == 'sparse' else mlp}"
        for kind, mlp in zip(shape.layer_types, shape.mlp_layer_types, strict=True)
    )
    return FoundShape(name, shape, f"layers 0 to {layers - 1} of {whole_name}: {kinds}", None)


@cache
def _shipped(name: str) -> Architecture:
    return _read(_CONFIGS / f"{name}.json")


def _read(path: Path) -> Architecture:
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: not valid JSON ({str(error).splitlines()[0]}); give a config.json"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the path") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds no object; give a config.json of the model")
    return Architecture.from_file(values, str(path))
