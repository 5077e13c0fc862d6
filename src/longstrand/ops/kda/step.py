"""Kimi delta attention of one token in each row: what decoding runs."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from longstrand.ops.kda.reference import l2_normalise
from longstrand.ops.precision import wide


def kda_step(
    q: Float[Tensor, "B H K"],
    k: Float[Tensor, "B H K"],
    v: Float[Tensor, "B H V"],
    g: Float[Tensor, "B H K"],
    beta: Float[Tensor, "B H"],
    state: Float[Tensor, "B H K V"],
) -> Float[Tensor, "B H V"]:
    """Outputs of one token per row; `kda_reference` with T = 1 is the definition.

    The state (float32 or wider) is overwritten by the next one: no copy of its B H K V values is made.
    """
    q = l2_normalise(wide(q)) * q.shape[-1] ** -0.5
    k = l2_normalise(wide(k)).flatten(0, 1)
    rows = state.view(-1, *state.shape[2:])  # BH K V
    rows.mul_(wide(g).exp().view(-1, k.shape[-1], 1))
    error = (wide(v) * wide(beta).unsqueeze(-1)).flatten(0, 1).unsqueeze(1)
    error = error - wide(beta).view(-1, 1, 1) * (k.unsqueeze(1) @ rows)
    rows.baddbmm_(k.unsqueeze(-1), error)
    return (q.flatten(0, 1).unsqueeze(1) @ rows).view(v.shape)
