"""Hyper-connections with a hand-written backward.

The small matrices are held with the tokens last ([R, R, T]), so that the 39 normalisations are contiguous passes over
tokens; only their divisors are saved, and backward multiplies them back. In eager form these steps cost more than all
matrix products of a layer together.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from longstrand.ops.precision import wide


def mhc_gather(
    x: Float[Tensor, "T R D"],
    fn: Float[Tensor, "M RD"],
    base: Float[Tensor, "M"],
    scale: Float[Tensor, "3"],
    *,
    norm_eps: float,
    eps: float,
    iterations: int,
) -> tuple[Float[Tensor, "T D"], Float[Tensor, "T R"], Float[Tensor, "T R R"]]:
    """The sublayer's input and the weights of `mhc_update`; see `mhc_gather_reference` for the formulas.

    Saved for backward: the streams and about (39 R + 3 M) x T values.
    """
    return _Gather.apply(x, fn, base, scale, norm_eps, eps, iterations)


def mhc_update(
    x: Float[Tensor, "T R D"],
    out: Float[Tensor, "T D"],
    post: Float[Tensor, "T R"],
    comb: Float[Tensor, "T R R"],
) -> Float[Tensor, "T R D"]:
    """The streams after a sublayer; see `mhc_update_reference`."""
    return _Update.apply(x, out, post, comb)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        fn: Tensor,
        base: Tensor,
        scale: Tensor,
        norm_eps: float,
        eps: float,
        iterations: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        length, streams, _ = x.shape
        flat = wide(x).reshape(length, -1)
        rstd = torch.rsqrt(flat.square().mean(-1) + norm_eps)
        logits = (wide(fn) @ flat.T).mul_(rstd)  # M T
        per_row = wide(scale).repeat_interleave(_sizes(streams, scale.device), output_size=len(base))
        gates = torch.addcmul(wide(base)[:, None], logits, per_row[:, None])
        gate = gates[: 2 * streams].sigmoid()
        soft = gates[2 * streams :].view(streams, streams, length).softmax(dim=1)  # in out T
        comb, divisors = _sinkhorn(soft + eps, eps, iterations)
        pre = gate[:streams] + eps
        h = torch.bmm(pre.T.to(x.dtype).contiguous().unsqueeze(1), x).squeeze(1)
        ctx.save_for_backward(x, fn, scale, rstd, logits, gate, soft, comb, divisors)
        ctx.eps, ctx.norm_eps = eps, norm_eps
        return h, (2 * gate[streams:].T).contiguous(), comb.permute(2, 0, 1).contiguous()

    @staticmethod
    def backward(ctx: Any, dh: Tensor, d_post: Tensor, d_comb: Tensor) -> tuple[Tensor | None, ...]:
        x, fn, scale, rstd, logits, gate, soft, comb, divisors = ctx.saved_tensors
        length, streams, width = x.shape
        xw, dhw = wide(x), wide(dh)
        d_pre = (xw * dhw.unsqueeze(1)).sum(-1)  # T R; a bmm with one column is five times slower
        d_gate = torch.cat([d_pre.T, 2 * d_post.T]).mul_(gate * (1 - gate))
        d_soft = _sinkhorn_backward(d_comb.permute(1, 2, 0).contiguous(), comb, divisors)
        d_mix = soft * (d_soft - (soft * d_soft).sum(dim=1, keepdim=True))
        d_gates = torch.cat([d_gate, d_mix.view(-1, length)])  # M T
        sizes = _sizes(streams, scale.device)
        per_row = wide(scale).repeat_interleave(sizes, output_size=len(d_gates))
        d_base = d_gates.sum(-1)
        row_scale = (d_gates * logits).sum(-1)
        d_scale = torch.stack([part.sum() for part in row_scale.split(sizes.tolist())])
        d_logits = d_gates.mul_(per_row[:, None])
        coefficient = (d_logits * logits).sum(0) * rstd.square() / -(streams * width)
        d_logits.mul_(rstd)
        flat = xw.reshape(length, -1)
        d_fn = (d_logits @ flat).to(fn.dtype) if ctx.needs_input_grad[1] else None
        dx = torch.addmm(flat * coefficient[:, None], d_logits.T, wide(fn)).view(length, streams, width)
        pre = gate[:streams] + ctx.eps
        dx.baddbmm_(pre.T.contiguous().unsqueeze(-1), dhw.unsqueeze(1))
        return dx.to(x.dtype), d_fn, d_base, d_scale.to(scale.dtype), None, None, None


def _sizes(streams: int, device: torch.device) -> Tensor:
    return torch.tensor([streams, streams, streams * streams], device=device)


def _sinkhorn(matrix: Tensor, eps: float, iterations: int) -> tuple[Tensor, Tensor]:
    """Columns, then (iterations - 1) x (rows, columns); returns the matrix [R, R, T] and each pass's divisors."""
    streams, _, length = matrix.shape
    divisors = matrix.new_empty(2 * iterations - 1, streams, length)
    matrix = matrix.clone()
    for index in range(2 * iterations - 1):
        dim = index % 2  # 0: over the inputs (columns), 1: over the outputs (rows)
        torch.sum(matrix, dim=dim, out=divisors[index])
        divisors[index].add_(eps)
        matrix.div_(divisors[index].unsqueeze(dim))
    return matrix, divisors


def _sinkhorn_backward(grad: Tensor, matrix: Tensor, divisors: Tensor) -> Tensor:
    """y = x / s, s = sum(x) + eps: dx = (dy - sum(dy y)) / s, and x = y s gives the pass before."""
    matrix = matrix.clone()
    for index in range(len(divisors) - 1, -1, -1):
        dim = index % 2
        divisor = divisors[index].unsqueeze(dim)
        grad.sub_((grad * matrix).sum(dim=dim, keepdim=True)).div_(divisor)
        matrix.mul_(divisor)
    return grad


class _Update(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        post, comb = post.to(x.dtype), comb.to(x.dtype)
        ctx.save_for_backward(x, out, post, comb)
        return torch.baddbmm(post.unsqueeze(-1) * out.unsqueeze(1), comb.mT.contiguous(), x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        x, out, post, comb = ctx.saved_tensors
        d_out = torch.bmm(post.unsqueeze(1), dy).squeeze(1)
        d_post = (dy * out.unsqueeze(1)).sum(-1)
        d_comb = torch.bmm(x, dy.mT)
        return torch.bmm(comb, dy), d_out, wide(d_post), wide(d_comb)
