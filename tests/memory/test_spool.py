"""The file of a spool: made only where there is room, never another's, and gone whatever happens to the run."""

import errno
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from longstrand.bench._small_models import documents, model
from longstrand.data.pack import Pack
from longstrand.errors import RunFailed
from longstrand.memory import Levers
from longstrand.memory import spool as spools
from longstrand.memory.slots import Demand, SlottedStreams
from longstrand.memory.spool import Spool, remove_stale_spools
from longstrand.memory.tiles import PackLayout
from longstrand.peak_memory import resident_bytes

CPU = torch.device("cpu")
MIB = 2**20
HOLD = """
import sys, time, torch
from pathlib import Path
from longstrand.memory.spool import Spool
spool = Spool(Path(sys.argv[1]), 3 * 2**20, torch.device("cpu"))
spool.save(0, torch.ones(2**18), torch.float32).result()
print(spool.path, flush=True)
time.sleep(60)
"""
FULL = """
import resource, sys, torch
from longstrand.bench._small_models import model, pack
from longstrand.errors import RunFailed
from longstrand.memory import Levers
torch.set_num_threads(1)
trained = model("KDK")
logprobs = trained.token_logprobs(pack((40,)), levers=Levers(4, 1, "disk", sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    logprobs.sum().backward()
except RunFailed as error:
    print(error)
"""


def open_files():
    gc.collect()  # pipes to the processes of other tests
    return len(os.listdir("/proc/self/fd"))


