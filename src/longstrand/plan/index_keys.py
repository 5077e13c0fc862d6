"""What a learning indexer takes on a tile, as `model/index_keys.py` and the ops that it calls compute it.

I indices per query, DI channels of IH heads, P pools of a tile; L channels of a latent, H heads of attention
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from longstrand.plan.tape import Value

if TYPE_CHECKING:
    from longstrand.plan.ops import Ops

GATHER_BYTES = 4 << 20  # keys gathered at once by the loss over selected pools
DENSE_BLOCK = 256  # pools that dense attention looks at at once


def pool_keys(ops: Ops) -> Value:
    """The graph of a tile's pool keys, which stays until all later tiles have sent their gradients."""
    shape, t, e, w, narrow = ops.shape, ops.t, ops.e, ops.w, ops.s.narrow
    one = t * shape.index_head_dim
    # wk's output and its statistics; members and where they lie; shares, and those cast; the keys
    kept = (
        one * e
        + 2 * t * w
        + 2 * one * e
        + 8 * t
        + one * w
        + one * e * narrow
        + _pools(ops) * (one // t * e + 8)
    )
    keys = ops.tape.value(kept)
    ops.tape.at_once(2 * one * e + one * w * narrow)  # the joined rows, gates widened
    return keys


def pool_keys_back(ops: Ops, keys: Value) -> None:
    """Once their gradients are complete: beside them those of shares and members."""
    one = ops.t * ops.shape.index_head_dim
    ops.tape.at_once(2 * one * ops.e + _pools(ops) * ops.shape.index_head_dim * (ops.w + ops.e))
    ops.tape.drop(keys)


def queries(ops: Ops, h: Value, q_resid: Value) -> tuple[Value, Value]:
    """Index queries and head weights, of inputs that no gradient reaches."""
    shape, t, e, w = ops.shape, ops.t, ops.e, ops.w
    found = []
    for x, inputs, outputs in (
        (q_resid, shape.q_lora_rank, shape.index_n_heads * shape.index_head_dim),
        (h, shape.hidden_size, shape.index_n_heads),
    ):
        learns = ops.s.learns("indexer", inputs * outputs)
        (y,) = ops.tape.op([], [t * outputs * e], saves=[x], learns=learns)
        found.append(_replaced(ops, y, ops.wide_of(y, t * outputs)))
    weights = _replaced(ops, found[1], ops.tape.op([found[1]], [t * shape.index_n_heads * w])[0])
    return found[0], weights


def selected_loss(ops: Ops, h: Value, q_resid: Value) -> Value:
    """KL over the selected pools of each row: `selected_indexer_loss`."""
    shape, tape, t, w = ops.shape, ops.tape, ops.t, ops.w
    q, weights = queries(ops, h, q_resid)
    scaled = _replaced(ops, q, tape.op([q], [q.grad_bytes])[0])
    selected = shape.index_topk // shape.index_kpool
    tape.at_once(2 * t * selected * w)  # shares of the mass beside the target
    target = tape.value(t * selected * w)
    work, back = _blocks(ops, selected)
    (loss,) = tape.op([scaled, weights], [w], saves=[scaled, weights, target], work=work, back=back)
    tape.drop(scaled, weights, target)
    return loss


def dense_attention(ops: Ops, q: Value) -> Value:
    """The output of attention to all that a token sees, without a graph; `q` in latent space."""
    shape, tape, t, w, narrow = ops.shape, ops.tape, ops.t, ops.w, ops.s.narrow
    outputs = t * shape.num_attention_heads * shape.kv_lora_rank
    wide = outputs * w
    of_head = t * shape.num_attention_heads * w
    # Before a block's scores are there: the output so far, and its rescaling. After: what it adds to the output.
    coming = wide + _scores(ops)
    adding = 3 * wide + outputs * ops.e + _of_block(ops) * (2 * w + ops.e * narrow) // w
    tape.at_once(
        5 * of_head + max(coming, adding)
    )  # peak and total, the peak before, its shift, what rescales
    return tape.value(outputs * ops.e)


def dense_loss(ops: Ops, h: Value, q_resid: Value, q: Value) -> None:
    """KL over all visible pools and its gradients, beside the queries of attention; nothing of it stays."""
    shape, tape, t, w = ops.shape, ops.tape, ops.t, ops.w
    out = dense_attention(ops, q)
    normaliser = tape.value(t * (shape.num_attention_heads + 1) * w)
    index_q, weights = queries(ops, h, q_resid)
    grads = tape.value(index_q.grad_bytes + weights.grad_bytes)
    row = t * _dense_pools(ops)[0]
    # Of the block before: its mass and share; share, scores, logprobs and gradients of scores and products; masks.
    coming = 8 * row * w + _scores(ops)
    tape.at_once(3 * row + max(coming, 12 * row * w + 2 * _of_block(ops)))
    tape.drop(out, normaliser, q)
    for value in (index_q, weights):
        tape.give(value, 0)
    tape.walk_back()
    tape.drop(index_q, weights, grads)


def _scores(ops: Ops) -> int:
    """Of a block: a product, then scaled, beside two of the block before: its scores, and what was made of them."""
    now, before = _dense_pools(ops)
    return _of_block(ops) * 2 * (now + before) // now


def _of_block(ops: Ops) -> int:
    """A score of every head for each token of the largest block of pools."""
    shape = ops.shape
    return ops.t * shape.num_attention_heads * shape.index_kpool * _dense_pools(ops)[0] * ops.w


def _dense_pools(ops: Ops) -> tuple[int, int]:
    """Of the largest block, and of the one after it, of a tile that sees all pools."""
    first = min(ops.s.pools, DENSE_BLOCK)
    return first, min(ops.s.pools - first, DENSE_BLOCK)


def _blocks(ops: Ops, selected: int) -> tuple[int, int]:
    """Most at once of a block of rows, each way: the gathered keys, their ids, products with them, and scores."""
    shape, w = ops.shape, ops.w
    keys = selected * shape.index_head_dim
    rows = min(ops.t, max(1, GATHER_BYTES // (keys * w)))
    following = min(ops.t - rows, rows)  # what was of the block before lives until its own is there
    gathered, ids, scores = keys * w, 8 * selected, selected * w
    products = shape.index_n_heads * scores
    coming = following * (ids + gathered + keys * ops.e * ops.s.narrow)
    there, back = gathered + ids + products + 4 * scores, gathered + ids + 2 * products + 3 * scores
    forward = max(rows * (gathered + ids + 2 * scores) + coming, rows * there)
    return forward, max(rows * back + coming, rows * (back + gathered))


def _pools(ops: Ops) -> int:
    return ops.t // ops.shape.index_kpool


def _replaced(ops: Ops, x: Value, y: Value) -> Value:
    """`y`, in the place of `x` where that is another."""
    if y is not x:
        ops.tape.drop(x)
    return y
