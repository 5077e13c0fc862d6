"""A layer's tile, written onto a tape as `model/layer.py`, `kda_layer.py` and `dsa_layer.py` compute it."""

from __future__ import annotations

from dataclasses import dataclass

from longstrand.architecture import KDA
from longstrand.plan.ops import Ops, Settings
from longstrand.plan.tape import Learns, Tape, Value


@dataclass
class Site:
    """What a hyper-connection hands to its sublayer."""

    h: Value
    post: Value
    comb: Value

    def cut(self, tape: Tape) -> Site:
        """The same as leaves, where a tile's graph is cut; see `model.layer.Cut`."""
        return Site(tape.leaf(self.h), tape.leaf(self.post), tape.leaf(self.comb))

    def join(self, leaves: Site) -> None:
        """The leaves' gradients arrive here."""
        self.h.grad, self.post.grad, self.comb.grad = leaves.h.grad, leaves.post.grad, leaves.comb.grad


class HeadTape:
    """The end of the trunk on tiles of `tokens` rows: the mean over streams, the last norm, log-probabilities."""

    def __init__(self, settings: Settings, tokens: int) -> None:
        self.s, self.t = settings, tokens
        self.width = settings.shape.hidden_size

    def forward(self) -> int:
        """Most that lives from the last layer's output on, which is not counted."""
        tape = Tape(graph=False)
        mean = tape.value(self.t * self.width * self.s.e)
        self._logprobs(tape, mean)
        return tape.most

    def backward(self) -> tuple[int, int]:
        """The gradient of the last layer's output, and most that lives until it is there."""
        tape = Tape()
        self._logprobs(tape, tape.view(self.t * self.width * self.s.e))
        tape.walk_back()
        streams = self.t * self.s.shape.hc_mult * self.width * self.s.e
        # d_mean, its part of each stream, and the streams
        return streams, max(tape.most, 2 * self.t * self.width * self.s.e + streams)

    def _logprobs(self, tape: Tape, mean: Value) -> None:
        ops = Ops(tape, self.s, self.t)
        hidden = ops.rms_norm(mean, self.width)
        found = ops.logprobs(hidden)
        tape.drop(hidden)
        tape.give(found, 0)


