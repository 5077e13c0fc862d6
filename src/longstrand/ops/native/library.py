"""Which form of the ops runs, decided once at start; and how a kernel is called."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from longstrand.errors import UserError
from longstrand.ops.native.build import CannotBuild, loaded_library
from longstrand.ops.native.forms import tell_kernel
from longstrand.ops.native.products import bound_products

Choice = Literal["auto", "native", "portable"]
SUFFIX = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
LANES = 16  # values of a vector; see vector.h


ASKED = "asked for"


@dataclass(frozen=True)
class NativeState:
    """Whether the CPU kernels are in use, and if not, why."""

    used: bool
    reason: str

    def __str__(self) -> str:
        return f"{'native' if self.used else 'portable'} ({self.reason})"


_library: ctypes.CDLL | None = None
_state = NativeState(False, "not decided yet")


def use_native(choice: Choice) -> NativeState:
    """Decides for this process; called once at start, before the first pass.

    Args:
        choice: `native`: the kernels, or an error; `portable`: plain torch; `auto`: the kernels where a compiler is.

    Raises:
        UserError: `native` was asked and cannot be had.
    """
    global _library, _state
    bound_products()
    _library, _state = None, NativeState(False, ASKED)
    if choice == "portable":
        return _state
    try:
        _library = loaded_library()
    except CannotBuild as error:
        _state = NativeState(False, str(error))
        if choice == "native":
            raise UserError(
                f'kernels.cpu = "native": {error}; install a C++ compiler, or set kernels.cpu = "portable"'
            ) from None
        return _state
    _state = NativeState(True, "compiled for this processor")
    return _state


def native_state() -> NativeState:
    """What was decided last, and why."""
    return _state


def refusal(*tensors: Tensor) -> str | None:
    """Why no CPU kernel takes these together; None where one does: kernels in use, on the CPU, all of one dtype."""
    first = tensors[0].dtype
    for tensor in tensors:
        if tensor.device.type != "cpu":
            return f"device is {tensor.device.type}: no kernel of ours"
        if tensor.dtype != first:
            return f"{name_of(first)} and {name_of(tensor.dtype)} together: a kernel takes one dtype"
    if first not in SUFFIX:
        return f"{name_of(first)} has no kernels"
    if _library is None:
        return "asked for portable" if _state.reason == ASKED else _state.reason
    return None


def refusal_of_any(*tensors: Tensor) -> str | None:
    """The same for a kernel that takes each in a dtype of its own."""
    return next(filter(None, map(refusal, tensors)), None)


def name_of(dtype: torch.dtype) -> str:
    """As a recipe writes it."""
    return str(dtype).removeprefix("torch.")


def require(shape: tuple[int, ...], dtype: torch.dtype, **tensors: Tensor | None) -> None:
    """A kernel reads what it is told to: raises ValueError where a tensor has another shape or dtype."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, must be {shape}")
        if tensor.dtype != dtype:
            raise ValueError(f"{name} is {tensor.dtype}, must be {dtype}")


def require_contiguous(**tensors: Tensor | None) -> None:
    """For what a kernel writes in place, or is too large to copy: raises ValueError."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}, must be contiguous")


def call(name: str, *arguments: Tensor | float | int | None) -> None:
    """Runs a kernel on as many threads as torch has, whichever OpenMP runtime torch brought along.

    Args:
        name: the function; whole numbers go in as int64, other numbers as float32, None as a null pointer.
    """
    assert _library is not None, "use_native comes first"
    tell_kernel(name)
    _library.set_kernel_threads(ctypes.c_int64(torch.get_num_threads()))
    getattr(_library, name)(*map(_argument, arguments))


def _argument(value: Tensor | float | int | None) -> object:
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if value is None:
        return None
    return ctypes.c_int64(value) if isinstance(value, int) else ctypes.c_float(value)
