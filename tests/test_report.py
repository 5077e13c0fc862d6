"""The report: true numbers in plain words, from any run folder, whole or not."""

import json
import re
import shutil
import subprocess
import sys
import warnings
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from fake_runs import add_series, write_demo, write_run

from longstrand.errors import UserError
from longstrand.report import plots, write_report
from longstrand.report.drawing import Plot


class Page(HTMLParser):
    """Text, tags, ids and table rows of a page; an element closed out of order is an error."""

    VOID = ("meta", "br", "link", "img", "hr", "input")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.page, self.open, self.tags, self.ids, self.links = page, [], [], [], []
        self.text, self.rows = "", []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.ids += [value for key, value in attrs if key == "id"]
        self.links += [value for key, value in attrs if key in ("src", "href", "xlink:href")]
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"style", "svg", "title"} & set(self.open):
            return
        self.text += " " + data
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def report(folder: Path) -> Page:
    page = Page(write_report(folder).read_text(encoding="utf-8"))
    page.text = re.sub(r"\s+", " ", page.text)
    return page


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    return write_demo(tmp_path_factory.mktemp("runs") / "demo")


@pytest.fixture(scope="module")
def page(demo: Path) -> Page:
    return report(demo)


@pytest.fixture
def words_only(monkeypatch):
    """Leaves out the drawing, which takes a second per report."""
    monkeypatch.setattr(plots, "render", lambda name, *_, **__: Plot(name, "<svg></svg>", "<svg></svg>", b""))


def stored(folder: Path, name: str, step: int) -> dict:
    series = json.loads((folder / "evaluate.json").read_text())["series"]
    return next(one for one in series if (one["name"], one["step"]) == (name, step))


def share_gained(folder: Path, first: int, last: int, prefix: str = "") -> float:
    """1 - after / before over the buckets first..last-1, from the sums per document."""
    before, after = (
        sum(sum(row["nats"][first:last]) for row in stored(folder, name, step)["documents"])
        for name, step in ((f"{prefix}before", 0), (f"{prefix}after", 400))
    )
    return 1 - after / before


def test_the_report_is_one_file_without_links_or_scripts(page: Page):
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert [link for link in page.links if not link.startswith("#")] == []
    assert re.findall(r"https?://(?!www\.w3\.org/)", page.page) == []
    assert "@import" not in page.page
    assert re.findall(r"url\((?!#)", page.page) == []


def test_ids_are_unique_and_every_reference_inside_figures_resolves(page: Page):
    assert len(page.ids) == len(set(page.ids))
    used = set(re.findall(r"url\(#([^)]*)\)", page.page)) | {link[1:] for link in page.links}
    assert used <= set(page.ids)


def test_the_headline_states_the_gains_of_the_stored_sums(demo: Path, page: Page):
    overall, late, early = (
        f"{100 * share_gained(demo, *buckets):.1f} %" for buckets in ((0, 5), (4, 5), (0, 1))
    )
    assert (
        f"held-out loss fell by {overall}, {late} where there is most context, {early} in the first 1,024"
        in page.text
    )
    assert "with strangers for relatives that lead is lost" in page.text


def test_the_table_shows_bits_per_base_token_counts_and_gains(demo: Path, page: Page):
    row = next(row for row in page.rows if row[0] == "8,192\u201316,384")
    before, after = (stored(demo, name, step)["buckets"][4] for name, step in (("before", 0), ("after", 400)))
    assert row[:3] == ["8,192\u201316,384", f"{before['tokens']:,}", "16"]
    assert row[3:5] == [f"{one['nats'] / np.log(2):.3f}" for one in (before, after)]
    assert row[5] == f"{100 * share_gained(demo, 4, 5):.1f}\u202f%"
    low, high = re.fullmatch(r"([\d.]+) to ([\d.]+)\u202f%", row[6]).groups()
    assert float(low) < 100 * share_gained(demo, 4, 5) < float(high)


