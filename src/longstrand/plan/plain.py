"""The ops in plain torch on a tape, as their modules compute them where no CPU kernel runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from longstrand.plan.tape import Learns, Tape, Value

if TYPE_CHECKING:
    from longstrand.plan.ops import Ops

GATHER_BYTES = 4 << 20  # latents gathered at once by sparse attention
ROW_BLOCK, POOL_BLOCK = 256, 4096  # of selection


def rms_norm(ops: Ops, x: Value, values: int, width: int, *, narrow: bool) -> Value:
    """Of `values` values in all, in rows of `width`; `narrow`: narrower than float32."""
    w, e = ops.w, ops.e if narrow else ops.w
    # forward: the wide copy, then its square or its product. Back: normed, the wide gradient, dnormed, a product
    work, back = values * w * (1 + narrow), values * (w * (3 + narrow) - e)
    (y,) = ops.tape.op([x], [values * e], saves=[x], kept=values // width * w, work=work, back=back)
    return y


def gated_rms_norm(ops: Ops, x: Value, gate: Value, values: int, width: int) -> Value:
    tape, w, narrow = ops.tape, ops.w, ops.s.narrow
    normed = rms_norm(ops, x, values, width, narrow=False)
    wide = ops.wide_of(gate, values)
    (open_,) = tape.op([wide], [values * w])
    tape.save(open_)
    if narrow:
        tape.drop(wide)
    (y,) = tape.op([normed, open_], [values * w], saves=[normed, open_])
    tape.drop(normed, open_)
    return narrowed(ops, y, values)


def narrowed(ops: Ops, x: Value, values: int) -> Value:
    """Cast to the model's dtype."""
    if not ops.s.narrow:
        return x
    (y,) = ops.tape.op([x], [values * ops.e])
    ops.tape.drop(x)
    return y


def log_decay(ops: Ops, raw: Value, values: int) -> Value:
    tape, size = ops.tape, values * ops.w
    wide = ops.wide_of(raw, values)
    (shifted,) = tape.op([wide], [size], shares=True)
    if wide is not raw:
        tape.drop(wide)
    # saved for the gradient of the heads' rates
    (product,) = tape.op([shifted], [size], saves=[shifted] if "kda" in ops.s.groups else [], back=size)
    (open_,) = tape.op([product], [size])
    tape.save(open_)
    tape.drop(product)
    (g,) = tape.op([open_], [size])
    tape.drop(open_, shifted)
    return g


def short_conv(ops: Ops, x: Value, channels: int) -> Value:
    tape, values = ops.tape, ops.t * channels
    size = values * ops.w
    (joined,) = tape.op([x], [values * ops.e], shares=True)  # with the tail before it
    wide = ops.wide_of(joined, values)
    # where a document begins, rows are masked: a copy for each tap, on the way back beside the one before
    (summed,) = tape.op([wide], [size], saves=[wide], work=size, back=2 * size)
    if wide is not joined:
        tape.drop(wide)
    (y,) = tape.op([summed], [size], saves=[summed])
    tape.drop(summed)
    y = narrowed(ops, y, values)
    tape.drop(joined)
    return y


def mhc_gather(ops: Ops, x: Value, outputs: list[int], fn: int) -> list[Value]:
    """`fn`: bytes of the gradient of the mixing weights."""
    shape, t, w, narrow = ops.shape, ops.t, ops.w, ops.s.narrow
    streams, width = shape.hc_mult, shape.hidden_size
    mixes, whole = streams * (2 + streams), t * streams * width
    passes = 2 * shape.hc_sinkhorn_iters - 1
    # rstd, logits, gate, soft, comb and the divisors
    kept = t * w * (1 + mixes + 2 * streams + 2 * streams**2 + passes * streams)
    ops.tape.at_once(whole * w * (1 + narrow))  # the wide streams and their square
    # the wide streams, gates and pre
    work = whole * w * narrow + t * (w * (mixes + streams) + ops.e * streams)
    small = t * w * (mixes + 3 * streams + 2 * streams**2)  # d_pre, d_gate, d_soft, d_mix, d_gates
    # wide streams and d_h, the product and dx, whose cast is counted where it leaves
    back = whole * (w * (2 + narrow) - ops.e) + t * width * w * narrow + fn + small
    return ops.tape.op([x], outputs, saves=[x], kept=kept, work=work, back=back)


def mhc_update(ops: Ops, x: Value, out: Value, post: Value, comb: Value, size: int) -> Value:
    streams, narrow = ops.shape.hc_mult, ops.s.narrow
    small = ops.t * streams * (1 + streams) * ops.e
    saves = [x, out] if narrow else [x, out, post, comb]  # casts of the last two
    # the outer product and comb transposed; back: gradients of both before they are widened, beside a product
    work, kept = size + ops.t * streams**2 * ops.e, small * narrow
    (y,) = ops.tape.op([x, out, post, comb], [size], saves=saves, kept=kept, work=work, back=small * narrow)
    return y


def swiglu(ops: Ops, both: Value, size: int) -> Value:
    # gate and up clamped. Back: both, sigmoid, silu, d_up and d_gate
    (y,) = ops.tape.op([both], [size], saves=[both], work=2 * size, back=6 * size)
    return y


