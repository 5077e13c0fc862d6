"""Experts that ranks share, on the tape: tokens go to where their experts are, in bounded rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from longstrand.plan.tape import Learns, Value

if TYPE_CHECKING:
    from longstrand.plan.ops import Ops

LEAST_ROWS = 32
"""An expert's rows are a multiple of it, in bfloat16."""


class Rounds(NamedTuple):
    """How a tile's choices move.

    Attributes:
        ranks: of the expert axis; 1: nothing moves.
        receive: most rows that a rank receives at once.
        skew: what the busiest rank receives, over the mean.
    """

    ranks: int = 1
    receive: int = 1
    skew: float = 1.0

    def number(self, pairs: int) -> int:
        """Of rounds, for so many choices of a tile."""
        return max(1, -(-int(pairs * self.skew) // self.receive))

    def rows(self, pairs: int) -> tuple[int, int]:
        """Rows that a rank sends in a round, and that the busiest one receives."""
        number = self.number(pairs)
        return -(-pairs // number), -(-int(pairs * self.skew) // number)


ALONE = Rounds()


def fill_step(tokens: int) -> int:
    """The bfloat16 kernel fills up an expert's rows to a multiple of it: one of 8 numbers between two powers of two."""
    return max(LEAST_ROWS, 1 << max(tokens.bit_length() - 4, 0))


def filled(choices: int, experts: int) -> int:
    """Rows of that kernel for choices spread evenly: each expert's fill up half a step on the average."""
    return choices + experts * fill_step(choices // experts) // 2


def experts_over(ops: Ops, x: Value, weights: Value) -> Value:
    """As `parallel.dispatch` computes them: a round is a recompute unit, so that nothing of it stays.

    Forward: the output in float32, the order of all choices, and of a round what is sent, what comes and what the
    experts hold. Backward: the gradient of x in float32, that of the local experts, of a round x and d_out side by
    side, and a graph of the rows that came.
    """
    shape, tape, t, e, w, narrow = ops.shape, ops.tape, ops.t, ops.e, ops.w, ops.s.narrow
    width, inner = shape.hidden_size, shape.moe_intermediate_size
    pairs = t * shape.num_experts_per_tok
    sent, came = ops.s.rounds.rows(pairs)
    local = shape.n_routed_experts // ops.s.rounds.ranks
    held = filled(came, local) if narrow and ops.s.native else came
    inside = held * (2 * width + 3 * inner) * e + came * (16 + w)  # rows in groups, halves, hidden, results
    going, coming = sent * width * e, came * width * e
    ids = (sent * 2 + came) * 8
    there = max(going + coming, 2 * coming + inside, coming + going + sent * width * w)
    output = t * width * w
    work = output + pairs * 16 + ids + max(there, (t * width * e) * narrow)

    values = local * 3 * width * inner
    trains = "experts" in ops.s.groups
    learns = ops.s.learns("experts", values * 2 // 3, values // 3)
    graph = 2 * coming + inside  # a copy of the rows, what the graph keeps, its output
    products = came * width * w * (1 + narrow) + coming  # d_out by weight, and cast: the latter stays
    walked = coming + held * (width + 3 * inner) * e + coming + max(learns)
    round_back = 2 * coming + max(4 * going, graph + products, graph + walked)
    # What earlier rounds have added up; in the only one it is what the gradients become as they are widened.
    added = values * w * (trains and ops.s.rounds.number(pairs) > 1)
    back = output + pairs * (16 + w) + ids + round_back + added
    (y,) = tape.op(
        [x, weights],
        [t * width * e],
        saves=[x, weights],
        work=work,
        back=back,
        learns=Learns(0, values * w * trains),
    )
    return y
