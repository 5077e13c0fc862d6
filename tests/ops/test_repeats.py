"""KDA on keys that repeat: runs of one letter and tandem repeats, everyday DNA."""

import pytest

from longstrand.bench.repeats import BETAS, DECAYS, LIMIT, PERIODS, RepeatCase, cases, errors


@pytest.mark.parametrize("length", [64, 65])
@pytest.mark.parametrize("period", PERIODS)
def test_repeated_keys_stay_exact_in_float32(period, length):
    batch = [RepeatCase(period, beta, decay, length) for beta in BETAS[1:] for decay in DECAYS]
    for case, found in zip(batch, errors(batch), strict=True):
        assert max(found.values()) <= LIMIT, (case, found)


@pytest.mark.slow
@pytest.mark.parametrize("period", PERIODS)
def test_repeated_keys_stay_exact_over_4096_tokens(period):
    batch = [case for case in cases((4096,)) if case.period == period]
    for case, found in zip(batch, errors(batch, seed=1), strict=True):
        assert max(found.values()) <= LIMIT, (case, found)
