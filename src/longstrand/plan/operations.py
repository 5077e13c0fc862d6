"""What the slowest rank does in a step, by kind: operations, bytes moved, starts of operations; no torch.

The counts are those of the scan: each tile forward, again in backward, and its gradients; scores once, since choices
are kept. `products.py` has the definition's products per token, `exchanges.py` and `links.py` what moves between
ranks. Of one document per sequence every context rank has the same attention to compute; of experts the busiest
rank counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from longstrand.architecture import DSA, KDA, Architecture
from longstrand.plan.job import Job
from longstrand.plan.passes import LayerPasses, Passes
from longstrand.plan.products import (
    Products,
    dsa_terms,
    feed_forward_terms,
    kda_terms,
    mean_attended,
    mhc_terms,
)
from longstrand.plan.rows import rows_of
from longstrand.wording import operations

CHUNK = 16
"""Tokens that the delta rule computes at once (ops/kda)."""

ROW_BLOCK, POOL_BLOCK, GATHER_BYTES = 256, 4096, 4 << 20
"""Blocks of plain torch's selection and attention (ops/select, ops/sparse_attention)."""

NO_WEIGHTS = {"delta rule": 2.0, "attention": 2.5, "scores": 2.0}
"""Backward over forward of products of two activations; attention's computes its scores again."""

GROUPS = {
    "projections": ("kda", "mla"),
    "experts": ("experts", "dense"),
    "streams": ("mhc",),
    "head": ("head",),
}
"""The parameters whose gradients a kind of products computes, beside those of its inputs."""


@dataclass(frozen=True)
class Work:
    """What a rank does of one kind in a step.

    Attributes:
        amount: operations, bytes or starts, by what `rate` counts.
        rate: what it is divided by, as in `rates.py`.
        span: ranks that an exchange joins; 1: it leaves no device.
    """

    name: str
    amount: float
    rate: str
    why: str
    span: int = 1


def product_work(passes: Passes) -> list[Work]:
    """Operations by kind of product, two per multiply and add."""
    job, totals = passes.job, dict[str, float]()
    for layer in range(job.shape.num_hidden_layers):
        for term, times in layer_products(passes, layer):
            totals[term.kind] = totals.get(term.kind, 0.0) + term.forward * times
        totals["experts"] += _of_spread_experts(passes, layer)
    head = 2.0 * job.shape.hidden_size * job.shape.vocab_size
    trains = _head_goes_back(passes)
    # On the way back a tile's log-probabilities are computed again, and inside them each block of logits.
    totals["head"] = head * (1 + passes.whole + trains * (3 + ("head" in passes.trained_groups)))
    tokens = passes.tokens * job.passes
    return [
        Work(kind, per_token * tokens, kind, f"{operations(per_token)} per token")
        for kind, per_token in totals.items()
    ]


def layer_products(passes: Passes, layer: int) -> Iterator[tuple[Products, float]]:
    """The products of a layer, per token, and how many forward passes they cost in a step."""
    job, shape, times = passes.job, passes.job.shape, passes.of(layer)
    for term in _mixer(job, layer):
        yield term, _times(term, times, passes)
    for term in feed_forward_terms(shape, shape.mlp_layer_types[layer]):
        yield term, _times(term, times, passes)
    (streams,) = mhc_terms(shape)
    yield streams, _times(streams, times, passes)
    for term in _front(shape, layer):
        yield term, times.front
    if shape.layer_types[layer] == KDA and job.parallel.context > 1:
        # There what ranks exchange, and back the gradients of the states that their segments enter.
        yield Products("summaries of segments", delta_rule(shape), "delta rule"), times.there + times.back


def delta_rule(shape: Architecture) -> float:
    """Operations per token of the delta rule in chunks of C: per head 6 K V with the state, C (3 K + 2 V) inside."""
    head = shape.linear_head_dim
    return shape.linear_num_heads * (6.0 * head * head + CHUNK * 5 * head)


def elementwise_bytes(job: Job, layer: int) -> float:
    """Bytes that one forward pass of a layer reads and writes outside of products, per token.

    Streams, two sites: R D read twice and updated (two reads, a write), and four passes over D. KDA: convolution,
    activations, normalisation and gate of q, k, v and output, 17 H K, and 3 H K of decays in float32. DSA: queries and
    outputs in head and latent space. Feed-forward: five passes over each hidden row, and the rows of each choice.
    """
    shape, e, w = job.shape, job.itemsize, job.wide
    width, streams = shape.hidden_size, shape.hc_mult
    total = 2.0 * (4 * streams * width + 4 * width) * e
    if shape.layer_types[layer] == KDA:
        inner = shape.linear_num_heads * shape.linear_head_dim
        total += 17 * inner * e + 3 * inner * w
    else:
        heads = shape.num_attention_heads
        total += 2 * heads * (shape.qk_nope_head_dim + 2 * shape.kv_lora_rank + shape.v_head_dim) * e
    if shape.mlp_layer_types[layer] == "dense":
        return total + 5 * shape.intermediate_size * e
    active, hidden = shape.num_experts_per_tok, shape.moe_intermediate_size
    rows = active * width * (2 * e + 2 * w) + 3 * shape.n_routed_experts * w
    return total + 5 * hidden * (active + shape.n_shared_experts) * e + rows


