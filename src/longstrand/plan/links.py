"""Bytes that a rank exchanges with others, or moves off its device, in a step; no torch."""

from __future__ import annotations

from functools import lru_cache

from longstrand.architecture import DSA, KDA
from longstrand.plan.exchanges import Received, dsa_received, kda_received, moe_received
from longstrand.plan.job import Job, Weight
from longstrand.plan.operations import Work
from longstrand.plan.passes import LayerPasses, Passes
from longstrand.plan.rows import rows_of
from longstrand.plan.sizes import Sizes
from longstrand.wording import three_digits


def exchange_work(passes: Passes) -> list[Work]:
    """What comes from other ranks, by kind; none on one rank."""
    job, context, expert = passes.job, passes.job.parallel.context, passes.job.parallel.expert
    if job.world == 1:
        return []
    totals = {"summaries": 0.0, "latents": 0.0, "tokens": 0.0}
    summaries, latents, tokens = summaries_received(job), latents_received(job), tokens_received(job)
    for layer, kind in enumerate(job.shape.layer_types):
        times = passes.of(layer)
        if context > 1 and kind == KDA:
            totals["summaries"] += _moved(summaries, times)
        if context > 1 and kind == DSA:
            totals["latents"] += _moved(latents, times)
        if expert > 1 and job.shape.mlp_layer_types[layer] == "sparse":
            totals["tokens"] += _moved(tokens, times) * job.skew
    n = job.passes
    why = (
        f"the busiest rank: {three_digits(job.skew)} x the mean"
        if job.skew > 1
        else "each to its experts and back"
    )
    found = [
        Work("KDA summaries", totals["summaries"] * n, "link", f"all-to-all over {context}", context),
        Work(
            "DSA latents", totals["latents"] * n, "link", f"gathered over {context}, gradients back", context
        ),
        Work("MoE tokens", totals["tokens"] * n, "link", why, expert),
        Work("weights gathered", _weights(passes.counts), "link", "a layer at a time, each pass", job.world),
        Work("gradients reduced", _gradients(passes.counts), "link", "once per sequence", job.world),
    ]
    return [work for work in found if work.amount]


def summaries_received(job: Job) -> Received:
    """Of one KDA layer, in one pass of a sequence."""
    return kda_received(job.shape, job.segments, job.parallel.context, job.itemsize, job.wide)


def latents_received(job: Job) -> Received:
    """Of one DSA layer: each segment ends in a pool of its own, and ranks send as many rows as the longest has."""
    pools, shape = Sizes(job).pools(), job.shape
    return dsa_received(
        pools * shape.index_kpool * shape.kv_lora_rank,
        pools * shape.index_head_dim,
        job.parallel.context,
        job.itemsize,
        job.wide,
        indexer_learns=job.indexer != "frozen",
        latents_learn=job.indexer != "warmup",
        recompute=job.memory.recompute,
    )


def tokens_received(job: Job) -> Received:
    """Of one MoE layer, on the rank with most tokens."""
    return moe_received(
        job.shape, Sizes(job).tokens, job.parallel.expert, job.itemsize, recompute=job.memory.recompute
    )


def offload_work(passes: Passes) -> Work | None:
    """Layer inputs, their gradients and the last mean, as they leave the device and come back.

    To a host both ways are used at once, so the larger counts; a disk's reads and writes share its rate.
    """
    job, offload = passes.job, passes.job.memory.offload
    if offload == "none":
        return None
    read, written = moved_streams(passes)
    stream = job.shape.hc_mult * job.shape.hidden_size * job.itemsize * passes.tokens * job.passes
    rate, streams = ("host link", max(read, written)) if offload == "host" else ("disk", read + written)
    why = f"a layer input's size {three_digits(read)} times read, {three_digits(written)} times written"
    return Work(f"offload to {offload}", streams * stream, rate, why)


