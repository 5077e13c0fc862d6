"""Compiles C++ sources into a library, once per source, compiler and processor."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

COMPILER = "g++"
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared")
OPS = Path(__file__).parent.parent
COMPILER_SECONDS = 300
KEEP_SECONDS = 30 * 24 * 3600  # a library that no process has loaded for so long goes when another is built


class CannotBuild(Exception):
    """Why there is no library; the message is for people."""


@dataclass(frozen=True)
class Sources:
    """What a library is made of.

    Attributes:
        headers: files that the sources include; a change of one makes the library anew.
    """

    files: tuple[Path, ...]
    headers: tuple[Path, ...]
    flags: tuple[str, ...]


def kernel_sources() -> Sources:
    """The kernels of the ops."""
    return Sources(tuple(sorted(OPS.glob("*/*.cpp"))), tuple(sorted(OPS.glob("native/*.h"))), FLAGS)


def loaded_library(cache: Path | None = None, sources: Sources | None = None) -> ctypes.CDLL:
    """The library of some sources (default: the kernels); a damaged file in the cache is built again once.

    Raises:
        CannotBuild: as `built_library`, or what was built cannot be loaded.
    """
    cache = cache or _cache_folder()
    library = built_library(cache, sources)
    try:
        return ctypes.CDLL(str(library))
    except OSError:
        with contextlib.suppress(OSError):  # of a cache that cannot be written: it fails again below
            library.unlink()
    try:
        return ctypes.CDLL(str(built_library(cache, sources)))
    except OSError as error:
        raise CannotBuild(f"the built kernels cannot be loaded: {error}") from error


def built_library(cache: Path, sources: Sources | None = None) -> Path:
    """The library's file, compiled (about 11 s) where the cache has none for these sources on this processor.

    Raises:
        CannotBuild: no compiler, it fails or hangs, or the cache cannot be written.
    """
    compiler = shutil.which(COMPILER)
    if compiler is None:
        raise CannotBuild(f"no C++ compiler: {COMPILER} is not on the PATH")
    sources = sources or kernel_sources()
    library = cache / f"{_fingerprint(compiler, sources)}.so"
    try:
        if not library.exists():
            cache.mkdir(parents=True, exist_ok=True)
            with open(cache / ".lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # several processes start at once
                if not library.exists():
                    _compile(compiler, sources, library)
                    _remove_unused(cache)
    except OSError as error:
        raise CannotBuild(f"{cache} cannot be written: {error.strerror}") from error
    with contextlib.suppress(OSError):  # of a cache that others fill
        os.utime(library)
    return library


def _cache_folder() -> Path:
    try:
        return Path.home() / ".cache" / "longstrand" / "kernels"
    except RuntimeError:
        raise CannotBuild("no home folder is known to keep the kernels in") from None


def _compile(compiler: str, sources: Sources, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / "kernels.so"
        code, said = _run([compiler, *map(str, sources.files), *sources.flags, "-o", str(made)])
        if code:
            errors = [line for line in said.splitlines() if "error" in line] or said.splitlines()
            reason = errors[0] if errors else f"exit status {code}"
            raise CannotBuild(f"{COMPILER} failed on the kernels: {reason}")
        os.replace(made, library)


def _remove_unused(cache: Path) -> None:
    for other in cache.glob("*.so"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - other.stat().st_mtime > KEEP_SECONDS:
                other.unlink()


def _run(command: list[str]) -> tuple[int, str]:
    """Exit status and all output; the compiler's own children end with it when it takes too long."""
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
    except OSError as error:
        raise CannotBuild(f"{COMPILER} cannot be run: {error.strerror}") from error
    with process:
        try:
            said, _ = process.communicate(timeout=COMPILER_SECONDS)
        except subprocess.TimeoutExpired:
            raise CannotBuild(f"{COMPILER} did not end within {COMPILER_SECONDS} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, said.strip()


def _fingerprint(compiler: str, sources: Sources) -> str:
    _, version = _run([compiler, "--version"])
    digest = hashlib.sha256("\n".join([version, *sources.flags, platform.machine(), _processor()]).encode())
    for source in [*sources.files, *sources.headers]:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:24]


def _processor() -> str:
    """The processor's instruction sets: a library built for more of them would crash."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
