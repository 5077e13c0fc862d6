"""The CPU kernels: C++ sources beside each op, compiled once per machine and used where a model asks for them."""

from longstrand.ops.native.library import (
    SUFFIX,
    NativeState,
    call,
    has_kernel,
    native_state,
    require,
    require_contiguous,
    use_native,
)

__all__ = [
    "SUFFIX",
    "NativeState",
    "call",
    "has_kernel",
    "native_state",
    "require",
    "require_contiguous",
    "use_native",
]
