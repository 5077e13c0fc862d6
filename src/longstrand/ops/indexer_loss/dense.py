"""The indexer's loss over all visible pools, in two passes over blocks: normaliser, then value and gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longstrand.ops.native import Op
from longstrand.ops.select import pool_scores, unseen

DENSE_LOSS = Op("dense_indexer_loss", "blockwise")
Blocks = Callable[[], Iterator[tuple[slice, Tensor]]]


def dense_indexer_loss(
    q: Float[Tensor, "T H D"],
    weights: Float[Tensor, "T H"],
    keys: Float[Tensor, "P D"],
    d_keys: Float[Tensor, "P D"],
    first_pool: Int[Tensor, "T"],
    num_visible: Int[Tensor, "T"],
    target_blocks: Blocks,
    scale: float,
) -> tuple[float, Float[Tensor, "T H D"], Float[Tensor, "T H"]]:
    """Sum over rows of the KL in nats, and `scale` times its gradient with respect to q and weights.

    Args:
        q: float32 or wider, not yet scaled by D^-0.5.
        d_keys: `scale` times the pool keys' gradient is *added* into it.
        target_blocks: yields (pools, share [T, pools]) over all pools that any row sees; see `pool_masses`.

    Transients: a few T x POOL_BLOCK matrices; nothing of size [T, P].
    """
    DENSE_LOSS.in_kernel(q=q, weights=weights, keys=keys, d_keys=d_keys)
    normaliser = q.new_full((len(q),), -torch.inf)
    for pools, _ in target_blocks():
        scores = _visible_scores(q, weights, keys, pools, first_pool, num_visible)
        normaliser = torch.logaddexp(normaliser, scores.logsumexp(-1))
    loss, dq, d_weights = q.new_zeros(()), torch.zeros_like(q), torch.zeros_like(weights)
    root = q.shape[-1] ** -0.5
    for pools, share in target_blocks():
        scores = _visible_scores(q, weights, keys, pools, first_pool, num_visible)
        seen = scores > -torch.inf
        logprobs = torch.where(seen, scores - normaliser[:, None], 0)
        loss += (torch.xlogy(share, share) - share * logprobs).sum()
        d_scores = torch.where(seen, logprobs.exp() - share, 0) * scale
        block = keys[pools].to(q.dtype)
        for head in range(q.shape[1]):
            active = (q[:, head] @ block.T).mul_(root).relu_()
            d_weights[:, head] += (d_scores * active).sum(-1)
            d_products = d_scores * weights[:, head, None] * (active > 0) * root
            dq[:, head] += d_products @ block
            d_keys[pools] += (d_products.T @ q[:, head]).to(d_keys.dtype)
    return float(loss), dq, d_weights


def _visible_scores(
    q: Tensor, weights: Tensor, keys: Tensor, pools: slice, first_pool: Tensor, num_visible: Tensor
) -> Tensor:
    ids = torch.arange(pools.start, pools.stop, device=q.device)
    hidden = unseen(ids, first_pool, num_visible)
    return pool_scores(q, weights, keys[pools].to(q.dtype)).masked_fill_(hidden, -torch.inf)