def moved_streams(passes: Passes) -> tuple[float, float]:
    """What a pass reads from its streams and writes to them, in sizes of one layer input, R D e bytes per token.

    As `memory/walk.py` and `shared_walk.py` walk: the first layer's input is the embedding, and no stream.
    """
    job, layers = passes.job, passes.job.shape.num_hidden_layers
    in_streams = job.world > 1  # passes without gradients; alone they go tile by tile through all layers
    read = written = 0.0
    for layer in range(layers):
        times, has_input = passes.of(layer), layer > 0
        walks = times.there - (0 if in_streams else passes.whole)
        read += has_input * (walks * _reads_of_a_walk(passes) + _reads_back(passes, layer))
        rebuilt = layer in passes.rebuilt
        written += has_input * (1 + passes.whole * in_streams) + rebuilt
        if times.back:
            read += layer < layers - 1  # the gradient from above
            read += layer > passes.first and _tails(passes)[0]
            written += layer > passes.first and 1 + _tails(passes)[1]
            middle = job.parallel.context > 1 and not job.memory.keep_fronts
            read, written = read + middle, written + middle
    mean = bool(passes.trained_groups) / job.shape.hc_mult
    return read + mean * (job.indexer != "warmup"), written + mean


def _reads_of_a_walk(passes: Passes) -> float:
    """Of a layer's input, from there to its output; where ranks share a sequence, before they exchange too."""
    return 1.0 if passes.job.parallel.context == 1 else 2.0 + _tails(passes)[0]


def _reads_back(passes: Passes, layer: int) -> float:
    """Of a layer's input, on its way back: for the tile's graph, its halves, and a DSA layer's latents."""
    job, times = passes.job, passes.of(layer)
    shares = job.parallel.context > 1
    exchanged = 1.0 + _tails(passes)[0]
    if times.warms:
        return exchanged + 1 + shares
    halves = 1 + (shares and not job.memory.keep_fronts)
    return times.back * (halves + exchanged * (job.shape.layer_types[layer] == DSA))


def _tails(passes: Passes) -> tuple[float, float]:
    """Of a stream, the last tile of each segment: read for later segments, and written when their gradients come.

    What is read ahead there is the tile before, of which no one has use.
    """
    job, sizes = passes.job, passes.tiles // passes.job.segments
    if job.parallel.context == 1:
        return 0.0, 0.0
    segment = passes.tokens / job.segments
    part = 1 - (sizes - 1) * min(job.memory.tile, segment) / segment
    return part + (sizes > 1) * min(job.memory.tile, segment) / segment, part


def host_optimizer_work(passes: Passes) -> Work | None:
    """Gradients to the host and weights back, one after the other."""
    job = passes.job
    if job.memory.optimizer != "host":
        return None
    amount = rows_of(job).own_trained * (job.wide + job.itemsize)
    return Work("optimizer's copies", amount, "host link", "gradients there, weights back")


def _moved(received: Received, times: LayerPasses) -> float:
    """Of all walks there and back; what is named for both ways comes half there, half back."""
    back = float(times.back or times.warms)
    ways = {"forward": times.there, "backward": back, "there and back": 0.5 * (times.there + back)}
    return sum(amount * ways[when] for (_, when), amount in received.items())


@lru_cache(maxsize=256)
def _weights(passes: Passes) -> float:
    """Of each layer, and of the root around them, what this rank has not, each time that it is gathered."""
    total = 0.0
    for weight in passes.weights:
        if not passes.job.shards(weight):
            continue
        share, holders = _shared(weight, passes.job)
        times = 2 + passes.whole if weight.layer is None else _gatherings(passes.of(weight.layer))
        total += weight.num_bytes / share * (holders - 1) / holders * times
    return total * passes.job.passes


def _gatherings(times: LayerPasses) -> int:
    return times.there + (times.back or times.warms)


@lru_cache(maxsize=256)
def _gradients(passes: Passes) -> float:
    """Summed in float32 or wider: of a weight that is cut a rank receives its rows', of a whole one all, twice."""
    job, total = passes.job, 0.0
    wide = job.wide
    for weight in passes.weights:
        if weight.trains:
            share, holders = _shared(weight, job)
            times = 1 if job.shards(weight) else 2
            total += times * weight.num_values * wide / share * (holders - 1) / holders
    return total * job.passes


def _shared(weight: Weight, job: Job) -> tuple[int, int]:
    """The parts that a weight is whole in, and the ranks over which such a part is sharded."""
    expert = job.parallel.expert
    return (expert, job.world // expert) if weight.is_expert else (1, job.world)
