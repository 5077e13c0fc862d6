"""Published numbers of million-token training, each computed again by the planner.

longstrand bench anchors
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from longstrand.bench._arguments import command_line
from longstrand.bench.figures import show
from longstrand.plan.devices import GIB
from longstrand.plan.job import Job
from longstrand.plan.memory import plan_memory
from longstrand.plan.published import (
    TensorLayout,
    adam_bytes,
    dense_attention_bytes,
    index_score_bytes,
    layer_input_bytes,
    own_values,
    stream_bytes,
)
from longstrand.plan.shapes import find_shape
from longstrand.plan.streams import streams_at_once
from longstrand.plan.terms import Memory

MIB, TIB = 2**20, 2**40
LIMIT_GIB = 178.0  # of a B200, as published
DENSE_GIB = 114.0  # per GPU at 16,384 tokens with the dense fallback; padding to the sparse kernel halved it


@dataclass(frozen=True)
class Anchor:
    """A published number and ours.

    Attributes:
        published: as printed.
        within: half of the last printed digit, or what the comparison allows; None: shown, not judged.
        why: what the number is, and why ours differs where it does.
    """

    name: str
    published: float
    ours: float
    unit: str
    within: float | None
    why: str

    @property
    def passes(self) -> bool:
        return self.within is None or abs(self.ours - self.published) <= self.within


def measure() -> list[dict[str, Any]]:
    """A record per anchor; those that our formulas cover are judged, the others shown with the difference explained."""
    anchors = [*covered(), *_dense(), *_their_layout()]
    return [_record(anchor) for anchor in anchors[:-1]] + [_record(anchors[-1]) | {"table": _table(anchors)}]


def covered() -> Iterator[Anchor]:
    """What the same expressions as in a run's plan give."""
    for length, ranks, published, within in ((20, 8, 180, 0.5), (20, 64, 22.5, 0.05), (18, 8, 45, 0.5)):
        job = _job(2**length, ranks)
        layers = job.shape.num_hidden_layers
        each = _named(plan_memory(job), "layer inputs") / streams_at_once(layers, 0, 1)
        ours = each * layers / GIB
        name = f"layer inputs, {2**length:,} tokens over {ranks} ranks"
        why = "45 inputs of 4 x 4,096 values; a plan of ours has 44, since the first is read from the token ids again"
        yield Anchor(name, published, ours, "GiB per GPU", within, why)
    million = _job(2**20)
    yield Anchor(
        "full index scores, 1,048,576 tokens",
        1,
        index_score_bytes(million) / TIB,
        "TiB",
        0.05,
        "each query against each pool of 4, float32; never formed",
    )
    longer = replace(million, length=2 * million.length)
    tokens = longer.length - million.length
    grown = [_named(plan_memory(job), "choices") for job in (million, longer)]
    yield Anchor(
        "choices per token",
        22.7,
        (grown[1] - grown[0]) / tokens / 1024,
        "KiB",
        0.05,
        "512 pool ids of 4 bytes in 11 layers, 8 expert ids of 2 bytes in 42",
    )
    carried = [_named(plan_memory(job), "carries") for job in (million, longer)]
    yield Anchor(
        "carries per tile border",
        141,
        (carried[1] - carried[0]) / (tokens / million.memory.tile) / MIB,
        "MiB",
        0.5,
        "34 KDA layers: a state of 64 x 128 x 128 float32 values, and 3 tokens before the convolutions",
    )


def _dense() -> Iterator[Anchor]:
    """A dense fallback in one layer: what it holds, that it fits at 16k and that it does not at 32k."""
    layout, short = TensorLayout(), _job(2**14)
    dense = dense_attention_bytes(short, layout) / GIB
    sparse = (
        dense_attention_bytes(short, layout, keys=short.shape.index_topk + short.shape.index_kpool - 1) / GIB
    )
    yield Anchor(
        "dense fallback at 16,384 tokens",
        DENSE_GIB / 2,
        dense,
        "GiB per GPU",
        None,
        f"8 heads x T x T pairs of 16 bytes, one layer on its way back; {sparse:.1f} GiB with 2,051 keys each. "
        "Published: 114 GiB in all, and half of it with the sparse kernel. Missing here: a mask, copies that are not "
        "fused, and the fallback's index scores, which the report does not list",
    )
    rest = DENSE_GIB / 2
    for length, published in ((2**14, True), (2**15, False)):
        needs = rest + dense_attention_bytes(_job(length), layout) / GIB
        yield Anchor(
            f"the fallback fits at {length:,} tokens (1) or not (0)",
            float(published),
            float(needs <= LIMIT_GIB),
            "",
            0.0,
            f"{needs:.0f} GiB with the published rest of {rest:.0f}, of {LIMIT_GIB:.0f} GiB",
        )


