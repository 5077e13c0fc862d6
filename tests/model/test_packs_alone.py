"""A document in a pack gives what it gives alone: log-probabilities, side losses and every gradient."""

import pytest
import torch

from longstrand.bench._small_models import LENGTHS, MODES, documents, model
from longstrand.bench.tiles import KINDS, LIMIT, PACKS, alone_error
from longstrand.data.pack import Pack
from longstrand.memory import Levers


@pytest.mark.parametrize("mode", MODES)
def test_a_pack_is_each_document_alone_with_all_gradients(mode):
    """Slow decay; edges on and off the borders of tiles of 64."""
    error, where = alone_error("KDDK", mode, 64)
    assert error <= LIMIT, where


@pytest.mark.slow
@pytest.mark.parametrize("lengths", PACKS, ids=str)
@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tile", [1, 3, 64, 100, 1000])
def test_the_full_grid_of_packs(lengths, kinds, mode, tile):
    error, where = alone_error(kinds, mode, tile, lengths)
    assert error <= LIMIT, where


def test_the_oracle_runs_each_document_alone_and_agrees():
    from longstrand.bench.oracle import Oracle

    ours, each = model("KDDK"), documents(LENGTHS)
    weights = dict(ours.named_parameters()) | dict(ours.named_buffers())
    theirs = Oracle(ours.architecture, weights).run(each)
    with torch.no_grad():
        found = ours.token_logprobs(Pack.from_documents(each), levers=Levers(tile=50))
    assert torch.allclose(found, theirs.logprobs, rtol=0, atol=1e-9)


@pytest.mark.parametrize("changed", range(7))
def test_changing_one_document_leaves_every_other_as_it_was(changed):
    """A03: the state, the convolution, the pools and the attention all begin anew.

    Rows share matrix products with other rows, so that the last bit may differ; what leaks is of size 1.
    """
    ours = model("KDDK")
    before = documents(LENGTHS)
    after = [d if i != changed else (d + 1) % 19 for i, d in enumerate(before)]
    packs = [Pack.from_documents(each) for each in (before, after)]
    with torch.no_grad():
        first, second = (ours.hidden(given, levers=Levers(tile=33)) for given in packs)
    start, stop = packs[0].starts[changed : changed + 2].tolist()
    own = torch.zeros(len(first), dtype=torch.bool)
    own[start:stop] = True
    assert torch.allclose(first[~own], second[~own], rtol=0, atol=1e-12)
    assert bool(((first - second)[own].abs().amax(-1) > 1e-3).all())


def test_a_documents_last_token_has_no_target_in_the_next():
    ours, each = model("KD"), documents((4, 1, 6))
    given = Pack.from_documents(each)
    with torch.no_grad():
        logprobs = ours.token_logprobs(given)
    assert (logprobs == 0).nonzero()[:, 0].tolist() == [3, 4, 10]
