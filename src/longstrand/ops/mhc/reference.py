"""Hyper-connections, written as the formulas: the definition."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from longstrand.ops.precision import wide


def mhc_gather_reference(
    x: Float[Tensor, "T R D"],
    fn: Float[Tensor, "M RD"],
    base: Float[Tensor, "M"],
    scale: Float[Tensor, "3"],
    *,
    norm_eps: float,
    eps: float,
    iterations: int,
) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T R"], Float[Tensor, "T R R"]]:
    """The sublayer's input h, and the weights post and comb of `mhc_update_reference`.

    M = R (2 + R) coefficients come from the flattened, normalised streams; pre = sigmoid + eps, post = 2 sigmoid,
    comb = a doubly stochastic matrix by alternating normalisation, columns first. h = sum_r pre_r x_r.

    Source: mHC (arXiv 2512.24880), eq. 5-9; transformers `Glm5NextTextHyperConnection`.
    """
    length, streams, _ = x.shape
    flat = wide(x).reshape(length, -1)
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    pre, post, comb = (flat @ wide(fn).T).split([streams, streams, streams * streams], dim=-1)
    pre_base, post_base, comb_base = wide(base).split([streams, streams, streams * streams])
    pre = torch.sigmoid(pre * scale[0] + pre_base) + eps
    post = 2 * torch.sigmoid(post * scale[1] + post_base)
    comb = (comb * scale[2] + comb_base).view(length, streams, streams)
    comb = torch.softmax(comb, dim=-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return (pre.unsqueeze(-1) * x).sum(1).to(x.dtype), post, comb


def mhc_update_reference(
    x: Float[Tensor, "T R D"],
    out: Float[Tensor, "T D"],
    post: Float[Tensor, "T R"],
    comb: Float[Tensor, "T R R"],
) -> Float[Tensor, "T R D"]:
    """y_i = post_i out + sum_j comb[j, i] x_j: comb is applied transposed."""
    post, comb = post.to(x.dtype), comb.to(x.dtype)
    return post.unsqueeze(-1) * out.unsqueeze(1) + torch.einsum("tji,tjd->tid", comb, x)
