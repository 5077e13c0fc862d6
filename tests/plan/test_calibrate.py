"""Calibration: planted coefficients come back, what cannot be known is said, and what is no run is refused."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from planned import REAL, TOY, with_memory, with_ranks

from longstrand.errors import UserError
from longstrand.plan.calibrate import Measured, calibrate, fit, least_squares
from longstrand.plan.calibrated import TERMS, Calibrated, Origin, load_calibrated
from longstrand.plan.devices import find_device
from longstrand.plan.job import Job
from longstrand.plan.seconds import plan_seconds

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
    assert "other" not in found.determined and "scores" in found.determined
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
        {"name": "projections", "seconds": 1.0 * length, "why": "", "evidence": ""},
        {"name": "scores", "seconds": 0.05 * length**2, "why": "", "evidence": ""},
    ]
    plan = {"device": device, "device_kind": "cpu", "form": "native", "dtype": "float32", "ranks": ranks}
    plan |= {"threads": 1, "tokens_per_step": 100 * length, "seconds": {"terms": terms}}
    plan |= {"version": 1, "problems": []}
    words = dict.fromkeys(("name", "place", "why", "evidence"), "")
    phases = {"start": [300], "backward": [700, 100]}
    phases = {name: [words | {"num_bytes": number} for number in terms] for name, terms in phases.items()}
    (path / "plan.json").write_text(json.dumps(plan | {"memory": {"phases": phases, "elsewhere": []}}))
    counted = {"start": 1250, "backward": 2000, "evaluate": 9000}  # an evaluation is no part of a step
    rest = {"resident_bytes": 5000, "times": 1, "seconds": 1.0}
    phases = {name: rest | {"counted_bytes": number} for name, number in counted.items()}
    memory = {"version": 1, "baseline": rest | {"counted_bytes": 1000}, "phases": phases}
    (path / "memory.json").write_text(json.dumps(memory))
    seconds = factor * length + 0.05 * length**2
    record = {"tokens": tokens or 100 * length, "cpu_seconds": seconds, "seconds": 7 * seconds}
    first = {**record, "cpu_seconds": 50 * seconds, "seconds": 50 * seconds}  # compiles
    lines = [first, record, {**record, "tokens": 3}, record]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": ')
    return path


def test_runs_are_read_from_their_folders(tmp_path):
    runs = [_folder(tmp_path / str(length), length) for length in (4, 16, 48)]
    found = calibrate(runs)
    assert found.factors == pytest.approx({"projections": 2.0, "scores": 1.0}, rel=0.05)
    assert str(found.origin) == "CPU, native ops, float32, 1 rank of 1 thread"
    assert found.rows[0].name == str(runs[0])
    assert found.rows[0].before < 0
    assert found.rows[0].left_out is None  # three runs: none can be left out
    assert {(row.planned_bytes, row.counted_bytes) for row in found.rows} == {(800, 1000)}
    found.write(tmp_path / "factors.json")
    read = load_calibrated(tmp_path / "factors.json")
    assert dict(read.factors) == pytest.approx(dict(found.factors))
    assert (read.origin, read.determined) == (found.origin, set(found.determined))


def test_memory_that_a_run_did_not_count_is_left_out(tmp_path):
    runs = [_folder(tmp_path / str(length), length) for length in (4, 16, 48)]
    (runs[0] / "memory.json").unlink()
    text = (runs[1] / "memory.json").read_text()
    (runs[1] / "memory.json").write_text(text.replace("1000", "null"))
    assert [row.counted_bytes for row in calibrate(runs).rows] == [None, None, 1000]


def test_runs_that_are_nothing_like_planned_are_refused(tmp_path):
    runs = [_folder(tmp_path / str(length), length, factor=5000.0) for length in (4, 16, 48)]
    with pytest.raises(UserError, match="no factor may exceed 1,000"):
        calibrate(runs)


def test_on_ranks_the_clock_counts(tmp_path):
    runs = [_folder(tmp_path / str(length), length, ranks=2) for length in (4, 16, 48)]
    assert calibrate(runs).factors == pytest.approx({"projections": 14.0, "scores": 7.0}, rel=0.05)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("plan.json", None, "has no plan.json; give"),
        ("plan.json", "{", "not valid JSON"),
        ("plan.json", "[]", "plan.json: damaged: not a record; take the file"),
        ("plan.json", "{}", "plan.json: damaged: version = None"),
        (
            "plan.json",
            {"seconds": None},
            r"has no seconds, so nothing to calibrate \(and it does not say why\); leave",
        ),
        ("plan.json", {"seconds": None, "problems": ["too long"]}, r"calibrate \(too long\); leave"),
        ("plan.json", {"seconds": {}}, "seconds: not a list of terms with their seconds; take"),
        ("plan.json", {"tokens_per_step": math.nan}, "tokens_per_step = nan: must be a number above 0; take"),
        (
            "plan.json",
            {"tokens_per_step": 10**400},
            "tokens_per_step = 1000.*: must be a number above 0; take",
        ),
        ("plan.json", {"threads": None}, "threads = None: must be what a run was made on; take"),
        ("plan.json", Ellipsis, r"plan.json: cannot be read \(Is a directory\)"),
        ("memory.json", "{}", "memory.json: damaged: version = None"),
        ("memory.json", "[1]", "memory.json: damaged: not a record; take"),
        ("memory.json", {"phases": 3}, "memory.json: damaged: it has no phases; take"),
        (
            "memory.json",
            {"baseline": {"resident_bytes": 1, "counted_bytes": -5}},
            "baseline has counted_bytes = -5: must",
        ),
        ("memory.json", Ellipsis, r"memory.json: cannot be read \(Is a directory\)"),
        ("metrics.jsonl", None, "has no metrics.jsonl; give"),
        ("metrics.jsonl", Ellipsis, r"metrics.jsonl: cannot be read \(Is a directory\); take"),
        ("metrics.jsonl", "", "no step with cpu_seconds has the 1,600 tokens that were planned, .*; leave"),
        ("metrics.jsonl", b'{"tokens": 1600}\n\xff\xfe\n', "not UTF-8 text at byte 17; take"),
        (
            "metrics.jsonl",
            '{"tokens": 1600, "cpu_seconds": 1.0}\n{"tokens": 1600, "cpu_seconds": NaN}\n',
            "line 2: cpu_seconds = nan: must be a number above 0; take",
        ),
        (
            "metrics.jsonl",
            '{"tokens": 1600, \n{"tokens": 1600, "cpu_seconds": 1.0}\n',
            "line 1: not valid JSON",
        ),
        ("metrics.jsonl", "[1]\n", "line 1: not a record; take"),
    ],
)
def test_what_is_no_measured_run_is_refused(tmp_path, file, content, words):
    runs = [_folder(tmp_path / str(length), length) for length in (4, 16, 48)]
    path = runs[1] / file
    if isinstance(content, dict):
        _changed(path, **content)
    else:
        path.unlink()
    if content is Ellipsis:
        path.mkdir()
    elif isinstance(content, str | bytes):
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UserError, match=words) as refused:
        calibrate(runs)
    assert "\n" not in str(refused.value) and ";" in str(refused.value)


def test_a_factor_of_nothing_is_not_determined(tmp_path):
    """Seconds fall as the second term grows, so that its factor ends at 0, where it would be less."""
    steps = [(2.0 * n - 0.04 * n * n, n) for n in (1, 3, 9, 20, 30)]
    found = fit([Measured(str(n), {"scores": 1.0 * n, "head": 0.5 * n * n}, taken) for taken, n in steps])
    assert found.factors["head"] == 0
    assert "head" not in found.determined
    assert any(note.startswith("head: 0 x") and "0 is the least it may be" in note for note in found.notes)
    file = _file(tmp_path / "f.json", factors={"head": 0, "scores": 2.0}, determined=["head", "scores"])
    assert load_calibrated(file).determined == {"scores"}


def test_settings_differ_by_the_names_of_their_terms():
    """The same values, in another order and of other terms."""
    one, other = {"a": 1.0, "b": 4.0}, {"b": 4.0, "a": 1.0}
    with pytest.raises(UserError, match="3 runs of 1 settings"):
        fit([Measured("x", one, 5.0), Measured("y", other, 5.0), Measured("z", one | {"c": 0.0}, 5.0)])
    fit(
        [
            Measured("x", one, 5.0),
            Measured("y", {"a": 4.0, "b": 1.0}, 5.0),
            Measured("z", {"a": 1.0, "c": 4.0}, 5.0),
        ]
    )


def test_runs_of_two_devices_are_calibrated_apart(tmp_path):
    runs = [
        _folder(tmp_path / str(n), n, device=device) for n, device in ((4, "CPU"), (16, "H200"), (48, "CPU"))
    ]
    with pytest.raises(UserError, match=r"different devices.*CPU.*H200"):
        calibrate(runs)


def _changed(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


ORIGIN = Origin("CPU", "cpu", "native", "float32", 1, 1)
ON_CPU = Job(TOY, 4096, dtype="float32", form="native")


def _file(path, **changes):
    values = {"version": 2, "fitted_on": vars(ORIGIN), "factors": {"scores": 0.5}, "determined": ["scores"]}
    path.write_text(json.dumps(values | changes))
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 1}, "version = 1: must be 2"),
        ({"version": None}, "version = None: must be 2"),
        ({"factors": {"warp": 1.0}}, "factors has 'warp', no term of a plan's seconds"),
        ({"factors": {"scores": -0.5}}, "factor of 'scores' is -0.5: must be a number from 0 to 1,000"),
        ({"factors": {"scores": math.nan}}, "factor of 'scores' is nan"),
        ({"factors": {"scores": math.inf}}, "factor of 'scores' is inf"),
        ({"factors": {"scores": 1e308}}, r"factor of 'scores' is 1e\+308"),
        ({"factors": {"scores": "2"}}, "factor of 'scores' is '2'"),
        ({"factors": {"scores": True}}, "factor of 'scores' is True"),
        ({"factors": [1.0]}, "not a calibration"),
        ({"determined": None}, "not a calibration"),
        ({"fitted_on": None}, "device = None: must be what a run was made on"),
        ({"fitted_on": {**vars(ORIGIN), "ranks": 1.5}}, "ranks = 1.5: must be what a run was made on"),
    ],
)
def test_a_calibration_that_is_damaged_is_refused(tmp_path, changes, words):
    with pytest.raises(UserError, match=words) as refused:
        load_calibrated(_file(tmp_path / "f.json", **changes))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["{", "[]", "{}", "[" * 100_000])
def test_a_file_that_is_no_calibration_is_refused(tmp_path, text):
    (tmp_path / "f.json").write_text(text)
    with pytest.raises(UserError, match=r"not valid JSON|not a calibration"):
        load_calibrated(tmp_path / "f.json")


@pytest.mark.parametrize(
    ("job", "device"),
    [
        (ON_CPU, find_device("H200")),
        (ON_CPU, find_device("CPU").model_copy(update={"name": "another"})),
        (replace(ON_CPU, dtype="bfloat16"), find_device("CPU")),
        (replace(ON_CPU, form="portable"), find_device("CPU")),
    ],
)
def test_factors_of_another_device_dtype_or_form_are_refused(tmp_path, job, device):
    read = load_calibrated(_file(tmp_path / "f.json"))
    read.require_same(ON_CPU, find_device("CPU"))
    with pytest.raises(UserError) as refused:
        read.require_same(job, device)
    assert "fitted on CPU, native ops, float32, 1 rank of 1 thread" in str(refused.value)
    assert f"asked for {Origin.of(job, device)}" in str(refused.value)


def test_only_what_the_runs_determined_on_as_many_ranks_is_measured():
    fitted = Calibrated("f.json", ORIGIN, (("scores", 3.0), ("head", 2.0)), frozenset({"scores"}))

    def evidence(job):
        seconds = fitted.explained(plan_seconds(job, find_device("CPU"), dict(fitted.factors)), job)
        return {term.name: term.evidence for term in seconds.terms}

    alone = evidence(ON_CPU)
    assert alone["scores"] == f"measured: 3 x the estimate, calibrated on {ORIGIN}"
    plain = {term.name: term.evidence for term in plan_seconds(ON_CPU, find_device("CPU")).terms}
    assert alone["experts"] == plain["experts"]
    scaled = f"scaled by 2 (runs on {ORIGIN}, which do not determine this term alone)"
    assert plain["head"].startswith("measured: one core") and alone["head"] == f"{plain['head']}; {scaled}"
    for other in (with_ranks(ON_CPU, context=2), replace(ON_CPU, threads=2)):
        assert evidence(other)["scores"] == f"estimated: 3 x the estimate, calibrated on {ORIGIN}"


def test_every_term_of_a_plan_can_be_calibrated():
    ranks = with_ranks(Job(REAL, 2**20, kind="gpu"), context=8, expert=8)
    jobs = [with_memory(ranks, offload="host", optimizer="host"), with_memory(ranks, offload="disk")]
    slow = find_device("H200").model_copy(update={"host_gb_per_second": 1e-3})
    found = {term.name for job in jobs for term in plan_seconds(job, slow).terms}
    assert found | {"offload to disk"} == set(TERMS)  # beside so much work a disk is fast enough
