"""Bytes that a rank exchanges with others, or moves off its device, in a step; no torch."""

from __future__ import annotations

from longstrand.architecture import DSA, KDA
from longstrand.plan.exchanges import Received, dsa_received, kda_received, moe_received
from longstrand.plan.job import Job, Weight
from longstrand.plan.operations import Work
from longstrand.plan.passes import LayerPasses, Passes


def exchange_work(passes: Passes) -> list[Work]:
    """What comes from other ranks, by kind; none on one rank."""
    job, context, expert = passes.job, passes.job.parallel.context, passes.job.parallel.expert
    if job.world == 1:
        return []
    totals = {"summaries": 0.0, "latents": 0.0, "tokens": 0.0}
    for layer, kind in enumerate(job.shape.layer_types):
        times = passes.of(layer)
        if context > 1 and kind == KDA:
            totals["summaries"] += _moved(_summaries(passes), times)
        if context > 1 and kind == DSA:
            totals["latents"] += _moved(_latents(job), times)
        if expert > 1 and job.shape.mlp_layer_types[layer] == "sparse":
            received = moe_received(job.shape, int(passes.tokens), expert, job.itemsize)
            totals["tokens"] += _moved(received, times) * job.data_skew
    n = job.passes
    why = (
        f"the busiest rank: {job.data_skew:g} x the mean"
        if job.data_skew > 1
        else "each to its experts and back"
    )
    found = [
        Work("KDA summaries", totals["summaries"] * n, "link", f"all-to-all over {context}", context),
        Work(
            "DSA latents", totals["latents"] * n, "link", f"gathered over {context}, gradients back", context
        ),
        Work("MoE tokens", totals["tokens"] * n, "link", why, expert),
        Work("weights gathered", _weights(passes), "link", "a layer at a time, each pass", job.world),
        Work("gradients reduced", _gradients(passes), "link", "once per sequence", job.world),
    ]
    return [work for work in found if work.amount]


def offload_work(passes: Passes) -> Work | None:
    """Layer inputs that leave the device: written and read forward, read backward, and dx written and read.

    Reads go one way and writes the other at the same time, so the three reads of R D e bytes per token and layer count.
    """
    job, offload, shape = passes.job, passes.job.memory.offload, passes.job.shape
    if offload == "none":
        return None
    stream = shape.hc_mult * shape.hidden_size * job.itemsize
    above = shape.num_hidden_layers - 1
    reads = sum(1 + passes.of(layer).back * 2 + (layer in passes.rebuilt) for layer in range(above))
    amount = reads * stream * passes.tokens * job.passes
    rate = {"host": "host link", "disk": "disk"}[offload]
    return Work(f"offload to {offload}", amount, rate, f"{above} layer inputs, three times each way")


def host_optimizer_work(passes: Passes) -> Work | None:
    """Gradients to the host and weights back, one after the other."""
    job = passes.job
    if job.memory.optimizer != "host":
        return None
    amount = passes.own_trained * (job.wide + job.itemsize)
    return Work("optimizer's copies", amount, "host link", "gradients there, weights back")


def _summaries(passes: Passes) -> Received:
    job = passes.job
    return kda_received(job.shape, job.segments, job.parallel.context, job.itemsize, job.wide)


def _latents(job: Job) -> Received:
    pools = -(-job.length // job.shape.index_kpool)
    latents = pools * job.shape.index_kpool * job.shape.kv_lora_rank
    keys, learns = pools * job.shape.index_head_dim, job.indexer != "frozen"
    context = job.parallel.context
    return dsa_received(latents, keys, context, job.itemsize, job.wide, indexer_learns=learns)


def _moved(received: Received, times: LayerPasses) -> float:
    """One way there for each pass without a graph, one back with it; what is in both is of the whole step."""
    rebuilt = max(0, times.forward - 1 - times.back)
    ways = {"forward": 1.0 + rebuilt, "backward": float(times.back), "there and back": 0.5 * (1 + times.back)}
    return sum(amount * ways[when] for (_, when), amount in received.items())


def _weights(passes: Passes) -> float:
    """Of each layer what this rank has not, each time that it is gathered."""
    total = 0.0
    for weight in passes.weights:
        share, holders = _shared(weight, passes.job)
        times = 2 if weight.layer is None else _gatherings(passes, weight.layer)
        total += weight.num_bytes / share * (holders - 1) / holders * times
    return total * passes.job.passes


def _gatherings(passes: Passes, layer: int) -> int:
    return 1 + passes.whole + passes.of(layer).back + (layer in passes.rebuilt)


def _gradients(passes: Passes) -> float:
    """Summed over the ranks that hold parts of the same weight, in float32 or wider."""
    total = 0.0
    for weight in passes.weights:
        share, holders = _shared(weight, passes.job)
        total += weight.trains * weight.num_values * passes.job.wide / share * (holders - 1) / holders
    return total * passes.job.passes


def _shared(weight: Weight, job: Job) -> tuple[int, int]:
    """The parts that a weight is whole in, and the ranks over which such a part is sharded."""
    expert = job.parallel.expert
    return (expert, job.world // expert) if weight.is_expert else (1, job.world)
