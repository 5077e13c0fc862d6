"""Offsets beyond 2^31 elements: every index and count is 64 bits wide, shown on sizes alone (A26)."""

import ast
from pathlib import Path

import pytest
import torch

import longstrand.ops
from longstrand.memory.tiles import PackLayout

LONG = 2**31 + 4099  # tokens


@pytest.mark.parametrize("kpool", [1, 4, 16])
def test_slots_and_pools_beyond_two_to_the_31_do_not_wrap(kpool):
    """Starts are given as they come from a pack; only the last few tokens are looked at."""
    layout = PackLayout(torch.tensor([0, 3, LONG - 7, LONG]), kpool, torch.device("cpu"))
    first = -(-3 // kpool) + -(-(LONG - 10) // kpool)
    tile = layout.tile(LONG - 9, LONG)
    assert layout.num_pools == first + -(-7 // kpool)
    assert layout.num_slots == layout.num_pools * kpool
    assert tile.offsets.tolist() == [LONG - 12, LONG - 11, *range(7)]
    assert tile.slots.tolist()[2:] == [first * kpool + offset for offset in range(7)]
    assert tile.slots.tolist()[0] == -(-3 // kpool) * kpool + LONG - 12
    assert tile.num_visible.tolist()[1] == (LONG - 10) // kpool
    assert all(value.dtype == torch.int64 for value in (tile.offsets, tile.slots, tile.first_pool))


def test_starts_of_32_bits_are_widened_before_they_are_multiplied():
    starts = torch.tensor([0, 2**31 - 5, 2**31 - 1], dtype=torch.int32)
    layout = PackLayout(starts, 4, torch.device("cpu"))
    assert layout.num_slots == 2**31 - 4 + 4
    assert layout.tile(2**31 - 5, 2**31 - 1).slots.tolist() == [2**31 - 4 + i for i in range(4)]


def test_ids_are_narrow_only_where_they_are_stored():
    """Pool ids are kept in 32 bits, expert ids in 8 or 16; whoever multiplies them widens first.

    `gathered.py` narrows pool ids (`.int()`) for the kernel, which multiplies in 64 bits; `given.py` says of what
    dtype they are; `memory/host.py` and `memory/spool.py` name uint8 for a block of bytes.
    """
    source = Path(longstrand.ops.__path__[0]).parent
    narrow = {
        str(path.relative_to(source))
        for part in ("ops", "memory", "model")
        for path in (source / part).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("int32", "int", "short", "int16", "uint8")
        if path.name != "cases.py" and path.parent.name != "hf"
    }
    assert narrow <= {
        *("ops/select/blockwise.py", "ops/select/reference.py", "ops/sparse_attention/gathered.py"),
        *("model/dsa.py", "model/ffn.py", "model/given.py", "memory/host.py", "memory/spool.py"),
    }
