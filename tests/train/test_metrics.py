"""metrics.jsonl: a line is there as soon as it is written, and a full disk is said."""

import json

import pytest

from longstrand.errors import RunFailed, UserError
from longstrand.train.metrics import Metrics, cut_after


class Kept:
    def __init__(self):
        self.records, self.closed = [], False

    def write(self, record):
        self.records.append(record)

    def close(self):
        self.closed = True


def _write(folder, *lines):
    (folder / "metrics.jsonl").write_text("".join(lines))


def test_each_line_can_be_read_as_soon_as_it_is_written_and_goes_to_every_sink(tmp_path):
    sinks = [Kept(), Kept()]
    records = [{"step": 1, "loss": 1.5}, {"step": 2, "loss": None}]
    with Metrics(tmp_path, sinks) as metrics:
        for number, record in enumerate(records, start=1):
            metrics.write(record)
            lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
            assert [json.loads(line) for line in lines] == records[:number]
    assert [sink.records for sink in sinks] == [records, records]
    assert [sink.closed for sink in sinks] == [True, True]


def test_a_full_disk_is_said_with_the_step(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with (
        pytest.raises(
            RunFailed, match=r"metrics\.jsonl: step 4 cannot be written \(No space left on device\)"
        ),
        Metrics(tmp_path, []) as metrics,
    ):
        metrics.write({"step": 4})


def test_lines_after_the_step_and_a_torn_one_are_cut_and_missing_ones_counted(tmp_path):
    _write(tmp_path, '{"step": 1}\n', '{"step": 3}\n', '{"step": 4}\n', '{"step": 5}\n', '{"st')
    assert cut_after(tmp_path, 4) == (2, 1)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 3}\n{"step": 4}\n'
    assert cut_after(tmp_path, 4) == (0, 1)


def test_a_step_that_is_there_twice_hides_none_that_is_absent(tmp_path):
    _write(tmp_path, '{"step": 1}\n', '{"step": 2}\n', '{"step": 2}\n')
    assert cut_after(tmp_path, 2) == (0, 0)
    assert cut_after(tmp_path, 3) == (0, 1)


def test_a_whole_last_line_without_its_newline_is_kept_whole(tmp_path):
    _write(tmp_path, '{"step": 1}\n', '{"step": 2}')
    assert cut_after(tmp_path, 2) == (0, 0)
    with Metrics(tmp_path, []) as metrics:
        metrics.write({"step": 3})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'


@pytest.mark.parametrize(
    "damaged", ["nonsense\n", "[" * 100_000 + "\n"], ids=["no JSON", "nested without end"]
)
def test_a_damaged_line_before_the_last_is_named(damaged, tmp_path):
    _write(tmp_path, '{"step": 1}\n', damaged, '{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl: line 2 is not a metrics record"):
        cut_after(tmp_path, 3)


def test_no_file_has_no_lines(tmp_path):
    assert cut_after(tmp_path, 0) == (0, 0)
