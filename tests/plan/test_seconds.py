"""Seconds of a step: what they rest on, and how they answer to length, levers, ranks and devices."""

import dataclasses
import json
import re
import time
from importlib import resources

import pytest

from longstrand.architecture import Architecture
from longstrand.config import MemorySection, ParallelSection
from longstrand.plan.devices import devices, find_device
from longstrand.plan.job import Job
from longstrand.plan.links import offload_work
from longstrand.plan.passes import Passes
from longstrand.plan.rates import CPU_BFLOAT16, CPU_NATIVE, CPU_PORTABLE, GPU, per_second, share_of
from longstrand.plan.seconds import plan_seconds
from longstrand.wording import operations


def _shape(name):
    return Architecture.from_hf(
        json.loads((resources.files("longstrand") / f"configs/{name}.json").read_text())
    )


GLM, TOY = _shape("glm-5.3-flash"), _shape("toy")
B200, CPU = find_device("B200"), find_device("CPU")
SPREAD = ParallelSection(context=64, expert=32)


def _by_name(job, device, fitted=None):
    return {term.name: term for term in plan_seconds(job, device, fitted).terms}


@pytest.mark.parametrize("name", list(devices()))
def test_a_longer_sequence_takes_longer_on_every_device(name):
    totals = [plan_seconds(Job(GLM, length, parallel=SPREAD), devices()[name]).total for length in _lengths()]
    assert totals == sorted(totals)
    assert len(set(totals)) == len(totals)


def _lengths():
    return [1000, 2**14, 2**14 + 1, 2**17, 2**20, 2**22]


def test_time_per_token_grows_by_scores_alone():
    """The index scores of 4 heads of 32 at 0.75 x 107 GFLOP/s; all else is the same for each token."""
    short, long = (
        Job(TOY, 2**17, dtype="float32", form="native"),
        Job(TOY, 2**18, dtype="float32", form="native"),
    )
    per_token = [plan_seconds(job, CPU).total / job.length for job in (short, long)]
    pools = (2**18 - 2**17) / 2 / 4
    scores = 2 * 4 * 32 * pools / (CPU_NATIVE["scores"].part * 0.107e12)
    assert per_token[1] - per_token[0] == pytest.approx(scores, rel=0.02)


def test_every_term_says_what_it_rests_on():
    job = Job(GLM, 2**20, parallel=SPREAD, memory=MemorySection(offload="host", optimizer="host"))
    found = plan_seconds(job, B200).terms
    assert all(term.evidence.startswith(("estimated: ", "measured: ")) and term.why for term in found)
    # Nothing was measured on a GPU; only the disk's rate was, on a CPU.
    assert {term.name for term in found if term.evidence.startswith("measured")} == set()
    assert "because" in _by_name(job, B200)["projections"].evidence
    toy = Job(TOY, 2**14, dtype="float32", form="native")
    assert _by_name(toy, CPU)["projections"].evidence.startswith("measured: one core")
    for form in ("portable", "native"):  # no kernel takes float64
        double = dataclasses.replace(toy, dtype="float64", form=form)
        evidence = {name: term.evidence for name, term in _by_name(double, CPU).items()}
        assert evidence["projections"].startswith("estimated: the part that float32 reaches")
        assert "plain torch" in evidence["scores"] and not evidence["scores"].startswith("measured")
    half = dataclasses.replace(toy, dtype="bfloat16")
    assert "bfloat16" in _by_name(half, CPU)["projections"].evidence
    assert _by_name(half, CPU)["scores"].evidence.startswith("estimated: the part that float32 reaches")


def test_what_a_disk_leaves_over_beside_work_is_an_estimate():
    quick = CPU.model_copy(update={"float32_tflops": 1e3, "memory_gb_per_second": 1e6})
    job = Job(TOY, 2**16, dtype="float32", form="native", memory=MemorySection(offload="disk"))
    left = _by_name(job, quick)["offload to disk"]
    assert left.evidence.startswith("estimated: ") and "0.5 to 0.9 GB/s" in left.evidence


def test_every_table_has_every_kind_of_work():
    tables = (GPU, CPU_NATIVE, CPU_BFLOAT16, CPU_PORTABLE)
    assert all(set(table) == set(GPU) for table in tables)
    parts = [share for table in tables for share in table.values()]
    assert all(0 < share.part <= 1 for share in parts if share.of in ("narrow", "float32", "memory", "link"))


def test_factors_of_a_calibration_multiply_their_terms():
    job = Job(GLM, 2**18, parallel=SPREAD)
    plain, fitted = _by_name(job, B200), _by_name(job, B200, {"scores": 0.5, "no such term": 9.0})
    assert fitted["scores"].seconds == pytest.approx(plain["scores"].seconds / 2)
    assert fitted["scores"].evidence == plain["scores"].evidence
    assert fitted["experts"] == plain["experts"]


