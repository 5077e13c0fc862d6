"""A pytest plugin: which errors of ours each test met, and where they were raised."""

from __future__ import annotations

import json
import traceback
from pathlib import Path
from typing import Any

import longstrand
from longstrand.errors import LongstrandError

SOURCE = str(Path(longstrand.__file__).parent)
INNERMOST = 3  # frames of ours that tell one check from another

_met: list[dict[str, Any]] = []
_tests: list[dict[str, Any]] = []


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--refusals", help="file to write the errors of each test to, as JSON")


def pytest_configure(config: Any) -> None:
    own = LongstrandError.__init__

    def noted(self: LongstrandError, *arguments: Any) -> None:
        frames = [
            f"{f.filename}:{f.lineno}" for f in traceback.extract_stack() if f.filename.startswith(SOURCE)
        ]
        frames = [frame for frame in frames if not frame.startswith(__file__)]
        _met.append({"message": str(arguments[0]) if arguments else "", "raised": frames[-INNERMOST:]})
        own(self, *arguments)

    LongstrandError.__init__ = noted  # type: ignore[assignment, method-assign]


def pytest_runtest_setup(item: Any) -> None:
    _met.clear()


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or report.failed:
        _tests.append({"test": report.nodeid, "passed": report.passed, "errors": list(_met)})


def pytest_sessionfinish(session: Any) -> None:
    Path(session.config.getoption("--refusals")).write_text(json.dumps(_tests))
