"""How weights are drawn when a model starts from a config alone."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn

Init = Literal["fan_in", "class"]

ONES = ("norm.weight", "_layernorm.weight", "_scale", "index_kpool_compress_gate")
ZEROS = ("A_log", "_base", "index_kpool_compress_ape", "norm.bias", "e_score_correction_bias")


@torch.no_grad()
def draw_weights(model: nn.Module, seed: int, init: Init, initializer_range: float) -> None:
    """Fills every parameter, in the order of their names, from one float32 stream of the seed.

    `fan_in`: standard deviation 1/sqrt(inputs), embedding 1. `class`: the config's `initializer_range` for both, as
    the transformers class does. Either way A_log 0, dt_bias the inverse softplus of a log-uniform 1e-3..1e-1,
    hyper-connections 0.02 / 0 / 1, the pool gate ones and its position bias 0.
    """
    if init not in get_args(Init):
        raise ValueError(f"init = {init!r}: must be one of {', '.join(get_args(Init))}")
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        parameter.copy_(_drawn(name, parameter.shape, generator, init, initializer_range))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.zero_()


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
