"""Padding by hand, and the block sizes as the kernels have them."""

from functools import partial
from pathlib import Path

import pytest
import torch

from longstrand.ops import padding
from longstrand.ops.experts.grouped import rows_taken
from longstrand.ops.kda import CHUNK
from longstrand.ops.native import LANES
from longstrand.ops.padding import Padding, Tiles
from longstrand.ops.select.blockwise import KERNEL_POOLS, KERNEL_ROWS

OPS = Path(padding.__file__).parent


def test_block_sizes_are_those_of_the_kernels():
    assert f"LANES = {LANES};" in (OPS / "native/vector.h").read_text()
    assert f"C = {CHUNK}, BLOCK" in (OPS / "kda/kernel.cpp").read_text()
    assert KERNEL_POOLS == 2 * LANES
    assert f"ROWS = {KERNEL_ROWS}, STEP = 2 * LANES;" in (OPS / "select/kernel.cpp").read_text()


def test_tiles_end_with_each_part():
    tiles = Tiles([(0, 50), (100, 120)], 30)
    assert list(tiles) == [(0, 30), (30, 50), (100, 120)]
    assert tiles.num_tokens == 70 and tiles.rows(16) == 32 + 32 + 32


def test_chunks_of_whole_tiles_pad_nothing():
    assert padding.of_chunks(Tiles([(0, 4096)], 1024), [32, 32], native=True) == padding.NONE


def test_the_last_chunk_and_narrow_heads_are_padded():
    tiles = Tiles([(0, 1000)], 300)  # 304 + 304 + 304 + 112 rows
    assert padding.of_chunks(tiles, [32, 32], native=True).percent == 2.4
    assert padding.of_chunks(tiles, [8, 8], native=False).percent == 2.4
    assert padding.of_chunks(tiles, [8, 24], native=True).percent == 53.6  # 1024 x 48 of 1000 x 32
    assert padding.of_tokens_in_lanes(tiles, native=True).percent == 2.4


def test_rows_are_whole_vectors_in_a_kernel_only():
    assert padding.of_rows([40, 16], native=True) == Padding(14.29, "rows to 16")  # 64 of 56
    assert padding.of_rows([40, 16], native=False) == padding.NONE


@pytest.mark.parametrize(("native", "of_one", "of_two"), [(True, 160, 160), (False, 80, 120)])
def test_of_selected_pools_what_a_token_does_not_see_is_padding(native, of_one, of_two):
    """10 tokens, pools of four: a kernel takes 16 rows for each, plain torch all slots and the own pool."""
    tiles = Tiles([(0, 10)], 4)
    for chosen, computed, seen in (
        (
            1,
            of_one,
            1 + 2 + 3 + 4 + 5 + 6 + 7 + 4 + 5 + 6,
        ),  # the chosen pool, and of the own one what is there
        (2, of_two, 1 + 2 + 3 + 4 + 5 + 6 + 7 + 8 + 9 + 10),
    ):
        found = padding.of_selected(tiles, kpool=4, num_selected=chosen, width=16, native=native)
        assert found.percent == round(100 * (computed / seen - 1), 2)


def test_slots_of_a_choice_that_stay_empty():
    # 10 tokens see 0 0 0 1 1 1 1 2 2 2 pools of four: 10 used of 2 x 10 slots
    assert padding.of_slots(Tiles([(0, 10)], 4), kpool=4, num_selected=2).percent == 100.0


def test_rows_scored_together_take_what_the_last_of_them_sees():
    tiles = Tiles([(0, 8)], 8)
    # pools of two tokens, one is chosen: rows see 0 1 1 2 2 3 3 4, those above 1 are scored: 2 2 3 3 4 = 14
    assert padding.of_scores(tiles, kpool=2, num_selected=1, native=False).percent == round(
        100 * (32 / 14 - 1), 2
    )
    assert padding.of_scores(tiles, kpool=2, num_selected=1, native=True).percent == round(
        100 * (256 / 14 - 1), 2
    )
    assert padding.of_scores(tiles, kpool=2, num_selected=4, native=True) == padding.NONE


def test_the_kernel_fills_up_experts_rows_in_bfloat16():
    """Two tokens of one choice each and two experts: both on one, or one each."""
    tiles = Tiles([(0, 4)], 2)
    of = partial(padding.of_experts, tiles, active=1)
    assert of(experts=2, dtype=torch.bfloat16, native=True).percent == 100 * (1.5 * 32 / 2 - 1)
    assert of(experts=1, dtype=torch.bfloat16, native=True).percent == 100 * (32 / 2 - 1)
    assert of(experts=2, dtype=torch.bfloat16, native=False) == padding.NONE
    assert of(experts=2, dtype=torch.float32, native=True) == padding.NONE


def test_the_mean_rows_of_many_experts_are_those_of_random_choices():
    torch.manual_seed(0)
    counts = torch.stack([torch.bincount(torch.randint(8, (2048,)), minlength=8) for _ in range(300)])
    rows = sum(rows_taken(each, torch.bfloat16) for each in counts.flatten().tolist())
    said = padding.of_experts(
        Tiles([(0, 1024)], 1024), experts=8, active=2, dtype=torch.bfloat16, native=True
    )
    assert said.percent == pytest.approx(100 * (rows / counts.sum().item() - 1), rel=0.05)


@pytest.mark.parametrize(
    ("tokens", "rows"), [(0, 0), (1, 32), (32, 32), (33, 64), (511, 512), (513, 576), (1100, 1152)]
)
def test_an_expert_takes_one_of_few_numbers_of_rows(tokens, rows):
    assert rows_taken(tokens, torch.bfloat16) == rows
    assert rows_taken(tokens, torch.float32) == tokens


def test_at_most_eight_numbers_of_rows_lie_between_two_powers_of_two():
    assert len({rows_taken(each, torch.bfloat16) for each in range(257, 65537)}) == 8 * 8
