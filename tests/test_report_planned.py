"""The report's section on what was planned and what was taken, from any run folder."""

import json

import pytest
from fake_runs import add_plan, write_run
from test_report import report

from longstrand.errors import UserError
from longstrand.report import plots
from longstrand.report.drawing import Plot

TITLE = "Memory and time: predicted and measured"


@pytest.fixture(autouse=True)
def words_only(monkeypatch):
    monkeypatch.setattr(plots, "render", lambda name, *_, **__: Plot(name, "<svg></svg>", "<svg></svg>", b""))


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", steps=20)


def _row(page, name):
    return next(row for row in page.rows if row[0] == name)


def test_every_phase_stands_beside_its_prediction(run):
    add_plan(run)
    page = report(run)
    assert TITLE in page.text
    assert _row(page, "start") == [
        "start",
        "40 MiB",
        "42 MiB",
        "\u22124.8\u202f%",
        "84 MiB",
        "\u221252.4\u202f%",
    ]
    assert _row(page, "backward")[:4] == ["backward", "300 MiB", "310 MiB", "\u22123.2\u202f%"]
    assert _row(page, "forward")[1:4] == ["200 MiB", "190 MiB", "+5.3\u202f%"]
    assert _row(page, "evaluate") == ["evaluate", "\u2013", "120 MiB", "\u2013", "240 MiB", "\u2013"]
    assert "above the process without a model (200 MiB resident)" in page.text


def test_the_largest_terms_of_the_largest_phase_are_named_and_the_rest_added_up(run):
    add_plan(run)
    page = report(run)
    assert "What the largest phase, backward, holds by the plan." in page.text
    place = page.rows.index(_row(page, "spool"))  # 500 MiB in a file: the largest of all
    shown = page.rows[place : place + 9]
    assert [row[0] for row in shown[:4]] == ["spool", "layer inputs", "a tile in work", "moments"]
    assert shown[0][2] == "file"
    assert shown[1][3] == "layer inputs <of> it"
    assert shown[-1][:3] == ["5 smaller", "5 MiB", "device"]
    total = sum(int(row[1].split()[0]) for row in shown)
    assert total == 300 + 500


def test_a_planned_step_stands_beside_the_measured_one(run):
    add_plan(run)
    page = report(run)
    assert "a step, predicted 15.0 s" in page.text
    assert "a step, measured (median) 16.1 s" in page.text
    assert "prediction off by \u22126.8 %" in page.text
    assert "of it forward (mean) 10.0 s" in page.text
    assert _row(page, "projections")[1:3] == ["9.0 s", "60.0\u202f%"]
    assert _row(page, "scores")[4] == "measured: 0.5 x the estimate"


def test_one_thread_of_a_cpu_is_judged_by_its_own_time_too(run):
    add_plan(run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    slow = [line | {"cpu_seconds": 99.0 if line["step"] == 1 else 12.0} for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in slow))
    plan = json.loads((run / "plan.json").read_text())
    (run / "plan.json").write_text(json.dumps(plan | {"device_kind": "cpu", "threads": 1}))
    text = report(run).text
    assert "its CPU time, whatever else the machine did 12.0 s prediction off by +25.0 %" in text
    (run / "plan.json").write_text(json.dumps(plan | {"device_kind": "cpu", "threads": 2}))
    assert "its CPU time" not in report(run).text


def test_what_was_not_counted_says_why(run):
    add_plan(run, counted=False)
    page = report(run)
    assert "Living tensors are not counted: no compiler." in page.text
    assert _row(page, "start")[2:4] == ["\u2013", "\u2013"]
    assert _row(page, "start")[4] == "84 MiB"


def test_an_older_run_has_no_such_section(run):
    assert TITLE not in report(run).text


def test_half_of_it_is_shown_with_what_is_missing(run):
    add_plan(run)
    plan = json.loads((run / "plan.json").read_text())
    plan |= {"memory": None, "seconds": None, "problems": ["memory is not planned: too <odd>"]}
    (run / "plan.json").write_text(json.dumps(plan))
    page = report(run)
    assert _row(page, "start")[1:4] == ["\u2013", "42 MiB", "\u2013"]
    assert "memory is not planned: too <odd>" in page.text
    (run / "memory.json").unlink()
    assert "memory.json is absent" in report(run).text
    add_plan(run)
    (run / "plan.json").unlink()
    page = report(run)
    assert "plan.json is absent: nothing was predicted." in page.text
    assert "a step, measured (median) 16.1 s" in page.text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("plan.json", "[]"),
        ("plan.json", '{"problems": [], "memory": {"phases": {"start": [{}]}, "elsewhere": []}}'),
        ("plan.json", '{"problems": [], "memory": {"phases": {}}}'),
        ("plan.json", '{"problems": [], "seconds": {"terms": [{"name": "a", "seconds": "b"}]}}'),
        ("memory.json", '{"phases": {}}'),
        ("memory.json", '{"baseline": {"resident_bytes": 1}, "phases": {"start": {"resident_bytes": 1}}}'),
        ("memory.json", '{"baseline": {"resident_bytes": true}, "phases": {}}'),
    ],
)
def test_a_damaged_file_is_refused_by_name(run, name, text):
    add_plan(run)
    (run / name).write_text(text)
    with pytest.raises(UserError, match=rf"{name}: not .*; the file is damaged"):
        report(run)
