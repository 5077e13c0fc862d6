"""A host before a run: exact pinned blocks, what another allocator would take, and refusals with numbers."""

import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from planned import REAL, TOY, small_room, toy_job, with_memory, with_ranks

from longstrand.errors import UserError
from longstrand.model import Model
from longstrand.plan.devices import GIB, find_device
from longstrand.plan.host import (
    Machine,
    check_host,
    descriptors_of,
    file_shortages,
    host_needs,
    pinned_by,
    power_of_two,
    shortages,
    this_machine,
)
from longstrand.plan.job import Job
from longstrand.plan.room import PROCESS_BYTES, Room
from longstrand.plan.terms import total

PLENTY = Machine(10**18, "the memory of this machine")


def test_a_block_of_two_and_a_quarter_gib_becomes_four_in_an_allocator_that_rounds():
    assert power_of_two(int(2.25 * GIB)) == 4 * GIB
    assert power_of_two(4 * GIB) == 4 * GIB
    assert power_of_two(4 * GIB + 1) == 8 * GIB


def test_what_a_rank_pins_is_exact_and_shown_beside_what_rounding_would_take():
    # 73,728 tokens a rank: 32 KiB each are the 2.25 GiB of a stream.
    job = with_memory(with_ranks(Job(REAL, 8 * 73_728), context=8), offload="host")
    pinned = pinned_by(job)
    assert pinned is not None
    # The inputs of 44 layers, the middle of one's way back, since ranks share the sequence, and 9/16 GiB of mean.
    assert pinned.num_streams == 45
    assert pinned.exact == 45 * 2.25 * GIB + 0.5625 * GIB
    assert pinned.rounded == 45 * 4 * GIB + 1 * GIB
    assert pinned_by(with_memory(job, offload="disk")) is None


@pytest.mark.parametrize("tokens", [3, 1000, 2**15 - 1, 2**15, 2**15 + 1])
@pytest.mark.parametrize("context", [1, 2])
def test_a_block_that_is_rounded_is_never_smaller_than_an_exact_one(tokens, context):
    """Tiles of 7 tokens take whole pages: 4 x 128 values of 4 bytes each are 3.5 pages, the mean's less than one."""
    job = with_memory(with_ranks(toy_job(context * tokens), context=context), offload="host", tile=7)
    pinned = pinned_by(job)
    assert pinned is not None
    assert pinned.rounded >= pinned.exact
    if tokens == 1000 and context == 1:  # 143 tiles, 4 pages of a stream and 1 of the mean
        per_stream = 143 * 4 * 4096
        assert pinned.exact == pinned.num_streams * per_stream + 143 * 4096
        assert pinned.rounded == pinned.num_streams * 4 * 2**20 + 2**20


def test_a_host_holds_what_all_of_its_ranks_do():
    job = with_memory(with_ranks(Job(REAL, 2**20), context=64), offload="host", optimizer="host")
    needs = host_needs(job, Room(find_device("B200"), 64))
    assert needs.ranks == 8
    pinned = pinned_by(job)
    assert pinned is not None
    assert total(needs.memory) >= 8 * (pinned.exact + PROCESS_BYTES["gpu"])


def test_every_shortage_names_setting_value_rule_and_remedy():
    job = with_memory(with_ranks(toy_job(2**20), context=4), offload="host")
    needs = host_needs(job, small_room(8 * GIB, 4))
    assert shortages(needs, PLENTY) == []
    tight = Machine(
        2**20, "the limit of this cgroup (/sys/fs/cgroup/memory.max)", open_files=20, locked_bytes=4096
    )
    memory, pinned, files = shortages(needs, tight)
    assert "4 ranks here need" in memory and "the limit of this cgroup" in memory and "is 1 MiB" in memory
    assert 'memory.offload = "host"' in pinned and "ulimit -l" in pinned
    assert "may have 20 (ulimit -n)" in files and f"about {needs.descriptors}" in files


