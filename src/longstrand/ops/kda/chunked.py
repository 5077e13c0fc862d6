"""Kimi delta attention in chunks: portable, bounded memory, exact for the gate's whole range.

Within a chunk of C = 16 tokens the delta rule is a unit lower triangular system, solved by substitution; between
chunks a state [K, V] per head is carried. All decay differences are formed from factors whose exponents stay under
20 (sub-blocks of 8 rows around their middle, log decay at least -5 per token), so float32 never overflows and
no masked entry is exponentiated.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from longstrand.ops.kda.reference import l2_normalise
from longstrand.ops.native import LANES, Op, call, refusal_of_any, require
from longstrand.ops.precision import wide

BLOCK = 8
CHUNK = 2 * BLOCK
KDA = Op("kda", "chunked", "kda_", lambda **inputs: refusal_of_any(*inputs.values()))  # each is widened


def kda(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H K"],
    beta: Float[Tensor, "B T H"],
    state: Float[Tensor, "B H K V"],
    first: Bool[Tensor, "B T"] | None = None,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H K V"]]:
    """Outputs and last state of the gated delta rule, in chunks of 16; see `kda_reference` for the definition.

    The log decay g must be at least -5 per token. Documents are told apart inside a chunk by `first`: nothing is
    padded to a chunk but the tile's end. Transients, freed with the tile: about 40 x B x T x H x K values; the kernel's
    are K V / 16 + V per token and head, under gradients only, and about 3 K V + 330 K + 110 V per thread.

    Source: Kimi Linear (arXiv 2510.26692), section 4; the triangular form is that of DeltaNet (arXiv 2406.06484).
    """
    if KDA.in_kernel(q=q, k=k, v=v, g=g, beta=beta, state=state):
        begins = None if first is None or not bool(first.any()) else first
        return _NativeKda.apply(*(wide(x) for x in (q, k, v, g, beta)), begins, wide(state))
    batch, length, heads, _ = q.shape
    num_chunks = -(-length // CHUNK)
    q, k, v, g, beta = (
        _to_chunks(wide(x).reshape(batch, length, heads, -1), num_chunks) for x in (q, k, v, g, beta)
    )  # N B*H C K
    q = l2_normalise(q) * q.shape[-1] ** -0.5
    k = l2_normalise(k)
    scores, lower, q_in, k_in, k_out, decay = _decayed(q, k, g, beta)
    if first is not None and bool(first.any()):
        same, from_carry, to_carry, whole = _document_masks(first, num_chunks, heads, scores.dtype)
        scores, lower = scores * same, lower * same
        q_in, k_in, k_out, decay = q_in * from_carry, k_in * from_carry, k_out * to_carry, decay * whole
    inverse = _UnitLowerInverse.apply(lower)
    values = v.shape[-1]
    solved = inverse @ torch.cat([v * beta, k_in * beta], dim=-1)
    u, w = solved.split([values, k_in.shape[-1]], dim=-1)
    states, v_new, last = _StateScan.apply(w, u, k_out, decay, wide(state).flatten(0, 1))
    out = torch.matmul(q_in, states) + torch.matmul(scores, v_new)
    out = out.view(num_chunks, batch, heads, CHUNK, values).permute(1, 0, 3, 2, 4)
    return out.reshape(batch, num_chunks * CHUNK, heads, values)[:, :length], last.view_as(state)


class _UnitLowerInverse(torch.autograd.Function):
    """(I + L)^-1 for strictly lower L [..., C, C], by substitution: never by powers of L.

    Powers of L reach 1e18 when keys repeat (a run of one letter) and beta is near 1; substitution stays at 1.
    """

    @staticmethod
    def forward(ctx: Any, lower: Tensor) -> Tensor:
        size = lower.shape[-1]
        rows = lower.reshape(-1, size, size).permute(1, 2, 0).contiguous()  # C C N: N last is contiguous work
        half = size // 2
        inverse = torch.zeros_like(rows)
        _substitute(rows[:half, :half], inverse[:half, :half])
        _substitute(rows[half:, half:], inverse[half:, half:])
        solved = inverse.permute(2, 0, 1).contiguous()
        top, bottom = solved[:, :half, :half], solved[:, half:, half:]
        corner = lower.reshape(-1, size, size)[:, half:, :half]
        solved[:, half:, :half] = -(bottom @ (corner @ top))
        ctx.save_for_backward(solved)
        return solved.view_as(lower)

    @staticmethod
    def backward(ctx: Any, d_inverse: Tensor) -> Tensor:
        (solved,) = ctx.saved_tensors
        grad = d_inverse.reshape(solved.shape)
        return (-(solved.mT @ grad @ solved.mT)).tril_(-1).view_as(d_inverse)


def _substitute(lower: Tensor, inverse: Tensor) -> None:
    """Rows of the inverse one after the other: X_i = e_i - sum_{j<i} L_ij X_j; all [C, C, N]."""
    for i in range(lower.shape[0]):
        inverse[i, i] = 1
        if i:
            torch.sum(lower[i, :i, None] * inverse[:i, :i], dim=0, out=inverse[i, :i])
            inverse[i, :i].neg_()


class _StateScan(torch.autograd.Function):
    """The states before each chunk, and the corrected values.

        v_new[n] = u[n] - w[n] S[n]
        S[n + 1] = diag(decay[n]) S[n] + k_out[n]^T v_new[n]

    Shapes: w, k_out [N, H, C, K]; u [N, H, C, V]; decay [N, H, K]; state [H, K, V]. Keeps N states of the tile.
    """

    @staticmethod
    def forward(
        ctx: Any, w: Tensor, u: Tensor, k_out: Tensor, decay: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_chunks = w.shape[0]
        states = u.new_empty(num_chunks + 1, *state.shape)
        v_new = torch.empty_like(u)
        states[0] = state
        k_out_t = k_out.mT
        decay_column = decay.unsqueeze(-1)
        for n in range(num_chunks):
            torch.baddbmm(u[n], w[n], states[n], alpha=-1, out=v_new[n])
            torch.mul(decay_column[n], states[n], out=states[n + 1])
            states[n + 1].baddbmm_(k_out_t[n], v_new[n])
        ctx.save_for_backward(w, k_out, decay, states, v_new)
        return states[:-1], v_new, states[-1].clone()

    @staticmethod
    def backward(ctx: Any, d_states: Tensor, d_v_new: Tensor, d_last: Tensor) -> tuple[Tensor, ...]:
        w, k_out, decay, states, v_new = ctx.saved_tensors
        num_chunks = w.shape[0]
        d_next = torch.empty_like(states)  # gradient of the state after each chunk, then of the first
        d_next[num_chunks] = d_last
        d_u = torch.empty_like(v_new)
        w_t = w.mT
        decay_column = decay.unsqueeze(-1)
        for n in range(num_chunks - 1, -1, -1):
            torch.baddbmm(d_v_new[n], k_out[n], d_next[n + 1], out=d_u[n])
            torch.addcmul(d_states[n], decay_column[n], d_next[n + 1], out=d_next[n])
            d_next[n].baddbmm_(w_t[n], d_u[n], alpha=-1)
        after = d_next[1:]
        d_w = -(d_u @ states[:-1].mT)
        d_k_out = v_new @ after.mT
        d_decay = (after * states[:-1]).sum(-1)
        return d_w, d_u, d_k_out, d_decay, d_next[0]


def _to_chunks(x: Tensor, num_chunks: int) -> Tensor:
    """[B, T, H, K] -> [N, B*H, C, K], the end padded with zeros (a zero key and gate leave the state alone)."""
    batch, length, heads, width = x.shape
    x = F.pad(x, (0, 0, 0, 0, 0, num_chunks * CHUNK - length))
    x = x.view(batch, num_chunks, CHUNK, heads, width).permute(1, 0, 3, 2, 4)
    return x.reshape(num_chunks, batch * heads, CHUNK, width)


def _decayed(q: Tensor, k: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """Products of queries and keys under decay, and their forms against the carried state.

    With G the running sum of g in the chunk: scores[r, c] = sum_k q_r k_c exp(G_r - G_c) for c <= r;
    lower[r, c] = beta_r sum_k k_r k_c exp(G_r - G_c) for c < r; q_in = q exp(G); k_in = k exp(G);
    k_out = k exp(G_C - G); decay = exp(G_C).
    """
    num_chunks, heads, _, width = q.shape
    blocks = (num_chunks, heads, 2, BLOCK, width)
    total = g.cumsum(dim=-2).view(blocks)
    middle = total[..., BLOCK // 2, :]  # N H 2 K: the reference of each block
    grow = (total - middle.unsqueeze(-2)).exp()
    shrink = grow.reciprocal()
    end = total[:, :, 1, -1]  # N H K
    q_mid, k_mid = q.view(blocks) * grow, k.view(blocks) * grow
    k_ref = k.view(blocks) * shrink
    between = (middle[:, :, 1] - middle[:, :, 0]).exp().unsqueeze(-2)
    rows = torch.cat([q_mid, k_mid], dim=-2)  # N H 2 2*BLOCK K
    diagonal = rows @ k_ref.mT  # N H 2 2*BLOCK BLOCK
    corner = rows[:, :, 1] @ (k_ref[:, :, 0] * between).mT  # N H 2*BLOCK BLOCK
    scores = _assemble(diagonal[..., :BLOCK, :], corner[..., :BLOCK, :]).tril()
    lower = (_assemble(diagonal[..., BLOCK:, :], corner[..., BLOCK:, :]) * beta).tril(-1)
    start = middle.exp().unsqueeze(-2)
    rest = (end.unsqueeze(2) - middle).exp().unsqueeze(-2)
    shape = q.shape
    return (
        scores,
        lower,
        (q_mid * start).view(shape),
        (k_mid * start).view(shape),
        (k_ref * rest).view(shape),
        end.exp(),
    )


def _assemble(diagonal: Tensor, corner: Tensor) -> Tensor:
    """The [C, C] matrix of two diagonal blocks and the block below; what lies above is zero."""
    top = F.pad(diagonal[:, :, 0], (0, BLOCK))
    bottom = torch.cat([corner, diagonal[:, :, 1]], dim=-1)
    return torch.cat([top, bottom], dim=-2)


def _document_masks(
    first: Tensor, num_chunks: int, heads: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Which pairs share a document, which rows see the carry, which rows reach the next chunk, which carries pass."""
    begins = _to_chunks(first.to(dtype)[..., None, None], num_chunks)  # N B C 1
    begins = begins.repeat_interleave(heads, dim=1)
    document = begins.cumsum(dim=-2)
    same = (document == document.mT).to(dtype)
    last = document[:, :, -1:]
    return same, (document == 0).to(dtype), (document == last).to(dtype), (last[..., 0] == 0).to(dtype)


