"""What stands in metrics.jsonl that no run writes is counted on the page and on the terminal, and the rest is shown."""

import json
import warnings

import pytest
from called import caller
from fake_runs import add_plan, add_series, write_run
from test_report import Page

from longstrand.errors import UserError
from longstrand.report import plots, write_report
from longstrand.report.drawing import Plot

TITLE = "In metrics.jsonl is what no run writes:"
ODD = {
    "NaN and infinite": (
        ['{"step": 1, "loss": 1.0}', '{"step": 2, "loss": NaN}', '{"step": 3, "loss": -Infinity}'],
        ["loss is not a finite number at 2 of 3 steps, first NaN at step 2; left out of figures and sums"],
    ),
    "no number": (
        ['{"step": 1, "loss": 1.0, "grad_norm": "big"}'],
        [
            'grad_norm is not a finite number at 1 of 1 steps, first "big" at step 1; left out of figures and sums'
        ],
    ),
    "too large to draw, beside what is no number": (
        [
            '{"step": 1, "loss": 1e308}',
            '{"step": 2, "loss": "x"}',
            '{"step": 3, "loss": -1e301}',
            '{"step": 4, "loss": 1}',
        ],
        [
            'loss is not a finite number at 1 of 4 steps, first "x" at step 2; left out of figures and sums',
            "loss is beyond 1e+300 at 2 of 4 steps, first 1e+308 at step 1; left out of figures and sums",
        ],
    ),
    "again": (
        ['{"step": 1}', '{"step": 2}', '{"step": 2}', '{"step": 2}', '{"step": 3}'],
        ["2 lines hold a step again, first 2; the last line of a step counts"],
    ),
    "back and again, as of two runs in one file": (
        ['{"step": 1}', '{"step": 2}', '{"step": 3}', '{"step": 2}', '{"step": 3}'],
        [
            "2 lines hold a step again, first 2; the last line of a step counts",
            "1 line holds a step after a later one, first 2; shown in order of steps",
        ],
    ),
    "back": (
        ['{"step": 2}', '{"step": 1}'],
        ["1 line holds a step after a later one, first 1; shown in order of steps"],
    ),
    "absent": (
        ['{"step": 1}', '{"step": 4}', '{"step": 6}'],
        ["3 steps are absent up to the last one, 6; the first is 2"],
    ),
}


@pytest.fixture
def call(monkeypatch, capsys):
    monkeypatch.setattr(plots, "render", lambda name, *_, **__: Plot(name, "<svg></svg>", "<svg></svg>", b""))
    return caller(monkeypatch, capsys, "report")


