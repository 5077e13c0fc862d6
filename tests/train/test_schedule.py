"""The learning rate equals its formula at the edges and in the middle."""

import math

import pytest

from longstrand.config import TrainSection
from longstrand.train.schedule import learning_rate


def _rates(**settings):
    train = TrainSection(lr=2.0, **settings)
    return [learning_rate(train, step) for step in range(1, train.steps + 1)]


def test_constant_stays_at_the_peak():
    assert _rates(steps=4, schedule="constant") == [2.0] * 4


def test_warm_up_rises_linearly_to_the_peak():
    assert _rates(steps=6, schedule="constant", warmup_steps=4) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_linear_falls_from_the_peak_at_the_first_step_to_min_lr_at_the_last():
    assert _rates(steps=5, schedule="linear", min_lr=0.2) == pytest.approx(
        [2.0, 1.6, 1.2, 0.8, 0.4], rel=1e-15
    )


def test_linear_starts_to_fall_after_warm_up():
    assert _rates(steps=6, schedule="linear", warmup_steps=2, min_lr=0.0) == pytest.approx(
        [1.0, 2.0, 1.5, 1.0, 0.5, 0.0]
    )


def test_cosine_is_halfway_at_the_middle_and_min_lr_at_the_end():
    rates = _rates(steps=5, schedule="cosine", min_lr=0.1)
    quarter = 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2
    assert rates == pytest.approx([2.0, 2 * quarter, 1.1, 2 * (1.1 - quarter), 0.2], rel=1e-12)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_single_step_runs_at_the_peak(schedule):
    assert _rates(steps=1, schedule=schedule) == [2.0]
