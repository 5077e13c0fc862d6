"""Where each token of a pack lies in its document and its pools, against plain loops."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longstrand.data.pack import Pack
from longstrand.memory.tiles import PackLayout

LENGTHS = st.lists(st.integers(1, 70), min_size=1, max_size=8)


def plain(lengths, kpool):
    """offset, slot, first pool and number of visible pools of every token."""
    rows, first_pool = [], 0
    for length in lengths:
        for offset in range(length):
            rows.append((offset, first_pool * kpool + offset, first_pool, (offset + 1) // kpool))
        first_pool += (length + kpool - 1) // kpool
    return rows, first_pool


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.sampled_from([1, 2, 4, 16]), st.integers(1, 90))
def test_tiles_hold_what_plain_loops_say(lengths, kpool, size):
    rows, num_pools = plain(lengths, kpool)
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    layout = PackLayout(starts, kpool, torch.device("cpu"))
    tiles = list(layout.tiles(size))
    found = [
        row
        for tile in tiles
        for row in zip(
            tile.offsets.tolist(),
            tile.slots.tolist(),
            tile.first_pool.tolist(),
            tile.num_visible.tolist(),
            strict=True,
        )
    ]
    assert found == rows
    assert (layout.num_tokens, layout.num_pools, layout.num_slots) == (
        len(rows),
        num_pools,
        num_pools * kpool,
    )
    assert [(tile.start, tile.stop) for tile in tiles] == [
        (start, min(start + size, len(rows))) for start in range(0, len(rows), size)
    ]
    for tile in tiles:
        firsts = [offset == 0 for offset in tile.offsets.tolist()]
        assert (tile.first is None and not any(firsts)) or tile.first.tolist() == firsts


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.sampled_from([1, 2, 4, 16]))
def test_no_pool_belongs_to_two_documents(lengths, kpool):
    pack = Pack.from_documents([torch.zeros(length, dtype=torch.long) for length in lengths])
    tile = PackLayout(pack.starts, kpool, torch.device("cpu")).tile(0, len(pack))
    document = torch.repeat_interleave(torch.arange(len(lengths)), pack.lengths)
    owners = {}
    for pool, owner in zip((tile.slots // kpool).tolist(), document.tolist(), strict=True):
        assert owners.setdefault(pool, owner) == owner
    assert torch.equal(tile.offsets, pack.offsets)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.sampled_from([1, 2, 4, 16]))
def test_the_indexers_rows_are_those_that_see_a_complete_pool(lengths, kpool):
    pack = Pack.from_documents([torch.zeros(length, dtype=torch.long) for length in lengths])
    tile = PackLayout(pack.starts, kpool, torch.device("cpu")).tile(0, len(pack))
    assert pack.indexer_rows(kpool) == int((tile.num_visible > 0).sum())
