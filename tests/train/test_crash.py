"""A run killed with -9 goes on as if nothing had happened; `make figures ONLY=crash` kills twenty."""

import math
import random
import shutil

import pytest
from tiny_runs import metrics, recipe_in

from longstrand.bench.crash import (
    Moment,
    Watched,
    differences,
    draw,
    kill_and_resume,
    measure,
    watch,
    write_inputs,
)
from longstrand.train.sft import train


def test_a_run_killed_during_a_save_ends_as_the_run_that_was_never_killed(tmp_path):
    recipe = write_inputs(tmp_path, steps=5)
    assert watch(recipe, tmp_path / "never_killed").exit_code == 0
    for attempt in range(4):
        kill = kill_and_resume(
            recipe, tmp_path / "never_killed", tmp_path / f"killed_{attempt}", Moment(0.002, save=1)
        )
        assert kill is None or kill.good, kill
        if kill is not None and kill.during_save:
            assert kill.resumed_from == "step_000001"
            return
    pytest.fail("no kill came during a save")


def test_a_difference_of_one_bit_is_seen(tmp_path):
    one = train(recipe_in(tmp_path, "train.steps=2", "evaluate.before=false"))
    other = tmp_path / "other"
    shutil.copytree(one, other)
    assert differences(one, other) == []
    lines = (other / "metrics.jsonl").read_text()
    loss = metrics(other)[1]["loss"]
    (other / "metrics.jsonl").write_text(lines.replace(str(loss), str(math.nextafter(loss, 9))))
    assert differences(one, other) == ["metrics.jsonl"]


def test_moments_are_uniform_over_the_run_and_over_its_saves():
    rng = random.Random(5)
    reference = Watched(0, 40.0, [(10.0, 0.1), (20.0, 0.3)])
    anywhere = [draw(rng, reference, during_save=False) for _ in range(4000)]
    assert all(moment.save is None and 0 <= moment.seconds <= 40 for moment in anywhere)
    assert sum(moment.seconds for moment in anywhere) / 4000 == pytest.approx(20, abs=0.6)
    saving = [draw(rng, reference, during_save=True) for _ in range(4000)]
    assert sum(moment.save == 1 for moment in saving) / 4000 == pytest.approx(0.75, abs=0.03)
    assert all(moment.seconds <= (0.1, 0.3)[moment.save] for moment in saving)


@pytest.mark.slow
def test_twenty_runs_killed_at_moments_drawn_uniformly_end_bit_identical():
    result = measure()
    assert result["pass"], result
