"""The bytes of each op on a tile of tokens, as it stands in its module: native kernel and plain torch.

Each method mirrors one function of `longstrand.ops` or `longstrand.model`: what it makes, what its graph saves, what
lives for a moment. A change there is a change here; tests/plan/test_tape.py compares the two, op by op, with what torch
allocates.
"""

from __future__ import annotations

from dataclasses import dataclass

from longstrand.architecture import Architecture
from longstrand.plan import plain
from longstrand.plan.chunked import Chunked
from longstrand.plan.job import Job
from longstrand.plan.parameters import GROUPS
from longstrand.plan.rounds import ALONE, Rounds, experts_over, filled
from longstrand.plan.tape import Learns, Tape, Value

CHUNK = 16  # tokens of a chunk of KDA
TOKEN_BLOCK, VOCABULARY_BLOCK = 1024, 16384  # of the head


@dataclass(frozen=True)
class Settings:
    """What the ops of one job have in common.

    Attributes:
        e: bytes of a value of the model's dtype.
        w: of one in float32 or wider.
        native: whether CPU kernels run.
        groups: those that receive gradients.
        pools: of a sequence, as far as selection looks at them at once.
        rounds: of experts that ranks share.
        indexer: how it learns.
        aux: whether routers have a loss of their own.
        begins: whether a document begins in the tile.
    """

    shape: Architecture
    e: int
    w: int
    native: bool
    groups: frozenset[str] = frozenset(GROUPS)
    pools: int = plain.POOL_BLOCK + 1
    rounds: Rounds = ALONE
    indexer: str = "frozen"
    aux: bool = False
    begins: bool = True

    @classmethod
    def of(cls, job: Job) -> Settings:
        groups = frozenset(group for group in GROUPS if job.trains_group(group))
        native = job.form == "native" and job.itemsize < 8
        pools = min(job.length // job.shape.index_kpool, plain.POOL_BLOCK + 1)
        ranks, receive = job.parallel.expert, job.parallel.receive_rows(job.memory.tile)
        rounds = Rounds(ranks, receive, job.skew) if ranks > 1 else ALONE
        aux = job.balance == "aux"
        return cls(job.shape, job.itemsize, job.wide, native, groups, pools, rounds, job.indexer, aux)

    @property
    def narrow(self) -> bool:
        """Whether the model's dtype is narrower than float32."""
        return self.e < self.w

    def learns(self, group: str, *sizes: int) -> Learns:
        """What gradients of weights take on an operation's way back: all of them, then one at a time as it is widened.

        Args:
            sizes: values of each weight.
        """
        if group not in self.groups:
            return Learns()
        made = sum(sizes) * self.e
        return Learns(made, made + max(sizes) * self.w * self.narrow)


class Ops:
    """Writes ops of `tokens` rows onto a tape."""

    def __init__(self, tape: Tape, settings: Settings, tokens: int) -> None:
        self.tape, self.s, self.t = tape, settings, tokens
        self.shape, self.e, self.w = settings.shape, settings.e, settings.w

    def linear(self, x: Value, inputs: int, outputs: int, group: str) -> Value:
        """y = x W^T; x is saved for the gradient of W alone."""
        learns, saves = self.s.learns(group, inputs * outputs), [x] if group in self.s.groups else []
        (y,) = self.tape.op([x], [self.t * outputs * self.e], saves=saves, learns=learns)
        return y

    def wide_of(self, x: Value, values: int) -> Value:
        """A copy in float32, or x itself."""
        if not self.s.narrow:
            return x
        (y,) = self.tape.op([x], [values * self.w])
        return y

    def rms_norm(self, x: Value, width: int) -> Value:
        values, narrow = self.t * width, self.s.narrow
        if self.s.native:
            (y,) = self.tape.op([x], [values * self.e], saves=[x])
            return y
        return plain.rms_norm(self, x, values, width, narrow=narrow)

    def mhc_gather(self, x: Value) -> list[Value]:
        """The sublayer's input, post and comb."""
        streams, width, t = self.shape.hc_mult, self.shape.hidden_size, self.t
        mixes = streams * (2 + streams)
        outputs = [t * width * self.e, t * streams * self.w, t * streams**2 * self.w]
        fn = mixes * streams * width * self.w
        if self.s.native:
            kept = -(-t // 16) * 16 * (mixes + 1) * self.w
            return self.tape.op([x], outputs, saves=[x], kept=kept, back=fn * ("mhc" in self.s.groups))
        return plain.mhc_gather(self, x, outputs, fn * ("mhc" in self.s.groups))

    def mhc_update(self, x: Value, out: Value, post: Value, comb: Value) -> Value:
        size = self.t * self.shape.hc_mult * self.shape.hidden_size * self.e
        if not self.s.native:
            return plain.mhc_update(self, x, out, post, comb, size)
        inputs = [x, out, post, comb]
        (y,) = self.tape.op(inputs, [size], saves=inputs)
        return y

    def swiglu(self, both: Value, width: int) -> Value:
        size = self.t * width * self.e
        if not self.s.native:
            return plain.swiglu(self, both, size)
        (y,) = self.tape.op([both], [size], saves=[both])
        return y

    def dense(self, x: Value, width: int, inner: int, group: str) -> Value:
        """Gate and up in one product of joined weights, the activation, down."""
        size, trains = 2 * width * inner, group in self.s.groups
        # The joined gradient is cut into views, which are widened one after the other.
        widened = size * self.w * self.s.narrow // 2 * trains
        (joined,) = self.tape.op([], [size * self.e], learns=Learns(0, widened))
        joined.grad_bytes *= trains
        (both,) = self.tape.op(
            [x, joined], [self.t * 2 * inner * self.e], saves=[joined, *([x] if trains else [])]
        )
        self.tape.drop(joined)
        hidden = self.swiglu(both, inner)
        out = self.linear(hidden, inner, width, group)
        self.tape.drop(both, hidden)
        return out

    def short_conv(self, x: Value, channels: int) -> Value:
        size, taps = self.t * channels, self.shape.linear_conv_kernel_dim
        if self.s.native:
            held = channels * taps * self.w  # the taps of q, k and v joined, and their gradient
            (y,) = self.tape.op([x], [size * self.e], saves=[x], kept=held, back=held)
            return y
        return plain.short_conv(self, x, channels)

    def kda(
        self, mixed: Value, g: Value, beta: Value, *, summary: bool = False, state_only: bool = False
    ) -> Value:
        """The recurrence over a tile, from q, k, v side by side, whose gradient is put together again.

        Args:
            summary: over the state [A | B] with the values [0 | v]: twice the value width.
            state_only: only the state has a gradient, whose way back is walked twice.
        """
        heads, key, t = self.shape.linear_num_heads, self.shape.linear_head_dim, self.t
        inner = heads * key
        # as long as it runs: the values [0 | v] of a summary
        values = self.tape.value(2 * t * inner * self.e * summary)
        # Views of one value, whose gradients are put together again.
        parts = self.tape.op([mixed], [0, 0, 0])
        for part in parts:
            part.grad_bytes = t * inner * self.e
        if self.s.native:
            y = self._native_kda(mixed, parts, g, beta, 1 + summary, state_only=state_only)
        else:
            y = Chunked(self, key * (1 + summary), state_only=state_only).run(parts, g, beta)
        self.tape.drop(values)
        return y

    def _native_kda(
        self, mixed: Value, parts: list[Value], g: Value, beta: Value, width: int, *, state_only: bool
    ) -> Value:
        """`width`: of a value, in those of a key."""
        heads, key, t, w = self.shape.linear_num_heads, self.shape.linear_head_dim, self.t, self.w
        tape, inner, padded = self.tape, heads * key, -(-key // 16) * 16
        if self.s.narrow:
            sizes = (inner, inner, inner * width)
            parts = [self.tape.op([p], [t * n * w])[0] for p, n in zip(parts, sizes, strict=True)]
        states = -(-t // CHUNK) * heads * (padded * padded + CHUNK * padded) * w * tape.graph
        # The output's gradient, in a copy with a batch; where only the state has one, all others for a moment.
        back = t * inner * w + t * (4 * inner + heads) * w * state_only
        tape.value(heads * key * key * w * width)  # the state after the tile, which stays in the carry
        inputs = [] if state_only else [*parts, g, beta]
        saves = [*parts, g, beta] if self.s.narrow else [mixed, g, beta]
        (y,) = tape.op(inputs, [t * inner * w * width], saves=saves, kept=states, back=back)
        tape.drop(*parts)
        return y

    def select(self, queries: Value) -> None:
        """Pools of each row: nothing is kept."""
        shape, t = self.shape, self.t
        width = shape.index_n_heads * shape.index_head_dim
        selected = shape.index_topk // shape.index_kpool
        chosen = t * selected * 4
        if self.s.native:
            scaled = (t + 3) * width * self.w  # q scaled, then padded by three rows
            self.tape.at_once(chosen + scaled * 2 + (t + 3) * shape.index_n_heads * self.w)
            return
        plain.select(self)

    def sparse_attention(self, q: Value, *, gathered: bool) -> tuple[Value, Value]:
        """Latent outputs and the mass of each selected pool.

        Args:
            gathered: pools are looked up first: ids of 4 bytes, over a mask, two copies of 8 and one of 4.
        """
        shape, t = self.shape, self.t
        size = t * shape.num_attention_heads * shape.kv_lora_rank * self.e
        selected = shape.index_topk // shape.index_kpool
        mass = t * selected * self.w
        looked_up = t * selected * 4 * gathered
        self.tape.at_once(t * selected * 21 * gathered)
        if self.s.native:
            out, masses = self.tape.op([q], [size, mass], saves=[q], kept=looked_up)
        else:
            out, masses = plain.sparse_attention(self, q, [size, mass], looked_up)
        masses.grad_bytes = 0
        return out, masses

    def experts(self, x: Value, weights: Value) -> Value:
        """Routed experts: rows grouped, two products per expert, put together."""
        if self.s.rounds.ranks > 1:
            return experts_over(self, x, weights)
        shape, t, e = self.shape, self.t, self.e
        active, width, inner = shape.num_experts_per_tok, shape.hidden_size, shape.moe_intermediate_size
        pairs = t * active
        each = shape.n_routed_experts * width * inner
        learns = self.s.learns("experts", 2 * each, each)
        inputs, outputs = [x, weights], [t * width * e]
        if self.s.native:
            rows = filled(pairs, shape.n_routed_experts) if self.s.narrow else pairs
            kept = rows * (2 * width + 3 * inner) * e + pairs * 8
            back = rows * (width + 3 * inner) * e
            (y,) = self.tape.op(
                inputs, outputs, saves=[weights], kept=kept, work=pairs * 8, back=back, learns=learns
            )
            return y
        return plain.experts(self, x, weights, shape.n_routed_experts)

    def logprobs(self, hidden: Value) -> Value:
        """Of each token's target, from its last hidden state: a block of tokens and of the vocabulary at a time."""
        t = self.t
        trains = "head" in self.s.groups
        work, back = plain.logprob_bytes(self, TOKEN_BLOCK, VOCABULARY_BLOCK, trains)
        (y,) = self.tape.op([hidden], [t * self.w], saves=[hidden], kept=t * self.w, work=work, back=back)
        return y

    def log_decay(self, raw: Value, inner: int) -> Value:
        size = self.t * inner
        if self.s.native:
            (y,) = self.tape.op([raw], [size * self.w], saves=[raw])
            return y
        return plain.log_decay(self, raw, size)

    def gated_rms_norm(self, x: Value, gate: Value, inner: int) -> Value:
        size = self.t * inner
        if self.s.native and self.w == 4:
            (y,) = self.tape.op([x, gate], [size * self.e], saves=[x, gate])
            return y
        return plain.gated_rms_norm(self, x, gate, size, self.shape.linear_head_dim)
