"""What lives while a tile is computed, in bytes: a planner's stand-in for tensors and their graph.

The functions of `layers.py` write a tile's operations onto a tape in the order in which the model runs them. Each says
what it makes, what the graph saves of it and what it needs for a moment; the tape adds up what lives, as reference
counts do: a value lives while the code holds it, or while the graph has saved it for an operation that was not walked
back yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Block:
    """Memory that is given back when no one holds it."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes, self.holders = num_bytes, 1


@dataclass(eq=False)
class Value:
    """A tensor.

    Attributes:
        grad_bytes: of its gradient; 0 where none flows.
        grad: as far as it has arrived.
    """

    block: Block
    grad_bytes: int
    grad: Block | None = None


class Learns(NamedTuple):
    """The gradients of an operation's weights, in bytes.

    Attributes:
        made: all of them, as the operation makes them.
        widened: most that lives while they are widened, beside what was saved and the gradients that came and go.
    """

    made: int = 0
    widened: int = 0


NOTHING = Learns()


@dataclass(frozen=True)
class _Node:
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    saved: tuple[Block, ...]
    back: int
    after: int
    shares: bool


@dataclass
class Tape:
    """Bytes that live now, and the most at once.

    Attributes:
        graph: whether operations are saved for a way back.
    """

    graph: bool = True
    live: int = 0
    most: int = 0
    nodes: list[_Node] = field(default_factory=list)

    def op(
        self,
        inputs: Sequence[Value],
        outputs: Sequence[int],
        *,
        saves: Iterable[Value] = (),
        kept: int = 0,
        work: int = 0,
        back: int = 0,
        learns: Learns = NOTHING,
        shares: bool = False,
    ) -> list[Value]:
        """One operation.

        Args:
            outputs: bytes of each.
            saves: inputs that the graph keeps.
            kept: bytes made for the way back alone, or, without a graph, made and dropped.
            work: most that lives during the operation beside inputs, outputs and `kept`.
            back: most that lives on its way back beside what was saved and the gradients that come and go.
            learns: what the gradients of its weights take.
            shares: the gradient of the output is handed on to the inputs as it is.
        """
        made = [self.value(num_bytes) for num_bytes in outputs]
        held = self.new(kept)
        self.at_once(work)
        if not self.graph:
            self.drop_block(held)
            return made
        blocks = [each.block for each in saves]
        for block in blocks:
            block.holders += 1
        self.nodes.append(
            _Node(tuple(inputs), tuple(made), (held, *blocks), back + learns.made, learns.widened, shares)
        )
        return made

    def save(self, *values: Value) -> None:
        """The last operation keeps its outputs too."""
        if self.graph:
            node = self.nodes.pop()
            for value in values:
                value.block.holders += 1
            saved = (*node.saved, *(value.block for value in values))
            self.nodes.append(_Node(node.inputs, node.outputs, saved, node.back, node.after, node.shares))

    def value(self, num_bytes: int, *, grad_bytes: int | None = None) -> Value:
        """A tensor that the code holds."""
        return Value(self.new(num_bytes), num_bytes if grad_bytes is None else grad_bytes)

    def leaf(self, of: Value) -> Value:
        """The same memory with a gradient of its own: where a graph is cut."""
        of.block.holders += 1
        return Value(of.block, of.grad_bytes)

    def view(self, num_bytes: int) -> Value:
        """Rows of a buffer that is counted elsewhere."""
        return Value(Block(0), num_bytes)

    def drop(self, *values: Value) -> None:
        """The code no longer holds them."""
        for value in values:
            self.drop_block(value.block)

    def give(self, value: Value, num_bytes: int | None = None) -> None:
        """A gradient arrives from outside; `num_bytes` of a new buffer, 0 of one that is counted elsewhere."""
        value.grad = self.new(value.grad_bytes if num_bytes is None else num_bytes)

    def walk_back(self, mark: int = 0) -> None:
        """From the gradients at hand through all operations since `mark` (a number of nodes), last first."""
        while len(self.nodes) > mark:
            node = self.nodes.pop()
            arrived = [value for value in node.outputs if value.grad is not None]
            if arrived:
                leaving = self._leaving(node, arrived[0])
                self.at_once(node.after)
            for value in arrived:
                self.take(value)
            for block in node.saved:
                self.drop_block(block)
            if not arrived:
                continue
            for value, grad in zip(node.inputs, leaving, strict=True):
                if value.grad is None:
                    value.grad = grad
                else:
                    self.drop_block(grad)  # added in place

    def _leaving(self, node: _Node, arrived: Value) -> list[Block]:
        if not node.shares:
            blocks = [self.new(value.grad_bytes) for value in node.inputs]
            self.at_once(node.back)
            return blocks
        assert arrived.grad is not None
        arrived.grad.holders += len(node.inputs)
        return [arrived.grad for _ in node.inputs]

    def take(self, value: Value) -> None:
        """Frees a value's gradient."""
        if value.grad is not None:
            self.drop_block(value.grad)
            value.grad = None

    def new(self, num_bytes: int) -> Block:
        self.live += num_bytes
        self.most = max(self.most, self.live)
        return Block(num_bytes)

    def at_once(self, num_bytes: int) -> None:
        """Something lives for a moment."""
        self.most = max(self.most, self.live + num_bytes)

    def drop_block(self, block: Block) -> None:
        block.holders -= 1
        assert block.holders >= 0, "dropped twice"
        if block.holders == 0:
            self.live -= block.num_bytes
