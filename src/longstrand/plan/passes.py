"""How often a step computes each layer: forward, again in backward, once more where inputs are rebuilt; no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from longstrand.architecture import DSA
from longstrand.plan.job import Job, Weight
from longstrand.plan.streams import first_trained_layer


@dataclass(frozen=True)
class LayerPasses:
    """Passes of one layer in one pass of a sequence.

    Attributes:
        forward: of the whole layer, without a graph and with one.
        front: more of its first half alone: latents in backward, and what ranks that share a sequence exchange.
        back: 1 where gradients go through it, else 0.
        there: walks over its tiles from their input to their output: forward, and where inputs are rebuilt.
        again: 1 where the way back computes it once more.
        warms: 1 where only its indexer learns, from all that is visible: a walk back of its own.
    """

    forward: int
    front: int
    back: int
    there: int
    again: int
    warms: int = 0


@dataclass(frozen=True)
class Passes:
    """What a step of a job computes how often on one rank."""

    job: Job

    @cached_property
    def counts(self) -> Passes:
        """Those of a job that computes each layer as often, whatever its length, its tile and where things move.

        What is summed over all weights depends on nothing else, so that it is summed once for many jobs.
        """
        still = {"tile": 1, "offload": "none", "optimizer": "device", "spool": None}
        memory = self.job.memory.model_copy(update=still)
        return Passes(replace(self.job, length=2, memory=memory, data_skew=1.0, threads=1))

    @cached_property
    def weights(self) -> list[Weight]:
        """Of the whole model."""
        return self.job.weights()

    @cached_property
    def trained_groups(self) -> frozenset[str]:
        """Groups of parameters that receive gradients."""
        return frozenset(weight.group for weight in self.weights if weight.trains)

    @cached_property
    def first(self) -> int:
        """The lowest layer with something to train: gradients go down to it; the number of layers where none has."""
        return first_trained_layer(self.job)

    @cached_property
    def rebuilt(self) -> frozenset[int]:
        """Layers that run once more because the input above them was not kept: up to the highest that goes back."""
        every, layers = self.job.memory.keep_every, self.job.shape.num_hidden_layers
        groups = [range(start, start + every) for start in range(self.first, layers, every)[:-1]]
        back = [[index for index in group if self._goes_back(index)] for group in groups]
        return frozenset(
            index
            for group, own in zip(groups, back, strict=True)
            if own
            for index in range(group[0], own[-1])
        )

    @property
    def tokens(self) -> float:
        """Of one rank in one pass; the last pass of a step may be a short one, or none on some ranks."""
        return self.job.length / self.job.parallel.context

    @property
    def tiles(self) -> int:
        """Of one rank in one pass: a segment ends in a tile of its own."""
        job, segments = self.job, self.job.segments
        return segments * max(1, -(-job.length // (segments * job.parallel.context * job.memory.tile)))

    @property
    def whole(self) -> int:
        """Passes of a sequence that need no gradients, before the one that does."""
        job = self.job
        return int(job.balance == "aux" and (job.sequences_per_step > 1 or job.world > 1))

    def of(self, layer: int) -> LayerPasses:
        """In one pass of a sequence and its way back."""
        return self._of_layers[layer]

    @cached_property
    def _of_layers(self) -> list[LayerPasses]:
        return [self._of(layer) for layer in range(self.job.shape.num_hidden_layers)]

    def _of(self, layer: int) -> LayerPasses:
        memory = self.job.memory
        warms = int(self.job.indexer == "warmup" and self._goes_back(layer))
        back = int(self._goes_back(layer)) - warms
        again, there = back * memory.recompute, 1 + self.whole + (layer in self.rebuilt)
        front = self._fronts(layer, there, back) + warms * (2 + (self.job.parallel.context > 1))
        return LayerPasses(there + again, front, back, there, again, warms)

    def _fronts(self, layer: int, there: int, back: int) -> int:
        memory, is_dsa = self.job.memory, self.job.shape.layer_types[layer] == DSA
        # DSA goes back in two stages: latents of a tile are computed again once their gradient is complete.
        latents = back * memory.recompute * is_dsa
        if self.job.parallel.context == 1:
            return latents
        if memory.keep_fronts:
            return 0
        # There: once for what ranks exchange, unless the graphs of the only walk are kept. Back: once more for a half
        # of its own.
        return latents + there + (back if memory.recompute else -back)

    def _goes_back(self, layer: int) -> bool:
        if self.job.indexer != "warmup":
            return layer >= self.first
        shape = self.job.shape
        learns = shape.layer_types[layer] == DSA and shape.indexer_types[layer] == "full"
        return learns and layer >= self.first