def memory_work(passes: Passes) -> list[Work]:
    """Bytes that pass through a device's own memory beside those of products."""
    job, shape, w = passes.job, passes.job.shape, passes.job.wide
    tokens, elementwise, gathers = passes.tokens * job.passes, 0.0, 0.0
    for layer in range(shape.num_hidden_layers):
        times = passes.of(layer)
        elementwise += elementwise_bytes(job, layer) * (times.forward + 2 * times.back + 0.4 * times.front)
        elementwise += _hidden_of_spread_experts(passes, layer)
        if shape.layer_types[layer] == DSA:
            gathers += _gathered(job) * (times.forward + 2 * times.back)
    logits = 3.0 * shape.vocab_size * w * (1 + passes.whole + 2 * _head_goes_back(passes))
    found = [
        Work(
            "elementwise",
            (elementwise + logits) * tokens,
            "memory",
            "streams, norms, gates, logits in blocks",
        ),
        Work("gathers", gathers * tokens, "gathers", "latents of the selected tokens"),
        Work(
            "weights of tiles",
            _weights_of_a_tile(passes.counts) * passes.tiles * job.passes,
            "memory",
            f"{passes.tiles} tiles read and add to them",
        ),
    ]
    return [
        *found,
        Work("optimizer", _optimizer_bytes(passes), "host memory" if _on_host(job) else "optimizer", "AdamW"),
    ]


def _head_goes_back(passes: Passes) -> bool:
    """Whether gradients go through the head: in a warm-up of indexers none does."""
    return passes.job.indexer != "warmup" and bool(passes.trained_groups)


def _of_spread_experts(passes: Passes, layer: int) -> float:
    """Operations per token of routed experts that ranks share, beside those of the mean rank and one process.

    The busiest rank has its surplus of all; and backward computes each round's rows again, recompute or not
    (`parallel/dispatch.py`).
    """
    job, shape = passes.job, passes.job.shape
    if not _spreads(job, layer):
        return 0.0
    times = passes.of(layer)
    own = times.forward + times.back * (1 + ("experts" in passes.trained_groups))
    routed = 6.0 * shape.num_experts_per_tok * shape.hidden_size * shape.moe_intermediate_size
    return routed * (job.skew * (own + times.back) - own)


def _hidden_of_spread_experts(passes: Passes, layer: int) -> float:
    """Bytes per token, as `_of_spread_experts`: five passes over each hidden row."""
    job, shape, times = passes.job, passes.job.shape, passes.of(layer)
    own = times.forward + 2 * times.back
    hidden = 5.0 * shape.moe_intermediate_size * shape.num_experts_per_tok * job.itemsize
    return hidden * (job.skew * (own + times.back) - own) * _spreads(job, layer)


def _spreads(job: Job, layer: int) -> bool:
    return job.parallel.expert > 1 and job.shape.mlp_layer_types[layer] == "sparse"


def start_work(passes: Passes) -> Work:
    """Starts of operations: of kernels, or of torch's functions on a CPU; what small tiles cost."""
    job, starts = passes.job, 0.0
    for layer in range(job.shape.num_hidden_layers):
        times = passes.of(layer)
        forwards = times.forward + 2 * times.back + 0.4 * times.front
        starts += passes.tiles * forwards * _starts_of_tile(job, layer)
        starts += passes.tiles * times.back * _starts_of_experts(job, layer) * _spreads(job, layer)
        if job.form == "portable" and job.shape.layer_types[layer] == DSA:
            starts += _score_starts(passes)
    return Work(
        "starts",
        starts * job.passes,
        "starts",
        f"{passes.tiles} tiles x {job.shape.num_hidden_layers} layers",
    )


def _mixer(job: Job, layer: int) -> list[Products]:
    shape = job.shape
    if shape.layer_types[layer] == KDA:
        *projections, _ = kda_terms(shape)
        return [*projections, Products("delta rule in chunks", delta_rule(shape), "delta rule")]
    found = dsa_terms(shape, job.length, shape.indexer_types[layer])
    if job.indexer == "warmup":
        dense = 4.0 * shape.num_attention_heads * shape.kv_lora_rank * (job.length + 1) / 2
        found.append(Products("attention to every visible token", dense, "attention"))
    return found


