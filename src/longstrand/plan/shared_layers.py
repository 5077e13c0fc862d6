"""A layer's tile where ranks share a pack: each way in two passes, as the passages of `model/` compute it."""

from __future__ import annotations

from typing import NamedTuple

from longstrand.plan.layers import LayerTape, hand_on
from longstrand.plan.ops import Ops
from longstrand.plan.tape import Value


class Middle(NamedTuple):
    """The first stage of a tile's way back.

    Attributes:
        most: at once.
        left: what stays of the tile until the second stage, beside its row of the middle stream.
        stands: the tile's whole graph, before it is walked back.
        rest: most that lives in the second stage beside what was left; of a kept front.
    """

    most: int
    left: int
    stands: int
    rest: int = 0


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

    def forward_kept(self) -> int:
        """Most that lives in the second pass forward beside what was kept of the tile, which stays meanwhile."""
        ops, x = self._begin(graph=False)
        tape, site = ops.tape, self._enter(ops, x)
        rule = self._rule(ops, site.h) if self.is_kda else ()
        tape.most = kept = tape.live
        mixer = self._project(ops, site.h, ops.kda(*rule)) if len(rule) == 3 else self._mix(ops, site.h)
        self._feed_forward(ops, ops.mhc_update(x, mixer, site.post, site.comb))
        return tape.most - kept

    def to_the_middle(self, *, keeps_front: bool = False) -> Middle:
        """From a tile's output to the leaves of its front.

        Args:
            keeps_front: the front has a graph, and stays with it; otherwise it is computed without one and goes.
        """
        ops, x = self._begin(graph=keeps_front)
        tape, site = ops.tape, self._enter(ops, x)
        leaves, join = site.cut(tape), len(tape.nodes)
        rule = self._rule(ops, leaves.h) if self.is_kda else (self._latents(ops, leaves.h),)
        tape.graph = True
        recurred = len(tape.nodes)
        found = ops.kda(*rule, state_only=not keeps_front) if len(rule) == 3 else rule[0]
        rest = len(tape.nodes)
        keys, grown = self._learn_keys(ops), tape.leaf(found)
        mixer = self._project(ops, leaves.h, grown) if self.is_kda else self._mix(ops, leaves.h)
        middle = ops.mhc_update(x, mixer, leaves.post, leaves.comb)
        tape.drop(mixer)
        y = self._feed_forward(ops, middle)
        tape.drop(middle)
        stands = tape.live
        self._give(tape, y)
        tape.walk_back(rest)
        if self.is_kda and self.s.native:
            tape.at_once(tape.nodes[recurred].back)
        elif self.is_kda and not keeps_front:
            hand_on(grown, found)
            tape.walk_back(recurred)
        if not keeps_front:
            parts = (leaves.h, leaves.post, leaves.comb, *([grown] if self.is_kda else []))
            return Middle(tape.most, sum(part.grad.num_bytes for part in parts if part.grad), stands)
        tape.drop(y)
        most, left, tape.most = tape.most, tape.live, tape.live
        self._give_front(tape, found, grown)
        tape.walk_back(join)
        site.join(leaves)
        tape.walk_back()
        self._keys_back(ops, keys)
        return Middle(most, left, stands, tape.most - left)

    def to_the_input(self) -> int:
        """From the leaves, whose gradients are there, to the gradient of the tile's input."""
        ops, x = self._begin()
        tape, site = ops.tape, self._enter(ops, x)
        leaves, join = site.cut(tape), len(tape.nodes)
        found = ops.kda(*self._rule(ops, leaves.h)) if self.is_kda else self._latents(ops, leaves.h)
        keys, grown = self._learn_keys(ops), tape.leaf(found)
        for leaf in (leaves.h, leaves.post, leaves.comb, grown):
            tape.give(leaf, 0)
        self._give_front(tape, found, grown)
        tape.walk_back(join)
        site.join(leaves)
        tape.walk_back()
        self._keys_back(ops, keys)
        return tape.most

    def _mix(self, ops: Ops, h: Value) -> Value:
        """The mixer's output, from latents and pools that ranks have gathered."""
        return self._kda(ops, h) if self.is_kda else self._dsa(ops, h, append=False, gathered=True)
