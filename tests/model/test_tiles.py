"""The size of a tile changes nothing but speed and memory."""

import pytest
import torch

from longstrand.bench._small_models import (
    LENGTHS,
    MODES,
    documents,
    gradients,
    largest_difference,
    losses,
    model,
)
from longstrand.bench.tiles import KINDS, LIMIT, TILES, bfloat16_errors, tile_error
from longstrand.data.pack import Pack
from longstrand.memory import Levers, SideLosses

FEW = (1, 2, 3, 9, 5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tile", [1, 3, 7])
def test_tiles_smaller_than_a_pool_or_a_window_give_what_one_tile_gives(mode, tile):
    error, where = tile_error("KDDK", mode, tile, FEW)
    assert error <= LIMIT, where


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tile", [64, 100])
def test_tiles_on_and_off_document_borders_give_what_one_tile_gives(mode, tile):
    error, where = tile_error("KDKD", mode, tile)
    assert error <= LIMIT, where


@pytest.mark.slow
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tile", TILES)
def test_the_full_grid_of_tiles(kinds, mode, tile):
    error, where = tile_error(kinds, mode, tile)
    assert error <= LIMIT, where


def test_pools_of_one_and_of_sixteen_tokens_cross_tiles():
    for kpool, topk in ((1, 6), (16, 32)):
        trained = model("DK", index_kpool=kpool, index_topk=topk)
        given = Pack.from_documents(documents((70, 3)))
        found = []
        for tile in (9, 73):
            side = losses(given, "sparse")
            logprobs, grads = gradients(trained, given, tile, side)
            found.append(grads | {"log-probabilities": logprobs})
        error, where = largest_difference(*found)
        assert error <= LIMIT, (kpool, where)


def test_the_choice_of_a_tile_is_made_by_its_own_rows():
    """Selections and expert counts are those of one tile: a row offset that is wrong in a later tile shows."""
    trained, given = model("DK"), Pack.from_documents(documents(LENGTHS))
    counts = []
    for tile in (5, 1000):
        side = SideLosses()
        with torch.no_grad():
            trained.token_logprobs(given, levers=Levers(tile=tile), side=side)
        counts.append(side.expert_counts)
    assert all(torch.equal(counts[0][layer], counts[1][layer]) for layer in counts[1])


def test_many_tiles_round_no_worse_than_one_in_bfloat16():
    """Gradients add up in float32: two runs are 2e-3 apart at 64 tiles, and 1.6e-2 when they add up in bfloat16."""
    errors = bfloat16_errors(tokens=128, num_tiles=64)
    assert errors.keys() >= {"kda", "mla", "mhc", "experts", "head", "embedding"}
    assert max(many / one for one, many, _ in errors.values()) <= 2
    assert max(apart for _, _, apart in errors.values()) <= 5e-3