def test_the_control_has_its_own_table_and_check(demo: Path, page: Page):
    control = next(row for row in reversed(page.rows) if row[0] == "all")
    assert control[5] == f"{100 * share_gained(demo, 0, 5, 'control '):.1f}\u202f%"
    assert "Does the control lose the late gain? ✓ Yes" in page.text


def test_everything_else_that_the_run_recorded_is_there(page: Page):
    for text in (
        "1.32 GiB",
        "26,212,800",
        "sparse_attention",
        "gathered",
        "skipped: too few relatives",
        "171,002",
        "R (9), Y (5)",
    ):
        assert text in page.text
    assert "1,217 masked targets" in page.text
    assert 'path = "resfinder_alleles.fa.gz"' in page.text
    assert "their order is constructed" in page.text
    assert "Not in this report yet" not in page.text


def test_figures_are_saved_as_svg_and_png(demo: Path, page: Page):
    names = ("loss_by_position", "loss_curve", "run")
    assert sorted(path.name for path in (demo / "plots").iterdir()) == sorted(
        f"{name}.{kind}" for name in names for kind in ("png", "svg")
    )
    for name in names:
        assert (demo / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        drawn = ElementTree.parse(demo / "plots" / f"{name}.svg").getroot()
        assert "".join(drawn.itertext()).strip(), "text stays text"
    assert page.tags.count("svg") == 2 * len(names), "each figure is drawn for wide and for narrow screens"


def test_the_same_run_gives_the_same_bytes(demo: Path):
    files = [demo / "report.html", *sorted((demo / "plots").iterdir())]
    write_report(demo)
    first = [path.read_bytes() for path in files]
    write_report(demo)
    assert [path.read_bytes() for path in files] == first


@pytest.mark.usefixtures("words_only")
@pytest.mark.parametrize(
    ("gains", "headline", "late"),
    [
        ("everywhere", r"Held-out loss fell by \d+\.\d %, with no sign that long context helped", "✗ No"),
        (
            "negative",
            r"Held-out loss rose by \d+\.\d %, and most where there is most context: gains of \u2212",
            "✗ No",
        ),
        ("none", r"Held-out loss did not change measurably", "✗ No"),
    ],
)
def test_the_headline_does_not_claim_more_than_was_found(
    tmp_path: Path, gains: str, headline: str, late: str
):
    text = report(write_demo(tmp_path / "run", gains=gains)).text
    assert re.search(headline, text)
    assert f"Did late positions gain more than early ones? {late}" in text
    assert "learned to use long context" not in text


@pytest.mark.usefixtures("words_only")
def test_a_control_that_keeps_the_gain_is_said_in_the_headline(tmp_path: Path):
    folder = write_run(tmp_path / "run")
    for name, step, late in (
        ("before", 0, 1.3),
        ("after", 400, 0.6),
        ("control before", 0, 1.3),
        ("control after", 400, 0.65),
    ):
        add_series(folder, name, step, [1.3, late], [0, 1024, 2048], seed=int("control" in name))
    text = report(folder).text
    assert "a control with strangers for relatives keeps that lead" in text
    assert "Does the control lose the late gain? ✗ No" in text
    assert "learned to use long context" not in text


def test_a_single_sequence_has_no_interval_and_nothing_is_sure(tmp_path: Path):
    text = report(write_demo(tmp_path / "run", steps=1, sequences=1)).text
    assert "On the one sequence scored, held-out loss fell by" in text
    assert "one sequence, no interval" in text
    assert text.count("? Not clear") == 3
    assert "✓" not in text


@pytest.mark.usefixtures("words_only")
def test_few_sequences_are_called_rough(tmp_path: Path):
    assert "Only 4 sequences were scored" in report(write_demo(tmp_path / "run", sequences=4)).text


@pytest.mark.usefixtures("words_only")
def test_a_run_that_is_going_on_says_what_is_missing(tmp_path: Path):
    folder = write_run(tmp_path / "run", steps=20, of=400)
    (folder / "kernels.json").unlink()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "lo')
    text = report(folder).text
    assert "Training is at step 20 of 400; its loss went from" in text
    for part in (
        "stands at step 20 of 400",
        "last line of metrics.jsonl is incomplete",
        "kernels.json is absent",
    ):
        assert part in text
    assert "has not been evaluated yet" in text
    assert "Which implementation ran" not in text


@pytest.mark.usefixtures("words_only")
def test_a_run_with_nothing_but_a_recipe_has_a_report(tmp_path: Path):
    folder = write_run(tmp_path / "run")
    for name in ("kernels.json", "data.json", "metrics.jsonl"):
        (folder / name).unlink()
    page = report(folder)
    assert "No training step and no evaluation is recorded yet." in page.text
    assert "svg" not in page.tags


@pytest.mark.parametrize(
    ("name", "step", "headline"),
    [
        ("before", 0, "Before training, held-out loss is {nats} bits per base ("),
        ("after", 3, "After 3 steps held-out loss is {nats} bits per base ("),
    ],
)
@pytest.mark.usefixtures("words_only")
def test_one_evaluation_alone_is_reported_without_a_gain(tmp_path: Path, name: str, step: int, headline: str):
    folder = write_run(tmp_path / "run", steps=3)
    if name == "before":
        (folder / "metrics.jsonl").unlink()
    add_series(folder, name, step, [1.3, 1.3], [0, 1024, 2048])
    page = report(folder)
    assert headline.format(nats=f"{stored(folder, name, step)['nats'] / np.log(2):.3f}") in page.text
    assert "Did held-out loss fall?" not in page.text
    assert any(row[0] == "1,024\u20132,048" for row in page.rows)


@pytest.mark.usefixtures("words_only")
def test_without_a_recipe_losses_stay_in_nats(tmp_path: Path):
    folder = write_demo(tmp_path / "run")
    (folder / "run.toml").unlink()
    page = report(folder)
    assert "run.toml is absent: losses are in nats per token" in page.text
    row = next(row for row in page.rows if row[0] == "all")
    assert row[3] == f"{stored(folder, 'before', 0)['nats']:.3f}"


def test_an_empty_bucket_is_shown_and_not_dropped(tmp_path: Path):
    folder = write_run(tmp_path / "run")
    for name, step, nats in (("before", 0, 1.3), ("after", 400, 1.2)):
        add_series(folder, name, step, [nats], [0, 1024])
    content = json.loads((folder / "evaluate.json").read_text())
    for series in content["series"]:
        series["buckets"].append(
            {"start": 1024, "end": 2048, "tokens": 0, "nats": None, "low": None, "high": None, "sequences": 0}
        )
    (folder / "evaluate.json").write_text(json.dumps(content))
    assert ["1,024\u20132,048", "0", "0", "\u2013", "\u2013", "\u2013", "nothing scored"] in report(
        folder
    ).rows


@pytest.mark.usefixtures("words_only")
def test_the_newest_evaluation_counts_after_a_resumed_run(tmp_path: Path):
    folder = write_demo(tmp_path / "run")
    edges = [bucket["end"] for bucket in stored(folder, "before", 0)["buckets"]]
    add_series(folder, "after", 800, [0.2] * len(edges), [0, *edges])
    row = next(row for row in report(folder).rows if row[0] == "all")
    assert row[4] == f"{stored(folder, 'after', 800)['nats'] / np.log(2):.3f}"


@pytest.mark.usefixtures("words_only")
def test_evaluations_of_different_sequences_are_not_compared(tmp_path: Path):
    folder = write_run(tmp_path / "run")
    add_series(folder, "before", 0, [1.3, 1.3], [0, 1024, 2048], seed=1)
    add_series(folder, "after", 400, [1.2, 1.1], [0, 1024, 2048], seed=2)
    text = report(folder).text
    assert "before and after cannot be compared" in text
    assert "did not score the same sequences" in text
    assert "Did held-out loss fall?" not in text


def test_text_from_files_is_escaped(tmp_path: Path):
    evil = "<script>alert('x')</script>&"
    folder = write_demo(tmp_path / "run", steps=2)
    recipe = (folder / "run.toml").read_text()
    (folder / "run.toml").write_text(re.sub(r'title = ".*"', f'title = "{evil}"', recipe) + f"# {evil}\n")
    (folder / "kernels.json").write_text(json.dumps({evil: {"implementation": evil}, "b": {evil: 1}}))
    (folder / "data.json").write_text(
        json.dumps({evil: evil, "rows": [{evil: evil}], "deep": [[[[[{"a": evil}]]]]]})
    )
    page = report(folder)
    assert "script" not in page.tags
    assert page.text.count("alert('x')") >= 7


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        "text",
        [],
        {},
        [1, "a", None],
        [{"a": 1}, {"b": [2]}],
        [[{}]],
        {"sources": [{"split": {"a": 1}}]},
    ],
)
@pytest.mark.usefixtures("words_only")
def test_any_json_value_is_shown_in_some_form(tmp_path: Path, value):
    folder = write_run(tmp_path / "run", steps=2)
    for name in ("kernels.json", "data.json"):
        (folder / name).write_text(json.dumps(value))
    report(folder)


