"""`longstrand plan`: its answers, exit codes, the recipe that it writes, and that it is fast without torch."""

import errno
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from called import caller
from matplotlib.figure import Figure
from planned import REAL, TOY
from typer.main import get_command

from longstrand.cli import plan_recipe
from longstrand.cli.commands import app
from longstrand.cli.plan_options import ALLOWED
from longstrand.config import load_recipe
from longstrand.model import load_model
from longstrand.plan import summary
from longstrand.plan.devices import GIB, find_device
from longstrand.plan.host import Machine, checkpoint_bytes
from longstrand.plan.inverse import sweep
from longstrand.plan.job import Job
from longstrand.plan.room import Room
from longstrand.plan.summary import setting
from longstrand.report.lengths import _draw_memory

TIGHT = """
memory_gib = {gib}
bfloat16_tflops = 100.0
float32_tflops = 50.0
memory_gb_per_second = 1000.0
host_gb_per_second = 20.0
peer_gb_per_second = 20.0
network_gb_per_second = 2.0
devices_per_host = 2
"""
LONG = "x" * 300
FLASH = ("--model", "glm-5.3-flash", "--device", "B200", "--devices", "64")


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """Runs `longstrand plan` in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return caller(monkeypatch, capsys, "plan")


@pytest.fixture
def tight(tmp_path):
    """A device on which the toy needs levers at 1M tokens."""
    path = tmp_path / "mine.toml"
    path.write_text(TIGHT.format(gib=2.0))
    return str(path)


def test_it_says_memory_seconds_levers_and_what_was_not_measured(call):
    called = call(*FLASH, "--length", "1M")
    assert called.code == 0
    for part in (
        "1M tokens (1,048,576)",
        "64 x B200 on 8 hosts",
        "layer inputs",
        "tokens/s",
        "Fits the devices: ",
        "of 178.0 GiB",
        "Not judged: 24.00 GiB of memory of each host (--host-memory).",
    ):
        assert part in called.out
    assert "Not measured on a GPU" in called.out
    assert max(map(len, called.out.splitlines())) <= 100


def test_loading_is_said_where_ranks_cut_the_model(call):
    """2 bytes of 313,326,799,870 parameters over 64 ranks, and of a layer of 288 experts of 3 x 2,048 x 4,096."""
    called = call(*FLASH, "--length", "1M")
    said = re.search(r"Loading takes up to ([\d,.]+) GiB of each host", called.out)
    part, experts = 2 * 313_326_799_870 / 64, 2 * 288 * 3 * 2048 * 4096
    assert 8 * (part + experts) / 2**30 < float(said[1]) < 8 * (part + 1.5 * experts) / 2**30
    assert "Loading" not in call("--model", "toy", "--length", "64k").out


def test_room_that_would_buy_speed_is_named_and_is_true(call, tmp_path):
    """What is said fits, and is as much faster when it is planned itself."""
    asked = (
        "--model",
        "wide",
        "--device",
        "B200",
        "--devices",
        "2",
        "--length",
        "64k",
        "--host-memory",
        "64",
    )
    said = json.loads(call(*asked, "--write", "r.toml", "--json").out)
    assert {each["setting"] for each in said["faster_with"]} == {
        "memory.recompute = false",
        "memory.keep_fronts = true",
    }
    for each in said["faster_with"]:
        sets = ("--set", each["setting"].replace(" ", ""), "--device", "B200", "--host-memory", "64")
        plan = json.loads(call("r.toml", *sets, "--json").out)
        assert plan["fits"] and plan["device_bytes"] == each["device_bytes"]
        rates = (plan["seconds"]["tokens_per_second"], said["seconds"]["tokens_per_second"])
        assert rates[0] / rates[1] == pytest.approx(1 + each["gain"])
    assert "planned faster: memory.recompute = false" in call(*asked).out


def test_a_recipe_for_a_device_whose_name_breaks_a_line_can_be_read(call, tmp_path):
    (tmp_path / "a\nb.toml").write_text(TIGHT.format(gib=2.0))
    asked = ("--model", "toy", "--device", "a\nb.toml", "--length", "64k")
    assert call(*asked, "--write", "r.toml").code == 0
    assert load_recipe(tmp_path / "r.toml").data.length == 65536


@pytest.mark.parametrize("told", ["\u00b2", "abc", "-3", "", "0"])
def test_threads_that_openmp_cannot_read_are_not_told(call, monkeypatch, told):
    monkeypatch.setenv("OMP_NUM_THREADS", told)
    found = json.loads(call("--model", "toy", "--length", "1k", "--host-disk", "9", "--json").out)
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert found == json.loads(call("--model", "toy", "--length", "1k", "--host-disk", "9", "--json").out)


@pytest.mark.parametrize("question", [("--fit", "length"), ("--sweep", "1k..2k")])
def test_no_rank_is_busier_than_the_devices_of_a_recipe_allow(call, question):
    called = call("human_x", "--device", "H200", "--data-skew", "3", *question)
    assert called.code == 2 and "--data-skew 3.0: must be 1, since no ranks share the experts" in called.err


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_no_graphs_are_proposed_where_a_whole_pass_comes_before_gradients(call, form):
    asked = (*FLASH[:4], "--devices", "16", "--length", "16k", "--trainable", "indexer", *form)
    called = call(*asked)
    assert called.code == 0 and "memory.recompute = false" not in called.out


def test_json_adds_up(call):
    plan = json.loads(call(*FLASH, "--length", "1M", "--json").out)
    assert plan["fits"] and plan["length"] == 2**20
    assert plan["not_judged_bytes"] == {"host": 24 * 2**30}  # eight processes of 3 GiB
    assert plan["limits_bytes"]["device"] == 178 * 2**30
    peaks = {name: sum(term["bytes"] for term in terms) for name, terms in plan["phases"].items()}
    assert max(peaks.values()) == peaks[plan["peak_phase"]] == plan["device_bytes"]
    seconds = plan["seconds"]
    assert sum(term["seconds"] for term in seconds["terms"]) == pytest.approx(seconds["total"])
    assert seconds["tokens_per_second"] == pytest.approx(2**20 / seconds["total"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "needs a recipe (a file, or one of demo, "),
        ([], "), or --model with --device, --devices and --length; give one of them"),
        (["nowhere.toml"], "nowhere.toml: no such recipe"),
        (["human_x", "--model", "toy"], "--model: the recipe human_x says it"),
        (["human_x", "--length", "1M"], "change it there with --set data.length="),
        (
            ["human_x", "--devices", "3"],
            "--devices 3: the recipe is for parallel.data x parallel.context = 1",
        ),
        (["human_x", "human_x"], "one recipe at a time"),
        (["--model", "toy"], "--length: missing"),
        (["--model", "toy", "--length", "1MB"], "--length 1MB: must be a whole number of tokens"),
        (["--model", "toy", "--length", "1"], "--length 1: must be at least 2"),
        (["--model", "tooy", "--length", "1M"], "did you mean toy?"),
        (["--model", "toy", "--length", "1M", "--device", "B300"], "--device B300: no such device or file"),
        (["--model", "toy", "--length", "1M", "--dtype", "fp8"], "--dtype fp8: must be float32"),
        (
            ["--model", "toy", "--length", "1M", "--trainable", "everything"],
            "--trainable everything: must be all",
        ),
        (["--model", "toy", "--length", "1M", "--trainable", "all,kda"], "--trainable all,kda: must be all"),
        (["--model", "toy", "--length", "1M", "--optimizer", "disk"], "--optimizer disk: must be auto"),
        (["--model", "toy", "--length", "1M", "--optimizer", "host"], "a CPU's memory is the host's"),
        (["--model", "toy", "--length", "1M", "--set", "train.lr=1"], "--set train.lr=1: overrides a recipe"),
        (["--model", "toy", "--fit", "width"], "--fit width: must be length or devices"),
        (["--model", "toy", "--fit", "length", "--sweep", "1k..2k"], "ask one at a time"),
        (["--model", "toy", "--sweep", "16k"], "--sweep 16k: must be two lengths"),
        (["--model", "toy", "--sweep", "4M..16k"], "must ascend"),
        (["--model", "toy", "--length", "1M", "--picture", "x.svg"], "shows a sweep; add --sweep 16k..4M"),
        (["toy"], "toy: no recipe, but the name of a model's shape; give --model toy"),
        (["--model", "toy", "--length", ""], "--length : must be a whole number of tokens"),
        (["--model", "toy", "--length", "1M", "--dtype", ""], "--dtype : must be float32"),
        (["--model", "toy", "--length", "1M", "--trainable", ""], "--trainable : must be all"),
        (["--model", "toy", "--length", "1M", "--optimizer", ""], "--optimizer : must be auto"),
        (["--model", "toy", "--length", "1M", "--device", ""], "--device : no such device or file"),
        (["--model", "toy", "--fit", ""], "--fit : must be length or devices"),
        (["demo"], "demo: model.path = demo_data/checkpoint: no such file or folder here; give"),
        (
            ["demo"],
            "plan another recipe (glm-5.3-flash_1m_64gpus, hg38_chr1-2_chr22, human_x, human_x_65k or a",
        ),
        (["demo"], "or a model alone: --model NAME (glm-5.3-flash, toy, wide, glm-5.3-flash-4-layers)"),
        (["--model", "", "--length", "1k"], "--model '': no valid path"),
        (["--model", LONG, "--length", "1k"], "File name too long"),
        (["--model", "toy", "--length", "1k", "--device", "~nobody_has_this_name/d"], "no such device"),
        (["--model", "toy", "--length", "1k", "--device", LONG], "no such device or file"),
        (["--model", "toy", "--length", "1k", "--write", LONG], "File name too long; choose another name"),
        (["--model", "toy", "--length", "1k", "--write", "a\nb"], "'a\\nb': has a control character"),
        (["--model", "toy", "--length", "0"], "--length 0: must be at least 2"),
        (["--model", "toy", "--length", "-1"], "--length -1: must be a whole number of tokens"),
        (["--model", "toy", "--length", "1Q"], "--length 1Q: must be a whole number of tokens"),
        (["--model", "toy", "--sweep", "1k..2k", "--picture", "x.pdf"], "must end in .svg or .png"),
        (["--model", "toy", "--sweep", "1k..2k", "--write", "x.toml"], "which has many plans; ask for one"),
        (
            ["--model", "toy", "--sweep", "1k..5M"],
            "--sweep 1024..5242880: has 14 lengths, and at most 13 are planned",
        ),
    ],
)
def test_what_cannot_be_asked_is_refused_in_one_line(call, arguments, says):
    called = call(*arguments)
    assert called.code == 2
    assert says in called.err and called.err.count("\n") == 1 and "Traceback" not in called.err


@pytest.mark.parametrize(
    ("question", "options"),
    [
        ("--calibrate", ["--length", "1M"]),
        ("--calibrate", ["--model", "toy"]),
        ("--calibrate", ["--device", "CPU"]),
        ("--calibrate", ["--calibrated", "f.json"]),
        ("--calibrate", ["--host-memory", "0"]),
        ("--calibrate", ["--picture", "x.svg"]),
        ("--calibrate", ["--set", "data.length=1M"]),
        ("--calibrate", ["--this-host"]),
        ("--fit length", ["--length", "1M"]),
        ("--fit length", ["--picture", "x.svg"]),
        ("--fit devices", ["--devices", "1"]),
        ("--fit devices", ["--picture", "x.svg"]),
        ("--sweep", ["--length", "1M"]),
    ],
    ids=str,
)
def test_an_option_without_a_meaning_is_refused_by_its_name(call, question, options):
    asked = {
        "--calibrate": ("--calibrate", "run"),
        "--fit length": ("--model", "toy", "--fit", "length"),
        "--fit devices": ("--model", "toy", "--fit", "devices"),
        "--sweep": ("--model", "toy", "--sweep", "1k..2k"),
    }
    called = call(*asked[question], *options)
    assert called.code == 2
    assert called.err.startswith(f"error: {options[0]}: has no meaning with {question}")
    assert "remove it" in called.err or "ask for --sweep" in called.err


def test_two_questions_at_once_are_refused(call):
    for options in (("--sweep", "1k..2k"), ("--fit", "length")):
        called = call("--calibrate", "run", *options)
        assert called.code == 2 and f"{options[0]} and --calibrate: each is a question" in called.err


def test_every_option_says_for_which_questions_it_is():
    options = {name for parameter in get_command(app).commands["plan"].params for name in parameter.opts}
    assert {name for name in options if name.startswith("--")} - {"--help"} == {
        name for name in ALLOWED if name.startswith("--")
    }


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("--sequences", "1000000000000", "from 1 to 1,048,576"),
        ("--sequences", "0", "from 1 to 1,048,576"),
        ("--devices", "0", "from 1 to 1,048,576"),
        ("--devices", "-3", "from 1 to 1,048,576"),
        ("--host-memory", "nan", "from 0 to"),
        ("--host-memory", "inf", "from 0 to"),
        ("--host-memory", "-1", "from 0 to"),
        ("--host-disk", "nan", "from 0 to"),
        ("--data-skew", "nan", "from 1 to 2"),
        ("--data-skew", "inf", "from 1 to 2"),
        ("--data-skew", "1e9", "from 1 to 2"),
        ("--data-skew", "0.5", "from 1 to 2"),
    ],
)
def test_a_number_out_of_its_range_is_refused_with_its_value(call, option, value, rule):
    more = () if option == "--devices" else ("--devices", "2")
    called = call("--model", "toy", "--length", "64k", *more, option, value)
    shown = {"1e9": "1000000000.0", "-1": "-1.0"}.get(value, value)
    assert called.code == 2 and called.err.startswith(f"error: {option} {shown}: must be ")
    assert rule in called.err


def test_more_threads_than_this_machine_has_cores_are_said(call, monkeypatch):
    """The rates are those of one core each."""
    monkeypatch.setattr(summary, "cores_here", lambda: 2)
    eight = call("human_x", "--set", "parallel.context=8", "--set", "run.threads=1")
    assert "The seconds take 8 cores" in eight.out and "about 4.0 times as long" in " ".join(
        eight.out.split()
    )
    assert "The seconds take" not in call("human_x", "--set", "run.threads=2").out
    assert "The seconds take" not in call(*FLASH, "--length", "1M").out


def test_a_part_of_a_device_s_name_is_a_hint(call):
    called = call("--model", "toy", "--device", "h100", "--length", "1k")
    assert called.code == 2 and "did you mean H100-80?" in called.err


def test_skew_needs_experts_on_several_ranks(call):
    called = call("--model", "toy", "--length", "64k", "--data-skew", "1.5")
    assert called.code == 2 and "remove it" in called.err
    called = call("human_x", "--data-skew", "1.5")
    assert called.code == 2 and "must be 1, since no ranks share the experts" in called.err


REFUSED_BY_TRAIN = [
    ("parallel.context=3", "parallel.expert=2"),
    ("parallel.context=3", "parallel.expert=3"),
    ("parallel.context=2", "parallel.expert=2", "parallel.receive=1"),
    ("memory.offload=host",),
    ("memory.optimizer=host",),
    ("memory.keep_every=9",),
    ('train.trainable=["router", "mla"]', "model.config=bare.json"),
    ("train.indexer=sparse", "model.config=bare.json"),
    ("train.balance=bias", "model.config=bare.json"),
    ("train.indexer=sparse", "data.length=3"),
]


@pytest.mark.parametrize("settings", REFUSED_BY_TRAIN, ids=str)
def test_what_train_refuses_is_refused_in_the_same_words(call, monkeypatch, capsys, tmp_path, settings):
    """`bare.json` has neither experts nor sparse attention."""
    bare = {"layer_types": ["linear_attention"] * 4, "mlp_layer_types": ["dense"] * 4}
    bare |= {"indexer_types": ["full"] * 4}
    (tmp_path / "bare.json").write_text(json.dumps(TOY.to_hf() | bare))
    (tmp_path / "x.fa").write_text(">a\n" + "ACGT" * 3000 + "\n")
    (tmp_path / "r.toml").write_text(
        '[run]\nout = "run"\n[model]\nconfig = "toy"\n[data]\nlength = 4096\ncache = "cache"\n'
        '[[data.sources]]\npath = "x.fa"\n[train]\nsteps = 1\nlr = 1e-3\n'
    )
    sets = [word for setting in settings for word in ("--set", setting)]
    planned = call("r.toml", *sets)
    trained = caller(monkeypatch, capsys, "train")("r.toml", *sets, "--dry-run")
    assert (planned.code, trained.code) == (2, 2)
    assert planned.err == trained.err.splitlines()[-1] + "\n"


def test_a_model_is_held_to_the_same_rules(call, tmp_path):
    bare = {"layer_types": ["linear_attention"] * 4, "indexer_types": ["full"] * 4}
    (tmp_path / "bare.json").write_text(json.dumps(TOY.to_hf() | bare))
    called = call("--model", "bare.json", "--length", "4k", "--trainable", "mla")
    assert called.code == 2 and 'this model has no parameters in group "mla"; its groups are' in called.err
    called = call("--model", "toy", "--length", "3", "--trainable", "indexer,mla")
    assert called.code == 2 and "data.length = 3: no sequence completes a pool of 4 tokens" in called.err


def test_what_does_not_fit_ends_with_3_and_says_what_is_missing(call):
    called = call("--model", "glm-5.3-flash-4-layers", "--device", "RTX-4090", "--length", "64k")
    assert called.code == 3
    assert "GiB are missing on a device" in called.err and "largest: " in called.err
    assert called.err.endswith("take more or larger devices, or a shorter length\n")
    assert "Does not fit: " in called.out and "GiB too many on a device." in called.out


def test_what_is_short_on_a_host_or_a_disk_is_remedied_there(call, tight):
    asked = ("--model", "toy", "--device", tight, "--length", "4M")
    called = call(*asked, "--host-memory", "6.3", "--host-disk", "0")
    assert called.code == 3 and "on a host (" in called.err and "hosts with more memory" in called.err
    with_disk = ("human_x", "--set", "data.length=1M", "--set", "memory.offload=disk", "--host-disk", "1")
    called = call(*with_disk)
    assert called.code == 3 and "missing on a host's disk" in called.err and "a device" not in called.err
    assert called.err.endswith(
        "take more room on that disk, or another for memory.spool, or a shorter length\n"
    )


WRITING = {
    "a recipe": (["--length", "4k", "--write", "a.toml"], "--write a.toml"),
    "a picture": (["--sweep", "4k..8k", "--picture", "a.svg"], "--picture a.svg"),
}


@pytest.mark.parametrize("asked, option", WRITING.values(), ids=WRITING)
def test_what_cannot_be_written_whole_leaves_nothing_that_blocks_the_next_try(tmp_path, asked, option):
    """Both have more than the 4 KiB that the shell allows."""
    command = [sys.executable, "-m", "longstrand", "plan", "--model", "toy", *asked]

    def ended(**how):
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, **how)

    limited = ended(
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    )
    assert limited.returncode == 2
    assert limited.stderr.splitlines()[-1].startswith(f"error: {option}: cannot be written (File too large)")
    assert list(tmp_path.iterdir()) == []
    assert ended().returncode == 0
    assert [each.suffix for each in tmp_path.iterdir()] == [
        option[-5:] if option.endswith("toml") else ".svg"
    ]


def test_a_config_whose_recipe_cannot_be_written_does_not_stay(call, monkeypatch):
    real, written = plan_recipe.write_new, []

    def once(path, text):
        if written:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(path)
        real(path, text)

    monkeypatch.setattr(plan_recipe, "write_new", once)
    asked = ("--model", "glm-5.3-flash-4-layers", "--device", "H200", "--length", "4k", "--write", "a.toml")
    called = call(*asked)
    assert called.code == 2 and "No space left on device" in called.err
    assert [each.name for each in written] == ["a-config.json"] and not list(Path().iterdir())


def test_several_shortages_say_that_their_sum_is_the_least(call):
    called = call(
        *("--model", "glm-5.3-flash-4-layers", "--device", "H200", "--length", "8M"),
        *("--host-memory", "64", "--host-disk", "10"),
    )
    assert called.code == 3
    assert "on a device (" in called.err and "on a host (" in called.err
    assert "of all levers these leave the least sum over the limits" in called.err


@pytest.mark.parametrize("devices", ["64", "128"])
def test_what_grows_with_the_sequences_is_remedied_by_fewer(call, devices):
    """Each rank holds 20 bytes per token of a step: no more devices help, nor a little shorter a length."""
    asked = ("--model", "glm-5.3-flash", "--device", "B200", "--devices", devices, "--length", "1M")
    called = call(*asked, "--sequences", "1000000")
    assert called.code == 3 and f"largest: pack {20 * 2**20 * 10**6 // 2**30:,}." in called.err
    assert called.err.endswith(
        "take fewer sequences per step, of which every rank holds the tokens of all, or a shorter length\n"
    )
    assert call(*asked, "--sequences", "64").code == 0


def test_no_number_of_devices_that_suffices_is_said(call):
    called = call("--model", "glm-5.3-flash", "--device", "RTX-4090", "--length", "1M", "--fit", "devices")
    assert called.code == 3
    closest = re.search(
        r"nor on any doubling of it up to 4,096 devices; closest are ([\d,]+), where", called.err
    )
    assert closest is not None and f"\n{closest[1].replace(',', '')} x RTX-4090" in called.out
    assert called.err.endswith("take larger devices, or a shorter length\n")


def test_the_longest_sequence_of_a_recipe_leaves_room_for_its_checkpoints(call, monkeypatch):
    """On a disk with 20 GiB, beside 8 GiB of memory: without them a spool would take all of it."""
    monkeypatch.setattr("longstrand.cli.plan_asked.this_machine", lambda: Machine(8 * GIB, "a machine"))
    real = os.statvfs(".")
    free = 20 * GIB // real.f_frsize
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((*real[:4], free, *real[5:])))
    called = call("human_x", "--fit", "length")
    assert called.code == 0 and "no room" not in called.out
    assert "missing on a host's disk" in " ".join(called.out.split())
    plan = json.loads(call("human_x", "--fit", "length", "--json").out)
    assert plan["problems"] == []
    longest, per_token = plan["length"], plan["files"]["bytes"] / plan["length"]
    kept = 3 * checkpoint_bytes(Job(TOY, longest, dtype="float32"))
    assert 0 <= 20 * GIB - kept - plan["files"]["bytes"] < 1024 * 1.01 * per_token


def test_the_longest_sequence_has_spools_no_larger_than_the_shell_allows(call, monkeypatch):
    """4 x 128 + 128 values of 4 bytes per token: 39 MiB hold some 6,000 tokens; far more fit without a spool."""
    machine = Machine(8 * GIB, "a machine", file_bytes=40_000 * 1024)
    monkeypatch.setattr("longstrand.cli.plan_asked.this_machine", lambda: machine)
    called = call("human_x", "--fit", "length")
    assert called.code == 0 and "no room" not in called.out
    said = " ".join(called.out.split())
    assert (
        "missing on a device" in said and "; ulimit -f allows each rank's spool no more than 39 MiB." in said
    )
    plan = json.loads(call("human_x", "--fit", "length", "--json").out)
    assert plan["problems"] == [] and plan["files"]["bytes"] <= 40_000 * 1024 and plan["length"] > 100_000
    asked = ("human_x", "--set", f"data.length={plan['length']}", "--set", "memory.offload=disk")
    called = call(*asked)
    assert (
        called.code == 3
        and "missing on a host's disk, where ulimit -f allows each rank's spool 39 MiB" in called.err
    )
    assert 'take a higher ulimit -f, or memory.offload = "none"' in called.err
    assert "It would fit with" in called.out and "memory.offload=none" in called.out


def test_what_else_this_host_lacks_is_no_fit(call, monkeypatch):
    monkeypatch.setattr(
        "longstrand.cli.plan_asked.this_machine", lambda: Machine(8 * GIB, "a machine", open_files=20)
    )
    for question in ((), ("--fit", "length")):
        called = call("human_x_65k", *question)
        assert called.code == 3 and "open files" in called.err
        assert "but this host has no room for the run" in called.out and "Fits: " not in called.out


def test_a_recipe_is_planned_as_it_stands_and_told_what_would_fit(call, tight):
    recipe = ["human_x", "--set", "data.length=1M", "--set", "memory.tile=4096"]
    as_it_is = json.loads(call(*recipe, "--device", tight, "--json").out)
    assert as_it_is["memory"]["tile"] == 4096 and not as_it_is["fits"]
    called = call(*recipe, "--device", tight)
    assert called.code == 3
    assert "It would fit with --set memory." in called.out
    sets = called.out.partition("It would fit with ")[2].split()
    assert call(*recipe, *sets, "--device", tight).code == 0


def test_what_would_fit_is_all_that_differs_from_the_recipe(call):
    """A lever of the recipe that the others exclude is among it: `recompute = false` allows none."""
    recipe = ["human_x", "--set", "data.length=256k", "--set", "memory.recompute=false", "--host-memory", "1"]
    called = call(*recipe)
    assert called.code == 3
    sets = called.out.partition("It would fit with ")[2].split()
    assert "memory.recompute=true" in sets
    assert call(*recipe, *sets).code == 0


def test_a_recipe_for_this_machine_is_judged_by_it(call):
    called = call("human_x_65k")
    assert called.code == 0
    assert "this host" in called.out and "open files per rank" in called.out
    called = call("human_x_65k", "--host-memory", "0.3")
    assert called.code == 3


def test_a_recipe_takes_as_many_threads_as_a_run_would(call, monkeypatch):
    """Half as many threads take twice as long for what is computed; two ranks share them."""
    seconds = {}
    monkeypatch.setattr("longstrand.cli.plan_asked.cores_here", lambda: 8)
    for threads in (1, 4):
        monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
        for ranks in (1, 2):
            sets = ("--set", "run.threads=none", "--set", f"parallel.context={ranks}")
            plan = json.loads(call("human_x_65k", *sets, "--json").out)
            terms = {term["name"]: term["seconds"] for term in plan["seconds"]["terms"]}
            seconds[threads, ranks] = terms["projections"]
    assert seconds[1, 1] == pytest.approx(4 * seconds[4, 1])
    assert seconds[1, 2] == pytest.approx(2 * seconds[4, 2])


def test_this_host_is_judged_for_a_model_too(call, tight):
    called = call("--model", "toy", "--device", tight, "--length", "64k", "--this-host")
    assert called.code == 0 and "this host" in called.out and "open files per rank" in called.out
    elsewhere = call("--model", "toy", "--device", tight, "--length", "64k")
    assert "this host" not in elsewhere.out and "not given (--host-memory)" in elsewhere.out


def test_the_longest_sequence_and_the_fewest_devices(call, tight):
    longest = call(
        "--model", "toy", "--device", tight, "--fit", "length", "--host-memory", "4", "--host-disk", "0"
    )
    assert longest.code == 0 and "(rounded down to a multiple of 1,024)" in longest.out
    fewest = call("--model", "glm-5.3-flash", "--device", "B200", "--fit", "devices", "--length", "1M")
    assert fewest.code == 0 and "The fewest: 16 devices" in fewest.out


@pytest.mark.parametrize(
    "asked",
    [
        (*FLASH, "--length", "4M"),
        (*FLASH, "--fit", "length"),
        (*FLASH, "--sweep", "16k..4M"),
        ("--model", "glm-5.3-flash", "--device", "H200", "--length", "1M", "--fit", "devices"),
        ("--model", "toy", "--length", "64k", "--this-host"),
    ],
    ids=str,
)
def test_no_line_is_wider_than_100_columns(call, asked):
    lines = call(*asked).out.splitlines()
    assert lines and max(map(len, lines)) <= 100


def test_the_longest_sequence_is_shown_with_a_plan_that_fits(call):
    called = call(
        "--model", "glm-5.3-flash-4-layers", "--device", "H200", "--devices", "1", "--fit", "length"
    )
    assert called.code == 0
    assert "Fits the devices: 139.8 of 139.8 GiB" in called.out and "Does not fit" not in called.out
    assert re.search(r"Not judged: [\d.,]+ GiB of memory of each host \(--host-memory\)", called.out)
    longest, next_one = (
        int(re.search(rf"{before} ([\d,]+)", called.out)[1].replace(",", ""))
        for before in ("longest sequence is", "; at")
    )
    assert next_one == longest + 1024


def test_levers_are_named_above_the_limit_of_a_picture():
    plans = sweep(Job(REAL, 1024, kind="gpu"), Room(find_device("B200"), 64), [2**20, 2**21, 2**22])
    axes = Figure().subplots()
    _draw_memory(axes, plans)
    named = [text for text in axes.texts if "=" in text.get_text()]
    limit = find_device("B200").memory_gib
    switched_on = {setting(step).partition(".")[2] for plan in plans for step in plan.steps}
    lines = {line for text in named for line in text.get_text().split("\n")}
    assert (
        {line for line in lines if "tile" not in line} == {s.replace('"', "") for s in switched_on} != set()
    )
    assert all(text.get_position()[1] > limit and text.get_va() == "bottom" for text in named)
    tiles = [plan.job.memory.tile for plan in plans]
    changed = {place: tile for place, tile in enumerate(tiles) if place and tile != tiles[place - 1]}
    labelled = {text.get_position()[0]: text.get_text() for text in named if "tile" in text.get_text()}
    assert changed and labelled.keys() == changed.keys()
    assert all(f"tile = {tile}" in labelled[place] for place, tile in changed.items())


def test_a_picture_says_what_pale_bars_are_and_names_weights_that_are_half():
    room = Room(find_device("H200"), 8, host_bytes=2048 * GIB)
    plans = sweep(Job(REAL, 1024, trainable=("kda", "mla"), kind="gpu"), room, [2**20, 2**22])
    assert [plan.fits for plan in plans] == [True, False]
    memory, speed = Figure().subplots(2, 1)
    _draw_memory(memory, plans)
    names = [text.get_text() for text in memory.get_legend().get_texts()]
    assert "weights" in names and names[-1] == "pale: does not fit"
    _draw_memory(speed, plans[:1])
    assert "pale: does not fit" not in [text.get_text() for text in speed.get_legend().get_texts()]


def test_a_picture_of_what_does_not_fit_has_no_speeds(call, tmp_path):
    asked = ("--model", "glm-5.3-flash", "--device", "H200", "--sweep", "16k..32k")
    assert call(*asked, "--picture", "none.svg").code == 3
    svg = (tmp_path / "none.svg").read_text()
    assert "nothing fits" in svg and "\N{MINUS SIGN}0.0" not in svg


@pytest.mark.parametrize("option", ["--picture", "--write"])
def test_a_folder_that_is_missing_is_said_before_anything_is_computed(call, monkeypatch, option):
    def never(*_: object) -> None:
        raise AssertionError("computed")

    for name in ("sweep", "search"):
        monkeypatch.setattr(f"longstrand.cli.plan_answers.{name}", never)
    question = ("--sweep", "1k..2k") if option == "--picture" else ("--length", "1k")
    called = call("--model", "toy", *question, option, "/missing/a.svg")
    assert called.code == 2
    assert (
        called.err
        == f"error: {option} /missing/a.svg: /missing is no folder; make it, or choose another path\n"
    )


def test_more_devices_are_no_remedy_where_states_between_ranks_are_what_is_too_much(call):
    called = call("--model", "glm-5.3-flash", "--device", "H200", "--length", "1M", "--devices", "100000")
    assert called.code == 3 and "largest: KDA's maps and states" in called.err
    assert "more or larger devices" not in called.err
    assert "take fewer context ranks" in called.err and called.err.endswith("or a shorter length\n")
    assert call("--model", "glm-5.3-flash", "--device", "H200", "--length", "1M", "--devices", "64").code == 0


def test_the_longest_sequence_says_what_disk_it_takes_where_none_is_judged(call, tight):
    asked = ("--model", "toy", "--device", tight, "--fit", "length", "--host-memory", "8")
    plan = json.loads(call(*asked, "--json").out)
    taken = plan["files"]["bytes"] / GIB
    assert taken > 1
    last = " ".join(call(*asked).out.split()).rpartition("The longest sequence")[2]
    said = re.search(r", with ([\d.,]+) GiB of disk per host, not judged \(--host-disk\)\.$", last)
    assert float(said[1].replace(",", "")) == pytest.approx(taken, rel=0.01)
    assert "not judged" not in call(*asked, "--host-disk", "100").out.rpartition("The longest")[2]


def test_a_sweep_has_a_row_per_length_and_a_picture(call, tight, tmp_path):
    called = call("--model", "toy", "--device", tight, "--sweep", "16k..4M", "--picture", "sweep.svg")
    assert called.code == 0
    for length in ("16k", "32k", "64k", "128k", "256k", "512k", "1M", "2M", "4M"):
        assert sum(line.split()[:1] == [length] for line in called.out.splitlines()) == 1
    svg = (tmp_path / "sweep.svg").read_text()
    assert svg.lstrip().startswith("<?xml") and "layer inputs" in svg and "Tokens per second" in svg
    assert call("--model", "toy", "--device", tight, "--sweep", "16k..1M", "--picture", "s.png").code == 0
    assert (tmp_path / "s.png").read_bytes()[:4] == b"\x89PNG"
    rows = json.loads(call("--model", "toy", "--device", tight, "--sweep", "16k..1M", "--json").out)
    assert [row["length"] for row in rows] == [16384 * 2**n for n in range(7)]
    alone = json.loads(call("--model", "toy", "--device", tight, "--length", "16k", "--json").out)
    assert set(alone) - set(rows[0]) == {"faster_with", "problems"}  # of many no room is spent
    before = (tmp_path / "s.png").read_bytes()
    refused = call("--model", "toy", "--sweep", "16k..32k", "--picture", "s.png")
    assert refused.code == 2 and "--picture s.png: exists, and is never overwritten" in refused.err
    assert (tmp_path / "s.png").read_bytes() == before


@pytest.mark.filterwarnings("error")
def test_a_picture_is_drawn_without_a_warning(call):
    assert call(*FLASH, "--sweep", "16k..4M", "--picture", "s.svg").code == 0


def test_a_written_recipe_loads_says_why_and_plans_the_same(call, tight, tmp_path):
    asked = ("--model", "toy", "--device", tight, "--length", "2M", "--host-memory", "64")
    called = call(*asked, "--write", "r.toml", "--json")
    assert called.code == 0
    plan = json.loads(called.out)
    recipe = load_recipe(tmp_path / "r.toml")
    assert recipe.memory.model_dump(exclude_none=True) == plan["memory"]
    assert recipe.parallel.model_dump(exclude_none=True) == plan["parallel"]
    assert (recipe.data.length, recipe.run.dtype) == (2**21, "bfloat16")
    text = (tmp_path / "r.toml").read_text()
    assert plan["levers"]
    assert text.count("# plan: ") == len(plan["levers"])
    again = json.loads(call("r.toml", "--device", tight, "--host-memory", "64", "--json").out)
    assert again["device_bytes"] == plan["device_bytes"] and again["fits"]
    told = re.search(r"#   longstrand plan (.+)\n", text)[1].split()
    assert told == ["r.toml", "--device", tight, "--host-memory", "64"]
    assert json.loads(call(*told, "--json").out)["device_bytes"] == plan["device_bytes"]
    assert 'model.path = "FOLDER"' in text and "data.tokenizer where the model has its own" in text
    refused = call(*asked, "--write", "r.toml")
    assert refused.code == 2 and "exists, and is never overwritten" in refused.err
    assert (tmp_path / "r.toml").read_text() == text


@pytest.mark.parametrize(
    ("groups", "indexer"), [("kda,mla", "frozen"), ("mla,indexer", "sparse"), ("indexer", "warmup")]
)
def test_groups_that_learn_are_written_as_a_recipe_must_say_them(call, groups, indexer):
    asked = ("--model", "toy", "--length", "4k", "--trainable", groups)
    some = json.loads(call(*asked, "--write", "r.toml", "--json").out)
    recipe = load_recipe("r.toml")
    assert (",".join(recipe.train.trainable), recipe.train.indexer) == (groups, indexer)
    whole = json.loads(call("--model", "toy", "--length", "4k", "--json").out)
    assert sum(t["bytes"] for t in some["phases"]["start"]) < sum(
        t["bytes"] for t in whole["phases"]["start"]
    )


def test_a_recipe_that_fits_is_written_as_it_is(call, tmp_path):
    assert call("human_x_65k", "--set", "train.betas=[0.9, 0.99]", "--write", "same.toml").code == 0
    assert load_recipe("same.toml") == load_recipe("human_x_65k", ["train.betas=[0.9, 0.99]"])


def test_a_recipe_that_does_not_is_written_with_what_would(call, tight, tmp_path):
    asked = ("human_x", "--set", "data.length=2M", "--device", tight, "--host-memory", "64")
    assert call(*asked, "--write", "fits.toml").code == 3
    before, after = load_recipe("human_x", ["data.length=2M"]), load_recipe("fits.toml")
    assert after.model_copy(update={"memory": before.memory, "parallel": before.parallel}) == before
    assert after.memory != before.memory
    assert call("fits.toml", "--device", tight, "--host-memory", "64").code == 0


def test_a_shape_without_a_file_gets_one_beside_its_recipe(call, tmp_path):
    asked = ("--model", "glm-5.3-flash-4-layers", "--device", "H200", "--length", "64k", "--write", "r.toml")
    assert call(*asked).code == 0
    assert load_recipe(tmp_path / "r.toml").model.config == "r-config.json"
    assert json.loads((tmp_path / "r-config.json").read_text())["num_hidden_layers"] == 4
    assert call("r.toml", "--device", "H200").code == 0


def test_a_written_config_is_one_that_train_reads(call, tmp_path):
    assert call("--model", "toy", "--length", "4k", "--write", "r.toml").code == 0
    assert load_recipe(tmp_path / "r.toml").model.config == "toy"
    call("--model", "glm-5.3-flash-4-layers", "--device", "H200", "--length", "4k", "--write", "s.toml")
    config = json.loads((tmp_path / "s-config.json").read_text())
    small = {"hidden_size": 32, "vocab_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    small |= {
        "linear_num_heads": 2,
        "linear_head_dim": 8,
        "n_routed_experts": 8,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
    }
    small |= {"intermediate_size": 16, "moe_intermediate_size": 8, "pad_token_id": None}
    (tmp_path / "small.json").write_text(json.dumps(config | small))
    assert len(load_model(tmp_path / "small.json").layers) == 4


def test_nothing_is_written_for_what_does_not_fit(call, tmp_path):
    called = call("--model", "glm-5.3-flash", "--device", "L40S", "--length", "64k", "--write", "r.toml")
    assert called.code == 3 and not (tmp_path / "r.toml").exists()


def test_factors_of_finished_runs_change_the_seconds(call, tmp_path):
    asked = ("human_x_65k", "--set", "run.threads=1", "--set", "kernels.cpu=portable")
    before = json.loads(call(*asked, "--json").out)["seconds"]
    origin = {"device": "CPU", "device_kind": "cpu", "form": "portable", "dtype": "float32"}
    origin |= {"ranks": 1, "threads": 1}
    record = {"version": 2, "fitted_on": origin, "determined": ["scores", "experts"]}
    record["factors"] = {term["name"]: 2.0 for term in before["terms"]}
    (tmp_path / "mine.json").write_text(json.dumps(record))
    asked = (*asked, "--calibrated", "mine.json")
    called = call(*asked, "--json")
    after = json.loads(called.out)
    assert called.err == "" and after["calibrated"]["fitted_on"] == origin
    assert after["calibrated"]["file"] == "mine.json"
    assert after["seconds"]["total"] == pytest.approx(2 * before["total"], rel=0.01)
    evidence = {term["name"]: term["evidence"] for term in after["seconds"]["terms"]}
    measured = {name for name, text in evidence.items() if text.startswith("measured: 2 x the estimate")}
    assert measured == {"scores", "experts"}
    for term in before["terms"]:  # as well known as without a calibration
        kept = evidence[term["name"]].startswith(term["evidence"] + "; scaled by 2 (")
        assert kept == (term["name"] not in measured)
    table = " ".join(call(*asked).out.split())
    assert "calibrated by mine.json, fitted on CPU, portable ops, float32, 1 rank of 1 thread" in table
    elsewhere = call(*asked, "--set", "run.threads=2", "--json")
    assert elsewhere.code == 0 and "fitted on 1 rank of 1 thread" in elsewhere.err
    assert not any(
        t["evidence"].startswith("measured") for t in json.loads(elsewhere.out)["seconds"]["terms"]
    )
    refused = call("--model", "toy", "--length", "64k", "--device", "H200", "--calibrated", "mine.json")
    assert refused.code == 2 and "and asked for H200 (gpu), portable ops, bfloat16, 1 rank" in refused.err


def test_a_calibration_is_printed_as_json_too(call, tmp_path):
    """Three runs, twice as slow as planned throughout."""
    for length in (4, 16, 48):
        run = tmp_path / str(length)
        run.mkdir()
        terms = [
            {"name": "projections", "seconds": 1.0 * length, "why": "", "evidence": ""},
            {"name": "scores", "seconds": 0.05 * length**2, "why": "", "evidence": ""},
        ]
        plan = {"device": "CPU", "device_kind": "cpu", "form": "native", "dtype": "float32", "ranks": 1}
        plan |= {"threads": 1, "tokens_per_step": 100 * length, "seconds": {"terms": terms}, "memory": None}
        plan |= {"version": 1, "problems": []}
        (run / "plan.json").write_text(json.dumps(plan))
        taken = {"tokens": 100 * length, "cpu_seconds": 2.0 * length + 0.1 * length**2}
        (run / "metrics.jsonl").write_text(json.dumps(taken) + "\n")
    called = call("--calibrate", "4", "16", "48", "--json", "--write", "f.json")
    assert called.code == 0 and json.loads(called.out) == json.loads((tmp_path / "f.json").read_text())
    assert json.loads(called.out)["factors"] == pytest.approx({"projections": 2.0, "scores": 2.0}, rel=0.02)
    shown = call("--calibrate", "4", "16", "48")
    assert "CPU, native ops, float32, 1 rank of 1 thread" in shown.out and "-50.0%" in shown.out
    refused = call("--calibrate", "4", "16", "48", "--write", "f.json")
    assert refused.code == 2 and "exists, and is never overwritten" in refused.err
    refused = call("--calibrate", "nowhere", "elsewhere")
    assert refused.code == 2 and "nowhere" in refused.err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("memory_gib = -1", "memory_gib = -1"),
        ("memory_gib = 'much'", "memory_gib = 'much'"),
        ("memory_gb = 80", "memory_gb"),
        ("bfloat16_tflops = 0.0", "bfloat16_tflops = 0.0"),
        ("devices_per_host = 0", "devices_per_host = 0"),
        ("kind = 'tpu'", "kind = 'tpu'"),
        ("broken", "not valid TOML"),
    ],
)
def test_a_device_of_ones_own_names_what_is_wrong(call, tmp_path, change, says):
    key = change.partition(" =")[0]
    lines = [line for line in TIGHT.format(gib=80.0).splitlines() if not line.startswith(f"{key} ")]
    (tmp_path / "wrong.toml").write_text("\n".join([*lines, change]))
    called = call("--model", "toy", "--length", "64k", "--device", "wrong.toml")
    assert called.code == 2 and says in called.err and called.err.count("\n") == 1


def test_a_device_that_lacks_a_number_says_which(call, tmp_path):
    (tmp_path / "lacks.toml").write_text(TIGHT.format(gib=80.0).replace("peer_gb_per_second = 20.0\n", ""))
    called = call("--model", "toy", "--length", "64k", "--device", "lacks.toml")
    assert called.code == 2 and "peer_gb_per_second" in called.err


def test_host_memory_is_gib(call):
    plan = json.loads(call("--model", "toy", "--length", "64k", "--host-memory", "4", "--json").out)
    assert plan["limits_bytes"]["host"] == 4 * GIB
    assert plan["device"] == find_device("cpu").name


COMMANDS = [
    [*FLASH, "--length", "1M"],
    [*FLASH, "--sweep", "16k..4M"],
    ["--model", "glm-5.3-flash-4-layers", "--device", "H200", "--devices", "8", "--fit", "length"],
    ["--model", "glm-5.3-flash", "--device", "B200", "--length", "4M", "--fit", "devices"],
    ["human_x"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command[-3:]))
def test_it_answers_within_two_seconds_without_torch(command, tmp_path):
    code = (
        "import sys\nfrom longstrand.cli import main\nsys.argv = ['longstrand', 'plan', *sys.argv[1:]]\n"
        "try:\n    main()\nexcept SystemExit as ended:\n    assert not ended.code, ended.code\n"
        "assert 'torch' not in sys.modules"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code, *command], cwd=tmp_path, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Of its own: other work on the machine stretches what a clock would say.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2
