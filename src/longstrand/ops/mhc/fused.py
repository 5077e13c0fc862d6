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

from longstrand.ops.native import LANES, SUFFIX, Op, call, refusal, require
from longstrand.ops.precision import wide

KERNEL_STREAMS = (1, 2, 3, 4)
KERNEL_ITERATIONS = 64  # 2 x 64 - 1 passes, of which kernel.cpp keeps the divisors on its stack


def _gather_refusal(x: Tensor, iterations: int, **weights: Tensor) -> str | None:
    if iterations > KERNEL_ITERATIONS:
        return refusal(x) or f"{iterations} iterations: the kernel takes up to {KERNEL_ITERATIONS}"
    return _update_refusal(x)


def _update_refusal(*tensors: Tensor) -> str | None:
    streams = tensors[0].shape[1]
    if streams not in KERNEL_STREAMS:
        return (
            refusal(*tensors)
            or f"{streams} streams: the kernel takes {KERNEL_STREAMS[0]} to {KERNEL_STREAMS[-1]}"
        )
    return refusal(*tensors)


GATHER = Op("mhc_gather", "fused", "mhc_gather_", _gather_refusal)
UPDATE = Op("mhc_update", "fused", "mhc_update_", lambda x, out, post, comb: _update_refusal(x, out))


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

    Saved for backward: the streams and about (39 R + 3 M) x T values; by the kernel (M + 1) x T.
    """
    native = GATHER.in_kernel(x=x, iterations=iterations, fn=fn, base=base, scale=scale)
    form = _NativeGather if native else _Gather
    return form.apply(x, fn, base, scale, norm_eps, eps, iterations)


def mhc_update(
    x: Float[Tensor, "T R D"],
    out: Float[Tensor, "T D"],
    post: Float[Tensor, "T R"],
    comb: Float[Tensor, "T R R"],
) -> Float[Tensor, "T R D"]:
    """The streams after a sublayer; see `mhc_update_reference`."""
    form = _NativeUpdate if UPDATE.in_kernel(x=x, out=out, post=post, comb=comb) else _Update
    return form.apply(x, out, post, comb)


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
        flat = wide(x).reshape(length, x.shape[1] * x.shape[2])
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
        flat = xw.reshape(length, x.shape[1] * x.shape[2])
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


class _NativeGather(torch.autograd.Function):
    """The same in one pass over the streams each way, sixteen tokens at a time; see kernel.cpp."""

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
        x, weights = x.contiguous(), [wide(part).contiguous() for part in (fn, base, scale)]
        length, streams, width = x.shape
        outputs = streams * (2 + streams)
        require((outputs, streams * width), torch.float32, fn=weights[0])
        require((outputs,), torch.float32, base=weights[1])
        require((3,), torch.float32, scale=weights[2])
        h, post = x.new_empty(length, width), x.new_empty(length, streams, dtype=torch.float32)
        comb = x.new_empty(length, streams, streams, dtype=torch.float32)
        saved = comb.new_empty(-(-length // LANES), len(base) + 1, LANES)  # a token per lane
        sizes, passes = (streams, length, width), 2 * iterations - 1
        inputs = (x, *weights, *sizes, float(eps), float(norm_eps), passes)
        call(f"mhc_gather_forward_{SUFFIX[x.dtype]}", *inputs, h, post, comb, saved)  # type: ignore[arg-type]
        ctx.save_for_backward(x, *weights, saved)
        ctx.settings = (*sizes, float(eps), passes)
        ctx.dtypes = (fn.dtype, base.dtype, scale.dtype)
        return h, post, comb

    @staticmethod
    def backward(ctx: Any, dh: Tensor, d_post: Tensor, d_comb: Tensor) -> tuple[Tensor | None, ...]:
        x, fn, base, scale, saved = ctx.saved_tensors
        dx, d_base, d_scale = torch.empty_like(x), torch.zeros_like(base), torch.zeros_like(scale)
        d_fn = torch.zeros_like(fn) if ctx.needs_input_grad[1] else None
        above = (dh.contiguous(), d_post.contiguous(), d_comb.contiguous())
        call(
            f"mhc_gather_backward_{SUFFIX[x.dtype]}",
            *(x, fn, base, scale, saved, *above, *ctx.settings, dx, d_fn, d_base, d_scale),
        )
        grads = [
            None if g is None else g.to(d) for g, d in zip((d_fn, d_base, d_scale), ctx.dtypes, strict=True)
        ]
        return dx, *grads, None, None, None


class _NativeUpdate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, out: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        x, out = x.contiguous(), out.contiguous()
        post, comb = wide(post).contiguous(), wide(comb).contiguous()
        y = torch.empty_like(x)
        length, streams, width = x.shape
        require((length, width), x.dtype, out=out)
        require((length, streams), torch.float32, post=post)
        require((length, streams, streams), torch.float32, comb=comb)
        call(f"mhc_update_forward_{SUFFIX[x.dtype]}", x, out, post, comb, streams, length, width, y)
        ctx.save_for_backward(x, out, post, comb)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        x, out, post, comb = ctx.saved_tensors
        length, streams, width = x.shape
        grads = tuple(torch.empty_like(part) for part in (x, out, post, comb))
        call(
            f"mhc_update_backward_{SUFFIX[x.dtype]}",
            *(x, out, post, comb, dy.contiguous(), streams, length, width, *grads),
        )
        return grads
