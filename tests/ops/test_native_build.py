"""How the kernels' library is made, kept and loaded, and what is said where it cannot be."""

import os
import time
from pathlib import Path

import pytest
import torch

from longstrand.errors import UserError
from longstrand.ops import native
from longstrand.ops.native import build, library


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Puts a shell script in the compiler's place; it answers `--version` and then does as it is told."""

    def pretend(body):
        script = tmp_path / "compiler"
        script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit 0\necho >> {tmp_path}/runs\n{body}\n')
        script.chmod(0o755)
        monkeypatch.setattr(build, "COMPILER", str(script))

    return pretend


WRITES_NO_LIBRARY = 'while [ "$1" != -o ]; do shift; done; echo no library > "$2"'


def copies(path):
    return f'while [ "$1" != -o ]; do shift; done; cp {path} "$2"'


@pytest.fixture(scope="module")
def good():
    """A library that can be loaded, whatever is in it."""
    loaded = Path("/proc/self/maps").read_text().split()
    return next((path for path in loaded if "libgomp" in path), None) or pytest.skip("no library to copy")


def test_without_a_compiler_auto_says_why_and_native_is_refused(monkeypatch):
    monkeypatch.setattr(build, "COMPILER", "no-such-compiler")
    state = native.use_native("auto")
    assert not state.used and "no-such-compiler is not on the PATH" in state.reason
    with pytest.raises(UserError, match=r'kernels.cpu = "native".*install a C\+\+ compiler'):
        native.use_native("native")
    assert native.refusal(torch.ones(1)) == "no C++ compiler: no-such-compiler is not on the PATH"


def test_without_a_home_folder_auto_says_so(monkeypatch, compiler):
    compiler("exit 1")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: (_ for _ in ()).throw(KeyError(uid)))
    state = native.use_native("auto")
    assert not state.used and "no home folder is known" in state.reason


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(build.CannotBuild, match="cannot be written"):
        build.built_library(tmp_path / "file" / "cache")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("exit 3", "exit status 3"),
        ("echo warning; echo kernel.cpp:7: error: gone; echo note; exit 1", "kernel.cpp:7: error: gone"),
        ("echo out of luck; exit 1", "out of luck"),
    ],
)
def test_a_compiler_that_fails_is_quoted(body, reason, tmp_path, compiler):
    compiler(body)
    with pytest.raises(build.CannotBuild, match=f"failed on the kernels: {reason}$"):
        build.built_library(tmp_path / "cache")


def test_a_compiler_that_cannot_be_run_is_named(tmp_path, monkeypatch):
    (tmp_path / "compiler").write_bytes(b"\x00not a program")
    (tmp_path / "compiler").chmod(0o755)
    monkeypatch.setattr(build, "COMPILER", str(tmp_path / "compiler"))
    with pytest.raises(build.CannotBuild, match="cannot be run"):
        build.built_library(tmp_path / "cache")


def test_a_compiler_that_hangs_is_ended_with_its_children(tmp_path, compiler, monkeypatch):
    compiler(f"sh -c 'sleep 2; echo > {tmp_path}/still-there'; exit 1")
    monkeypatch.setattr(build, "COMPILER_SECONDS", 0.5)
    began = time.monotonic()
    with pytest.raises(build.CannotBuild, match="did not end within"):
        build.built_library(tmp_path / "cache")
    assert time.monotonic() - began < 2
    time.sleep(2.5 - (time.monotonic() - began))
    assert not (tmp_path / "still-there").exists()


def test_a_damaged_library_is_built_again(tmp_path, compiler, good):
    compiler(copies(good))
    damaged = build.built_library(tmp_path / "cache")
    damaged.write_text("half a file")
    assert build.loaded_library(tmp_path / "cache")._name == str(damaged)
    assert (tmp_path / "runs").read_text() == "\n\n"


def test_a_library_that_cannot_be_loaded_is_built_once_more_and_then_given_up(tmp_path, compiler):
    compiler(WRITES_NO_LIBRARY)
    with pytest.raises(build.CannotBuild, match=r"cannot be loaded: .*\.so"):
        build.loaded_library(tmp_path / "cache")
    assert (tmp_path / "runs").read_text() == "\n\n"


def test_what_was_not_used_for_a_month_goes_when_something_is_built(tmp_path, compiler, monkeypatch):
    compiler(WRITES_NO_LIBRARY)
    used = build.built_library(tmp_path)
    month = time.time() - build.KEEP_SECONDS
    for name, moved in (("unused.so", -60), ("recent.so", 60), ("notes.txt", -60)):
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (month + moved,) * 2)
    os.utime(used, (month - 60,) * 2)
    assert build.built_library(tmp_path) == used  # no build, and used now
    assert (tmp_path / "unused.so").exists()
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    made = build.built_library(tmp_path)
    assert {path.name for path in tmp_path.glob("*.so")} == {made.name, used.name, "recent.so"}
    assert (tmp_path / "notes.txt").exists()


def test_a_kernel_takes_the_threads_of_torch_even_where_their_runtimes_differ(monkeypatch):
    """Which OpenMP runtime a wheel of torch brings is its own affair."""
    state = native.use_native("auto")
    if not state.used:
        pytest.skip(f"the CPU kernels cannot be built: {state.reason}")
    before = torch.get_num_threads()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(torch, "get_num_threads", lambda: before + 2)
            native.call("swiglu_forward_float32", torch.ones(2), 1, 1, 1.0, torch.empty(1))
        assert library._library.kernel_threads() == before + 2
    finally:
        torch.set_num_threads(before)
    native.call("swiglu_forward_float32", torch.ones(2), 1, 1, 1.0, torch.empty(1))
    assert library._library.kernel_threads() == before