class LayerTape:
    """One layer on tiles of `tokens` rows.

    Attributes:
        index: of the layer.
    """

    def __init__(self, settings: Settings, index: int, tokens: int) -> None:
        self.s, self.index, self.t = settings, index, tokens
        self.shape = settings.shape
        self.is_kda = self.shape.layer_types[index] == KDA
        self.has_indexer = not self.is_kda and self.shape.indexer_types[index] == "full"
        self.is_sparse = self.shape.mlp_layer_types[index] == "sparse"
        self.width = self.shape.hidden_size

    def forward(self) -> int:
        """Most that lives while a tile goes forward without a graph, its output included; not its input."""
        ops, x = self._begin(graph=False)
        site = self._enter(ops, x)
        out = self._mix(ops, site.h)
        self._feed_forward(ops, ops.mhc_update(x, out, site.post, site.comb))
        return ops.tape.most

    def backward(self) -> tuple[int, int]:
        """Bytes that a tile's graph keeps, and most that lives until its input's gradient is there."""
        ops, x = self._begin()
        tape, site = ops.tape, self._enter(ops, x)
        leaves = site.cut(tape)
        join = len(tape.nodes)
        latents = None if self.is_kda else self._latents(ops, leaves.h)
        front = len(tape.nodes)
        out = self._kda(ops, leaves.h) if self.is_kda else self._dsa(ops, leaves.h, append=False)
        middle = ops.mhc_update(x, out, leaves.post, leaves.comb)
        tape.drop(out)
        y = self._feed_forward(ops, middle)
        tape.drop(middle)
        kept = tape.live
        tape.give(y, 0)
        tape.walk_back(front)
        if latents is not None:  # complete now: the rows of the tile's latents, cast to what they are
            tape.give(latents)
            tape.at_once(self.t * self.shape.kv_lora_rank * self.s.w * self.s.narrow)
            tape.walk_back(join)
        site.join(leaves)
        tape.walk_back()
        return kept, tape.most

    def _begin(self, *, graph: bool = True) -> tuple[Ops, Value]:
        """A tape of its own, and the tile's input, which is a view."""
        tape = Tape(graph)
        x = tape.view(self.t * self.shape.hc_mult * self.width * self.s.e)
        return Ops(tape, self.s, self.t), x

    def _mix(self, ops: Ops, h: Value) -> Value:
        """The mixer's output."""
        return self._kda(ops, h) if self.is_kda else self._dsa(ops, h)

    def _enter(self, ops: Ops, x: Value) -> Site:
        h, post, comb = ops.mhc_gather(x)
        normed = ops.rms_norm(h, self.width)
        ops.tape.drop(h)
        return Site(normed, post, comb)

    def _kda(self, ops: Ops, h: Value) -> Value:
        """The mixer's output."""
        rule = self._rule(ops, h)
        out = ops.kda(*rule)
        mixer = self._project(ops, h, out)
        if not ops.tape.graph:  # otherwise the front holds them
            ops.tape.drop(*rule, out)
        return mixer

    def _rule(self, ops: Ops, h: Value) -> tuple[Value, Value, Value]:
        """q, k and v side by side, log decay and beta."""
        tape, shape, t, e = ops.tape, self.shape, self.t, self.s.e
        heads, key, width = shape.linear_num_heads, shape.linear_head_dim, self.width
        inner = heads * key
        parts = [ops.linear(h, width, inner, "kda") for _ in range(3)]
        (inputs,) = tape.op(parts, [3 * t * inner * e])
        tape.drop(*parts)
        mixed = ops.short_conv(inputs, 3 * inner)
        first = ops.linear(h, width, key, "kda")
        raw = ops.linear(first, key, inner, "kda")
        g = ops.log_decay(raw, inner)
        tape.drop(first, raw)
        logits = ops.linear(h, width, heads, "kda")
        (beta,) = tape.op([logits], [t * heads * self.s.w])
        tape.save(beta)
        tape.drop(logits, inputs)
        return mixed, g, beta

    def _project(self, ops: Ops, h: Value, out: Value) -> Value:
        heads, key = self.shape.linear_num_heads, self.shape.linear_head_dim
        first = ops.linear(h, self.width, key, "kda")
        gate = ops.linear(first, key, heads * key, "kda")
        ops.tape.drop(first)
        normed = ops.gated_rms_norm(out, gate, heads * key)
        ops.tape.drop(gate)
        mixer = ops.linear(normed, heads * key, self.width, "kda")
        ops.tape.drop(normed)
        return mixer

    def _latents(self, ops: Ops, h: Value) -> Value:
        latent = self.shape.kv_lora_rank
        raw = ops.linear(h, self.width, latent, "mla")
        latents = ops.rms_norm(raw, latent)
        ops.tape.drop(raw)
        return latents

    def _complete_pools(self, ops: Ops) -> None:
        """Keys and gates of each token, then the keys of the pools: nothing stays but what is written to buffers."""
        t, e, w, width = self.t, self.s.e, self.s.w, self.shape.index_head_dim
        both = 2 * t * width * e  # keys and gates
        # wk, its norm and the gates beside the joined rows; then the members twice, their shares and products
        ops.tape.at_once(max(3 * t * width * e + both, 2 * both + t * width * (2 * w + e)))

    def _dsa(self, ops: Ops, h: Value, *, append: bool = True, gathered: bool = False) -> Value:
        """The mixer's output.

        Args:
            append: whether the tile's latents and pools are made here.
            gathered: whether ranks have gathered them, so that pools are looked up.
        """
        tape, shape, t, e = ops.tape, self.shape, self.t, self.s.e
        heads, rank, latent = shape.num_attention_heads, shape.q_lora_rank, shape.kv_lora_rank
        queries, values = heads * shape.qk_nope_head_dim, heads * shape.v_head_dim
        if append:
            latents = self._latents(ops, h)
            if self.has_indexer:
                self._complete_pools(ops)
            tape.drop(latents)
        raw = ops.linear(h, self.width, rank, "mla")
        q_resid = ops.rms_norm(raw, rank)
        tape.drop(raw)
        if not tape.graph and self.has_indexer:
            self._select(ops, q_resid)
        q = ops.linear(q_resid, rank, queries, "mla")
        weight = self._of_slice(heads * (shape.qk_nope_head_dim + shape.v_head_dim) * latent)
        (by_head,) = tape.op([q], [t * heads * latent * e], saves=[q], learns=weight)
        tape.drop(q)
        (absorbed,) = tape.op([by_head], [t * heads * latent * e], shares=True)
        tape.drop(by_head)
        out, mass = ops.sparse_attention(absorbed, gathered=gathered)
        tape.drop(absorbed)
        (by_head,) = tape.op([out], [t * values * e], saves=[out], learns=weight)
        (flat,) = tape.op([by_head], [t * values * e], shares=True)
        tape.drop(by_head)
        mixer = ops.linear(flat, values, self.width, "mla")
        tape.drop(flat, q_resid, out, mass)
        return mixer

    def _of_slice(self, values: int) -> Learns:
        """A part of a weight took part: its gradient is put into one of the whole weight's size."""
        learns = self.s.learns("mla", values)
        return Learns(learns.made // 2, learns.widened + learns.made // 2)

    def _select(self, ops: Ops, q_resid: Value) -> None:
        shape = self.shape
        width = shape.index_n_heads * shape.index_head_dim
        q = ops.linear(q_resid, shape.q_lora_rank, width, "indexer")
        wide = ops.wide_of(q, self.t * width)
        weights = ops.tape.value(self.t * shape.index_n_heads * self.s.w)
        if wide is not q:
            ops.tape.drop(q)
        ops.select(wide)
        ops.tape.drop(wide, weights)

    def _feed_forward(self, ops: Ops, x: Value) -> Value:
        tape = ops.tape
        site = self._enter(ops, x)
        if not self.is_sparse:
            out = ops.dense(site.h, self.width, self.shape.intermediate_size, "dense")
        else:
            out = self._mixture(ops, site.h)
        y = ops.mhc_update(x, out, site.post, site.comb)
        tape.drop(out, site.h, site.post, site.comb)
        return y

    def _mixture(self, ops: Ops, h: Value) -> Value:
        tape, shape, t, w = ops.tape, self.shape, self.t, self.s.w
        active, experts = shape.num_experts_per_tok, shape.n_routed_experts
        wide = ops.wide_of(h, t * self.width)
        learns = self.s.learns("router", self.width * experts)
        (logits,) = tape.op(
            [wide], [t * experts * w], saves=[wide] if "router" in self.s.groups else [], learns=learns
        )
        if wide is not h:
            tape.drop(wide)
        ids = tape.value(t * active * 8)
        # scores of the chosen, their sum; the ids, by which they were looked up
        (weights,) = tape.op([logits], [t * active * w], saves=[ids], kept=t * (active + 1) * w)
        routed = ops.experts(h, weights)
        shared = ops.dense(h, self.width, shape.moe_intermediate_size * shape.n_shared_experts, "experts")
        (out,) = tape.op([routed, shared], [t * self.width * self.s.e], shares=True)
        tape.drop(routed, shared, ids, logits, weights)
        return out
