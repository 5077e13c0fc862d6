"""The bytes of each op on a tile of tokens, as it stands in its module: native kernel and plain torch.

Each method mirrors one function of `longstrand.ops` or `longstrand.model`: what it makes, what its graph saves, what
lives for a moment. A change there is a change here; tests/plan/test_tape.py compares the two, op by op, with what torch
allocates.
"""

from __future__ import annotations

from dataclasses import dataclass

from longstrand.architecture import Architecture
from longstrand.plan.job import Job
from longstrand.plan.parameters import GROUPS
from longstrand.plan.tape import Learns, Tape, Value

CHUNK = 16  # tokens of a chunk of KDA
GATHER_BYTES = 4 << 20  # latents gathered at once by plain sparse attention
ROW_BLOCK, POOL_BLOCK = 256, 4096  # of plain selection
TOKEN_BLOCK, VOCABULARY_BLOCK = 1024, 16384  # of the head


@dataclass(frozen=True)
class Settings:
    """What the ops of one job have in common.

    Attributes:
        e: bytes of a value of the model's dtype.
        w: of one in float32 or wider.
        native: whether CPU kernels run.
        groups: those that receive gradients.
    """

    shape: Architecture
    e: int
    w: int
    native: bool
    groups: frozenset[str] = frozenset(GROUPS)

    @classmethod
    def of(cls, job: Job) -> Settings:
        groups = frozenset(group for group in GROUPS if job.trains_group(group))
        return cls(job.shape, job.itemsize, job.wide, job.form == "native" and job.itemsize < 8, groups)

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
        # forward: the wide copy, its square or product; backward: normed, the wide gradient, its product, dx
        work = values * self.w * (1 + narrow) + values * self.e
        back = values * self.w * (2 + 2 * narrow)
        (y,) = self.tape.op([x], [values * self.e], saves=[x], kept=self.t * self.w, work=work, back=back)
        return y

    def mhc_gather(self, x: Value) -> list[Value]:
        """The sublayer's input, post and comb."""
        streams, width, t = self.shape.hc_mult, self.shape.hidden_size, self.t
        mixes = streams * (2 + streams)
        outputs = [t * width * self.e, t * streams * self.w, t * streams**2 * self.w]
        whole = t * streams * width
        fn = mixes * streams * width * self.w
        if self.s.native:
            kept = -(-t // 16) * 16 * (mixes + 1) * self.w
            return self.tape.op([x], outputs, saves=[x], kept=kept, back=fn * ("mhc" in self.s.groups))
        passes = 2 * self.shape.hc_sinkhorn_iters - 1
        kept = t * self.w * (1 + mixes + 2 * streams + 2 * streams**2 + passes * streams)
        small = t * self.w * (mixes + streams**2)
        wide = whole * self.w
        work = wide * (1 + self.s.narrow) + small
        back = wide * (1 + 2 * self.s.narrow) + t * width * self.w * self.s.narrow + fn + 3 * small
        return self.tape.op([x], outputs, saves=[x], kept=kept, work=work, back=back)

    def mhc_update(self, x: Value, out: Value, post: Value, comb: Value) -> Value:
        size = self.t * self.shape.hc_mult * self.shape.hidden_size * self.e
        kept = 0
        work = back = 0
        if not self.s.native:
            small = self.t * self.shape.hc_mult * (1 + self.shape.hc_mult)
            kept = small * self.e * self.s.narrow
            work, back = size + small * self.e, size
        inputs = [x, out, post, comb]
        (y,) = self.tape.op(inputs, [size], saves=inputs, kept=kept, work=work, back=back)
        return y

    def swiglu(self, both: Value, width: int) -> Value:
        size = self.t * width * self.e
        work, back = (0, 0) if self.s.native else (2 * size, 7 * size)
        (y,) = self.tape.op([both], [size], saves=[both], work=work, back=back)
        return y

    def dense(self, x: Value, width: int, inner: int, group: str) -> Value:
        """Gate and up in one product of joined weights, the activation, down."""
        size, trains = 2 * width * inner, group in self.s.groups
        # The joined gradient is cut into views, each of which is widened.
        widened = size * (self.e + self.w * self.s.narrow) * trains
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
            (y,) = self.tape.op([x], [size * self.e], saves=[x], back=channels * taps * self.w)
            return y
        # joined [tail, x], wide where it is narrow; the sum before silu is saved by silu
        joined = size * self.e + size * self.w * self.s.narrow
        work = size * self.w * (1 + self.s.narrow)
        back = size * self.w * 3
        (y,) = self.tape.op([x], [size * self.e], kept=joined * 1 + size * self.w, work=work, back=back)
        return y

    def kda(
        self, mixed: Value, g: Value, beta: Value, *, summary: bool = False, state_only: bool = False
    ) -> Value:
        """The recurrence over a tile, from q, k, v side by side, whose gradient is put together again.

        Args:
            summary: over the state [A | B] with the values [0 | v]: twice the value width.
            state_only: only the state has a gradient, whose way back is walked twice.
        """
        heads, key, t = self.shape.linear_num_heads, self.shape.linear_head_dim, self.t
        inner, chunks, graph = heads * key, -(-t // CHUNK), self.tape.graph
        joined = 2 * t * inner * self.e * summary
        out = t * inner * self.w * (1 + summary)
        inputs = [] if state_only else [mixed, g, beta]
        if self.s.native:
            padded = -(-key // 16) * 16
            copies = (3 + summary) * t * inner * self.w * self.s.narrow
            states = chunks * heads * (padded * padded + CHUNK * padded) * self.w * graph
            saves = [g, beta] if self.s.narrow else [mixed, g, beta]
            # dq, dk and dv, wide; alone with the state's, all of them for a moment
            back = t * (4 * inner + heads) * self.w if state_only else 3 * t * inner * self.w
            kept = copies + states
            (y,) = self.tape.op(inputs, [out], saves=saves, kept=kept, work=joined, back=back)
            return y
        per = self._chunked()
        (y,) = self.tape.op(
            [mixed, g, beta],
            [out],
            kept=per[0] * t * self.w,
            work=per[1] * t * self.w,
            back=per[2] * t * self.w,
        )
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
        rows = min(t, ROW_BLOCK)
        self.tape.at_once(chosen + rows * (POOL_BLOCK + selected) * (4 * self.w + 24))

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
        work = back = 0
        if not self.s.native:
            tokens = (selected + 1) * shape.index_kpool
            per_query = tokens * shape.kv_lora_rank * self.e
            rows = min(t, max(1, GATHER_BYTES // per_query))
            scores = rows * shape.num_attention_heads * tokens * self.w
            work = rows * per_query + 3 * scores
            back = rows * per_query * (2 + self.w // self.e) + 5 * scores
        out, masses = self.tape.op([q], [size, mass], saves=[q], kept=looked_up, work=work, back=back)
        masses.grad_bytes = 0
        return out, masses

    def experts(self, x: Value, weights: Value) -> Value:
        """Routed experts: rows grouped, two products per expert, put together."""
        shape, t, e = self.shape, self.t, self.e
        active, width, inner = shape.num_experts_per_tok, shape.hidden_size, shape.moe_intermediate_size
        pairs = t * active
        each = shape.n_routed_experts * width * inner
        learns = self.s.learns("experts", 2 * each, each)
        inputs, outputs = [x, weights], [t * width * e]
        if self.s.native:
            kept = pairs * (2 * width + 3 * inner) * e + pairs * 8
            back = pairs * (width + 3 * inner) * e
            (y,) = self.tape.op(
                inputs, outputs, saves=[weights], kept=kept, work=pairs * 8, back=back, learns=learns
            )
            return y
        kept = pairs * (3 * width + 3 * inner) * e + pairs * 16
        back = pairs * (2 * width + 3 * inner) * e
        (y,) = self.tape.op(
            inputs, outputs, saves=[weights], kept=kept, work=2 * pairs * width * e, back=back, learns=learns
        )
        return y

    def logprobs(self, hidden: Value) -> Value:
        """Of each token's target, from its last hidden state: a block of tokens and of the vocabulary at a time."""
        shape, t = self.shape, self.t
        rows, words, width = min(t, TOKEN_BLOCK), min(shape.vocab_size, VOCABULARY_BLOCK), shape.hidden_size
        logits = rows * words
        work = logits * (self.w * 2 + self.e * self.s.narrow) + t * self.w
        d_weight = (shape.vocab_size * width * self.w + words * width * (self.e + self.w * self.s.narrow)) * (
            "head" in self.s.groups
        )
        back = d_weight + logits * (self.w + self.e * self.s.narrow) + rows * width * (self.w + self.e)
        (y,) = self.tape.op([hidden], [t * self.w], saves=[hidden], kept=t * self.w, work=work, back=back)
        return y

    def _chunked(self) -> tuple[int, int, int]:
        """Values per token that plain chunks keep, and need for a moment each way; see `ops/kda/chunked.py`."""
        heads, key = self.shape.linear_num_heads, self.shape.linear_head_dim
        kept = heads * (key * key + 366 * key) // 16 + 51 * heads
        return kept, 6 * heads * key, 10 * heads * key

    def log_decay(self, raw: Value, inner: int) -> Value:
        size = self.t * inner
        if self.s.native:
            (y,) = self.tape.op([raw], [size * self.w], saves=[raw])
            return y
        (y,) = self.tape.op(
            [raw], [size * self.w], kept=2 * size * self.w, work=size * self.w, back=2 * size * self.w
        )
        return y

    def gated_rms_norm(self, x: Value, gate: Value, inner: int) -> Value:
        size = self.t * inner
        if self.s.native and self.w == 4:
            (y,) = self.tape.op([x, gate], [size * self.e], saves=[x, gate])
            return y
        work = 2 * size * self.w
        kept = 2 * size * self.w
        (y,) = self.tape.op(
            [x, gate], [size * self.e], saves=[x], kept=kept, work=work, back=4 * size * self.w
        )
        return y