def select(ops: Ops) -> None:
    """Scores and ids of a block of rows: those kept so far, joined with those of a block of pools."""
    shape, w, chosen = ops.shape, ops.w, ops.shape.index_topk // ops.shape.index_kpool
    rows, pools = min(ops.t, ROW_BLOCK), min(ops.s.pools, POOL_BLOCK)
    out = ops.t * chosen * 4
    if ops.s.pools <= chosen:
        ops.tape.at_once(
            out + rows * chosen * 25
        )  # ids, what is hidden of them, a masked copy, ids of 4 bytes
        return
    best, joined = rows * chosen * (w + 8), rows * (chosen + pools)
    again = joined * (w + 8) * (ops.s.pools > POOL_BLOCK)  # scores and ids of the block before
    query = rows * shape.index_n_heads * shape.index_head_dim * w
    scoring = again + query + 2 * rows * pools * w + pools * shape.index_head_dim * w * ops.s.narrow
    joining = again * 8 // (w + 8) + joined * (w + 8)
    picking = joined * (w + 8 + 1) + rows * chosen * (w + 8)  # which equal the least: a byte each
    ops.tape.at_once(out + best * (1 + (again > 0)) + max(scoring, joining, picking))


def sparse_attention(ops: Ops, q: Value, outputs: list[int], looked_up: int) -> list[Value]:
    """`looked_up`: bytes of pool ids that the graph keeps."""
    shape, w, e, narrow = ops.shape, ops.w, ops.e, ops.s.narrow
    tokens = (shape.index_topk // shape.index_kpool + 1) * shape.index_kpool
    per_query = tokens * shape.kv_lora_rank * e
    rows = min(ops.t, max(1, GATHER_BYTES // per_query))
    again = ops.t > rows  # values of the block before live until theirs are there
    latents, heads = rows * per_query, shape.num_attention_heads
    hidden, ids = rows * tokens, rows * (tokens // shape.index_kpool) * 8
    scores, low = rows * heads * tokens * w, rows * heads * tokens * e
    query = rows * heads * shape.kv_lora_rank * e
    mine = latents + hidden + ids
    softmax = mine + scores * (2 + again)
    work = max(softmax, again * (2 * latents + 2 * hidden + 2 * ids + scores))
    # d_scores, probabilities and, cast, both joined; the joined rows; the latents' gradient
    before = again * (scores * 2 + low * 2 + query * 2 + latents)
    joining = mine + again * (latents + low * 2 + query * 2) + scores * 4 + 2 * low * narrow
    gradient = mine + scores * 2 + low * 2 + query * 2 + latents
    last = max(latents * again, latents * w // e * narrow)  # the one before; then the wide copy
    back = max(mine + latents + hidden + before, mine + before + scores * 2, joining, gradient + last)
    return ops.tape.op([q], outputs, saves=[q], kept=looked_up, work=work, back=back)


def experts(ops: Ops, x: Value, weights: Value, num: int) -> Value:
    """Rows grouped, two products for each of `num` experts, put together again."""
    shape, tape, t, e, w, narrow = ops.shape, ops.tape, ops.t, ops.e, ops.w, ops.s.narrow
    width, inner = shape.hidden_size, shape.moe_intermediate_size
    pairs, trains = t * shape.num_experts_per_tok, "experts" in ops.s.groups
    row, hidden = pairs * width * e, pairs * inner * e
    each = num * width * inner
    # The experts' gradients wait one by one, are put together, and then widened.
    parts = [_unbound(tape, size * e, size * w * narrow) for size in (2 * each, each)] if trains else []
    order = tape.value(pairs * 8)
    (grouped,) = tape.op([x], [row], kept=pairs * 8)
    # of one expert: both halves, hidden and the clamped parts
    one = (4 if not tape.graph else 2) * hidden // num
    one_back = (2 * row - 3 * hidden) // num
    back = max(one_back - row, row, 8 * hidden // num)
    kept = (2 + trains) * hidden * tape.graph
    (outputs,) = tape.op([grouped, *parts], [row], saves=[grouped] * trains, kept=kept, work=one, back=back)
    (joined,) = tape.op([outputs], [row], shares=True)
    index = tape.value(pairs * 8)
    (chosen,) = tape.op([joined], [row], saves=[index])
    tape.drop(joined)
    inputs = [chosen, weights]
    small = pairs * e * narrow
    (y,) = tape.op(
        inputs, [t * width * e], saves=[chosen, *([] if narrow else [weights])], kept=small, back=small
    )
    tape.drop(chosen, outputs, grouped, order, index)
    return y


def _unbound(tape: Tape, size: int, widened: int) -> Value:
    """Views of each expert's part of a weight."""
    (parts,) = tape.op([], [0], learns=Learns(size, size + widened))
    parts.grad_bytes = size
    return parts


def logprob_bytes(ops: Ops, token_block: int, vocabulary_block: int, trains: bool) -> tuple[int, int]:
    """Most at once each way beside normaliser, outputs and gradients that leave."""
    shape, t, e, w, narrow = ops.shape, ops.t, ops.e, ops.w, ops.s.narrow
    vocabulary, width = shape.vocab_size, shape.hidden_size
    rows, words = min(t, token_block), min(vocabulary, vocabulary_block)
    logits, next_rows = rows * words, min(t - rows, token_block)
    following = max(
        rows * min(vocabulary - words, vocabulary_block) if vocabulary > words else 0, next_rows * words
    )
    again = following > 0  # logits of the block before live until the next are there
    # logits less their maximum, in a copy
    work = max(2 * logits * w, logits * w * again + following * (w + e * narrow), logits * (w + e * narrow))
    d_weight = vocabulary * width * w * trains
    add = (w + e * narrow) if narrow else e  # a product, widened to be added
    part = words * width * add * trains
    back = max(
        logits * (w + e * narrow) + max(part, rows * width * add),
        (logits * (w + e * narrow)) * again + following * (w + e * narrow),
    )
    return work, back + d_weight + rows * width * w
