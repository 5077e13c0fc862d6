"""The ops figure: each op against its definition and against transformers' function, at the toy's and the wide shapes.

    longstrand bench ops [--tokens N] [--threads N] [--kernels K]

Errors are norms of differences over norms, of outputs in float32 against the definition in float64; times are medians
in float32 of one tile, in microseconds per token. select and sparse_attention stand at the end of a longer document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from longstrand.architecture import Architecture
from longstrand.bench._arguments import command_line, parsed_count, parsed_length
from longstrand.bench._op_cases import OPS, Inputs, Op
from longstrand.bench._results import publish
from longstrand.bench._steps import architecture, median_seconds
from longstrand.bench._trial import Kernels
from longstrand.bench.figures import show
from longstrand.ops.native import use_native

TOKENS = 1024
SHORT = 96  # tokens that definitions, which loop over them, are compared on
COLUMNS = (
    "op",
    "shapes",
    "error",
    "of the definition",
    "of transformers",
    "forward, us/token",
    "transformers",
    "both ways, us/token",
    "transformers, both ways",
)


def measure() -> list[dict[str, Any]]:
    """All ops at both shapes, ours in their CPU kernels where there are any."""
    use_native("auto")
    found = list(judge(TOKENS))
    found[0]["detail"]["table"] = table(found)
    return found


def judge(tokens: int, configs: Sequence[str] = ("toy", "wide")) -> Iterator[dict[str, Any]]:
    """One record per op and config; an error may be twice the definition's in float32, or some units of rounding."""
    for config in configs:
        shape = architecture(config)
        for op in OPS:
            error = errors(op, shape)
            allowed = max(2 * error["definition"], op.floor * torch.finfo(torch.float32).eps)
            yield {
                "name": f"{op.name}, {config}: error in float32",
                "asked": f"at most {allowed:.1e}",
                "measured": error["ours"],
                "pass": error["ours"] <= allowed,
                "detail": {"op": op.name, "config": config, "errors": error, "us": times(op, shape, tokens)},
            }


def errors(op: Op, shape: Architecture) -> dict[str, float]:
    """Of ours, of the definition in float32 and of transformers', all against the definition in float64."""
    exact = op.draw(shape, op.short or SHORT)
    rounded = cast(exact, torch.float32)
    calls = {"ours": op.ours, "definition": op.definition, "transformers": op.theirs}
    with torch.no_grad():
        truth = _outputs(op, op.definition, shape, cast(rounded, torch.float64))
        return {
            name: max(
                _relative(*pair) for pair in zip(_outputs(op, call, shape, rounded), truth, strict=True)
            )
            for name, call in calls.items()
            if call is not None
        }


def times(op: Op, shape: Architecture, tokens: int) -> dict[str, float]:
    """Microseconds per token, forward alone and with backward."""
    inputs = cast(op.draw(shape, op.depth or tokens, tokens), torch.float32)
    found = {}
    for side, call in (("ours", op.ours), ("transformers", op.theirs)):
        if call is None:
            continue
        with torch.no_grad():
            found[f"{side}, forward"] = median_seconds(partial(call, shape, **inputs)) * 1e6 / tokens
        if op.learns:
            found[f"{side}, both ways"] = median_seconds(both_ways(call, shape, inputs)) * 1e6 / tokens
    return found


def both_ways(call: Callable[..., Any], shape: Architecture, inputs: Inputs) -> Callable[[], None]:
    """The call and its backward under fixed upstream gradients."""
    leaves = {name: x.requires_grad_() if x.is_floating_point() else x for name, x in inputs.items()}
    outputs = [out for out in _as_list(call(shape, **leaves)) if out.requires_grad]
    upstream = [torch.randn_like(out) for out in outputs]

    def run() -> None:
        outputs = [out for out in _as_list(call(shape, **leaves)) if out.requires_grad]
        torch.autograd.backward(outputs, upstream)
        for leaf in leaves.values():
            leaf.grad = None

    return run


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Floating-point inputs in another dtype."""
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}


def table(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row per op and config."""
    rows = []
    for record in records:
        detail = record["detail"]
        error, us = detail["errors"], detail["us"]
        found = [detail["op"], detail["config"]]
        found += [f"{error[n]:.1e}" if n in error else "" for n in ("ours", "definition", "transformers")]
        sides = [f"{side}, {way}" for way in ("forward", "both ways") for side in ("ours", "transformers")]
        rows.append(found + [f"{us[name]:.2f}" if name in us else "" for name in sides])
    return {"columns": list(COLUMNS), "rows": rows}


def main(arguments: Sequence[str]) -> int:
    """`longstrand bench ops`."""
    options_of = command_line("ops", __doc__)
    options_of.add_argument("--tokens", type=parsed_length, default=TOKENS, help="of one tile")
    options_of.add_argument("--threads", type=parsed_count, default=2, help="of torch and of the CPU kernels")
    options_of.add_argument("--config", choices=("toy", "wide"), action="append", dest="configs")
    options_of.add_argument(
        "--kernels", choices=get_args(Kernels), default="auto", help="CPU kernels, or plain torch"
    )
    options = options_of.parse_args(list(arguments))
    torch.set_num_threads(options.threads)
    native = use_native(options.kernels)
    found = list(judge(options.tokens, options.configs or ("toy", "wide")))
    publish("ops", table(found), {"records": found, "kernels": vars(native), "threads": options.threads})
    return show(found)


def _outputs(op: Op, call: Callable[..., Any], shape: Architecture, inputs: Inputs) -> list[Tensor]:
    found = _as_list(call(shape, **inputs))
    return found if op.seen is None else [op.seen(out, **inputs) for out in found]


def _as_list(outputs: Any) -> list[Tensor]:
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


def _relative(value: Tensor, truth: Tensor) -> float:
    return float((value.double() - truth.double()).norm() / truth.double().norm())
