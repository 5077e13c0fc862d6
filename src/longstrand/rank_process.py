"""The process of a rank: how one that torchrun started is known, and how it ends."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Mapping
from typing import NoReturn


def under_torchrun(environment: Mapping[str, str]) -> bool:
    """Whether torchrun, or what sets the same variables, started a process with this environment."""
    return "TORCHELASTIC_RUN_ID" in environment or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environment.keys()


def leave(code: int) -> NoReturn:
    """Ends this process as `sys.exit` does, but does not take its interpreter apart.

    A thread of gloo drops the tensors of an exchange some time after the exchange is over, and needs the interpreter
    for that: where it is being taken apart, the process ends with SIGABRT ("terminate called without an active
    exception"). Those threads live as long as their process group, which torch's caches may hold to the last.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except OSError:  # no one reads any more; Python too ends such a process with a code of its own
        code = code or 120
    os._exit(code)
