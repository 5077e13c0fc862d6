"""A layer's tile, written onto a tape as `model/layer.py`, `kda_layer.py` and `dsa_layer.py` compute it."""

from __future__ import annotations

from dataclasses import dataclass

from longstrand.architecture import KDA
from longstrand.plan.ops import Ops, Settings
from longstrand.plan.tape import Tape, Value


@dataclass
class Site:
    """What a hyper-connection hands to its sublayer."""

    h: Value
    post: Value
    comb: Value


class LayerTape:
    """One layer on tiles of `tokens` rows.

    Attributes:
        index: of the layer.
    """

    def __init__(self, settings: Settings, index: int, tokens: int) -> None:
        self.s, self.index, self.t = settings, index, tokens
        self.shape = settings.shape
        self.is_kda = self.shape.layer_types[index] == KDA
        self.is_sparse = self.shape.mlp_layer_types[index] == "sparse"
        self.width = self.shape.hidden_size

    def forward(self) -> int:
        """Most that lives while a tile goes forward without a graph, its output included; not its input."""
        tape = Tape(graph=False)
        ops = Ops(tape, self.s, self.t)
        x = self._input(tape)
        site = self._enter(ops, x)
        out = self._kda(ops, site.h) if self.is_kda else self._dsa(ops, site.h)
        middle = ops.mhc_update(x, out, site.post, site.comb)
        self._feed_forward(ops, middle)
        return tape.most

    def backward(self) -> tuple[int, int]:
        """Bytes that a tile's graph keeps, and most that lives until its input's gradient is there."""
        tape = Tape()
        ops = Ops(tape, self.s, self.t)
        x = self._input(tape)
        site = self._enter(ops, x)
        leaves = Site(tape.leaf(site.h), tape.leaf(site.post), tape.leaf(site.comb))
        front = len(tape.nodes)
        out = self._kda(ops, leaves.h) if self.is_kda else self._dsa(ops, leaves.h)
        middle = ops.mhc_update(x, out, leaves.post, leaves.comb)
        tape.drop(out)
        y = self._feed_forward(ops, middle)
        tape.drop(middle)
        kept = tape.live
        y.grad_bytes, given = 0, y.grad_bytes
        y.grad = tape.new(0)
        tape.walk_back(front)
        for value, leaf in ((site.h, leaves.h), (site.post, leaves.post), (site.comb, leaves.comb)):
            value.grad = leaf.grad
        tape.walk_back()
        del given
        return kept, tape.most

    def _input(self, tape: Tape) -> Value:
        return tape.view(self.t * self.shape.hc_mult * self.width * self.s.e)

    def _enter(self, ops: Ops, x: Value) -> Site:
        h, post, comb = ops.mhc_gather(x)
        normed = ops.rms_norm(h, self.width)
        ops.tape.drop(h)
        return Site(normed, post, comb)

    def _kda(self, ops: Ops, h: Value) -> Value:
        """The mixer's output."""
        tape, shape, t, e = ops.tape, self.shape, self.t, self.s.e
        heads, key, width = shape.linear_num_heads, shape.linear_head_dim, self.width
        inner = heads * key
        parts = [ops.linear(h, width, inner) for _ in range(3)]
        (inputs,) = tape.op(parts, [3 * t * inner * e])
        tape.drop(*parts)
        mixed = ops.short_conv(inputs, 3 * inner)
        first = ops.linear(h, width, key)
        raw = ops.linear(first, key, inner)
        g = ops.log_decay(raw, inner)
        tape.drop(first, raw)
        logits = ops.linear(h, width, heads)
        (beta,) = tape.op([logits], [t * heads * self.s.w])
        tape.save(beta)
        tape.drop(logits)
        out = ops.kda(mixed, g, beta)
        first = ops.linear(h, width, key)
        gate = ops.linear(first, key, inner)
        tape.drop(first)
        normed = ops.gated_rms_norm(out, gate, inner)
        tape.drop(gate)
        mixer = ops.linear(normed, inner, width)
        tape.drop(normed)
        tape.drop(inputs, mixed, g, beta, out)
        return mixer

    def _dsa(self, ops: Ops, h: Value) -> Value:
        raise NotImplementedError

    def _feed_forward(self, ops: Ops, x: Value) -> Value:
        tape = ops.tape
        site = self._enter(ops, x)
        if not self.is_sparse:
            out = ops.dense(site.h, self.width, self.shape.intermediate_size)
        else:
            out = self._mixture(ops, site.h)
        y = ops.mhc_update(x, out, site.post, site.comb)
        tape.drop(out, site.h, site.post, site.comb)
        return y

    def _mixture(self, ops: Ops, h: Value) -> Value:
        tape, shape, t, w = ops.tape, self.shape, self.t, self.s.w
        active, experts = shape.num_experts_per_tok, shape.n_routed_experts
        wide = ops.wide_of(h, t * self.width)
        back = self.width * experts * (w + w * self.s.narrow) * self.s.trains
        (logits,) = tape.op([wide], [t * experts * w], saves=[wide] if self.s.trains else [], back=back)
        if wide is not h:
            tape.drop(wide)
        ids = tape.value(t * active * 8)
        (weights,) = tape.op([logits], [t * active * w], kept=3 * t * active * w)
        routed = ops.experts(h, weights)
        shared = ops.dense(h, self.width, shape.moe_intermediate_size * shape.n_shared_experts)
        (out,) = tape.op([routed, shared], [t * self.width * self.s.e], shares=True)
        tape.drop(routed, shared, ids, logits, weights)
        return out
