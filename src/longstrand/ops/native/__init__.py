"""The CPU kernels: C++ sources beside each op, compiled once per machine and used where a model asks for them."""

from longstrand.ops.native.forms import Given, Op, Watch, watched
from longstrand.ops.native.library import (
    LANES,
    SUFFIX,
    NativeState,
    call,
    name_of,
    native_state,
    refusal,
    refusal_of_any,
    require,
    require_contiguous,
    use_native,
)

__all__ = [
    "LANES",
    "SUFFIX",
    "Given",
    "NativeState",
    "Op",
    "Watch",
    "call",
    "name_of",
    "native_state",
    "refusal",
    "refusal_of_any",
    "require",
    "require_contiguous",
    "use_native",
    "watched",
]
