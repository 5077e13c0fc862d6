"""Weights in and out: Hugging Face folders, in the published and in transformers' own names."""

from longstrand.model.hf.files import read_json
from longstrand.model.hf.read import FolderWeights, SourceInfo, read_architecture, read_config
from longstrand.model.hf.write import save_from

__all__ = [
    "FolderWeights",
    "SourceInfo",
    "read_architecture",
    "read_config",
    "read_json",
    "save_from",
]
