"""Large blocks of the counting allocator: what a process holds follows what lives, and no block lies over another."""

import os
import random
import subprocess
import sys

import pytest
import torch

from longstrand.peak_memory import resident_bytes

MIB = 2**20
OTHER = 6 * MIB
"""What else of a process moves meanwhile."""


def test_blocks_that_come_and_go_keep_what_was_written(counted):
    chance, alive = random.Random(1), {}
    for number in range(3000):
        if alive and chance.random() < 0.48:
            value, tensor = alive.popitem() if chance.random() < 0.5 else (next(iter(alive)), None)
            tensor = alive.pop(value) if tensor is None else tensor
            assert bool((tensor == value).all())
        else:
            size = int(2 ** chance.uniform(12, 20))
            alive[number] = torch.full((size,), number, dtype=torch.int32)
    assert all(bool((tensor == value).all()) for value, tensor in alive.items())


def test_a_process_holds_the_most_that_lived_at_once_whatever_sizes_came_and_went(counted):
    before, chance, alive = resident_bytes(), random.Random(2), []
    for _ in range(600):
        alive.append(torch.ones(int(2 ** chance.uniform(16, 20))))
        while sum(x.nbytes for x in alive) > 60 * MIB:
            alive.pop(chance.randrange(len(alive)))
    held = resident_bytes() - before
    pages = len(alive) * 4096
    assert held <= 1.04 * (counted.take() or 0) + pages + OTHER


def test_free_pages_are_kept_for_the_next_block_of_any_size(counted):
    x = torch.ones(10 * MIB)
    before = resident_bytes()
    del x
    assert resident_bytes() > before - OTHER
    parts = [torch.ones(MIB) for _ in range(10)]
    assert abs(resident_bytes() - before) < OTHER
    del parts
    y = torch.ones(10 * MIB)
    assert abs(resident_bytes() - before) < OTHER
    del y


def test_a_reading_gives_free_pages_back(counted):
    before = resident_bytes()
    x = torch.ones(20 * MIB)
    assert resident_bytes() - before > 70 * MIB
    del x
    assert counted.take() is not None
    assert abs(resident_bytes() - before) < OTHER


def test_what_the_system_could_never_give_is_refused(counted):
    before = counted.live()
    with pytest.raises(RuntimeError, match="allocate"):
        torch.empty(8 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), dtype=torch.uint8)
    assert counted.live() == before


def test_addresses_are_reserved_once():
    script = """
import torch
from longstrand.memory.counted import CountedMemory
def addresses():
    return int(open("/proc/self/statm").read().split()[0]) * 4096
CountedMemory(torch.device("cpu"))
before = addresses()
for _ in range(5):
    CountedMemory(torch.device("cpu"))
assert addresses() - before < 1 << 30
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_process_forked_while_others_allocate_can_allocate():
    script = """
import os, threading, torch
from longstrand.memory.counted import CountedMemory
CountedMemory(torch.device("cpu"))
torch.set_num_threads(1)
ended = threading.Event()
def work():
    while not ended.is_set():
        torch.empty(1 << 20)
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
for _ in range(50):
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.empty(1 << 20).numel() else 1)
    assert os.waitpid(child, 0)[1] == 0
ended.set()
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=120)
    assert done.returncode == 0


def test_where_the_system_gives_no_addresses_blocks_are_torchs_own():
    script = """
import resource, torch
torch.ones(4)
resource.setrlimit(resource.RLIMIT_AS, (1 << 36, 1 << 36))
from longstrand.memory.counted import CountedMemory
counted = CountedMemory(torch.device("cpu"))
assert counted.why_not is None and not counted.has_pages
before = counted.live()
x = torch.ones(1 << 20)
assert counted.live() - before == 4 << 20 and x.sum() == 1 << 20
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