def test_ten_thousand_steps_are_summarised_and_one_step_is_a_point(tmp_path: Path):
    long, short = write_run(tmp_path / "long", steps=10_000), write_run(tmp_path / "short", steps=1)
    report(long)
    report(short)
    curve = (long / "plots" / "loss_curve.svg").read_text()
    assert "mean of 25 steps" in curve
    assert len(curve) < 150_000


def test_losses_that_are_not_finite_do_not_stop_the_report(tmp_path: Path):
    folder = write_run(tmp_path / "run", steps=3)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(
            '{"step": 4, "loss": NaN, "tokens": 8}\n{"step": 5, "loss": null}\n{"step": 6, "loss": "x"}\n'
            f'{{"step": 7, "loss": {10**400}}}\n'
        )
    text = report(folder).text
    assert "Training is at step 7" in text
    assert (
        "metrics.jsonl: loss is not a finite number at 3 of 7 steps, first NaN at step 4; left out of figures and sums"
    ) in text


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("run.toml", b"[run\n", "not valid TOML"),
        ("run.toml", b"\xff\xfe", "not UTF-8"),
        ("kernels.json", b"{", "not valid JSON"),
        ("data.json", b'{"a": 1', "not valid JSON"),
        ("data.json", b"[" * 100_000, "not valid JSON"),
        ("evaluate.json", b"nonsense", "not valid JSON"),
        ("evaluate.json", b'{"version": 1, "series": [{}]}', "has no name"),
        ("metrics.jsonl", b'{"step": 1}\n{"st\n{"step": 3}\n', "line 2: not valid JSON"),
        ("metrics.jsonl", b'{"step": 1}\n{"loss": 3}\n', "line 2: step = null: must be .*; remove the line"),
        (
            "metrics.jsonl",
            b'{"step": 1}\n[1,2]\n',
            r"line 2: \[1, 2\]: must be a record, a JSON object; remove",
        ),
        ("metrics.jsonl", b"null\n", "line 1: null: must be a record"),
        ("metrics.jsonl", b'{"step": 1' + b"0" * 30 + b"}\n", "line 1: step = 1000"),
    ],
)
@pytest.mark.usefixtures("words_only")
def test_a_corrupt_file_is_one_line_that_names_it(tmp_path: Path, name: str, content: bytes, says: str):
    folder = write_run(tmp_path / "run", steps=2)
    (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name}.*{says}") as caught:
        write_report(folder)
    assert "\n" not in str(caught.value)
    assert not (folder / "report.html").exists()


