"""A layer's tile, written onto a tape as `model/layer.py`, `kda_layer.py` and `dsa_layer.py` compute it."""

from __future__ import annotations

from dataclasses import dataclass

from longstrand.architecture import KDA
from longstrand.plan import index_keys
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
        """The leaves' gradients arrive here; the leaves have them until they go."""
        for part, leaf in ((self.h, leaves.h), (self.post, leaves.post), (self.comb, leaves.comb)):
            hand_on(leaf, part)


def hand_on(leaf: Value, to: Value) -> None:
    """A leaf's gradient arrives at what it was cut from."""
    to.grad = leaf.grad
    if to.grad is not None:
        to.grad.holders += 1


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
        self.learns = self.has_indexer and "indexer" in settings.groups and settings.indexer == "sparse"
        self.losses: list[Value] = []

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
        found = ops.kda(*self._rule(ops, leaves.h)) if self.is_kda else self._latents(ops, leaves.h)
        front = len(tape.nodes)
        keys, grown = self._learn_keys(ops), tape.leaf(found)
        out = self._project(ops, leaves.h, grown) if self.is_kda else self._dsa(ops, leaves.h, append=False)
        middle = ops.mhc_update(x, out, leaves.post, leaves.comb)
        tape.drop(out)
        y = self._feed_forward(ops, middle)
        tape.drop(middle)
        kept = tape.live
        self._give(tape, y)
        tape.walk_back(front)
        self._give_front(tape, found, grown)
        tape.walk_back(join)
        site.join(leaves)
        tape.walk_back()
        self._keys_back(ops, keys)
        return kept, tape.most

    def _give(self, tape: Tape, y: Value) -> None:
        """Gradients of a layer's output and of its side losses."""
        for value in (y, *self.losses):
            tape.give(value, 0)
        self.losses.clear()

    def _give_front(self, tape: Tape, found: Value, grown: Value) -> None:
        """The gradient of a front's end: of the recurrence's output, or of latents, complete by now."""
        if not self.is_kda:
            # The rows of the tile's latents, which stay, and what they are cast to.
            grown.grad = tape.new(self.t * self.shape.kv_lora_rank * self.s.w)
            if self.s.narrow:
                tape.give(found)
                return
        hand_on(grown, found)

    def _learn_keys(self, ops: Ops) -> Value | None:
        """The pool keys of a tile with their graph, where the indexer learns with all else."""
        return index_keys.pool_keys(ops) if self.learns else None

    def _keys_back(self, ops: Ops, keys: Value | None) -> None:
        if keys is not None:
            index_keys.pool_keys_back(ops, keys)

    def warm_up(self) -> int:
        """Most that lives while a tile teaches the indexer alone; not its input."""
        ops, x = self._begin(graph=False)
        tape, site = ops.tape, self._enter(ops, x)
        tape.drop(site.post, site.comb)
        raw = ops.linear(site.h, self.width, self.shape.q_lora_rank, "mla")
        q_resid = ops.rms_norm(raw, self.shape.q_lora_rank)
        tape.drop(raw)
        keys, absorbed = index_keys.pool_keys(ops), self._queries(ops, q_resid)
        tape.graph = True
        index_keys.dense_loss(ops, site.h, q_resid, absorbed)
        index_keys.pool_keys_back(ops, keys)
        return tape.most

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
        """The mixer's output, without a graph."""
        rule = self._rule(ops, h)
        out = ops.kda(*rule)
        mixer = self._project(ops, h, out)
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
        rank, values = shape.q_lora_rank, shape.num_attention_heads * shape.v_head_dim
        if append:
            latents = self._latents(ops, h)
            if self.has_indexer:
                self._complete_pools(ops)
            tape.drop(latents)
        raw = ops.linear(h, self.width, rank, "mla")
        q_resid = ops.rms_norm(raw, rank)
        tape.drop(raw)
        dense = self.s.indexer == "warmup"
        if not tape.graph and self.has_indexer and not dense:
            self._select(ops, q_resid)
        absorbed = self._queries(ops, q_resid)
        if dense:
            out, mass = index_keys.dense_attention(ops, absorbed), tape.value(0)
        else:
            out, mass = ops.sparse_attention(absorbed, gathered=gathered)
        tape.drop(absorbed)
        if tape.graph and self.learns:
            self.losses.append(index_keys.selected_loss(ops, h, q_resid))
        weight = self._of_heads()
        (by_head,) = tape.op([out], [t * values * e], saves=[out], learns=weight)
        (flat,) = tape.op([by_head], [t * values * e], shares=True)
        tape.drop(by_head)
        mixer = ops.linear(flat, values, self.width, "mla")
        tape.drop(flat, q_resid, out, mass)
        return mixer

    def _queries(self, ops: Ops, q_resid: Value) -> Value:
        """Those of attention, in latent space."""
        tape, shape, t, e = ops.tape, self.shape, self.t, self.s.e
        heads = shape.num_attention_heads
        q = ops.linear(q_resid, shape.q_lora_rank, heads * shape.qk_nope_head_dim, "mla")
        size = t * heads * shape.kv_lora_rank * e
        (by_head,) = tape.op([q], [size], saves=[q], learns=self._of_heads())
        tape.drop(q)
        (absorbed,) = tape.op([by_head], [size], shares=True)
        tape.drop(by_head)
        return absorbed

    def _of_heads(self) -> Learns:
        """A half of `kv_b_proj`."""
        shape = self.shape
        width = shape.qk_nope_head_dim + shape.v_head_dim
        return self._of_slice(shape.num_attention_heads * width * shape.kv_lora_rank)

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
        tape.drop(routed, shared, ids, weights)
        if self.s.aux and tape.graph:
            self._balance(tape, logits)
        tape.drop(logits)
        return out

    def _balance(self, tape: Tape, logits: Value) -> None:
        """The router's auxiliary loss: a softmax over experts, summed."""
        size = logits.grad_bytes
        (shares,) = tape.op([logits], [size])
        tape.save(shares)
        shares.grad_bytes = 0
        (loss,) = tape.op([shares], [self.s.w])
        tape.drop(shares)
        self.losses.append(loss)
