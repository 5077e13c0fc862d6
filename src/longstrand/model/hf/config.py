"""The config that stands beside written weights."""

from __future__ import annotations

from typing import Any

import torch

from longstrand.architecture import Architecture
from longstrand.hf_config_keys import OUTER

Json = dict[str, Any]

# At the outer level of a flat config, and not in the text config that is made of it.
_NOT_TEXT = {*OUTER, "architectures"} - {
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "tie_word_embeddings",
}


def written_config(
    architecture: Architecture, source: Json | None, asked: torch.dtype | None, drawn: torch.dtype
) -> Json:
    """The source's config without its quantization, or a new one; always around a text config.

    transformers has no class for a text model with a head, so a config without a vision tower gets the smallest
    one that transformers can build; its weights are not in the folder.

    Args:
        asked: dtype of the weights where it is not the source's.
        drawn: dtype of the weights where there is no source.
    """
    if source is None:
        text = architecture.to_hf()
        config = _around(text, architecture)
    elif source.get("text_config") is None:
        text = {key: value for key, value in source.items() if key not in _NOT_TEXT} | architecture.to_hf()
        outer = {key: source[key] for key in (*OUTER, "dtype") if source.get(key) is not None}
        config = _around(text, architecture) | outer | {"model_type": "glm5_next"}
    else:
        text = dict(source["text_config"])
        config = {"vision_config": _smallest_vision(architecture)} | source | {"text_config": text}
    dtype = asked or (drawn if source is None else None)
    if dtype is not None:
        text["dtype"] = config["dtype"] = str(dtype).removeprefix("torch.")
        config.pop("torch_dtype", None)
        text.pop("torch_dtype", None)
    config.pop("quantization_config", None)
    text.pop("quantization_config", None)
    return config


def _around(text: Json, architecture: Architecture) -> Json:
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "text_config": text,
        "tie_word_embeddings": architecture.tie_word_embeddings,
        "vision_config": _smallest_vision(architecture),
    }


def _smallest_vision(architecture: Architecture) -> Json:
    return {
        "model_type": "glm5_next_vision",
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 1,
        "out_hidden_size": architecture.hidden_size,
        "projection_intermediate_size": 16,
    }
