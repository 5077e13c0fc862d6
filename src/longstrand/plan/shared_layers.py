"""A layer's tile where ranks share a pack: each way in two passes, as the passages of `model/` compute it."""

from __future__ import annotations

from typing import NamedTuple

from longstrand.plan.layers import LayerTape
from longstrand.plan.ops import Ops
from longstrand.plan.tape import Value


class Middle(NamedTuple):
    """The first stage of a tile's way back.

    Attributes:
        most: at once.
        left: what stays of the tile until the second stage, beside its row of the middle stream.
        stands: the tile's whole graph, before it is walked back.
    """

    most: int
    left: int
    stands: int


class SharedLayerTape(LayerTape):
    """One layer on tiles of a rank that shares its pack."""

    def meet(self) -> int:
        """Most that lives in the first pass forward; nothing of it stays."""
        ops, x = self._begin(graph=False)
        h = self._enter(ops, x).h
        if self.is_kda:
            ops.kda(*self._rule(ops, h), summary=True)
        else:
            self._latents(ops, h)
            if self.has_indexer:
                self._complete_pools(ops)
        return ops.tape.most

    def meet_keeping(self) -> int:
        """What `keep_fronts` keeps of a tile from the first pass forward to the second."""
        ops, x = self._begin(graph=False)
        site = self._enter(ops, x)
        if self.is_kda:
            self._rule(ops, site.h)
        return ops.tape.live

    def to_the_middle(self, *, keeps_front: bool = False) -> Middle:
        """From a tile's output to the leaves of its front.

        Args:
            keeps_front: the front has a graph, and stays with it; otherwise it is computed without one and goes.
        """
        ops, x = self._begin(graph=keeps_front)
        tape, site = ops.tape, self._enter(ops, x)
        rule = self._rule(ops, site.h) if self.is_kda else (self._latents(ops, site.h),)
        tape.graph = True
        leaves = site.cut(tape)
        recurred = len(tape.nodes)
        out = ops.kda(*rule, state_only=not keeps_front) if len(rule) == 3 else None
        rest = len(tape.nodes)
        grown = tape.leaf(out) if out is not None else None
        mixer = self._mix(ops, leaves.h) if grown is None else self._project(ops, leaves.h, grown)
        middle = ops.mhc_update(x, mixer, leaves.post, leaves.comb)
        tape.drop(mixer)
        y = self._feed_forward(ops, middle)
        tape.drop(middle)
        stands = tape.live
        tape.give(y, 0)
        tape.walk_back(rest)
        if out is not None and grown is not None:
            out.grad = grown.grad
            if self.s.native:
                tape.at_once(tape.nodes[recurred].back)
            elif not keeps_front:
                tape.walk_back(recurred)
        if keeps_front:
            tape.drop(y)
            return Middle(tape.most, tape.live, stands)
        left = sum(part.grad.num_bytes for part in (leaves.h, leaves.post, leaves.comb) if part.grad)
        left += grown.grad.num_bytes if grown is not None and grown.grad else 0
        return Middle(tape.most, left, stands)

    def to_the_input(self) -> int:
        """From the leaves, whose gradients are there, to the gradient of the tile's input."""
        ops, x = self._begin()
        tape, site = ops.tape, self._enter(ops, x)
        leaves = site.cut(tape)
        front = len(tape.nodes)
        if self.is_kda:
            found = ops.kda(*self._rule(ops, leaves.h))
            tape.give(found, 0)
        else:
            found = self._latents(ops, leaves.h)
            tape.give(found)
            tape.at_once(self.t * self.shape.kv_lora_rank * self.s.w * self.s.narrow)
        for leaf in (leaves.h, leaves.post, leaves.comb):
            tape.give(leaf, 0)
        tape.walk_back(front)
        site.join(leaves)
        tape.walk_back()
        return tape.most

    def _mix(self, ops: Ops, h: Value) -> Value:
        """The mixer's output, from latents and pools that ranks have gathered."""
        return self._kda(ops, h) if self.is_kda else self._dsa(ops, h, append=False, gathered=True)