@pytest.mark.parametrize(("lines", "sentences"), ODD.values(), ids=ODD)
def test_what_no_run_writes_is_counted_on_page_and_terminal(call, tmp_path, lines, sentences):
    run = write_run(tmp_path / "run", steps=1)
    (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    called = call(run)
    assert called.code == 0 and called.out == f"{run}/report.html\n"
    page = Page((run / "report.html").read_text()).text
    assert TITLE in page
    assert called.err.splitlines() == [f"warning: {run}: metrics.jsonl: {each}" for each in sentences]
    for each in sentences:
        assert f"metrics.jsonl: {each}." in page


def test_the_last_line_of_a_step_is_the_one_that_is_shown(call, tmp_path):
    run = write_run(tmp_path / "run", steps=1)
    first, again = {"step": 1, "tokens": 1_111}, {"step": 1, "tokens": 2_222}
    (run / "metrics.jsonl").write_text(f"{json.dumps(first)}\n{json.dumps(again)}\n")
    call(run)
    page = (run / "report.html").read_text()
    assert "2,222" in page and "1,111" not in page and "3,333" not in page


def test_a_whole_run_and_a_step_without_a_target_need_no_word(call, tmp_path):
    run = write_run(tmp_path / "run", steps=3)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": null}\n{"st')  # torn, as while it is being written
    assert call(run).err == ""
    assert TITLE not in (run / "report.html").read_text()


@pytest.mark.parametrize("name", ["plan.json", "memory.json"])
def test_a_damaged_file_that_only_compares_is_named_on_the_terminal(call, tmp_path, name):
    run = write_run(tmp_path / "run", steps=2)
    add_plan(run)
    (run / name).write_text("{")
    called = call(run)
    assert called.code == 0 and called.out == f"{run}/report.html\n"
    assert called.err.startswith(f"warning: {run}: {name}: damaged: not valid JSON (")
    assert called.err.endswith("; nothing compared\n") and called.err.count("\n") == 1


@pytest.mark.parametrize("steps", [3, 900])
@pytest.mark.parametrize("value", [1e308, 1e300, -1e308])
def test_figures_are_drawn_whatever_a_step_holds(tmp_path, value, steps):
    """With each field at every second step: 1.7e308 is float64's end, so two of 1e308 have no sum and no distance."""
    run = write_run(tmp_path / "run", steps=steps)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [
        {key: value if key != "step" and record["step"] % 2 == 0 else kept for key, kept in record.items()}
        for record in records
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        page = write_report(run).read_text()
    assert page.count("is beyond 1e+300") == (0 if value == 1e300 else len(records[0]) - 1)


@pytest.mark.parametrize("where", ["nats", "bucket", "documents"])
def test_an_evaluation_that_cannot_be_drawn_is_refused_as_one_that_is_no_number(tmp_path, where):
    run = write_run(tmp_path / "run", steps=2)
    add_series(run, "before", 0, [1.0, 0.9], [0, 64, 128])
    content = json.loads((run / "evaluate.json").read_text())
    series = content["series"][0]
    if where == "documents":
        series["documents"][1]["nats"][0] = 1e308
    else:
        {"nats": series, "bucket": series["buckets"][1]}[where]["nats"] = 1e308
    (run / "evaluate.json").write_text(json.dumps(content))
    with pytest.raises(
        UserError, match=r"evaluate\.json: series 0: 1e\+308 is beyond 1e\+300; delete the file and"
    ):
        write_report(run)


FORMLESS = {
    "kernels.json": {
        "[]": "not a record",
        "null": "not a record",
        "{}": "does not say which form of each op ran",
        '{"device": null, "dtype": null, "layers": null}': "does not say which form of each op ran",
        '{"kda": null, "mhc": null}': "does not say which form of each op ran",
    },
    "data.json": {
        "[]": "not a record",
        "null": "not a record",
        "{}": "version = None, and this longstrand reads 1",
        '{"version": 1, "sources": null}': "sources: not a list of what was read",
        '{"version": 1, "sources": []}': "sources is empty",
        '{"version": 1, "sources": [{"path": null, "split": {}}]}': "sources, 0: no path or no format",
        '{"version": 1, "sources": [{"path": "a", "format": "fasta", "letters": null, "split": {}}]}': (
            "sources, 0: letters = None: must be a whole number from 0"
        ),
        '{"version": 1, "sources": [{"path": "a", "format": "jsonl", "tokens": 5, "split": {"a": {"tokens": -5}}}]}': (
            "sources, 0: tokens = -5: must be a whole number from 0"
        ),
    },
}


@pytest.mark.parametrize(
    ("name", "content"), [(name, content) for name, found in FORMLESS.items() for content in found]
)
def test_a_file_that_no_run_writes_is_shown_and_said(call, tmp_path, name, content):
    run = write_run(tmp_path / "run", steps=2)
    (run / name).write_text(content)
    called = call(run)
    said = f"{name}: damaged: {FORMLESS[name][content]}; shown as it stands"
    assert (called.code, called.err) == (0, f"warning: {run}: {said}\n")
    page = Page((run / "report.html").read_text())
    assert f"{said}." in page.text and f"{name} is absent" not in page.text
    title = {"kernels.json": "Which implementation ran", "data.json": "Everything that was read"}[name]
    assert (title in page.text) == (content != "null")


@pytest.mark.parametrize(
    "older", [{"kda": "native C++ (cpu)"}, {"kda": {"implementation": "chunked", "why": ""}}]
)
def test_kernels_of_an_older_run_need_no_word(call, tmp_path, older):
    run = write_run(tmp_path / "run", steps=2)
    (run / "kernels.json").write_text(json.dumps(older))
    assert call(run).err == ""


def test_kernels_of_a_layout_that_holds_none_are_said(call, tmp_path):
    run = write_run(tmp_path / "run", steps=2)
    texts = dict.fromkeys(("device", "dtype", "cpu", "require"), "cpu")
    (run / "kernels.json").write_text(json.dumps({**texts, "tokens": 5, "tile": 5, "layers": []}))
    assert call(run).err == f"warning: {run}: kernels.json: damaged: layers is empty; shown as it stands\n"
