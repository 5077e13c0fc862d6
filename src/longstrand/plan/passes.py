"""How often a step computes each layer: forward, again in backward, once more where inputs are rebuilt; no torch."""

from __future__ import annotations

from dataclasses import dataclass
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
    """

    forward: int
    front: int
    back: int


@dataclass(frozen=True)
class Passes:
    """What a step of a job computes how often on one rank."""

    job: Job

    @cached_property
    def weights(self) -> list[Weight]:
        """Of the whole model."""
        return self.job.weights()

    @cached_property
    def own_trained(self) -> float:
        """Trained values of one rank."""
        return sum(weight.num_values for weight in self.weights if weight.trains) / self.job.world

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
        """Layers that run once more because the input above them was not kept."""
        every, layers = self.job.memory.keep_every, self.job.shape.num_hidden_layers
        starts = range(self.first, layers, every)
        return frozenset(index for start in starts[:-1] for index in range(start, start + every - 1))

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
        memory, shape = self.job.memory, self.job.shape
        back = int(layer >= self.first and self.job.indexer != "warmup")
        again = back * memory.recompute + (layer in self.rebuilt)
        shares = self.job.parallel.context > 1
        # DSA goes back in two stages: latents of a tile are computed again once their gradient is complete.
        front = back * memory.recompute * (shape.layer_types[layer] == DSA)
        if shares and memory.recompute and not memory.keep_fronts:
            # Forward: once for what ranks exchange. Backward: once more for a half of its own; DSA exchanges anew.
            front += 1 + back + (layer in self.rebuilt)
        elif shares:
            front = 0
        return LayerPasses(1 + again + self.whole, front + shares * self.whole, back)