class _NativeKda(torch.autograd.Function):
    """The same, a chunk and head at a time in cache; see kernel.cpp. Keeps the states before each chunk and v_new."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        first: Tensor | None,
        state: Tensor,
    ) -> tuple[Tensor, Tensor]:
        q, k, v, g = (_rows(x) for x in (q, k, v, g))
        beta, state = beta.contiguous(), state.contiguous()
        first = None if first is None else first.contiguous()
        batch, length, heads, key = q.shape
        value = v.shape[-1]
        require((batch, length, heads, key), torch.float32, q=q, k=k, g=g)
        require((batch, length, heads), torch.float32, v=v[..., 0], beta=beta)
        require((batch, heads, key, value), torch.float32, state=state)
        require((batch, length), torch.bool, first=first)
        out, last = v.new_empty(batch, length, heads, value), torch.empty_like(state)
        states = v_new = None
        if any(ctx.needs_input_grad):
            chunks, width = -(-length // CHUNK), -(-value // LANES) * LANES
            states = v.new_empty(chunks, batch * heads, -(-key // LANES) * LANES, width)
            v_new = v.new_empty(chunks, batch * heads, CHUNK, width)
        ctx.sizes = (batch, length, heads, key, value, *(x.stride(1) for x in (q, k, v, g)))
        call("kda_forward", q, k, v, g, beta, first, state, *ctx.sizes, out, last, states, v_new)
        ctx.save_for_backward(q, k, v, g, beta, first, states, v_new)
        return out, last

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_last: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, first, states, v_new = ctx.saved_tensors
        dq, dk, dv, dg, d_beta = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v, g, beta))
        above = (d_out.contiguous(), d_last.contiguous())
        d_state = torch.empty(d_last.shape)
        call(
            "kda_backward",
            *(q, k, v, g, beta, first, states, v_new, *above, *ctx.sizes, dq, dk, dv, dg, d_beta, d_state),
        )
        return dq, dk, dv, dg, d_beta, None, d_state


def _rows(x: Tensor) -> Tensor:
    """Heads and channels of a token in a row; tokens, and then sequences, at an even distance. Copied if not."""
    batch, length, heads, width = x.shape
    inside = x.stride(-1) == 1 and (heads == 1 or x.stride(2) == width)
    even = batch == 1 or x.stride(0) == length * x.stride(1)
    # `contiguous` would keep any stride of a dim of size 1
    return x if inside and even else x.clone(memory_format=torch.contiguous_format)