def test_copies_that_overlap_count_only_beyond_the_work():
    host = MemorySection(offload="host")
    job = Job(GLM, 2**20, parallel=SPREAD, memory=host)
    work = offload_work(Passes(job))
    assert work is not None
    copies = work.amount / per_second("host link", job, B200)
    plain = plan_seconds(Job(GLM, 2**20, parallel=SPREAD), B200).total
    assert copies < plain
    assert plan_seconds(job, B200).total == pytest.approx(plain)
    slow = B200.model_copy(update={"host_gb_per_second": 0.1})
    assert plan_seconds(job, slow).total == pytest.approx(copies * 550)  # 55 GB/s became 0.1


def test_an_exchange_within_a_host_takes_its_faster_links():
    inside, across = (Job(GLM, 2**18, parallel=ParallelSection(context=ranks)) for ranks in (8, 16))
    assert per_second("link", inside, B200, 8) == pytest.approx(0.7 * 900e9)
    assert per_second("link", across, B200, 16) == pytest.approx(0.7 * 50e9)
    names = {"KDA summaries", "DSA latents", "weights gathered", "gradients reduced"}
    assert names <= set(_by_name(inside, B200))
    assert "MoE tokens" not in _by_name(inside, B200)


def test_threads_of_a_cpu_share_its_work():
    one = Job(TOY, 2**14, dtype="float32", form="native")
    two = dataclasses.replace(one, threads=2)
    for kind in ("scores", "projections"):
        assert _by_name(one, CPU)[kind].seconds == pytest.approx(2 * _by_name(two, CPU)[kind].seconds)
    assert _by_name(one, CPU)["starts"].seconds == _by_name(two, CPU)["starts"].seconds


def test_kernels_of_a_cpu_are_faster_than_plain_torch():
    native, portable = (Job(TOY, 2**14, dtype="float32", form=form) for form in ("native", "portable"))
    assert plan_seconds(portable, CPU).total > 1.5 * plan_seconds(native, CPU).total


def test_the_toy_on_one_core_is_within_a_third_of_what_was_measured():
    """B's figures on two threads: 8,521 tokens/s at 16,384 tokens and 7,699 at 65,536, by the CPU kernels."""
    for length, measured in ((16_384, 8521), (65_536, 7699)):
        job = Job(TOY, length, dtype="float32", form="native", threads=2)
        assert plan_seconds(job, CPU).tokens_per_second(job) == pytest.approx(measured, rel=0.34)


def test_a_step_of_the_real_model_is_planned_at_once():
    began = time.perf_counter()
    plan_seconds(Job(GLM, 2**20, parallel=SPREAD), B200)
    assert time.perf_counter() - began < 0.5


def test_numbers_of_a_plan_have_units_and_no_exponents():
    assert [operations(value) for value in (62.69e9, 1.234e13, 999.6e9, 5.0, 2.5e21)] == [
        "62.7 GFLOP",
        "12.3 TFLOP",
        "1 TFLOP",
        "5 FLOP",
        "2,500 EFLOP",
    ]
    for length in (1000, 2**20, 2**34):
        memory = MemorySection(offload="disk")
        job = Job(GLM, length, parallel=SPREAD, memory=memory, data_skew=3.0)
        for term in plan_seconds(job, B200, {"scores": 12345.678}).terms:
            assert not re.search(r"\de[+-]?\d", term.why + term.evidence), (term.why, term.evidence)


def test_ranks_of_a_host_share_its_disk():
    """1.5 GB/s: alone, and an eighth or a quarter of it; where ranks of two hosts are spread, those of one share."""
    disk = MemorySection(offload="disk")
    one, four = (Job(TOY, 2**16, memory=disk, parallel=ParallelSection(context=n)) for n in (1, 4))
    spread = Job(GLM, 2**20, memory=disk, parallel=SPREAD)
    assert per_second("disk", one, CPU) == 1.5e9
    assert per_second("disk", four, CPU) == 1.5e9 / 4  # all on this machine
    assert per_second("disk", one, B200) == 1.5e9
    assert per_second("disk", spread, B200) == 1.5e9 / 8
    assert GPU["disk"].evidence.startswith("estimated: 1.5 GB/s, because ")
    assert all(table["disk"].evidence.startswith("measured: ") for table in (CPU_NATIVE, CPU_PORTABLE))
    half = dataclasses.replace(one, dtype="bfloat16", form="portable")
    assert share_of("disk", half, CPU).evidence == CPU_NATIVE["disk"].evidence


def test_a_calibrated_offload_is_a_multiple_of_what_was_left_over():
    """Runs are fitted to what their plans say, which is the copies' seconds less those of other work."""
    job = Job(GLM, 2**20, parallel=SPREAD, memory=MemorySection(offload="disk"))
    plain, fitted = _by_name(job, B200), _by_name(job, B200, {"offload to disk": 0.5, "scores": 3.0})
    assert plain["offload to disk"].seconds > 0
    assert fitted["offload to disk"].seconds == pytest.approx(plain["offload to disk"].seconds / 2)
