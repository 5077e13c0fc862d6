"""What a run measures of itself: memory and seconds by phase, beside what was planned."""

import json
import time
from types import SimpleNamespace

import pytest
import torch
from tiny_runs import metrics, recipe_in

from longstrand.config import load_recipe
from longstrand.errors import UserError
from longstrand.model import load_model
from longstrand.parallel import run_ranks
from longstrand.peak_memory import PeakMemory
from longstrand.plan.job import Job
from longstrand.plan.seconds import plan_seconds
from longstrand.train import planning
from longstrand.train.phases import Phase, Phases, _record
from longstrand.train.planning import plan_of, planned_device
from longstrand.train.sft import train

MIB = 2**20


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(recipe_in(tmp_path_factory.mktemp("phases"), "memory.tile=32"))


def _written(run):
    return json.loads((run / "memory.json").read_text())


def _static_bytes(run):
    """Weights and moments by hand: what the config's model takes, and two float32 values per parameter that learns."""
    model = load_model(run.parent / "tiny.json", torch.float32, seed=0)
    held = sum(tensor.nbytes for tensor in model.state_dict().values())
    trained = sum(parameter.numel() for parameter in model.parameters())
    return held, 4 * trained


def _counted(run, phase):
    found = _written(run)
    if found["not_counted"]:
        pytest.skip(found["not_counted"])
    return found["phases"][phase]["counted_bytes"] - found["baseline"]["counted_bytes"]


def test_a_step_begins_with_weights_and_moments_and_ends_with_gradients_beside_them(run):
    held, gradients = _static_bytes(run)
    beside = 16_000  # counters of AdamW, the sequences of a step
    assert 0 <= _counted(run, "start") - held - 2 * gradients < beside
    assert 0 <= _counted(run, "optimizer") - held - 3 * gradients < beside
    assert _counted(run, "backward") > _counted(run, "forward") > _counted(run, "start")
    assert _counted(run, "backward") > held + 3 * gradients


def test_every_phase_is_timed_and_the_phases_of_a_step_make_the_step(run):
    phases = _written(run)["phases"]
    assert {name: phase["times"] for name, phase in phases.items()} == {
        "start": 5,
        "forward": 10,  # two sequences a step
        "backward": 10,
        "optimizer": 5,
        "evaluate": 2,
        "save": 3,
    }
    lines = metrics(run)
    for key in ("seconds", "cpu_seconds"):
        parts = sum(phases[name][key] for name in ("forward", "backward", "optimizer"))
        steps = sum(line[key] for line in lines)
        assert 0.2 * steps < parts <= steps
    # What a step does after its optimizer is of no phase, and little.
    assert max(phase["resident_bytes"] for phase in phases.values()) + MIB >= max(
        line["peak_memory_bytes"] for line in lines
    )


def test_a_peak_belongs_to_the_phase_that_it_was_in():
    with PeakMemory(every_seconds=0.001) as memory:
        phases = Phases(memory, torch.device("cpu"))
        if phases.why_not is not None:
            pytest.skip(phases.why_not)
        phases.begin_step()
        torch.ones(10 * MIB).sum()  # 40 MiB of float32
        time.sleep(0.01)
        phases.end("forward")
        torch.ones(MIB).sum()
        phases.end("backward")
        with phases.of("save"):
            torch.ones(5 * MIB).sum()
        largest = phases.take()
        start = phases.found["start"].counted_bytes
        above = {name: found.counted_bytes - start for name, found in phases.found.items()}
        assert 40 * MIB <= above["forward"] < 41 * MIB
        assert 4 * MIB <= above["backward"] < 5 * MIB
        assert 20 * MIB <= above["save"] < 21 * MIB
        assert largest == max(found.resident_bytes for found in phases.found.values())
        assert phases.take() < largest + MIB
        phases.end("forward")
        assert phases.found["forward"].counted_bytes == start + above["forward"]
        assert phases.found["forward"].times == 2


def test_the_largest_rank_stands_in_the_file():
    base = Phase(100, 7)
    one = {"start": Phase(500, None, 1.0, 0.5, 3), "forward": Phase(900, 40, 2.0, 1.5, 3)}
    two = {"start": Phase(600, 30, 9.0, 9.0, 3), "forward": Phase(800, 50, 9.0, 9.0, 3)}
    found = _record([(base, one, None), (Phase(90, 9), two, "no compiler")])
    assert found["baseline"] == {"resident_bytes": 100, "counted_bytes": 9}
    assert found["phases"]["start"] == {
        "resident_bytes": 600,
        "counted_bytes": 30,
        "seconds": 1.0,
        "cpu_seconds": 0.5,
        "times": 3,
    }
    assert found["phases"]["forward"]["resident_bytes"] == 900
    assert found["phases"]["forward"]["counted_bytes"] == 50
    assert (found["ranks"], found["not_counted"]) == (2, "no compiler")


def _train(recipe):
    torch.set_num_threads(1)
    return train(recipe)


