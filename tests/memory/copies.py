"""Copies between a block of host memory and a CPU that stands for a device: at once, or as late as allowed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Done:
    value: Any = None

    def result(self):
        return self.value


class PlainCopies:
    """At once."""

    def out(self, value, slot):
        slot.copy_(value)
        return Done()

    def back(self, slot):
        return Done(slot.clone())

    def close(self):
        """Nothing is under way."""


class LastMinute:
    """A slot gets its bytes once someone waits for it, from the memory that was given; loads are as late, or at once.

    Attributes:
        most: copies out that were under way at once.
    """

    def __init__(self, late_loads):
        self.late_loads, self.under_way, self.most = late_loads, [], 0

    def out(self, value, slot):
        transfer = Later(lambda: slot.copy_(value), self.under_way)
        self.under_way.append(transfer)
        self.most = max(self.most, len(self.under_way))
        return transfer

    def back(self, slot):
        return Later(slot.clone, []) if self.late_loads else Done(slot.clone())

    def close(self):
        for transfer in [*self.under_way]:
            transfer.result()


@dataclass(eq=False)
class Later:
    act: Callable[[], Any]
    under_way: list

    def result(self):
        if self in self.under_way:
            self.under_way.remove(self)
        return self.act()
