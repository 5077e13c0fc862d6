"""The counter of living tensor bytes: against sizes that are known."""

import subprocess
import sys
import threading

import pytest
import torch

from longstrand.memory import counted as module
from longstrand.memory.counted import CountedMemory
from longstrand.ops.native import build


@pytest.fixture
def counted():
    memory = CountedMemory(torch.device("cpu"))
    if memory.why_not is not None:
        pytest.skip(memory.why_not)
    memory.take()
    return memory


def test_a_tensor_counts_with_all_its_bytes_while_it_lives(counted):
    before = counted.live()
    x = torch.empty(1000, 33)
    assert counted.live() - before == 132_000
    view = x[5:]
    del x
    assert counted.live() - before == 132_000
    del view
    assert counted.live() == before
    assert counted.take() - before == 132_000


def test_what_a_backward_makes_is_counted(counted):
    before = counted.live()
    x = torch.empty(512, 512).requires_grad_()
    x.square().sum().backward()
    assert counted.live() - before == 2 * 512 * 512 * 4
    # at once: x, its square (freed after the sum), then x.grad with 2 x and the expanded gradient's product
    assert counted.take() - before >= 3 * 512 * 512 * 4


def test_the_peak_begins_anew_at_what_lives(counted):
    x = torch.empty(4096)
    counted.take()
    assert counted.take() == counted.live() >= x.nbytes


def test_what_another_thread_makes_counts_too(counted):
    before = counted.live()
    thread = threading.Thread(target=lambda: torch.empty(10_000))
    thread.start()
    thread.join()
    assert (counted.live(), counted.take() - before) == (before, 40_000)


def test_without_a_compiler_it_says_why(monkeypatch):
    monkeypatch.setattr(build, "COMPILER", "no-such-compiler")
    module._counter.cache_clear()
    memory = CountedMemory(torch.device("cpu"))
    assert "no-such-compiler" in (memory.why_not or "")
    assert memory.take() is None
    module._counter.cache_clear()


def test_what_was_made_before_it_may_be_freed_after_it():
    """oneDNN keeps blocks of torch's allocator from call to call; a counter that took them for its own crashed."""
    script = """
import torch
import torch.nn.functional as F
from longstrand.memory.counted import CountedMemory
taps, early = torch.randn(64, 1, 4), torch.randn(1000)
def convolve(length):
    for dtype in (torch.float32, torch.bfloat16):
        F.conv1d(torch.randn(1, 64, length).to(dtype), taps.to(dtype), groups=64)
convolve(300)
counted = CountedMemory(torch.device("cpu"))
for length in range(300, 330):
    convolve(length)
before = counted.live()
del early
assert counted.live() == before
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
