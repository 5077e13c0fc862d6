"""Peak memory follows what a process and its children hold."""

import subprocess
import sys
import time

import pytest

from longstrand.peak_memory import PROC, PeakMemory, resident_bytes

pytestmark = pytest.mark.skipif(not (PROC / "self/status").exists(), reason="needs /proc")
MIB = 2**20


def test_a_block_that_was_freed_before_the_reading_is_in_the_peak():
    with PeakMemory() as peak:
        peak.take()
        block = bytearray(b"x") * (64 * MIB)  # no tensor, whose pages stay where living tensors are counted
        time.sleep(0.15)
        del block
        time.sleep(0.05)
        seen = peak.take()
        assert 60 * MIB < seen - peak.baseline_bytes < 90 * MIB
        assert peak.take() < seen - 50 * MIB


def test_memory_of_a_child_counts_until_it_ends():
    code = "import time; block = bytearray(b'x') * (48 << 20); print('held', flush=True); time.sleep(60)"
    before = resident_bytes()
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert child.stdout.readline() == b"held\n"
        assert 48 * MIB < resident_bytes() - before < 80 * MIB
        assert 48 * MIB < resident_bytes(child.pid) < 80 * MIB
    finally:
        child.kill()
        child.wait()
    assert resident_bytes() - before < 8 * MIB
    assert resident_bytes(child.pid) == 0
