"""KDA in plain chunks on a tape: `ops/kda/chunked.py`, operation by operation.

Sizes are of tokens padded to chunks: `s` of one value per head and channel, `m` of a [C, C] matrix per chunk and head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from longstrand.plan.tape import Tape, Value

if TYPE_CHECKING:
    from longstrand.plan.ops import Ops

BLOCK, CHUNK = 8, 16


class _Decayed(NamedTuple):
    scores: Value
    lower: Value
    q_in: Value
    k_in: Value
    k_out: Value
    decay: Value


class Chunked:
    """One tile's recurrence.

    Args:
        values: channels of a head's value.
        state_only: only the state has a gradient.
    """

    def __init__(self, ops: Ops, values: int, *, state_only: bool = False) -> None:
        self.tape: Tape = ops.tape
        shape, w = ops.shape, ops.w
        self.w, self.e, self.narrow, self.state_only = w, ops.e, ops.s.narrow, state_only
        self.begins = ops.s.begins
        heads, key = shape.linear_num_heads, shape.linear_head_dim
        self.chunks, self.length = -(-ops.t // CHUNK), ops.t * heads
        self.rows = self.chunks * CHUNK * heads * w  # one value per token and head
        self.s, self.m = self.rows * key, self.rows * CHUNK
        self.v = self.rows * values
        self.key, self.values = key, values
        self.state = heads * key * values * w

    def run(self, parts: list[Value], g: Value, beta: Value) -> Value:
        """The output, from q, k and v, log decay and beta."""
        tape, graph = self.tape, self.tape.graph
        tape.graph = graph and not self.state_only
        q, k, v, log, rate = self._chunks([*parts, g, beta])
        q, k = self._normalised(q, scaled=True), self._normalised(k)
        decayed = self._decayed(q, k, log, rate)
        if self.begins:
            decayed = self._masked(decayed)
        solved = self._solved(decayed, v, rate)
        tape.graph = graph
        out = self._scanned(decayed, solved)
        tape.drop(q, k, v, log, rate, *decayed, solved)
        return out

    def _op(
        self, inputs: list[Value], size: int, *, back: int = 0, saves: list[Value] | None = None
    ) -> Value:
        saved = inputs if saves is None else saves
        return self.tape.op(inputs, [size], saves=saved, back=back)[0]

    def _kept(self, x: Value, size: int) -> Value:
        """exp and its kin save what they give."""
        y = self._op([x], size, saves=[])
        self.tape.save(y)
        return y

    def _chunks(self, inputs: list[Value]) -> list[Value]:
        """Each part widened, padded and put in order: while it is, a copy of the one before lives beside it."""
        found = []
        sizes = (self.s, self.s, self.v, self.s, self.rows)
        for number, (x, size) in enumerate(zip(inputs, sizes, strict=True)):
            is_narrow = self.narrow and number < 3
            # back: what is left of the padded gradient, before it is cast
            (y,) = self.tape.op([x], [size], work=size, back=size * is_narrow)
            found.append(y)
        return found

    def _normalised(self, x: Value, *, scaled: bool = False) -> Value:
        """x / sqrt(sum x^2 + 1e-6)."""
        tape = self.tape
        square = self._op([x], self.s, saves=[x], back=self.s)
        total = self._op([square], self.rows, saves=[])
        tape.drop(square)
        root = self._kept(total, self.rows)
        tape.drop(total)
        y = self._op([x, root], self.s, back=self.s)
        tape.drop(root)
        if scaled:
            unscaled, y = y, self._op([y], self.s, saves=[])
            tape.drop(unscaled)
        tape.drop(x)
        return y

    def _decayed(self, q: Value, k: Value, log: Value, beta: Value) -> _Decayed:
        """Scores and the system of each chunk, and the factors against the carried state."""
        tape, s, m, half = self.tape, self.s, self.m, self.s // 2
        total = self._op([log], s, saves=[], back=2 * s)  # back: flipped, summed
        shifted = self._op([total], s, saves=[], back=s)  # less the middle's, whose gradient is summed
        grow = self._kept(shifted, s)
        tape.drop(shifted)
        shrink = self._kept(grow, s)
        q_mid, k_mid = self._op([q, grow], s), self._op([k, grow], s)
        k_ref = self._op([k, shrink], s)
        between = self._kept(total, s // CHUNK)
        (rows,) = tape.op([q_mid, k_mid], [2 * s], shares=True)
        # A product of more than three dims copies a transposed factor, and saves the copy.
        (turned,) = tape.op([k_ref], [s], shares=True)
        diagonal = self._op([rows, turned], m)
        tape.drop(turned)
        moved = self._op(
            [k_ref, between], half, back=s
        )  # the gradient of a part is put into one of the whole
        corner = self._op([rows, moved], m // 2, back=s)
        tape.drop(moved)
        scores = self._assembled(diagonal, corner)
        square = self._assembled(diagonal, corner, triangle=False)
        product = self._op([square, beta], m, back=m)
        tape.drop(square)
        lower = self._op([product], m, saves=[])
        tape.drop(product)
        start, rest = self._kept(total, s // BLOCK), self._kept(total, s // BLOCK)
        q_in, k_in = self._op([q_mid, start], s, back=s), self._op([k_mid, start], s, back=s)
        k_out = self._op([k_ref, rest], s, back=s)
        decay = self._kept(total, s // CHUNK)
        tape.drop(total, grow, shrink, q_mid, k_mid, k_ref, between, rows, diagonal, corner, start, rest)
        return _Decayed(scores, lower, q_in, k_in, k_out, decay)

    def _assembled(self, diagonal: Value, corner: Value, *, triangle: bool = True) -> Value:
        """Two halves joined; then what lies above the diagonal is cleared in a copy."""
        (y,) = self.tape.op([diagonal, corner], [self.m], work=self.m)
        if not triangle:
            return y
        cleared = self._op([y], self.m, saves=[])
        self.tape.drop(y)
        return cleared

    def _masked(self, parts: _Decayed) -> _Decayed:
        """In the tile where a document begins: products with masks, which alone are saved."""
        tape, rows = self.tape, self.rows
        masks = [tape.value(size) for size in (self.m, rows, rows, rows // CHUNK)]
        found = []
        which = (0, 0, 1, 1, 2, 3)
        for part, mask in zip(parts, which, strict=True):
            size = part.block.num_bytes
            found.append(self._op([part], size, saves=[masks[mask]]))
        tape.drop(*parts, *masks)
        return _Decayed(*found)

    def _solved(self, parts: _Decayed, v: Value, beta: Value) -> Value:
        """u and w side by side: the inverse of each chunk's system times beta [v | k_in]."""
        tape, m, both = self.tape, self.m, self.v + self.s
        # the system and the inverse with chunks last; three products of quarters of it. Back: two products, a copy
        (inverse,) = tape.op([parts.lower], [m], work=2 * m, back=m)
        tape.save(inverse)
        u, w = self._op([v, beta], self.v, back=self.v), self._op([parts.k_in, beta], self.s, back=self.s)
        (joined,) = tape.op([u, w], [both], shares=True)
        tape.drop(u, w)
        solved = self._op([inverse, joined], both)
        tape.drop(inverse, joined)
        return solved

    def _scanned(self, parts: _Decayed, solved: Value) -> Value:
        """States before each chunk and corrected values; then what both add to the output."""
        tape, v = self.tape, self.v
        states = (self.chunks + 1) * self.state
        (parts_of,) = tape.op([solved], [0])  # u and w, whose gradients are put side by side again
        parts_of.grad_bytes = solved.grad_bytes
        inputs = [] if self.state_only else [parts_of, parts.k_out, parts.decay]
        saved = [solved, parts.k_out, parts.decay]
        # back: gradients of all states, and products of states
        scan = tape.op(inputs, [states, v, self.state], saves=saved, back=2 * states)
        tape.save(scan[0], scan[1])
        scan[2].grad_bytes = 0
        first, second = (
            self._op([scan[0], *([] if self.state_only else [parts.q_in])], v, saves=[parts.q_in, scan[0]]),
            self._op(
                [scan[1], *([] if self.state_only else [parts.scores])], v, saves=[parts.scores, scan[1]]
            ),
        )
        (out,) = tape.op([first, second], [v], shares=True)
        tape.drop(first, second)
        ordered = self._op([out], v, saves=[])
        tape.drop(out, scan[0], scan[1])
        self.carried = scan[2]
        return ordered