def test_slack_lets_through_what_would_fit_by_a_little_less():
    needs = host_needs(toy_job(65536), Room(find_device("CPU"), 1, host_bytes=GIB))
    barely = replace(PLENTY, memory_bytes=int(total(needs.memory) / 1.05))
    assert shortages(needs, barely) and not shortages(needs, barely, slack=0.1)


def test_disks_are_judged_by_what_is_free_on_them(tmp_path, monkeypatch):
    job = with_memory(toy_job(2**20), offload="disk")
    needs = host_needs(job, small_room(8 * GIB))
    spooled, kept = total(needs.files), 3 * needs.checkpoint_bytes
    assert spooled > 0 and kept > 0
    real = os.statvfs(tmp_path)
    block = real.f_frsize

    def with_free(num_bytes: int) -> list[str]:
        free = os.statvfs_result((*real[:4], num_bytes // block, *real[5:]))
        monkeypatch.setattr(os, "statvfs", lambda _: free)
        return file_shortages(needs, tmp_path / "spool", tmp_path / "run", keep=2)

    assert with_free(spooled + kept + block) == []
    (only,) = with_free(spooled + block)  # one disk for both
    assert only.startswith(f"run.out = {tmp_path / 'run'}: train.keep = 2") and "beside a spool of" in only
    spool, _ = with_free(spooled - block)
    assert spool.startswith(f"memory.spool = {tmp_path / 'spool'}") and "make room" in spool


def test_no_file_may_be_larger_than_the_shell_allows():
    """Two ranks of 1/2 Mi tokens each write 4 x 128 values of 4 bytes per token and stream, and 128 of the mean."""
    job = with_memory(with_ranks(toy_job(2**20), context=2), offload="disk")
    needs = host_needs(job, Room(find_device("CPU"), 2))
    kept_inputs = TOY.num_hidden_layers - 1  # of layer 0 none: the embedding gives it again
    middles = 1  # of a layer that ranks share, between the two stages of its way back
    spool = 2**19 * 4 * ((kept_inputs + middles) * 4 * 128 + 128)
    assert shortages(needs, replace(PLENTY, file_bytes=spool)) == []
    (said,) = shortages(needs, replace(PLENTY, file_bytes=spool - 1))
    assert said.startswith("size of a file: each rank writes its spool of 4.25 GiB") and "(ulimit -f)" in said
    kept = host_needs(toy_job(2**20), Room(find_device("CPU"), 1))
    values = {name: each.numel() for name, each in Model(TOY).named_parameters()}
    frozen = sum(number for name, number in values.items() if "indexer" in name)
    checkpoint = 12 * sum(values.values()) - 8 * frozen
    assert "its part of a checkpoint" in shortages(kept, replace(PLENTY, file_bytes=checkpoint // 2))[0]
    assert shortages(kept, replace(PLENTY, file_bytes=int(1.01 * checkpoint))) == []  # and buffers


def test_a_size_below_a_gib_is_said_in_a_unit_in_which_it_can_be_compared():
    """`ulimit -f 1000`, in blocks of 1,024 bytes, and a checkpoint of the toy: 12 bytes per trained value, 15 MB."""
    needs = host_needs(toy_job(2**11), Room(find_device("CPU"), 1))
    (said,) = shortages(needs, replace(PLENTY, file_bytes=1000 * 1024))
    assert (
        "its part of a checkpoint of 14 MiB into one, and a process may write 1,000 KiB (ulimit -f)" in said
    )
    (said,) = shortages(needs, replace(PLENTY, memory_bytes=2**20))
    assert "the memory of this machine is 1 MiB" in said and "0.00" not in said


def test_a_process_may_map_what_its_tensors_take():
    needs = host_needs(toy_job(2**22), Room(find_device("CPU"), 1))
    least = 2**22 * 4 * (TOY.num_hidden_layers - 1) * 4 * 128  # layer inputs alone
    (said,) = shortages(needs, replace(PLENTY, address_bytes=least))
    assert said.startswith("address space: each rank maps at least") and "(ulimit -v)" in said
    assert shortages(needs, replace(PLENTY, address_bytes=4 * least)) == []


def test_descriptors_cover_what_real_ranks_open():
    """Counted on processes of this project's own: 9 in one, at most 26, 30 and 50 in two to four on these axes."""
    for counted, axes in (
        (9, {}),
        (26, {"context": 2}),
        (30, {"context": 2, "expert": 2}),
        (32, {"context": 4, "expert": 4}),
        (50, {"data": 2, "context": 2, "expert": 2}),
    ):
        assert counted <= descriptors_of(with_ranks(toy_job(), **axes), 1) <= counted + 60
    assert descriptors_of(with_ranks(toy_job(), context=64, expert=32), 1) < 1024  # a common limit


def test_this_machine_is_read_from_where_the_kernel_says_it():
    machine = this_machine()
    kilobytes = next(
        int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line
    )
    assert 0 < machine.memory_bytes <= kilobytes * 1024
    assert machine.open_files == resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_a_run_that_this_host_has_no_room_for_is_refused_with_numbers():
    room = Room(find_device("CPU"), 1)
    check_host(toy_job(65536), room, num_sources=1)
    with pytest.raises(UserError, match=r"1 rank here need [\d,.]+ GiB, and the .* is [\d.]+ GiB"):
        check_host(toy_job(2**31), room, num_sources=1)


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (
            "NOFILE, (40, 40)",
            "open files: each rank needs about 49 descriptors, and a process may have 40 (ulimit -n)",
        ),
        ("FSIZE, (2**20, 2**20)", "into one, and a process may write 1 MiB (ulimit -f)"),
    ],
)
@pytest.mark.parametrize("command", [("train",), ("plan",)])
def test_train_and_plan_refuse_it_before_the_first_step(command, limit, said, tmp_path):
    (tmp_path / "x.fa").write_text(">a\n" + "ACGT" * 2000 + "\n")
    (tmp_path / "r.toml").write_text(
        '[run]\nout = "run"\nthreads = 1\n[model]\nconfig = "toy"\n[kernels]\ncpu = "portable"\n'
        '[data]\nlength = 4096\ncache = "cache"\n[[data.sources]]\npath = "x.fa"\n[train]\nsteps = 1\nlr = 1e-3\n'
    )
    code = (
        f"import resource, sys; resource.setrlimit(resource.RLIMIT_{limit}); sys.argv[0] = 'longstrand'; "
        "from longstrand.cli import main; main()"
    )
    called = [sys.executable, "-c", code, *command, "r.toml"]
    ended = subprocess.run(called, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == (2 if command == ("train",) else 3)
    assert said in ended.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


LEAST_TO_START = 850_000
"""KiB: with 850,000 a run of the toy on 2,048 tokens began and ended without memory, with 950,000 it ended well."""


@pytest.mark.parametrize("kib", [400_000, 500_000, 600_000, 700_000, LEAST_TO_START])
def test_a_plan_refuses_an_address_space_in_which_no_run_ends_well(kib):
    needs = host_needs(toy_job(2048), Room(find_device("CPU"), 1))
    (said,) = shortages(needs, replace(PLENTY, address_bytes=kib * 1024))
    assert said.startswith("address space: each rank maps at least 8") and "MiB (ulimit -v)" in said
    assert shortages(needs, replace(PLENTY, address_bytes=950_000 * 1024)) == []


@pytest.mark.parametrize("kib", [300_000, 450_000, 520_000, 600_000, 635_000, 680_000, 700_000])
def test_no_library_is_loaded_without_room_to_be_mapped(kib, tmp_path):
    (tmp_path / "x.fa").write_text(">a\n" + "ACGT" * 2000 + "\n")
    (tmp_path / "r.toml").write_text(
        '[run]\nout = "run"\nthreads = 1\n[model]\nconfig = "toy"\n[data]\nlength = 2048\ncache = "cache"\n'
        '[[data.sources]]\npath = "x.fa"\n[train]\nsteps = 1\nlr = 1e-3\n'
    )
    ended = subprocess.run(
        [sys.executable, "-m", "longstrand", "train", "r.toml"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (kib * 1024, kib * 1024)),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2  # before the import, where some libraries abort
    assert "Traceback" not in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("error: ") and "(ulimit -v)" in ended.stderr
