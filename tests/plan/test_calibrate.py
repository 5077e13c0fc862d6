"""Calibration: planted coefficients come back, what cannot be known is said, and what is no run is refused."""

import json

import numpy as np
import pytest

from longstrand.errors import UserError
from longstrand.plan.calibrate import Measured, calibrate, fit, least_squares, load_factors

PLANTED = {"products": 1.7, "scores": 0.4, "starts": 3.0}


def _runs(noise=0.0, seed=3, lengths=(3, 7, 20, 55, 90), tiles=(1, 4)):
    """Products grow with the length, scores with its square, starts with length over tile."""
    generator = np.random.default_rng(seed)
    found = []
    for length in lengths:
        for tile in tiles:
            terms = {
                "products": 1.0 * length,
                "scores": 0.02 * length**2,
                "starts": 0.5 * length / tile,
                "dust": 1e-4,
            }
            true = sum(seconds * PLANTED.get(name, 1.0) for name, seconds in terms.items())
            found.append(Measured(f"{length}/{tile}", terms, true * (1 + noise * generator.normal())))
    return found


def test_planted_factors_come_back():
    found = fit(_runs())
    assert {name: found.factors[name] for name in PLANTED} == pytest.approx(PLANTED, rel=0.03)
    assert max(abs(row.before) for row in found.rows) > 0.3
    assert max(abs(row.after) for row in found.rows) < 0.01
    assert max(abs(row.left_out) for row in found.rows) < 0.03


def test_planted_factors_come_back_through_noise():
    found = fit(_runs(noise=0.03, lengths=(3, 7, 12, 20, 33, 55, 90)))
    assert {name: found.factors[name] for name in PLANTED} == pytest.approx(PLANTED, rel=0.2)
    assert max(abs(row.after) for row in found.rows) < 0.1


def test_terms_that_runs_cannot_tell_apart_share_the_scale_and_are_named():
    """Always in the same proportion: their sum is known, neither is."""
    runs = [
        Measured(
            str(length), {"one": 2.0 * length, "other": 1.0 * length, "scores": 0.1 * length**2}, seconds
        )
        for length, seconds in [(2, 9.4), (5, 25.0), (9, 48.6), (20, 130.0)]  # 1.5 x 3 length + 0.1 length^2
    ]
    found = fit(runs)
    assert 2 * found.factors["one"] + found.factors["other"] == pytest.approx(4.5, rel=0.05)
    assert found.factors["scores"] == pytest.approx(1.0, rel=0.1)
    assert any(n.startswith("other: ") and "not determined" in n for n in found.notes)
    assert not any(n.startswith("scores: ") and "not determined" in n for n in found.notes)


def test_what_is_too_small_to_see_keeps_its_estimate():
    found = fit(_runs())
    assert "dust" not in found.factors
    assert "dust: less than 1% of every step; kept as estimated" in found.notes


def test_a_factor_is_never_negative():
    runs = [
        Measured(str(n), {"a": float(n), "b": float(n * n)}, 2.0 * n - 0.01 * n * n)
        for n in (1, 3, 9, 20, 40)
    ]
    found = fit(runs)
    assert min(found.factors.values()) >= 0


def test_too_few_settings_are_refused():
    same = Measured("x", {"a": 1.0, "b": 2.0}, 3.0)
    with pytest.raises(UserError, match="4 runs of 1 settings: it takes at least 3 that differ"):
        fit([same] * 4)


@pytest.mark.parametrize("seed", range(5))
def test_least_squares_without_negatives_is_the_best_of_all_supports(seed):
    """Against every choice of which values may differ from 0."""
    generator = np.random.default_rng(seed)
    matrix, wanted = generator.normal(size=(9, 4)), generator.normal(size=9)
    best = np.inf
    for mask in range(16):
        free = [place for place in range(4) if mask >> place & 1]
        x = np.zeros(4)
        if free:
            x[free] = np.linalg.lstsq(matrix[:, free], wanted, rcond=None)[0]
        if (x >= 0).all():
            best = min(best, float(np.sum((matrix @ x - wanted) ** 2)))
    found = least_squares(matrix, wanted)
    assert (found >= 0).all()
    assert float(np.sum((matrix @ found - wanted) ** 2)) == pytest.approx(best, rel=1e-9)