NAMES = ("run.toml", "kernels.json", "data.json", "metrics.jsonl", "evaluate.json", "certificate.json")


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_in_the_place_of_a_file_is_to_be_moved(tmp_path: Path, name: str):
    folder = write_run(tmp_path / "run", steps=2)
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()
    with pytest.raises(UserError, match=f"{name}: a folder is in the place of this file; move it away"):
        write_report(folder)


@pytest.mark.parametrize("name", ["plan.json", "memory.json"])
@pytest.mark.usefixtures("words_only")
def test_a_folder_in_the_place_of_a_file_that_only_compares_is_damage(tmp_path: Path, name: str):
    folder = write_run(tmp_path / "run", steps=2)
    (folder / name).mkdir()
    assert f"{name}: damaged: a folder is in the place of this file; nothing compared." in report(folder).text


@pytest.mark.usefixtures("words_only")
def test_a_folder_that_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="no such run folder"):
        write_report(tmp_path / "absent")
    with pytest.raises(UserError, match=r"not a run folder, it holds none of run\.toml"):
        write_report(tmp_path)


def test_plots_that_cannot_be_written_are_a_one_line_error(tmp_path: Path):
    folder = write_run(tmp_path / "run", steps=2)
    (folder / "plots").write_text("a file in the way")
    with pytest.raises(UserError, match="plots: cannot make the folder"):
        write_report(folder)


