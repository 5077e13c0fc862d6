"""What oneDNN keeps of its products: the last shapes, or what the environment says."""

import os
import subprocess
import sys

import pytest

from longstrand.ops.native.products import SHAPES

PROGRAM = """
import sys
import torch
from longstrand.ops.native import use_native
use_native("portable")
weights = torch.ones(64, 64, dtype=torch.bfloat16)
for rows in (*range(2, 2 + int(sys.argv[1])), 2):  # one row alone is multiplied as a vector, without oneDNN
    torch.ones(rows, 64, dtype=torch.bfloat16) @ weights
"""


def compiled(shapes, **environment):
    """How often oneDNN compiles for products of so many shapes and the first one again."""
    ours = {name: value for name, value in os.environ.items() if not name.endswith("_CAPACITY")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(shapes)],
        env=ours | {"ONEDNN_VERBOSE": "2", "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    if "onednn_verbose" not in done.stdout:
        pytest.skip("torch multiplies bfloat16 without oneDNN on this processor; run on one with AVX-512")
    return done.stdout.count("create:cache_miss")


def test_a_shape_is_compiled_again_once_as_many_others_were_met():
    assert compiled(SHAPES - 8) == SHAPES - 8
    assert compiled(SHAPES + 8) == SHAPES + 8 + 1


def test_the_environment_has_the_last_word():
    own = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1024", "LRU_CACHE_CAPACITY": "1024"}
    assert compiled(SHAPES + 8, **own) == SHAPES + 8