def _folder(path, length, *, device="CPU", tokens=None, factor=2.0, ranks=1):
    path.mkdir()
    terms = [
        {"name": "products", "seconds": 1.0 * length, "why": "", "evidence": ""},
        {"name": "scores", "seconds": 0.05 * length**2, "why": "", "evidence": ""},
    ]
    plan = {"device": device, "device_kind": "cpu", "form": "native", "dtype": "float32", "ranks": ranks}
    plan |= {"threads": 1, "tokens_per_step": 100 * length, "seconds": {"terms": terms}}
    (path / "plan.json").write_text(json.dumps(plan))
    (path / "memory.json").write_text("{}")
    seconds = factor * length + 0.05 * length**2
    record = {"tokens": tokens or 100 * length, "cpu_seconds": seconds, "seconds": 7 * seconds}
    first = {**record, "cpu_seconds": 50 * seconds, "seconds": 50 * seconds}  # compiles
    lines = [first, record, {**record, "tokens": 3}, record]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": ')
    return path


def test_runs_are_read_from_their_folders(tmp_path):
    runs = [_folder(tmp_path / str(length), length) for length in (4, 16, 48)]
    found = calibrate(runs)
    assert found.factors == pytest.approx({"products": 2.0, "scores": 1.0}, rel=0.05)
    assert "CPU, native ops, float32, 1 ranks, 1 threads" in found.where
    assert found.show()[0][0] == str(runs[0])
    assert found.show()[0][2].startswith("-")
    assert found.show()[0][4] == "\u2013"  # three runs: none can be left out
    found.write(tmp_path / "factors.json")
    assert load_factors(tmp_path / "factors.json") == pytest.approx(dict(found.factors))


def test_on_ranks_the_clock_counts(tmp_path):
    runs = [_folder(tmp_path / str(length), length, ranks=2) for length in (4, 16, 48)]
    assert calibrate(runs).factors == pytest.approx({"products": 14.0, "scores": 7.0}, rel=0.05)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda run: (run / "plan.json").unlink(), "has no plan.json"),
        (lambda run: (run / "memory.json").unlink(), "has no memory.json"),
        (lambda run: (run / "metrics.jsonl").unlink(), "has no metrics.jsonl"),
        (lambda run: (run / "plan.json").write_text("{"), "not valid JSON"),
        (lambda run: (run / "plan.json").write_text('{"seconds": null}'), "has no seconds"),
        (lambda run: (run / "plan.json").write_text('{"seconds": {}}'), "not a plan as train writes it"),
        (lambda run: (run / "metrics.jsonl").write_text(""), "no step with cpu_seconds has the 1,600 tokens"),
    ],
)
def test_what_is_no_measured_run_is_refused(tmp_path, spoil, words):
    runs = [_folder(tmp_path / str(length), length) for length in (4, 16, 48)]
    spoil(runs[1])
    with pytest.raises(UserError, match=words):
        calibrate(runs)


def test_runs_of_two_devices_are_calibrated_apart(tmp_path):
    runs = [
        _folder(tmp_path / str(n), n, device=device) for n, device in ((4, "CPU"), (16, "H200"), (48, "CPU"))
    ]
    with pytest.raises(UserError, match=r"different devices.*CPU.*H200"):
        calibrate(runs)


@pytest.mark.parametrize("text", ["{", "[]", '{"factors": {"a": -1}}', '{"factors": {"a": "x"}}'])
def test_a_file_that_is_no_calibration_is_refused(tmp_path, text):
    (tmp_path / "f.json").write_text(text)
    with pytest.raises(UserError, match=r"not valid JSON|not a calibration"):
        load_factors(tmp_path / "f.json")
