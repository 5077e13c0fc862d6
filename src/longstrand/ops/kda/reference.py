"""Kimi delta attention, token by token: the definition."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from longstrand.ops.precision import wide


def l2_normalise(x: Float[Tensor, "*N K"]) -> Float[Tensor, "*N K"]:
    """x / sqrt(sum(x^2) + 1e-6): the epsilon is inside the root, unlike `F.normalize`."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def kda_reference(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H K"],
    beta: Float[Tensor, "B T H"],
    state: Float[Tensor, "B H K V"],
    first: Bool[Tensor, "B T"] | None = None,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H K V"]]:
    """Outputs and last state of the gated delta rule, one token after the other.

        S <- diag(exp g_t) S
        S <- S + beta_t k_t (v_t - S^T k_t)^T
        o_t = S^T q_t

    with k and q normalised and q scaled by K^-0.5.

    Args:
        g: log decay, at most 0.
        state: carried in from the tokens before, float32 or wider.
        first: True at the first token of a document, where the state restarts from zero.

    Source: Kimi Linear (arXiv 2510.26692), eq. 1.
    """
    q, k, v, g, beta = wide(q), wide(k), wide(v), wide(g), wide(beta)
    q = l2_normalise(q) * q.shape[-1] ** -0.5
    k = l2_normalise(k)
    outputs = []
    for t in range(q.shape[1]):
        if first is not None:
            state = state * (~first[:, t])[:, None, None, None]
        state = g[:, t].exp()[..., None] * state
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bh,bhk,bhv->bhkv", beta[:, t], k[:, t], error)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, dim=1), state
