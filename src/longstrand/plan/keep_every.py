"""Which values of `memory.keep_every` are worth a look for a model."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import lru_cache
from math import inf
from typing import Any

from longstrand.plan.job import Job
from longstrand.plan.passes import Passes
from longstrand.plan.streams import first_trained_layer, streams_at_once


@lru_cache(maxsize=64)
def values_of_keep_every(job: Job) -> tuple[int, ...]:
    """From most streams to fewest; once per model and what it trains."""
    shape, first = job.shape, first_trained_layer(job)
    layers, found, least = shape.num_hidden_layers, dict[int, tuple[int, Counter[Any]]](), inf
    kinds = list(zip(shape.layer_types, shape.mlp_layer_types, shape.indexer_types, strict=True))
    forced = set()
    for k in range(1, max(1, layers - first) + 1):
        rebuilt = Passes(replace(job, memory=job.memory.model_copy(update={"keep_every": k}))).rebuilt
        streams = streams_at_once(layers, first, k)
        found[k] = streams, Counter(kinds[layer] for layer in rebuilt)
        if streams < least:
            forced.add(k)
            least = streams
    kept = [
        k for k, own in found.items() if k in forced or not any(_beats(found[o], own, o < k) for o in found)
    ]
    allowed = [k for k in kept if k == 1 or found[k][0] < found[1][0]]
    return tuple(sorted(allowed, key=lambda k: (-found[k][0], k)))


def _beats(one: tuple[int, Counter[Any]], other: tuple[int, Counter[Any]], earlier: bool) -> bool:
    """Whether it has as few streams and recomputes no more; of equals the earlier one does."""
    return one[0] <= other[0] and one[1] <= other[1] and (one != other or earlier)
