"""What the parts must never do; the order of imports itself is checked by import-linter (make check)."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import longstrand

SOURCE = Path(longstrand.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
VAGUE = {"utils", "util", "common", "misc", "manager", "handler", "factory"}


@pytest.mark.parametrize(
    "module",
    [
        "config",
        "architecture",
        "errors",
        "plan.inverse",
        "plan.host",
        "report",
        "cli",
        "cli.plan_answers",
        "doctor",
    ],
)
def test_what_describes_a_run_loads_without_torch_and_transformers(module):
    code = f"import sys, longstrand.{module}; sys.exit(bool({{'torch', 'transformers'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_training_loads_without_transformers():
    code = "import sys, longstrand.train.sft, longstrand.evaluate; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_only_the_command_line_and_the_benchmarks_read_the_environment():
    """But for what oneDNN can be told in no other way."""
    readers = {
        path.relative_to(SOURCE).parts[0]
        for path in FILES
        if path.relative_to(SOURCE) != Path("ops/native/products.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb")
    }
    assert readers <= {"cli", "bench"}


def test_files_are_short_and_their_names_say_something():
    lengths = {str(path.relative_to(SOURCE)): len(path.read_text().splitlines()) for path in FILES}
    assert {name: length for name, length in lengths.items() if length > 400} == {}
    assert not VAGUE & {part for path in FILES for part in path.relative_to(SOURCE).with_suffix("").parts}


def test_every_name_is_defined():
    """The linters cannot say so: to them jaxtyping's dimensions, capital letters in quotes, are names too."""
    ruff = Path(sys.executable).with_name("ruff")
    command = [
        ruff,
        "check",
        "--isolated",
        "--select",
        "F821",
        "--output-format",
        "json",
        SOURCE,
        Path(__file__).parent,
    ]
    found = json.loads(subprocess.run(command, capture_output=True, check=False).stdout)
    assert found, "not even a dimension: F821 no longer says what this looks for"
    names = {each["message"].split("`")[1] for each in found}
    assert {name for name in names if not re.fullmatch("[A-Z]{1,2}[0-9]?|_", name)} == set()
