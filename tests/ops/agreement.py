"""How an op is compared with its definition: outputs and gradients, in float64 to rounding, in float32 by its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Results = dict[str, Tensor]
Op = Callable[..., Any]


def run(op: Op, inputs: Mapping[str, Any], dtype: torch.dtype = torch.float64, seed: int = 1) -> Results:
    """Outputs, and the gradient of every floating-point input under random upstream gradients."""
    leaves = {}
    for name, value in inputs.items():
        floating = isinstance(value, Tensor) and value.is_floating_point()
        leaves[name] = value.detach().to(dtype).requires_grad_() if floating else value
    outputs = op(**leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(seed)
    upstream = [torch.randn(out.shape, generator=generator, dtype=torch.float64) for out in outputs]
    open_ends = [
        (out, grad.to(out.dtype)) for out, grad in zip(outputs, upstream, strict=True) if out.requires_grad
    ]
    torch.autograd.backward([out for out, _ in open_ends], [grad for _, grad in open_ends])
    results = {f"output {i}": out.detach() for i, out in enumerate(outputs)}
    for name, leaf in leaves.items():
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            assert leaf.grad is not None, f"no gradient for {name}"
            results[f"gradient of {name}"] = leaf.grad
    return results


def difference(value: Tensor, truth: Tensor, scale: float = 0.0) -> float:
    """Norm of the difference over the norm of the truth (at least `scale`); infinite where not finite."""
    assert value.shape == truth.shape
    if not value.isfinite().all():
        return float("inf")
    norm = max(float(truth.double().norm()), scale)
    error = float((value.double() - truth.double()).norm())
    return error / norm if norm else error


def agrees(op: Op, definition: Op, inputs: Mapping[str, Any], limit: float = 1e-12) -> None:
    """Asserts equality in float64 within rounding, for outputs and every gradient."""
    ours, truth = run(op, inputs), run(definition, inputs)
    assert ours.keys() == truth.keys()
    largest = max(float(value.norm()) for name, value in truth.items() if "gradient" in name)
    found = {
        name: difference(ours[name], truth[name], 1e-4 * largest if "gradient" in name else 0.0)
        for name in truth
    }
    assert max(found.values()) <= limit, found


def is_as_exact_as_plain_torch(
    op: Op,
    definition: Op,
    inputs: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
    *,
    floor: float = 4.0,
    without: str = "none",
) -> None:
    """Asserts an error of at most twice that of the definition in the same dtype, both against float64.

    A definition that happens to round luckily is no measure: `floor` units of rounding are always allowed.
    `without` names a result that has its own test.
    """
    inputs = {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    truth = run(definition, inputs)
    ours, plain = run(op, inputs, dtype), run(definition, inputs, dtype)
    errs_at_most_twice(ours, plain, truth, dtype, floor=floor, without=without)


def errs_at_most_twice(
    ours: Results,
    plain: Results,
    truth: Results,
    dtype: torch.dtype,
    *,
    floor: float = 4.0,
    without: str = "none",
) -> None:
    """Asserts that of results which are already there; see `is_as_exact_as_plain_torch`."""
    largest = max(float(value.norm()) for name, value in truth.items() if "gradient" in name)
    found = {}
    for name in truth.keys() - {without}:
        scale = 1e-3 * largest if "gradient" in name else 0.0
        allowed = max(2 * difference(plain[name], truth[name], scale), floor * torch.finfo(dtype).eps)
        found[name] = difference(ours[name], truth[name], scale) / allowed
    assert max(found.values()) <= 1, found