def test_two_ranks_measure_their_parts(run, tmp_path):
    (two, _) = run_ranks(
        2, _train, recipe_in(tmp_path, "memory.tile=32", "parallel.data=2"), start="fork", timeout=300
    )
    assert _written(two)["ranks"] == 2
    assert set(_written(two)["phases"]) == set(_written(run)["phases"])
    assert _written(two)["phases"]["forward"]["times"] == 5  # each rank has one of a step's two sequences
    held, gradients = _static_bytes(run)
    # Weights and moments are sharded over both; a row that does not divide lies on the first.
    assert 0.5 <= _counted(two, "start") / (held + 2 * gradients) < 0.6
    plan = json.loads((two / "plan.json").read_text())
    assert {"weights gathered", "gradients reduced"} <= {term["name"] for term in plan["seconds"]["terms"]}


def test_the_plan_of_a_run_is_that_of_its_recipe(run):
    plan = json.loads((run / "plan.json").read_text())
    recipe = recipe_in(run.parent, "memory.tile=32")
    assert plan["tokens_per_step"] == recipe.data.length * recipe.train.sequences_per_step
    assert plan["problems"] == []
    job = Job.of(
        recipe, load_model(run.parent / "tiny.json", torch.float32, seed=0).architecture, plan["form"]
    )
    terms = {term.name: term.seconds for term in plan_seconds(job, planned_device(torch.device("cpu"))).terms}
    assert {term["name"]: term["seconds"] for term in plan["seconds"]["terms"]} == pytest.approx(terms)
    assert list(plan["memory"]["phases"]) == ["start", "forward", "backward", "optimizer"]


def test_a_model_on_a_gpu_is_planned_as_on_a_gpu(tmp_path, monkeypatch):
    """With an allocator's slack, and with plain torch even where kernels are compiled for CPUs."""
    recipe, device = recipe_in(tmp_path), torch.device("cuda", 0)
    shape = load_model(tmp_path / "tiny.json", torch.float32, seed=0).architecture
    job = planning.job_of(recipe, shape, device)
    assert (job.kind, job.form) == ("gpu", "portable")
    monkeypatch.setattr(planning, "_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(planning, "_memory_bytes", lambda _: 143_771 * 2**20)
    plan = planning.plan_of(recipe, shape, device)
    assert (plan["device"], plan["device_kind"], plan["form"]) == ("H200", "gpu", "portable")
    assert "allocator slack" in {term["name"] for term in plan["memory"]["phases"]["backward"]}


def test_what_the_planner_refuses_is_written_and_ends_no_run(tmp_path, monkeypatch):
    def refuse(job):
        raise UserError("data.length = 96: too short to plan")

    monkeypatch.setattr(planning, "plan_memory", refuse)
    run = train(recipe_in(tmp_path, "train.steps=1", "evaluate.before=false"))
    plan = json.loads((run / "plan.json").read_text())
    assert plan["memory"] is None
    assert plan["problems"] == ["memory is not planned: data.length = 96: too short to plan"]
    assert "too short to plan" in (run / "log.txt").read_text()
    assert len(metrics(run)) == 1


def test_a_device_that_no_one_knows_has_bytes_and_no_seconds(run, monkeypatch):
    cuda = torch.device("cuda", 0)
    pretend_device(monkeypatch, "NVIDIA GTX 970", 3.9)
    plan = plan_of(
        recipe_in(run.parent), load_model(run.parent / "tiny.json", torch.float32).architecture, cuda
    )
    assert plan["seconds"] is None
    assert plan["form"] == "portable"
    assert "NVIDIA GTX 970 with 3.9 GiB is not one of B200" in plan["problems"][0]


def pretend_device(monkeypatch, name, gib):
    """A CUDA device as torch names and measures it."""
    properties = SimpleNamespace(total_memory=int(gib * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


@pytest.mark.parametrize(
    ("name", "gib", "known"),
    [
        ("NVIDIA H200", 140.4, "H200"),
        ("NVIDIA H200 NVL", 140.4, None),
        ("NVIDIA GH200 480GB", 94.5, None),
        ("NVIDIA B200", 178.4, "B200"),
        ("NVIDIA GB200", 184.0, None),
        ("NVIDIA H100 80GB HBM3", 79.1, "H100-80"),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 39.5, None),
        ("NVIDIA H100 PCIe", 79.1, None),
        ("NVIDIA H100 NVL", 93.1, None),
        ("NVIDIA A100-SXM4-80GB", 79.2, "A100-80"),
        ("NVIDIA A100-SXM4-40GB", 39.4, None),
        ("NVIDIA A100 80GB PCIe", 79.2, None),
        ("NVIDIA A100-PCIE-40GB", 39.4, None),
        ("NVIDIA L40S", 44.4, "L40S"),
        ("NVIDIA L40", 44.4, None),
        ("NVIDIA GeForce RTX 4090", 23.6, "RTX-4090"),
        ("NVIDIA GeForce RTX 4090 D", 23.6, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.9, None),
        ("NVIDIA GeForce RTX 5090", 31.4, "RTX-5090"),
    ],
)
def test_a_device_is_known_by_its_whole_name_and_its_memory(monkeypatch, name, gib, known):
    pretend_device(monkeypatch, name, gib)
    found = planned_device(torch.device("cuda", 0))
    assert (found.name if found else None) == known


def test_a_process_without_a_step_leaves_the_file_as_it_is(run):
    before = (run / "memory.json").read_text()
    train(load_recipe(run / "run.toml"), resume=True)
    assert (run / "memory.json").read_text() == before
