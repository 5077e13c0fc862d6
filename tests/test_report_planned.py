"""The report's section on what was planned and what was taken, from any run folder."""

import json
import re

import pytest
from fake_runs import add_plan, write_run
from test_report import report

from longstrand.report import plots
from longstrand.report.drawing import Plot

TITLE = "Memory and time: planned and measured"
PERCENT = "\u202f%"


@pytest.fixture(autouse=True)
def words_only(monkeypatch):
    monkeypatch.setattr(plots, "render", lambda name, *_, **__: Plot(name, "<svg></svg>", "<svg></svg>", b""))


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", steps=20)


def _row(page, name):
    return next(row for row in page.rows if row[0] == name)


def test_every_phase_is_judged_by_the_bytes_of_its_tensors(run):
    add_plan(run)
    page = report(run)
    assert TITLE in page.text
    assert _row(page, "start") == ["start", "40 MiB", "42 MiB", f"4.8{PERCENT} less than counted", "84 MiB"]
    assert _row(page, "backward")[1:4] == ["300 MiB", "310 MiB", f"3.2{PERCENT} less than counted"]
    assert _row(page, "forward")[1:4] == ["200 MiB", "190 MiB", f"5.3{PERCENT} more than counted"]
    assert _row(page, "optimizer")[1:4] == ["50 MiB", "50 MiB", "the same"]
    assert _row(page, "evaluate") == ["evaluate", "\u2013", "120 MiB", "\u2013", "240 MiB"]


def test_what_is_resident_is_explained_and_not_judged(run):
    add_plan(run)
    page = report(run)
    assert "above its own 200 MiB without a model" in page.text
    assert "what libraries take once they are used" in page.text
    assert "off by" not in page.text


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
    assert "a step, planned 15.0 s" in page.text
    assert "a step, measured (median) 16.1 s" in page.text
    assert "the plan is 6.8 % less than measured" in page.text
    assert "forward, mean of all steps with the first 10.0 s" in page.text
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
    assert "its CPU time, whatever else the machine did 12.0 s the plan is 25.0 % more than measured" in text
    (run / "plan.json").write_text(json.dumps(plan | {"device_kind": "cpu", "threads": 2}))
    assert "its CPU time" not in report(run).text


def test_what_was_not_counted_says_why(run):
    add_plan(run, counted=False)
    page = report(run)
    assert "Bytes of tensors are not counted, so nothing judges the plan: no compiler." in page.text
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
    assert "plan.json is absent: nothing was planned." in page.text
    assert "a step, measured (median) 16.1 s" in page.text


DAMAGE = {
    "cut off": (lambda text: text[: len(text) // 2], "not valid JSON"),
    "empty": (lambda text: "", "not valid JSON"),
    "of another kind": (lambda text: "[1, 2]", "not a record"),
    "nothing": (lambda text: "null", "not a record"),
    "of another version": (lambda text: text.replace('"version": 1', '"version": 2'), "version = 2"),
    "without phases": (lambda text: text.replace('"phases"', '"stages"'), "phases"),
    "bytes as text": (lambda text: text.replace('_bytes": ', '_bytes": "many", "x": '), "bytes"),
    "negative bytes": (lambda text: text.replace('_bytes": ', '_bytes": -'), "bytes"),
    "no numbers": (lambda text: text.replace('_bytes": ', '_bytes": NaN, "x": '), "bytes"),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("name", ["plan.json", "memory.json"])
def test_a_damaged_file_costs_its_comparison_and_nothing_else(run, name, kind):
    add_plan(run)
    whole = report(run)
    change, words = DAMAGE[kind]
    (run / name).write_text(change((run / name).read_text()))
    page = report(run)
    assert re.search(rf"{name}: damaged: [^;]*{words}[^;]*; nothing compared\.", page.text), page.text
    assert f"{name} is absent" not in page.text
    before, after = (text.partition(TITLE) for text in (whole.text, page.text))
    rest = "Which implementation ran"
    assert before[0] == after[0] and before[2].partition(rest)[2] == after[2].partition(rest)[2]


def test_what_is_left_is_shown_beside_a_damaged_file(run):
    add_plan(run)
    (run / "plan.json").write_bytes(b"\xff\xfe")
    page = report(run)
    assert "plan.json: damaged: not UTF-8 text at byte 0; nothing compared." in page.text
    assert _row(page, "start") == ["start", "\u2013", "42 MiB", "\u2013", "84 MiB"]
    add_plan(run)
    (run / "memory.json").write_text('{"version": 1, "baseline": {"resident_bytes": true}, "phases": {}}')
    page = report(run)
    assert (
        "memory.json: damaged: baseline has resident_bytes = True: must be a number from 0; nothing"
        in page.text
    )
    assert _row(page, "start") == ["start", "40 MiB", "\u2013", "\u2013", "\u2013"]
    assert "What the largest phase, backward, holds by the plan." in page.text


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"problems": None}, "problems is no list"),
        ({"memory": []}, "memory has no phases"),
        ({"memory": {"phases": {}}}, "memory, elsewhere: not a list of terms"),
        ({"memory": {"phases": {"start": [{}]}, "elsewhere": []}}, "memory, start: not a list of terms"),
        ({"seconds": {"terms": [{"name": "a", "why": "", "evidence": "", "seconds": "b"}]}}, "seconds: not a list"),
        ({"seconds": {"terms": [{"name": "a", "why": "", "evidence": "", "seconds": 1e308}] * 2}}, "seconds: not"),
        ({"seconds": 5}, "seconds: not a list"),
    ],
)  # fmt: skip
def test_a_part_of_the_wrong_form_is_named(run, changed, words):
    add_plan(run)
    plan = json.loads((run / "plan.json").read_text())
    (run / "plan.json").write_text(json.dumps(plan | changed))
    assert f"plan.json: damaged: {words}" in report(run).text
