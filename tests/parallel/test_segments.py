"""How a pack is cut and dealt, against counting pair by pair."""

import numpy as np
import pytest

from longstrand.parallel import deal


def _pairs(starts, spans):
    offsets = np.concatenate([np.arange(n) for n in np.diff(starts)])
    return sum(int((offsets[a:b] + 1).sum()) for a, b in spans)


@pytest.mark.parametrize(
    ("lengths", "ranks", "per_rank"),
    [
        ([64], 4, None),
        ([10], 3, None),
        ([2], 4, None),
        ([7], 2, 4),
        ([5, 1, 30, 2, 9], 3, None),
        ([3, 40, 3], 4, 8),
    ],
)
def test_every_token_has_one_owner_and_pairs_are_counted(lengths, ranks, per_rank):
    starts = np.concatenate([[0], np.cumsum(lengths)])
    dealt = deal(starts, ranks, per_rank)
    owned = [dealt.owned_by(rank) for rank in range(ranks)]
    tokens = sorted(t for spans in owned for a, b in spans for t in range(a, b))
    assert tokens == list(range(starts[-1]))
    assert list(dealt.pairs) == [_pairs(starts, spans) for spans in owned]


@pytest.mark.parametrize("ranks", [2, 3, 4, 64])
def test_one_document_is_even_to_the_pair(ranks):
    assert deal([0, 2 * ranks * 37], ranks).imbalance == 1.0


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 32, 64])
def test_packs_of_log_normal_documents_are_within_a_tenth(ranks):
    for seed in range(5):
        lengths = np.exp(np.random.default_rng(seed).normal(8, 1, 200)).astype(int) + 1
        assert deal(np.concatenate([[0], lengths.cumsum()]), ranks).imbalance <= 1.10