def _their_layout() -> Iterator[Anchor]:
    """TP8 x CP2 x EP32 x ETP2, DP4, Adam on the host, every layer recomputed."""
    layout, million, quarter = TensorLayout(), _all_trained(2**20), _all_trained(2**18)
    values = own_values(million, layout)
    weights, gradients = values * million.itemsize / GIB, values * million.wide / GIB
    inputs = layer_input_bytes(million, layout.token_ranks) / GIB
    for job, ranks, published in ((million, layout.token_ranks, 144.5), (quarter, layout.tensor, 98)):
        rest = published - weights - gradients
        yield Anchor(
            f"their memory at {job.length:,} tokens, layer inputs on the host",
            published,
            weights + gradients,
            "GiB per GPU",
            None,
            f"weights {weights:.1f}, float32 gradients {gradients:.1f}; the other {rest:.0f} GiB are transients of one "
            f"layer over {job.length // ranks:,} tokens at once: not ours to model, a tile bounds them here",
        )
    moved = (quarter.shape.num_hidden_layers - 1) * stream_bytes(quarter, layout.tensor) / GIB
    yield Anchor(
        "offload at 262,144 tokens: 142 to 98 GiB",
        142 - 98,
        moved,
        "GiB per GPU",
        1.0,
        "44 of 45 layer inputs over 8 ranks; the last one's is used at once. Both ends are rounded to 1 GiB",
    )
    before = layer_input_bytes(million, layout.tensor)
    yield Anchor(
        "layer inputs on the host before context ranks",
        180,
        before / GIB,
        "GiB per GPU",
        0.5,
        f"printed as 180 GB; as bytes it is {before / 1e9:.0f} GB",
    )
    adam = adam_bytes(million, layout) / GIB
    node = 8 * (inputs + adam)
    yield Anchor(
        "host memory of 8 GPUs",
        1,
        node * GIB / 1e12,
        "TB",
        None,
        f"published: over 1 TB. Layer inputs {8 * inputs:.0f} GiB, Adam {8 * adam:.0f} GiB",
    )


def _job(length: int, context: int = 1) -> Job:
    """Small tiles and one small group that learns: what is kept of all layers then lives at the peak."""
    job = Job(find_shape("glm-5.3-flash").shape, length, trainable=("embedding",))
    memory = job.memory.model_copy(update={"tile": 256})
    return replace(job, memory=memory, parallel=job.parallel.model_copy(update={"context": context}))


def _all_trained(length: int) -> Job:
    return replace(_job(length), trainable=("all",))


def _named(memory: Memory, name: str) -> int:
    """Bytes of the terms whose name begins like this, in the phase that holds most of them."""
    found = max(
        sum(term.num_bytes for term in terms if term.name.startswith(name))
        for terms in memory.phases.values()
    )
    assert found, f"no term of a plan is called {name}"
    return found


def _record(anchor: Anchor) -> dict[str, Any]:
    shown = f"{anchor.ours:.4g} {anchor.unit}".strip()
    return {
        "name": anchor.name,
        "asked": f"{anchor.published:g} {anchor.unit}".strip()
        + ("" if anchor.within is not None else " (shown)"),
        "measured": shown,
        "pass": anchor.passes,
        "why": anchor.why,
        "within": anchor.within,
    }


def _table(anchors: Sequence[Anchor]) -> dict[str, Any]:
    rows = [
        [
            anchor.name,
            f"{anchor.published:g} {anchor.unit}".strip(),
            f"{anchor.ours:.4g}",
            "" if anchor.within is None else f"{anchor.within:g}",
            anchor.why,
        ]
        for anchor in anchors
    ]
    return {"columns": ["anchor", "published", "planned", "within", "how"], "rows": rows}


def main(arguments: Sequence[str]) -> int:
    """`longstrand bench anchors`."""
    command_line("anchors", __doc__).parse_args(list(arguments))
    return show(measure())
