"""The linear-attention mixer: short convolutions, a gated delta rule, a gated norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longstrand.architecture import Architecture
from longstrand.memory.tiles import Tile
from longstrand.model.linear import Conv, Linear, Norm
from longstrand.ops.kda import kda, kda_step, log_decay
from longstrand.ops.norm import gated_rms_norm
from longstrand.ops.precision import wide, wide_dtype
from longstrand.ops.short_conv import short_conv, short_conv_step
from longstrand.parallel import local_part

Rule = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""q, k, v, log decay and beta."""


@dataclass(frozen=True)
class KdaCarry:
    """What one tile hands to the next: (J - 1) x 3 H K + H K V values, 141 MiB over the real model's 34 layers."""

    tail: Float[Tensor, "B J1 C"]  # the last inputs of the convolution
    state: Float[Tensor, "B H K V"]  # float32 or wider


class Kda(nn.Module):
    """Kimi delta attention; parameters carry the checkpoint's names."""

    def __init__(self, shape: Architecture) -> None:
        super().__init__()
        self.heads, self.head_dim = shape.linear_num_heads, shape.linear_head_dim
        self.taps, self.eps = shape.linear_conv_kernel_dim, shape.rms_norm_eps
        self.lower_bound = shape.linear_lower_bound
        inner, width = self.heads * self.head_dim, shape.hidden_size
        self.q_proj, self.k_proj, self.v_proj = (Linear(width, inner) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (Conv(inner, self.taps) for _ in range(3))
        self.f_a_proj, self.f_b_proj = Linear(width, self.head_dim), Linear(self.head_dim, inner)
        self.g_a_proj, self.g_b_proj = Linear(width, self.head_dim), Linear(self.head_dim, inner)
        self.b_proj = Linear(width, self.heads)
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.dt_bias = nn.Parameter(torch.empty(inner))
        self.o_norm = Norm(self.head_dim)
        self.o_proj = Linear(inner, width)

    def start(self) -> KdaCarry:
        weight = local_part(self.q_proj.weight)
        state = weight.new_zeros(1, self.heads, self.head_dim, self.head_dim, dtype=wide_dtype(weight.dtype))
        return KdaCarry(weight.new_zeros(1, self.taps - 1, 3 * self.heads * self.head_dim), state)

    def forward(self, h: Float[Tensor, "T D"], tile: Tile, carry: KdaCarry) -> tuple[Tensor, KdaCarry]:
        """Mixes one tile with what came before it in its documents."""
        rule, tail = self.rule(h, tile, carry.tail)
        out, state = self.recur(rule, tile, carry.state)
        return self.project(h, out), KdaCarry(tail, state)

    def rule(self, h: Float[Tensor, "T D"], tile: Tile, tail: Float[Tensor, "B J1 C"]) -> tuple[Rule, Tensor]:
        """The delta rule's inputs of a tile, each with a batch dim of 1, and the convolution's tail for the next."""
        inputs = self.conv_inputs(h).unsqueeze(0)
        mixed, tail = short_conv(inputs, self.conv_taps(), tail, tile.offsets)
        q, k, v, g, beta = (part.unsqueeze(0) for part in self.rule_inputs(h, mixed[0]))
        return (q, k, v, g, beta), tail

    def recur(
        self, rule: Rule, tile: Tile, state: Float[Tensor, "B H K V"]
    ) -> tuple[Float[Tensor, "T H V"], Float[Tensor, "B H K V"]]:
        """The recurrence's output and the state after the tile."""
        out, state = kda(*rule, state, None if tile.first is None else tile.first.unsqueeze(0))
        return out[0], state

    def start_summary(self) -> Float[Tensor, "B H K KV"]:
        """[A | B] of no token: the identity, and nothing added."""
        state = self.start().state
        eye = torch.eye(self.head_dim, dtype=state.dtype, device=state.device)
        return torch.cat([eye.expand_as(state), state], dim=-1)

    def summarise(
        self, rule: Rule, tile: Tile, summary: Float[Tensor, "B H K KV"]
    ) -> Float[Tensor, "B H K KV"]:
        """[A | B] of the tokens so far, with S_out = A S_in + B for whatever state S_in they enter.

        The recurrence itself, over the state [A | B] with the values [0 | v].
        """
        q, k, v, g, beta = rule
        values = torch.cat([torch.zeros_like(v), v], dim=-1)
        return self.recur((q, k, values, g, beta), tile, summary)[1]

    def step(self, h: Float[Tensor, "B D"], carry: KdaCarry) -> Tensor:
        """The next token of each of B documents; their carries move on in place."""
        mixed = short_conv_step(self.conv_inputs(h), self.conv_taps(), carry.tail)
        return self.project(h, kda_step(*self.rule_inputs(h, mixed), carry.state))

    def conv_inputs(self, h: Float[Tensor, "T D"]) -> Float[Tensor, "T C"]:
        return torch.cat([self.q_proj(h), self.k_proj(h), self.v_proj(h)], dim=-1)

    def conv_taps(self) -> Float[Tensor, "C J"]:
        return torch.cat([conv.weight.squeeze(1) for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d)])

    def rule_inputs(
        self, h: Float[Tensor, "T D"], mixed: Float[Tensor, "T C"]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, k, v [T, H, K], log decay [T, H, K] and beta [T, H] of the delta rule."""
        q, k, v = mixed.unflatten(-1, (3, self.heads, self.head_dim)).unbind(1)
        return q, k, v, self.log_decay(h), wide(self.b_proj(h)).sigmoid()

    def project(self, h: Float[Tensor, "T D"], out: Float[Tensor, "T H V"]) -> Float[Tensor, "T D"]:
        """The gated norm and the output projection."""
        gate = self.g_b_proj(self.g_a_proj(h)).unflatten(-1, (self.heads, self.head_dim))
        return self.o_proj(gated_rms_norm(out, gate, self.o_norm.weight, self.eps).flatten(-2))

    def log_decay(self, h: Float[Tensor, "T D"]) -> Float[Tensor, "T H K"]:
        raw = self.f_b_proj(self.f_a_proj(h)).unflatten(-1, (self.heads, self.head_dim))
        return log_decay(raw, self.A_log, self.dt_bias, self.lower_bound)
