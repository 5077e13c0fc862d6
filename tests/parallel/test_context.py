"""A pack that several ranks share is the pack of one: others' faults, and one case of each kind of the figure."""

import pytest
import torch

from longstrand.bench import _small_models as small
from longstrand.bench.equal import LIMIT, Case, differences
from longstrand.memory import Levers, SideLosses
from longstrand.memory.tiles import PackLayout, Shard
from longstrand.model import Model
from longstrand.parallel import Axis, deal, make_mesh, run_ranks
from longstrand.parallel.halo import Halo


def rank_of(rank, size):
    """An axis that is asked where it stands, and nothing else."""
    axis = Axis("context")
    axis.rank, axis.size = rank, size
    return axis


ALONE = Levers(tile=4)

CASES = {
    # A04: one document over the edge; a document's edge on it, one after it, one before it.
    2: (
        Case(((16,), (8, 8), (9, 7), (7, 9)), levers=ALONE),
        Case(((7,), (12, 1)), mode="frozen"),  # A19: not divisible; the last document has one token
        Case(((41,), (9, 1, 30, 1, 4)), kinds="KDDK", segments=8, levers=Levers(tile=3, keep_fronts=True)),
        Case(((30, 3),), mode="warmup"),
        Case(((30, 3),), levers=Levers(tile=5, recompute=False)),
    ),
    3: (Case(((10,), (1, 1, 2))),),  # A19
    4: (
        Case(((2,),)),  # A19: shorter than the number of ranks
        Case(
            ((61,),), levers=Levers(tile=7, keep_every=2)
        ),  # R15: per-channel gates of every head, four ranks
    ),
}


@pytest.mark.parametrize("ranks", CASES)
def test_ranks_that_share_packs_compute_what_one_process_does(ranks):
    for case, (value, where) in zip(CASES[ranks], differences(CASES[ranks], (1, ranks, 1)), strict=True):
        assert value <= LIMIT, (str(case), where)


@pytest.mark.parametrize("axes", [(2, 2, 1), (1, 2, 2)])
def test_axes_together_compute_what_one_process_does(axes):
    cases = (Case(((41,), (9, 1, 30, 1, 4), (5,))),)
    for value, where in differences(cases, axes):
        assert value <= LIMIT, where


@pytest.mark.parametrize(("length", "ranks", "segments"), [(8, 2, 2), (8, 2, 4), (7, 3, 2), (2, 4, 2)])
def test_every_pair_of_token_and_target_has_one_rank_whatever_the_layout(length, ranks, segments):
    """A02: targets are shifted before the pack is cut, so that none is lost at an edge."""
    pack = small.Pack.from_documents([torch.arange(1, length + 1)])
    pairs = []
    for rank in range(ranks):
        shard = Shard(rank_of(rank, ranks), deal(pack.starts.tolist(), ranks, segments))
        layout = PackLayout(pack.starts, 4, torch.device("cpu"), shard)
        for tile in layout.tiles(3):
            pairs += zip(
                pack.tokens[tile.positions].tolist(), pack.targets[tile.positions].tolist(), strict=True
            )
    assert sorted(pairs) == [*((token, token + 1) for token in range(1, length)), (length, -1)]


def test_a_halo_comes_from_all_earlier_segments_of_the_document_and_from_no_other():
    starts = [0, 5, 11]
    dealt = deal(starts, 4, 2)  # segments of one and two tokens
    for rank in range(4):
        halo = Halo(rank_of(rank, 4), dealt, starts, depth=3)
        wanted = [
            [p for p in range(start - 3, start) if p >= max(s for s in starts if s <= start)]
            for start, _ in dealt.owned_by(rank)
        ]
        assert sum(halo._receive) == sum(map(len, wanted))
        assert halo.tails == [min(3, stop - start) for start, stop in dealt.owned_by(rank)]


def _counted(axes):
    mesh = make_mesh(data=axes[0], context=axes[1], expert=1)
    model: Model = small.model("KD")
    model.mesh, model.segments = mesh, 2
    received = []
    for length in (64, 128):
        before = mesh.context.received.copy()
        model.token_logprobs(small.pack((length,)), Levers(tile=16), SideLosses()).sum().backward()
        received.append({what: n - before[what] for what, n in mesh.context.received.items()})
    return received


def test_what_kda_exchanges_does_not_grow_with_the_length_and_what_dsa_does_is_latents_and_keys():
    for short, long in run_ranks(2, _counted, (1, 2), start="fork", timeout=100):
        for what, number in short.items():
            grows = what in ("DSA latents", "DSA pool keys", "DSA latent gradients")
            assert long[what] == number * (2 if grows else 1), what
        width, keys = 8, 8  # latents and index keys of the small model, float64, gathered there and back
        assert long["DSA latents"] == 2 * 64 * width * 8
        assert long["DSA pool keys"] == 2 * 16 * keys * 8


def test_a_document_longer_than_its_segments_is_evaluated_as_by_one_process():
    pack = small.pack((41, 6))
    whole = small.model("KDKD").token_logprobs(pack, Levers(tile=7)).detach()
    for found in run_ranks(2, _scored, start="fork", timeout=100):
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)


def _scored():
    model = small.model("KDKD")
    model.mesh = make_mesh(data=1, context=2, expert=1)
    with torch.no_grad():
        return model.mesh.context.sum(model.token_logprobs(small.pack((41, 6)), Levers(tile=7)))
