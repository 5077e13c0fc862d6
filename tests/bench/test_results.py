"""Where results go: merged into one file, as Markdown, copied into pages; the fit; what levers save; the profile."""

import json
import re
from pathlib import Path

import pytest

from longstrand.bench import _results, figures
from longstrand.bench._profile import PLAIN, SOURCE, shares
from longstrand.bench._trial import HUMAN_X, Trial, human_x
from longstrand.bench.curve import fit
from longstrand.bench.growth import Sample
from longstrand.bench.growth import judge as judge_growth
from longstrand.bench.levers import compare
from longstrand.bench.million import judge as judge_million

ROOT = Path(__file__).parents[2]


def test_one_figure_is_measured_anew_and_the_others_stay(tmp_path):
    path = tmp_path / "results" / "B.json"
    entries = [("speed", 1.0), ("million", 3.0), ("speed", 2.0)]
    for name, value in entries:
        _results.keep(path, name, {"records": [{"measured": value}]})
    assert json.loads(path.read_text())["figures"] == {
        "speed": {"records": [{"measured": 2.0}]},
        "million": {"records": [{"measured": 3.0}]},
    }
    assert [file.name for file in path.parent.iterdir()] == ["B.json"]


def test_a_figure_that_lacks_its_data_does_not_replace_what_was_measured(tmp_path):
    path = tmp_path / "B.json"
    measured, skipped = {"records": [{"measured": 1}]}, {"records": [{"skipped": "no data"}]}
    for entry in (skipped, measured, skipped):
        _results.keep(path, "million", entry)
    assert json.loads(path.read_text())["figures"] == {"million": measured}


def test_each_figure_names_a_function_that_exists():
    for issue in figures.ISSUES.values():
        for module in issue.values():
            file, _, function = module.partition(":")
            source = (SOURCE / "bench" / f"{file}.py").read_text()
            assert f"\ndef {function or 'measure'}(" in source


def test_a_table_is_markdown_with_numbers_to_the_right():
    text = _results.markdown({"columns": ["lever", "MiB"], "rows": [["none", "1,024"], ["disk", "-31%"]]})
    assert text == "| lever | MiB |\n| --- | --: |\n| none | 1,024 |\n| disk | -31% |\n"


def test_a_page_takes_its_tables_from_the_results_and_keeps_the_rest(tmp_path):
    page = tmp_path / "page.md"
    text = (
        "before\n<!-- table: time -->\n{}<!-- end of table -->\nbetween\n"
        "<!-- table: absent -->\nkept\n<!-- end of table -->\nafter\n"
    )
    page.write_text(text.format("old\n"))
    (tmp_path / "time.md").write_text("new\n")
    for _ in range(2):
        assert _results.fill_page(page, tmp_path) == ["absent"]
        assert page.read_text() == text.format("new\n")


@pytest.mark.parametrize("page", _results.PAGES, ids=str)
def test_no_table_of_a_page_is_empty(page):
    """What a page shows is measured by a figure that `make figures` runs."""
    text = (ROOT / page).read_text()
    shown = re.findall(r"<!-- table: ([\w-]+) -->\n(.*?)<!-- end of table -->", text, re.DOTALL)
    assert len(shown) == text.count("<!-- table: ") > 0
    assert [name for name, table in shown if not table.startswith("| ")] == []


@pytest.mark.parametrize(("a", "b"), [(3e-4, 2e-10), (1e-3, 0.0), (5e-5, 7e-9)])
def test_the_fit_finds_the_line(a, b):
    lengths = (16_384, 65_536, 262_144, 1_048_576)
    found = fit(lengths, [a + b * length for length in lengths])
    assert found == pytest.approx((a, b), rel=1e-9, abs=1e-20)


def test_the_fit_counts_relative_errors():
    """One value 10 % off moves a by no more than that, wherever it stands."""
    lengths = (16_384, 65_536, 262_144, 1_048_576)
    exact = [3e-4 + 1e-10 * length for length in lengths]
    for off in range(4):
        seconds = [value * (1.1 if index == off else 1) for index, value in enumerate(exact)]
        a, _ = fit(lengths, seconds)
        assert abs(a / 3e-4 - 1) <= 0.1


def test_a_lever_saves_memory_and_costs_time_relative_to_none():
    none = [{"peak_bytes": 200, "tokens_per_second": 10.0}] * 2
    own = [{"peak_bytes": 100, "tokens_per_second": 8.0}]
    assert compare(none, own) == pytest.approx({"memory": -0.5, "time": 0.25})


def test_without_the_data_a_figure_is_skipped_and_says_what_to_fetch(tmp_path):
    assert human_x(None) is None and human_x(tmp_path) is None
    (record,) = judge_million([(Trial(2**20), 2.0**30)], tmp_path, None)
    assert HUMAN_X in record["skipped"] and not record["pass"]
    assert figures.passes([record])


def samples(late):
    return [Sample(step, 10**8 + (late if step > 120 else 0), 9, 4) for step in range(1, 200)]


def test_memory_that_grows_from_one_half_to_the_other_falls_short():
    assert all(record["pass"] for record in judge_growth(samples(2**20)))
    assert not judge_growth(samples(2**23))[0]["pass"]


def test_a_descriptor_more_every_fifty_steps_falls_short():
    found = [Sample(one.step, one.resident_bytes, 9 + one.step // 50, 4) for one in samples(0)]
    assert [record["pass"] for record in judge_growth(found)] == [True, False, True]


def test_time_in_torch_counts_for_the_part_that_called_it():
    """A table of cProfile: file, line, name -> calls, calls, own seconds, all seconds, callers."""
    op, layer = (str(SOURCE / "ops/kda/chunked.py"), 1, "kda"), (str(SOURCE / "model/kda.py"), 1, "forward")
    wrapper, matmul = ("torch/functional.py", 1, "matmul"), ("~", 0, "<built-in matmul>")
    backward = ("~", 0, "<method 'run_backward'>")
    stats = {
        layer: (1, 1, 1.0, 6.0, {}),
        op: (1, 1, 2.0, 5.0, {layer: (1, 1, 2.0, 5.0)}),
        wrapper: (1, 1, 0.0, 3.0, {op: (1, 1, 0.0, 3.0)}),
        matmul: (1, 1, 3.0, 3.0, {wrapper: (1, 1, 3.0, 3.0)}),
        backward: (1, 1, 4.0, 4.0, {layer: (1, 1, 4.0, 4.0)}),
    }
    assert shares(stats) == {"ops/kda": 0.5, PLAIN: 0.4, "model/kda.py": 0.1}