def start(script, folder):
    return subprocess.Popen(
        [sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def passes(trained, folder, given=None):
    given = given or Pack.from_documents(documents((30,)))
    return trained.token_logprobs(given, levers=Levers(4, 1, "disk", str(folder)))


def test_a_spool_has_its_bytes_from_the_start_and_is_gone_when_closed(tmp_path):
    spool = Spool(tmp_path / "made" / "here", 3 * MIB, CPU)
    assert spool.path.stat().st_blocks * 512 >= 3 * MIB
    spool.close()
    spool.close()
    assert not spool.path.exists()


def test_a_killed_process_leaves_a_spool_that_the_next_one_finds_and_a_living_one_keeps_its_own(
    tmp_path, caplog
):
    process = start(HOLD, tmp_path)
    try:
        theirs = Path(process.stdout.readline().strip())
        with caplog.at_level(logging.WARNING):
            ours = Spool(tmp_path, MIB, CPU)
        assert theirs.exists() and ours.path != theirs and caplog.text == ""  # two runs share the folder
    finally:
        process.kill()
        process.wait()
    assert theirs.exists()
    with caplog.at_level(logging.WARNING):
        freed = remove_stale_spools(tmp_path)
    assert freed == 3 * MIB
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: removed 1 spool of killed runs and freed 3,145,728 bytes"
    ]
    assert [*tmp_path.iterdir()] == [ours.path]
    ours.close()


def test_opening_a_spool_removes_stale_ones_first_so_that_their_room_counts(tmp_path):
    process = start(HOLD, tmp_path)
    theirs = Path(process.stdout.readline().strip())
    process.send_signal(signal.SIGKILL)
    process.wait()
    spool = Spool(tmp_path, MIB, CPU)
    assert [*tmp_path.iterdir()] == [spool.path] != [theirs]
    spool.close()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_that_locks_nothing_is_refused_and_nothing_of_the_try_is_left(
    code, tmp_path, monkeypatch
):
    def refuse(file, operation):
        raise OSError(code, os.strerror(code))

    files = open_files()
    monkeypatch.setattr(spools.fcntl, "flock", refuse)
    with pytest.raises(RunFailed, match=f"cannot be made there .{os.strerror(code)}.; set memory.spool"):
        Spool(tmp_path, MIB, CPU)
    assert [*tmp_path.iterdir()] == [] and open_files() == files


def test_only_files_named_as_spools_are_taken_for_stale_ones(tmp_path):
    notes, link, pipe = (tmp_path / f"longstrand-{name}.spool" for name in ("notes", "1-1", "2-2"))
    notes.write_text("mine")
    link.symlink_to(notes)
    os.mkfifo(pipe)
    assert remove_stale_spools(tmp_path) == 0
    assert notes.read_text() == "mine" and link.is_symlink() and pipe.exists()


def test_a_folder_in_memory_is_said_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(spools, "_file_system", lambda folder: "tmpfs")
    spools._say_in_memory.cache_clear()
    for _ in range(2):
        Spool(tmp_path, 4096, torch.device("cpu")).close()
    said = [line for line in caplog.messages if "lives in memory" in line]
    assert len(said) == 1 and str(tmp_path) in said[0]


def test_the_kind_of_a_file_system_is_known(tmp_path):
    assert spools._file_system(Path("/proc")) == "proc"
    assert spools._file_system(tmp_path) not in ("", "proc")


def test_a_file_that_cannot_be_removed_is_closed_all_the_same(tmp_path, monkeypatch):
    files, spool = open_files(), Spool(tmp_path, MIB, CPU)

    def refuse(path, missing_ok=False):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(PermissionError):
        spool.close()
    assert open_files() == files


def test_the_file_is_allocated_without_direct_io_and_then_read_and_written_with_it(tmp_path, monkeypatch):
    plain, flags = os.posix_fallocate, {}

    def allocate(file, offset, num_bytes):
        flags["allocating"] = spools.fcntl.fcntl(file, spools.fcntl.F_GETFL)
        flags["file"] = file
        plain(file, offset, num_bytes)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    spool = Spool(tmp_path, MIB, CPU)
    after = spools.fcntl.fcntl(flags["file"], spools.fcntl.F_GETFL)
    spool.close()
    if not after & os.O_DIRECT:
        pytest.skip("this file system refuses direct I/O")
    assert not flags["allocating"] & os.O_DIRECT


def test_without_room_nothing_is_written_and_the_error_names_both_numbers(tmp_path):
    disk = os.statvfs(tmp_path)
    free = disk.f_bavail * disk.f_frsize
    with pytest.raises(
        RunFailed, match=r"needs [0-9,]{14,} bytes there, and [0-9,]+ are free; .*spool"
    ) as raised:
        Spool(tmp_path / "spool", free + 2**34, CPU)
    assert str(tmp_path / "spool") in str(raised.value)
    assert [*tmp_path.rglob("*.spool")] == []


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_write_that_fails_in_the_middle_ends_the_step_and_leaves_no_file(
    direction, code, tmp_path, monkeypatch
):
    """The writer is another thread; its error stands in this one, names file and bytes, and nothing hangs."""
    trained, plain, files = model("KDK"), os.pwritev, open_files()
    threads = threading.active_count()

    def fails(file, buffers, at):
        raise OSError(code, os.strerror(code))

    logprobs = passes(trained, tmp_path) if direction == "backward" else None
    monkeypatch.setattr(os, "pwritev", fails if direction == "backward" else fails_after(3, plain, fails))
    with pytest.raises(
        RunFailed, match=r"\.spool: 4,096 bytes at [0-9,]+ of [0-9,]+ cannot be written"
    ) as raised:
        passes(trained, tmp_path) if logprobs is None else logprobs.sum().backward()
    assert os.strerror(code) in str(raised.value) and "memory.spool" in str(raised.value)
    del raised
    assert [*tmp_path.iterdir()] == []
    assert (open_files(), threading.active_count()) == (files, threads)


def fails_after(number, plain, fails):
    calls = []

    def write(*arguments):
        calls.append(arguments)
        return plain(*arguments) if len(calls) <= number else fails(*arguments)

    return write


def test_a_disk_that_takes_no_more_in_the_middle_of_a_step_is_one_line(tmp_path):
    """The system itself refuses: a limit on the size of files, set between forward and backward."""
    process = start(FULL, tmp_path)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "cannot be written (File too large); make room" in said
    assert [*tmp_path.iterdir()] == []


def test_a_short_write_is_continued_and_a_short_file_is_an_error(tmp_path, monkeypatch):
    plain_write, plain_read, spool = os.pwritev, os.preadv, Spool(tmp_path, 4 * MIB, CPU)
    value = torch.randn(2**18)
    monkeypatch.setattr(os, "pwritev", lambda f, b, at: plain_write(f, [b[0][: 16 * 4096]], at))
    monkeypatch.setattr(os, "preadv", lambda f, b, at: plain_read(f, [b[0][: 8 * 4096]], at))
    spool.save(MIB, value, torch.float32).result()
    assert torch.equal(spool.load(MIB, (2**18,), torch.float32).result(), value)
    os.truncate(spool.path, MIB)
    with pytest.raises(RunFailed, match=r"cannot be read .*ends too early"):
        spool.load(MIB, (2**18,), torch.float32).result()
    spool.close()


def test_a_file_system_without_direct_io_is_said_once(tmp_path, monkeypatch, caplog):
    plain = os.open

    def refuses(path, flags, *mode):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return plain(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuses)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            spool = Spool(tmp_path, MIB, CPU)
            spool.save(0, torch.arange(9.0), torch.float32).result()
            assert torch.equal(spool.load(0, (9,), torch.float32).result(), torch.arange(9.0))
            spool.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"memory.spool = {tmp_path}: this file system refuses direct I/O; the spool goes through the page cache, "
        "about a third as fast"
    ]


