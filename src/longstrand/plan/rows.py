"""What one rank holds of a model's weights: its rows for good, and whole ones while they are gathered."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache

from longstrand.config import ParallelSection
from longstrand.plan.job import Job, Weight


class Rows:
    """Of the first rank, which has most; by layer, or under None what is no layer's.

    Attributes:
        own_bytes: of all its weights and buffers.
        own_trained: values that learn.
        own_narrow: those of them in a dtype narrower than float32.
        trained: `own_trained` by layer.
        gathered: bytes of sharded weights, whole.
        gathered_trained: values of those that learn, whole.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.own_bytes = self.own_narrow = 0
        self.trained: dict[int | None, int] = defaultdict(int)
        self.gathered: dict[int | None, int] = defaultdict(int)
        self.gathered_trained: dict[int | None, int] = defaultdict(int)
        for each in job.weights():
            own, whole = self._own(each), self._whole(each)
            self.own_bytes += own * each.itemsize
            self.own_narrow += own * (each.trains and each.itemsize < 4)
            self.trained[each.layer] += own * each.trains
            self.gathered[each.layer] += whole * each.itemsize
            self.gathered_trained[each.layer] += whole * each.trains
        self.own_trained = sum(self.trained.values())

    def _own(self, weight: Weight) -> int:
        world, experts = self._job.world, self._job.parallel.expert
        if not self._is_sharded(weight):
            return weight.num_values
        rows, ranks = weight.shape[0], world
        if weight.is_expert:
            rows, ranks = rows // experts, world // experts
        return -(-rows // ranks) * (weight.num_values // weight.shape[0])

    def _whole(self, weight: Weight) -> int:
        """Of an expert weight: this rank's experts."""
        whole = weight.num_values // (self._job.parallel.expert if weight.is_expert else 1)
        return whole * self._is_sharded(weight)

    def _is_sharded(self, weight: Weight) -> bool:
        """What stays float32 in a narrower model is whole on every rank; so is a buffer."""
        return self._job.world > 1 and self._job.shards(weight)


def rows_of(job: Job) -> Rows:
    """Of a job's ranks, once for all lengths and levers."""
    ranks = ParallelSection(context=job.world, expert=job.parallel.expert)
    return _rows(Job(job.shape, 1, 1, job.dtype, job.trainable, job.indexer, parallel=ranks))


@lru_cache(maxsize=256)
def _rows(job: Job) -> Rows:
    return Rows(job)
