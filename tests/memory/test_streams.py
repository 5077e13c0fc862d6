"""Streams outside the device: what is read is what was written, whatever its layout, size or place."""

import os
import random
import time
from functools import partial

import pytest
import torch
from copies import LastMinute, PlainCopies

from longstrand.memory import spool as spools
from longstrand.memory.host import HostSlots, host_block
from longstrand.memory.slots import PAGE, Demand, SlottedStreams
from longstrand.memory.spool import Spool
from longstrand.memory.streams import DeviceStreams
from longstrand.memory.tiles import PackLayout
from longstrand.peak_memory import resident_bytes

CPU = torch.device("cpu")
HOST = {"host": PlainCopies, "late host": partial(LastMinute, late_loads=True)}


def layout_of(num_tokens):
    return PackLayout(torch.tensor([0, num_tokens]), 1, CPU)


def open_store(kind, demand, folder):
    if kind == "device":
        return DeviceStreams(demand.num_tokens, torch.empty(0, dtype=demand.dtype))
    if kind in HOST:
        return SlottedStreams(HostSlots(host_block(demand.num_bytes), HOST[kind]()), demand)
    return SlottedStreams(Spool(folder, demand.num_bytes, CPU), demand)


@pytest.mark.parametrize("kind", ["device", *HOST, "disk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views_of_one_storage_come_back_each_as_itself(kind, dtype, tmp_path):
    """A28: x, its transpose, a slice and an expanded row share an address; only their values may matter."""
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    views = {"x": x, "x^T": x.T, "slice": x[:, ::2].repeat(1, 2), "row": x[3].expand(8, 8), "late": x[4:]}
    kept = {name: view.clone() for name, view in views.items()}
    tile = layout_of(8).tile(0, 8)
    store = open_store(kind, Demand(8, 8, dtype, {(8,): len(views)}), tmp_path)
    streams = {}
    for name, view in views.items():
        streams[name] = store.new(8)
        rows = layout_of(8).tile(0, len(view)) if len(view) < 8 else tile
        streams[name].write(rows, view)
    for name, wanted in kept.items():
        rows = layout_of(8).tile(0, len(wanted)) if len(wanted) < 8 else tile
        found = streams[name].read(tile)[: len(rows)]
        assert found.dtype == dtype and torch.equal(found, wanted), name
    store.close()


@pytest.mark.parametrize("kind", [*HOST, "disk"])
@pytest.mark.parametrize("seed", range(4))
def test_walks_in_any_order_read_what_a_plain_tensor_holds(kind, seed, tmp_path):
    """Forward and backward walks, tiles written in place while the next is on its way, streams freed and made."""
    draw = random.Random(seed)
    num_tokens, size = draw.choice([(1, 3), (12, 4), (67, 5), (64, 64), (30, 1)])
    layout, row = layout_of(num_tokens), (3, 5)
    store = open_store(kind, Demand(num_tokens, size, torch.float64, {row: 2}), tmp_path)
    truth, streams = {}, {}
    for number in range(2):
        streams[number], truth[number] = store.new(*row), torch.zeros(num_tokens, *row, dtype=torch.float64)
        for tile in layout.tiles(size):
            streams[number].write(tile, truth[number][tile.rows])
    for _ in range(25):
        number, act = draw.randrange(2), draw.choice(["read", "write", "read and write", "renew"])
        if act == "renew":
            streams[number].free()
            streams[number] = store.new(*row)
            act = "write"
        for tile in draw.choice([layout.tiles, layout.tiles_back])(size):
            if "read" in act:
                assert torch.equal(streams[number].read(tile), truth[number][tile.rows])
            if "write" in act:
                value = torch.randn(len(tile), *row, dtype=torch.float64)
                streams[number].write(tile, value)
                truth[number][tile.rows] = value
    store.close()


@pytest.mark.parametrize("kind", [*HOST, "disk"])
def test_a_tile_that_is_written_while_it_is_read_ahead_comes_back_as_written(kind, tmp_path):
    layout, demand = layout_of(12), Demand(12, 4, torch.float64, {(2,): 1})
    store = open_store(kind, demand, tmp_path)
    stream, (first, second, third) = store.new(2), layout.tiles(4)
    for tile in (first, second, third):
        stream.write(tile, torch.zeros(4, 2))
    stream.read(first)
    stream.write(second, torch.ones(4, 2))
    assert torch.equal(stream.read(second), torch.ones(4, 2, dtype=torch.float64))
    assert torch.equal(stream.read(third), torch.zeros(4, 2, dtype=torch.float64))
    store.close()


def test_of_two_writes_to_a_tile_the_later_one_stays_however_slow_the_first_is(tmp_path, monkeypatch):
    demand = Demand(4, 4, torch.float32, {(2,): 1})
    store = open_store("disk", demand, tmp_path)
    stream, tile, plain, calls = store.new(2), layout_of(4).tile(0, 4), os.pwritev, []

    def slow_at_first(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            time.sleep(0.2)
        return plain(*arguments)

    monkeypatch.setattr(os, "pwritev", slow_at_first)
    stream.write(tile, torch.zeros(4, 2))
    stream.write(tile, torch.ones(4, 2))
    time.sleep(0.3)
    assert torch.equal(stream.read(tile), torch.ones(4, 2))
    store.close()


def test_the_next_tile_in_the_walks_direction_is_on_its_way():
    """Forward and back, each tile is asked for once, before it is read, except where a walk begins."""
    asked = []

    class Recording(HostSlots):
        def load(self, at, shape, dtype):
            asked.append(at // PAGE)
            return super().load(at, shape, dtype)

    layout, demand = layout_of(20), Demand(20, 4, torch.float32, {(1,): 1})
    stream = SlottedStreams(Recording(host_block(demand.num_bytes), PlainCopies()), demand).new(1)
    for walk in (layout.tiles, layout.tiles_back, layout.tiles):
        asked.clear()
        before_read = []
        for tile in walk(4):
            before_read.append(tile.start // 4 in asked)
            stream.read(tile)
        assert sorted(asked) == [0, 1, 2, 3, 4] and before_read == [False, True, True, True, True]


def test_slots_have_exact_sizes():
    """R22: nothing is rounded to a power of two; a slot is its tile's bytes in whole pages."""
    row = (4, 144)  # 1,024 tokens of float32: 2.25 MiB
    demand = Demand(10_240, 1024, torch.float32, {row: 3})
    assert demand.slot_bytes(row) == 2.25 * 2**20
    assert demand.num_bytes == 3 * 10 * 2.25 * 2**20
    assert Demand(10, 1024, torch.bfloat16, {(3,): 2}).num_bytes == 2 * PAGE
    assert Demand(2049, 1024, torch.bfloat16, {(1, 2): 1, (5,): 2}).num_bytes == 3 * PAGE + 2 * 3 * 3 * PAGE


def test_host_slots_hold_exactly_their_bytes_and_give_them_back():
    """R22 in resident memory: 2.25 units of 32 MiB take 2.25, not 4, and none is left after the pass."""
    unit = 2**25
    value = torch.ones(unit // 16, dtype=torch.float32)
    before = resident_bytes()
    num_bytes = 9 * unit // 4
    slots = HostSlots(host_block(num_bytes), PlainCopies())
    for at in range(0, num_bytes, unit // 4):
        slots.save(at, value, torch.float32).result()
    assert resident_bytes() - before == pytest.approx(2.25 * unit, abs=unit / 8)
    slots.close()
    assert resident_bytes() - before < unit / 8


def test_slots_beyond_two_to_the_31_bytes_and_elements_are_their_own(tmp_path, monkeypatch):
    """A26: a sparse file of 17.2 GB; offsets that 32 bits would make equal hold different tiles."""
    monkeypatch.setattr(spools, "_allocate", lambda file, num_bytes: spools.os.truncate(file, num_bytes))
    monkeypatch.setattr(spools, "require_room", lambda folder, num_bytes, **ranks: None)
    row, tokens = (4, 1024), 2**20 + 64
    demand = Demand(tokens, 64, torch.float32, {row: 1})
    assert tokens * 4096 > 2**32 and demand.num_bytes > 2**34
    store = open_store("disk", demand, tmp_path)
    stream, layout = store.new(*row), layout_of(tokens)
    rows_per_wrap = 2**31 // (4096 * 4)  # rows that 2^31 bytes hold
    starts = [0, rows_per_wrap, 2 * rows_per_wrap, 4 * rows_per_wrap, 8 * rows_per_wrap]
    for number, start in enumerate(starts):
        stream.write(layout.tile(start, start + 64, start // 64), torch.full((64, *row), float(number)))
    for number, start in enumerate(starts):
        assert stream.read(layout.tile(start, start + 64, start // 64)).unique().tolist() == [number]
    store.close()
