"""The figure of skewed routing passes for what is right, and falls short for each thing that is not."""

import pytest
import torch

from longstrand.bench import skew
from longstrand.parallel import Axis, Spread


@pytest.fixture
def found(monkeypatch):
    """One rank that holds all experts, and fewer rows at once than it has tokens."""
    monkeypatch.setattr(skew, "TOKENS", 96)
    monkeypatch.setattr(skew, "RECEIVE", 32)
    work = skew._zipf()
    part = skew._part(work, Spread(Axis("expert"), skew.NUM_EXPERTS, 32))
    return skew._join([part], work, skew._whole(work))


def test_rounds_are_counted_and_the_record_passes(found):
    assert found["rounds"] == 96 * 2 / 32
    assert found["largest_receive"] == 32
    assert found["largest_bytes"] == found["bound_bytes"] == 32 * (2 * skew.WIDTH + 1) * 8
    assert found["kept_bytes_per_token"] == skew.WIDTH * 8 + 2 * 8 + 2 * 8
    assert skew._record("name", found)["pass"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"largest_receive": 33},
        {"largest_bytes": 10**6},
        {"kept_bytes_per_token": 2000},
        {"dropped": 1},
        {"difference": 1e-9},
        {"difference": float("nan")},
    ],
    ids=str,
)
def test_what_is_wrong_falls_short(found, wrong):
    assert not skew._record("name", found | wrong)["pass"]


def test_zipf_is_uneven_and_gives_each_token_two_experts():
    work = skew._zipf()
    assert (work.ids[:, 0] != work.ids[:, 1]).all()
    assert work.per_expert.max() > 5 * work.per_expert.double().mean()
    assert torch.equal(skew._one_expert().per_expert.nonzero()[:, 0], torch.tensor([5]))