def test_the_report_is_written_without_torch(demo: Path, tmp_path: Path):
    shutil.copytree(demo, tmp_path / "run")
    code = (
        "import sys, pathlib; from longstrand.report import write_report; "
        "write_report(pathlib.Path(sys.argv[1])); sys.exit('torch' in sys.modules)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")], timeout=120, capture_output=True
    )
    assert (ended.returncode, ended.stderr) == (0, b"")


CERTIFICATE = {
    "passed": False,
    "subject": "toy.json, 1,244,772 parameters in float64",
    "tokens": 2046,
    "checks": [
        {
            "check": name,
            "settings": "context 2",
            "passed": passed,
            "loss": 0.0,
            "logprobs": None,
            "gradient": gradient,
            "group": "mhc",
            "where": None if passed else "layer 2 (KDA), backward",
            "limit": limit,
            "seconds": 1.5,
        }
        for name, passed, gradient, limit in (("tiles", True, 1.3e-14, 1e-10), ("ranks", False, "nan", 0.0))
    ],
    "not_checked": "documents longer than 1,023 tokens",
}


def test_a_certificate_has_a_section_of_its_own(tmp_path, words_only):
    folder = write_run(tmp_path / "run")
    assert "Certificate" not in report(folder).text
    (folder / "certificate.json").write_text(json.dumps(CERTIFICATE))
    page = report(folder)
    assert "1 of 2 checks failed; the first: ranks (context 2), layer 2 (KDA), backward." in page.text
    assert "Toy.json, 1,244,772 parameters" in page.text
    assert ["tiles", "context 2", "0", "\u2013", "1.3e-14", "mhc", "equal to 1e-10"] in page.rows
    assert ["not finite", "mhc", "differs: layer 2 (KDA), backward"] in [row[4:] for row in page.rows]
    assert "Not checked: documents longer than 1,023 tokens." in page.text


@pytest.mark.parametrize("broken", ["[]", '{"passed": true}', json.dumps(CERTIFICATE | {"checks": [{}]})])
def test_a_certificate_of_another_form_is_refused(broken, tmp_path, words_only):
    folder = write_run(tmp_path / "run")
    (folder / "certificate.json").write_text(broken)
    with pytest.raises(UserError, match=r"certificate.json: not a certificate as"):
        write_report(folder)


@pytest.mark.parametrize(
    "odd",
    [{}, {"grad_norm": 0.0, "lr": 0.0}, {"grad_norm": 1e200, "lr": 1e-300, "tokens_per_second": 1e12}],
    ids=["usual", "flat", "far"],
)
@pytest.mark.parametrize("steps", [1, 900])
def test_figures_are_drawn_without_a_warning(tmp_path, odd, steps):
    run = write_run(tmp_path / "run", steps=steps, length=64)
    for name, step, nats in (("before", 0, 1.0), ("after", steps, 0.5)):
        add_series(run, name, step, [nats], [0, 64], sequences=1)
    records = [json.loads(line) | odd for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        write_report(run)
