"""Bytes that a rank holds at the peak of each phase of a step, term by term."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from longstrand.plan import walk
from longstrand.plan.job import Job
from longstrand.plan.sizes import Sizes
from longstrand.plan.terms import Memory, Place, Term, evidence_of

SLACK_SHARE = 0.05
COMMUNICATOR_BYTES = 512 * 2**20

_ESTIMATED_SLACK = (
    f"estimated: {SLACK_SHARE:.0%} of what comes and goes, for blocks that a caching allocator cannot reuse; not "
    "measured on a GPU"
)
_ESTIMATED_SKEW = (
    "estimated: the busiest expert rank receives {:g} times the mean (data_skew); counted where it does"
)
_ESTIMATED_BUFFERS = "estimated: 0.5 GiB of NCCL buffers for each axis that exchanges; not measured on a GPU"


@lru_cache(maxsize=4096)
def plan_memory(job: Job) -> Memory:
    """What one rank of a job holds: on its device by phase, on its host and in files for the whole step.

    The rank is the one with most tokens and weights. Device terms of a phase are those that live at its peak.
    """
    sizes = Sizes(job)
    why = _why(sizes)
    phases = {
        phase: (*_terms(job, held, why), *_estimated(job, held))
        for phase, held in walk.walk_step(sizes).items()
    }
    return Memory(phases, _elsewhere(sizes))


def _terms(job: Job, held: Mapping[str, int], why: Mapping[str, str]) -> list[Term]:
    """Those of the walk; what a tile of shared experts takes depends on where its tokens choose to go."""
    counted = evidence_of(job.kind, "device")
    evidence = {walk.TILE: _ESTIMATED_SKEW.format(job.skew)} if job.parallel.expert > 1 else {}
    return [
        Term(name, num_bytes, "device", why[name], evidence.get(name, counted))
        for name, num_bytes in sorted(held.items(), key=lambda item: -item[1])
    ]


def _estimated(job: Job, held: Mapping[str, int]) -> list[Term]:
    """What no tensor of ours is: known on a CPU, where nothing caches and gloo has no buffers of note."""
    if job.kind == "cpu":
        return []
    moving = (
        *(walk.TILE, walk.GRAPHS, walk.MIDDLE, walk.FRONTS, walk.BUFFERS, walk.D_BUFFERS),
        *(walk.GATHERED, walk.D_GATHERED, walk.ROOT, walk.D_ROOT),
    )
    slack = int(SLACK_SHARE * sum(held.get(name, 0) for name in moving))
    axes = (job.world, job.parallel.context, job.parallel.expert)
    buffers = COMMUNICATOR_BYTES * sum(size > 1 for size in axes)
    found = [
        Term("allocator slack", slack, "device", "fragments between blocks", _ESTIMATED_SLACK),
        Term("communication buffers", buffers, "device", "of the exchanges themselves", _ESTIMATED_BUFFERS),
    ]
    return [term for term in found if term.num_bytes]


def _elsewhere(sizes: Sizes) -> tuple[Term, ...]:
    """Terms of the host's memory and of files."""
    job, found = sizes.job, list[Term]()
    trained, beside = sizes.rows.own_trained, evidence_of(job.kind, "host")
    if job.memory.optimizer == "host":
        found += [
            Term(walk.MOMENTS, 2 * trained * sizes.w, "host", "two per trained parameter", beside),
            Term(walk.COPIES, trained * sizes.w, "host", "what AdamW moves there", beside),
            Term("gradients on the host", trained * sizes.w, "host", "while it moves", beside),
        ]
    if job.memory.offload != "none":
        place: Place = "host" if job.memory.offload == "host" else "file"
        (inputs, mean), evidence = sizes.slots, evidence_of(job.kind, place)
        why = f"slots of one tile in whole pages, {sizes.num_tiles:,} of each stream"
        found += [
            Term(walk.INPUTS, inputs, place, why, evidence),
            Term(walk.MEAN, mean, place, "for the head's way back", evidence),
        ]
    return tuple(found)


def _why(sizes: Sizes) -> dict[str, str]:
    """How each term comes about."""
    job, shape = sizes.job, sizes.shape
    row = f"{shape.hc_mult} x {shape.hidden_size} x {sizes.e} B"
    tokens = f"{sizes.tokens:,} tokens"
    several = f"{job.sequences_per_step:,} sequences of " if job.sequences_per_step > 1 else ""
    every = f"all {job.length:,} tokens" if sizes.shared else tokens
    return {
        walk.WEIGHTS: f"this rank's rows, {job.dtype}" if job.world > 1 else job.dtype,
        walk.GRADIENTS: "float32 or wider, of this rank's trained weights",
        walk.MOMENTS: "two per trained parameter",
        walk.COPIES: "of trained weights narrower than float32",
        walk.INPUTS: f"{tokens}, {row} each",
        walk.MEAN: f"{tokens}, for the head's way back",
        walk.CHOICES: f"{tokens}: pools and experts",
        walk.BORDERS: f"{sizes.num_tiles:,} tiles of up to {sizes.tile:,} tokens",
        walk.BUFFERS: f"{every}, of one DSA layer",
        walk.D_BUFFERS: f"{every}, float32 or wider",
        walk.GRAPHS: "recompute = false",
        walk.TILE: f"{sizes.tile:,} tokens of one layer",
        walk.PACK: f"{several}{job.length:,} tokens: ids, targets, weights, log-probabilities",
        walk.POOL_ROWS: "8 B per pool of the sequence",
        walk.MAPS: "states between segments, all KDA layers",
        walk.MIDDLE: f"{tokens}, gradients of one layer",
        walk.FRONTS: f"{tokens} of one layer (keep_fronts)",
        walk.GATHERED: "all rows, one layer at a time",
        walk.D_GATHERED: "float32 or wider, until they are summed",
        walk.ROOT: "during a pass",
        walk.D_ROOT: "float32 or wider, until they are summed",
    }