def test_tiles_go_around_the_page_cache(tmp_path):
    spool = Spool(tmp_path, MIB, CPU)
    assert spools.fcntl.fcntl(spool._file, spools.fcntl.F_GETFL) & os.O_DIRECT
    spool.close()


def test_a_pass_that_is_never_walked_back_leaves_nothing(tmp_path):
    files, trained = open_files(), model("KDK")
    logprobs = passes(trained, tmp_path)
    assert len([*tmp_path.iterdir()]) == 1
    del logprobs
    deadline = time.monotonic() + 30
    while [
        *tmp_path.iterdir()
    ] and time.monotonic() < deadline:  # a write under way holds its file until it is done
        time.sleep(0.01)
    assert [*tmp_path.iterdir()] == [] and open_files() == files


def test_two_open_passes_have_files_of_their_own(tmp_path):
    trained = model("KDK")
    packs = [Pack.from_documents(documents((30,), seed)) for seed in (1, 2)]
    wanted = []
    for given in packs:
        trained.zero_grad(set_to_none=True)
        trained.token_logprobs(given, levers=Levers(tile=4)).sum().backward()
        wanted.append({name: p.grad for name, p in trained.named_parameters() if p.grad is not None})
    both = [passes(trained, tmp_path, given) for given in packs]
    assert len([*tmp_path.iterdir()]) == 2
    for logprobs, truth in zip(both, wanted, strict=True):
        trained.zero_grad(set_to_none=True)
        logprobs.sum().backward()
        assert all(torch.equal(trained.get_parameter(name).grad, grad) for name, grad in truth.items())


def nothing_grows(step):
    """Runs a step 200 times; files and threads must stay the same, memory within 2 MiB."""
    seen = []
    for _ in range(200):
        step()
        seen.append((len(os.listdir("/proc/self/fd")), threading.active_count(), resident_bytes()))
    assert {files for files, _, _ in seen} == {seen[0][0]}
    assert {threads for _, threads, _ in seen} == {seen[0][1]}
    assert max(resident for *_, resident in seen[100:]) - seen[20][2] < 2 * MIB


def test_memory_files_and_threads_do_not_grow_over_200_spools(tmp_path):
    layout, demand = PackLayout(torch.tensor([0, 1000]), 1, CPU), Demand(1000, 300, torch.float32, {(8,): 2})

    def step():
        streams = SlottedStreams(Spool(tmp_path, demand.num_bytes, CPU), demand)
        stream = streams.new(8)
        for tile in layout.tiles(300):
            stream.write(tile, torch.ones(len(tile), 8))
        for tile in layout.tiles_back(300):
            stream.write(tile, stream.read(tile) + 1)
        streams.close()

    nothing_grows(step)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
def test_memory_files_and_threads_do_not_grow_over_200_steps_of_a_model(tmp_path):
    trained, given = model("KD", dtype=torch.float32), Pack.from_documents(documents((10,)))

    def step():
        passes(trained, tmp_path, given).sum().backward()
        trained.zero_grad(set_to_none=True)

    nothing_grows(step)
    assert [*tmp_path.iterdir()] == []


def test_a_folder_that_another_rank_removes_meanwhile_is_made_again(tmp_path, monkeypatch):
    own, calls = spools._create, []

    def create(folder):
        calls.append(folder)
        if len(calls) == 1:
            folder.rmdir()  # the rank that has just ended
        return own(folder)

    monkeypatch.setattr(spools, "_create", create)
    spool = Spool(tmp_path / "spool", 4096, CPU)
    assert spool.path.exists() and len(calls) == 2
    spool.close()
