"""The command line: exit codes, one-line errors, and what `init`, `config` and `doctor` write."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from called import Called, caller

from longstrand.config import Recipe, dump_toml, example_recipe, load_recipe
from longstrand.doctor import examine
from longstrand.errors import CheckFailed, RunFailed, UserError
from longstrand.train.signals import Stopped


@pytest.fixture
def call(monkeypatch, capsys):
    """Runs the command line in this process, as the installed command does."""
    return caller(monkeypatch, capsys)


@pytest.fixture
def genome(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "my genome.fa"
    path.write_text(">one\n" + "ACGT" * 64 + "\n")
    return path


def is_one_line(called: Called) -> bool:
    return called.err.startswith("error: ") and called.err.count("\n") == 1 and "Traceback" not in called.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["fly"], "No such command 'fly'"),
        (["train"], "Missing argument 'RECIPE'"),
        (["train", "human_x", "--fast"], "No such option"),
        (["train", "nowhere.toml"], "nowhere.toml: no such recipe"),
        (["train", "human_x", "--set", "train.learning_rat=1"], 'did you mean "lr"?'),
        (["train", "human_x", "--set", "train.steps=1e5"], "write 100000"),
        (["certify", "nowhere.toml"], "nowhere.toml: no such recipe"),
        (["certify", "human_x", "--tokens", "many"], "--tokens many: must be a whole number of tokens"),
        (["certify", "human_x", "--ranks", "0"], "--ranks"),
        (["config", "show", "nowhere.toml"], "nowhere.toml: no such recipe"),
        (["init", "--data", "nowhere.fa", "--length", "1M"], "--data nowhere.fa: no such file"),
        (["init", "--data", "~nobody_has_this_name/x.fa", "--length", "1M"], "no home folder is known"),
        (["init", "--data", ".", "--length", "1M"], "--data .: no such file; give a file"),
        (
            ["init", "--data", "my genome.fa", "--length", "1MB"],
            "--length 1MB: must be a whole number of tokens",
        ),
        (["init", "--data", "my genome.fa", "--length", "1"], "--length 1: must be at least 2"),
        (
            ["init", "--data", "my genome.fa", "--length", "16k", "--out", "no/where.toml"],
            "cannot be written",
        ),
        (["demo", "--seeds", "0"], "--seeds"),
        (["bench", "nothing"], "bench nothing: no such measurement"),
        (["train", "caf\udce9.toml"], "'caf\\udce9.toml': its bytes are not UTF-8; rename the file"),
        (["init", "--data", "my genome.fa", "--length", "16k", "--model", ""], "model.path = '': "),
        (["init", "--data", "my genome.fa", "--length", "9" * 30], "and below 2**63"),
    ],
)
def test_a_bad_command_or_setting_is_one_line_and_code_2(call, genome, arguments, says):
    called = call(*arguments)
    assert (called.code, called.out) == (2, "") and is_one_line(called)
    assert says in called.err


def test_going_on_from_a_copied_run_folder_does_not_touch_the_first_one(call, genome, monkeypatch):
    went_on: list[str] = []
    monkeypatch.setattr(
        "longstrand.launch.starting.train", lambda settings, **_: went_on.append(settings.run.out)
    )
    monkeypatch.setattr("longstrand.report.write_report", lambda run: run)
    recipe = example_recipe()
    for name in ("first", "copy of it"):
        Path(name, "checkpoints").mkdir(parents=True)
        moved = recipe.model_copy(
            update={"run": recipe.run.model_copy(update={"out": str(Path("first").absolute())})}
        )
        Path(name, "run.toml").write_text(dump_toml(moved))
    refused = call("train", "copy of it/run.toml", "--resume")
    assert refused.code == 2 and is_one_line(refused) and went_on == []
    assert "stands in another folder" in refused.err
    assert f"--set run.out='{Path('copy of it').absolute()}'" in refused.err
    assert call("train", "copy of it/run.toml", "--resume", "--set", "run.out=copy of it").code == 0
    assert call("train", "first/run.toml", "--resume").code == 0
    assert went_on == ["copy of it", str(Path("first").absolute())]


def test_debug_shows_the_traceback_and_keeps_the_code(call):
    called = call("train", "nowhere.toml", "--debug")
    assert called.code == 2
    assert "Traceback" in called.err and called.err.splitlines()[-1].startswith("error: nowhere.toml")


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (UserError("x = 1: must be\nless; lower it"), 2, "error: x = 1: must be less; lower it\n"),
        (RunFailed("disk full"), 1, "error: disk full\n"),
        (CheckFailed("loss is nan"), 3, "error: loss is nan\n"),
        (
            PermissionError(13, "Permission denied", "out/x"),
            1,
            "error: out/x: Permission denied; check the path",
        ),
        (Stopped(15, "saved at step 3"), 143, "stopped by SIGTERM: saved at step 3\n"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 4 PB"),
            1,
            "error: out of memory; lower memory.tile or data.length",
        ),
        (
            RuntimeError("Storage size calculation overflowed with sizes=[1000000000000000000, 16]"),
            1,
            "error: out of memory; lower memory.tile or data.length",
        ),
        (MemoryError(), 1, "error: out of memory; lower memory.tile or data.length"),
    ],
)
def test_every_kind_of_error_has_its_exit_code(call, monkeypatch, error, code, says):
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("longstrand.cli.commands.load_recipe", fail)
    called = call("train", "human_x")
    assert called.code == code and called.err.startswith(says) and called.err.count("\n") == 1


def test_an_interrupt_that_reaches_the_command_line_is_code_130(call, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("longstrand.cli.commands.load_recipe", interrupt)
    called = call("train", "human_x")
    assert called.code == 130 and "Traceback" not in called.err


def test_init_writes_a_recipe_that_train_would_read_and_never_overwrites(call, genome):
    called = call("init", "--data", "my genome.fa", "--length", "512k")
    assert called.code == 0 and called.out.startswith("my_genome.toml: written")
    recipe = load_recipe("my_genome.toml")
    assert recipe.data.length == 524288 and recipe.data.sources[0].path == "my genome.fa"
    assert recipe.data.split is not None and recipe.data.split.by == "region"
    before = Path("my_genome.toml").read_bytes()
    again = call("init", "--data", "my genome.fa", "--length", "1M")
    assert again.code == 2 and "my_genome.toml: exists, and is never overwritten" in again.err
    assert Path("my_genome.toml").read_bytes() == before


def test_init_leaves_no_half_of_a_recipe_on_a_full_disk(call, genome, monkeypatch):
    class Full(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(28, "No space left on device")

    def opened(path: Path, *_: object, **__: object) -> Full:
        path.touch()
        return Full()

    monkeypatch.setattr(Path, "open", opened)
    called = call("init", "--data", "my genome.fa", "--length", "16k")
    assert called.code == 2 and "my_genome.toml: cannot be written (No space left on device)" in called.err
    assert not Path("my_genome.toml").exists()


def test_init_takes_a_glob_and_weights_from_a_folder(call, genome):
    Path("weights").mkdir()
    called = call("init", "--data", "*.fa", "--length", "4096", "--model", "weights", "--out", "r.toml")
    assert called.code == 0
    recipe = load_recipe("r.toml")
    assert (recipe.model.path, recipe.model.config, recipe.train.indexer) == ("weights", None, "frozen")


def test_config_show_is_a_recipe_and_carries_overrides(call, tmp_path):
    shown = call("config", "show")
    (tmp_path / "r.toml").write_text(shown.out)
    assert load_recipe(tmp_path / "r.toml") == example_recipe()
    changed = call(
        "config", "show", str(tmp_path / "r.toml"), "--set", "train.lr=3e-4", "--set", "run.out=elsewhere"
    )
    (tmp_path / "s.toml").write_text(changed.out)
    recipe = load_recipe(tmp_path / "s.toml")
    assert (recipe.train.lr, recipe.run.out) == (0.0003, "elsewhere")


def test_config_schema_describes_every_setting(call):
    schema = json.loads(call("config", "schema").out)
    assert schema == Recipe.model_json_schema()
    for record in schema["$defs"].values():
        assert all("description" in setting for setting in record["properties"].values())
        assert record["additionalProperties"] is False


def test_help_and_version_succeed(call):
    assert "Train as a recipe says" in call("--help").out
    assert call("train", "--help").code == 0
    assert call("--version").out.startswith("longstrand ")
    assert "Train as a recipe says" in call().out


def test_doctor_names_what_is_there_and_what_is_missing(call, monkeypatch, tmp_path):
    called = call("doctor")
    assert called.code == 0 and "torch" in called.out and "memory" in called.out
    monkeypatch.setattr("longstrand.doctor._OPTIONAL", {"no-such-package": "nothing at all"})
    found = {finding.name: finding for finding in examine(tmp_path, {"OMP_NUM_THREADS": "7"})}
    assert found["no-such-package"].state == "missing" and "nothing at all" in found["no-such-package"].found
    assert "OMP_NUM_THREADS=7" in found["threads"].found


def test_the_installed_command_refuses_a_typo_before_anything_is_loaded():
    code = (
        "import sys\nfrom longstrand.cli import main\n"
        "sys.argv = ['longstrand', 'train', 'human_x', '--set', 'train.length=4']\n"
        "try: main()\nfinally: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "False\n"
    assert done.stderr == (
        "error: human_x with --set: train.length: unknown setting; it belongs to [data], as data.length\n"
    )


def test_init_finds_what_train_would_read(call, genome):
    """`**` also stands for no folder at all, as in data.sources."""
    assert call("init", "--data", "**/*.fa", "--length", "16k", "--out", "r.toml").code == 0
