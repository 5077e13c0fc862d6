"""Compiles the ops' `kernel.cpp` files into one library, once per source, compiler and processor."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

COMPILER = "g++"
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared")
OPS = Path(__file__).parent.parent
CACHE = Path.home() / ".cache" / "longstrand" / "kernels"


class CannotBuild(Exception):
    """Why there is no library; the message is for people."""


def built_library(cache: Path = CACHE) -> Path:
    """The library's file, compiled (about 15 s) where the cache has none for these sources on this processor.

    Raises:
        CannotBuild: no compiler, it fails, or the cache cannot be written.
    """
    compiler = shutil.which(COMPILER)
    if compiler is None:
        raise CannotBuild(f"no C++ compiler: {COMPILER} is not on the PATH")
    sources = sorted(OPS.glob("*/*.cpp"))
    library = cache / f"{_fingerprint(compiler, sources)}.so"
    if library.exists():
        return library
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with open(cache / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # several processes start at once
            if not library.exists():
                _compile(compiler, sources, library)
    except OSError as error:
        raise CannotBuild(f"{cache} cannot be written: {error.strerror}") from error
    return library


def _compile(compiler: str, sources: list[Path], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / "kernels.so"
        command = [compiler, *FLAGS, "-o", str(made), *map(str, sources)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise CannotBuild(f"{COMPILER} failed on the kernels: {done.stderr.strip().splitlines()[-1]}")
        os.replace(made, library)


def _fingerprint(compiler: str, sources: list[Path]) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    digest = hashlib.sha256("\n".join([version, *FLAGS, platform.machine(), _processor()]).encode())
    for source in [*sources, *sorted(OPS.glob("native/*.h"))]:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:24]


def _processor() -> str:
    """The processor's instruction sets: a library built for more of them would crash."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
