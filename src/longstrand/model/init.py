"""How weights are drawn when a model starts from a config alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

Init = Literal["fan_in", "class"]

ONES = ("norm.weight", "_layernorm.weight", "_scale", "index_kpool_compress_gate")
ZEROS = ("A_log", "_base", "index_kpool_compress_ape", "norm.bias", "e_score_correction_bias")


class DrawnWeights:
    """Weights from one float32 stream of a seed, parameter after parameter in the order of their names.

    `fan_in`: standard deviation 1/sqrt(inputs), embedding 1. `class`: the config's `initializer_range` for both, as
    the transformers class does. Either way A_log 0, dt_bias the inverse softplus of a log-uniform 1e-3..1e-1,
    hyper-connections 0.02 / 0 / 1, the pool gate ones and its position bias 0.
    """

    def __init__(self, seed: int, init: Init, initializer_range: float) -> None:
        if init not in get_args(Init):
            raise ValueError(f"init = {init!r}: must be one of {', '.join(get_args(Init))}")
        self._generator = torch.Generator().manual_seed(seed)
        self._init, self._range = init, initializer_range
        self._last = ""

    @torch.no_grad()
    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Draws parameters and buffers of a model by name; one call after the other, in the order of the names."""
        for name, target in sorted(targets.items()):
            assert name > self._last, f"{name} comes before {self._last} in the stream"
            self._last = name
            target.copy_(_drawn(name, target.shape, self._generator, self._init, self._range))


def _drawn(
    name: str, shape: torch.Size, generator: torch.Generator, init: Init, initializer_range: float
) -> Tensor:
    if name.endswith(ONES):
        return torch.ones(shape)
    if name.endswith(ZEROS):
        return torch.zeros(shape)
    if name.endswith("dt_bias"):
        step = torch.empty(shape).uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp()
        return step + torch.log(-torch.expm1(-step))
    noise = torch.randn(shape, generator=generator)
    if name.endswith("_fn"):
        return noise * 0.02
    if name.endswith("conv1d.weight"):
        return noise * shape[-1] ** -0.5
    if init == "class":
        return noise * initializer_range
    return noise if name.startswith("embed_tokens") else noise * shape[-1] ** -0.5
