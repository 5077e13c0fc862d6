"""The counter of living tensor bytes: against sizes that are known."""

import subprocess
import sys
import threading

import pytest
import torch

from longstrand.memory import counted as module
from longstrand.memory.counted import CountedMemory
from longstrand.ops.native import build


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


OTHER_ALLOCATOR = """
#include <c10/core/CPUAllocator.h>
struct Other final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override { return c10::GetDefaultCPUAllocator()->allocate(bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return @deleter@; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
};
extern "C" void set_other() { static Other other; c10::SetCPUAllocator(&other, @priority@); }
"""
COUNTED_BEHIND = """
import sys
from pathlib import Path
import torch
from longstrand.memory import counted
from longstrand.ops.native.build import Sources, loaded_library
flags = ("-std=c++20", "-shared", "-fPIC", f"-I{counted._TORCH / 'include'}", f"-L{counted._TORCH / 'lib'}", "-lc10")
loaded_library(Path(sys.argv[1]), Sources((Path(sys.argv[1]) / "other.cpp",), (), flags)).set_other()
memory = counted.CountedMemory(torch.device("cpu"))
assert torch.ones(3).sum() == 3
assert memory.why_not is not None and "another library has set it" in memory.why_not, memory.why_not
assert memory.take() is None and memory.live() is None
"""


@pytest.mark.parametrize(
    ("deleter", "priority"), [("nullptr", 1), ("c10::GetDefaultCPUAllocator()->raw_deleter()", 2)]
)
def test_where_another_allocator_stands_it_says_so_and_counts_nothing(counted, tmp_path, deleter, priority):
    """One whose blocks cannot be given back, and one that keeps its place."""
    text = OTHER_ALLOCATOR.replace("@deleter@", deleter).replace("@priority@", str(priority))
    (tmp_path / "other.cpp").write_text(text)
    ended = subprocess.run(
        [sys.executable, "-c", COUNTED_BEHIND, tmp_path], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr


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