def _times(term: Products, times: LayerPasses, passes: Passes) -> float:
    """Forward passes that a term costs: its own, and one for each gradient."""
    if not term.learns:
        return _indexer_times(term, passes)
    if term.kind in NO_WEIGHTS:
        return times.forward + times.back * NO_WEIGHTS[term.kind]
    trained = bool(passes.trained_groups.intersection(GROUPS[term.kind]))
    return times.forward + times.back * (1 + trained)


def _indexer_times(term: Products, passes: Passes) -> float:
    """Scores and indexer run once per step; where it learns, again over what was selected (or all, in a warm-up)."""
    job, once = passes.job, 1.0 + passes.whole
    if job.indexer == "frozen":
        return once
    if term.kind != "scores" or job.indexer == "warmup":
        return once + 3
    pools = job.shape.index_topk // job.shape.index_kpool
    scored = 2.0 * job.shape.index_n_heads * job.shape.index_head_dim * pools
    return once + 3 * min(1.0, scored / max(term.forward, 1.0))


def _front(shape: Architecture, layer: int) -> list[Products]:
    """What the first half of a layer computes: up to what ranks exchange."""
    (streams,) = mhc_terms(shape)
    half = replace(streams, forward=streams.forward * 0.4)
    if shape.layer_types[layer] != KDA:
        latents = 2.0 * shape.hidden_size * shape.kv_lora_rank
        keys = 4.0 * shape.hidden_size * shape.index_head_dim * (shape.indexer_types[layer] == "full")
        return [half, Products("latents and pool keys", latents + keys, "projections")]
    qkvo, gates, _ = kda_terms(shape)
    return [half, replace(qkvo, forward=qkvo.forward * 3 / 4), gates]


def _gathered(job: Job) -> float:
    """Bytes per token and forward pass of one DSA layer: rows of latents copied and read twice; a kernel reads once."""
    attended = mean_attended(job.length, job.shape.index_topk, job.shape.index_kpool)
    return attended * job.shape.kv_lora_rank * job.itemsize * (1 if job.form == "native" else 4)


@lru_cache(maxsize=256)
def _weights_of_a_tile(passes: Passes) -> float:
    """A tile reads the weights of its layer, and adds its gradients to theirs: a product, a sum, a store."""
    job, total = passes.job, 0.0
    for weight in passes.weights:
        share = job.parallel.expert if weight.is_expert else 1
        if weight.layer is None:
            continue
        times = passes.of(weight.layer)
        again = times.back * (weight.is_expert and _spreads(job, weight.layer))
        read = (times.forward + times.back + again) * weight.num_bytes
        added = 3 * times.back * weight.trains * weight.num_values * job.wide
        total += (read + added) / share
    return total


def _optimizer_bytes(passes: Passes) -> float:
    """Gradients read for the norm, scaled, read; two moments and the weight read and written: ten passes."""
    job = passes.job
    narrow = job.itemsize < job.wide
    return rows_of(job).own_trained * (10 * job.wide + narrow * job.itemsize)


def _on_host(job: Job) -> bool:
    return job.memory.optimizer == "host"


def _starts_of_tile(job: Job, layer: int) -> float:
    """Of one forward of one tile. A CPU kernel is one start for many of plain torch."""
    shape, tile = job.shape, min(job.memory.tile, -(-job.length // job.parallel.context))
    if job.form == "native":
        return 60.0
    starts = 150.0 + _starts_of_experts(job, layer)
    if shape.layer_types[layer] == KDA:
        return starts + 8 * tile / CHUNK
    attended = mean_attended(job.length, shape.index_topk, shape.index_kpool)
    rows = max(1.0, GATHER_BYTES / (attended * shape.kv_lora_rank * job.itemsize))
    return starts + 12 * max(1.0, tile / rows)


def _starts_of_experts(job: Job, layer: int) -> float:
    """Of one tile's routed experts: plain torch takes one after the other."""
    if job.form == "native" or job.shape.mlp_layer_types[layer] == "dense":
        return 0.0
    return 6.0 * job.shape.n_routed_experts / job.parallel.expert


def _score_starts(passes: Passes) -> float:
    """Of one DSA layer and pass: blocks of rows by blocks of pools, heads one after the other."""
    job = passes.job
    rows, pools = passes.tokens / ROW_BLOCK, (job.length / job.shape.index_kpool) / 2 / POOL_BLOCK
    return max(1.0, rows) * max(1.0, pools) * (3 * job.shape.index_n_heads + 15)
