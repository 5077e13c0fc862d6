"""Where what ran is not what was planned or asked: layer, op, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from longstrand.checks.observing import SeenOp, describe
from longstrand.model import Model
from longstrand.model.forms import HEAD, Place, Plan, PlannedOp, Required, place_name, remedy_of
from longstrand.model.given import Wanted
from longstrand.ops.native import name_of
from longstrand.ops.precision import wide_dtype
from longstrand.plan.parameters import keeps_float32

_OTHER_OP = "run the model's own code: another one stands in its place"
_OTHER_SIZE = "make the model of config.json as it is; nothing may pad or default a size"
_OTHER_DTYPE = "load the weights in run.dtype, with what is kept in float32 left so"


@dataclass(frozen=True)
class Mismatch:
    """One difference.

    Attributes:
        op: its name, or that of a weight.
        asked, ran: in words.
    """

    place: Place
    op: str
    asked: str
    ran: str
    remedy: str

    def __str__(self) -> str:
        return f"{place_name(self.place)}, {self.op}: asked {self.asked}; ran {self.ran}; {self.remedy}"

    def as_dict(self) -> dict[str, Any]:
        values = asdict(self)
        return {"layer": values.pop("place"), **values}


def mismatches(
    plan: Plan, seen: Mapping[Place, Mapping[str, SeenOp]], model: Model, required: Required
) -> list[Mismatch]:
    """All of them: ops in the order of the layers, then weights and gradients."""
    found: list[Mismatch] = []
    for layer in plan.layers:
        ran = seen.get(layer.place, {})
        others = [name for name in ran if name not in layer.ops]
        for planned in layer.ops.values():
            found += _of_op(layer.place, planned, ran.get(planned.op.name), required, others)
        if set(ran) >= set(layer.ops):
            found += [Mismatch(layer.place, name, "nothing of it", "it", _OTHER_OP) for name in others]
    return found + list(_of_weights(model, plan.of.dtype))


def _of_op(
    place: Place, planned: PlannedOp, seen: SeenOp | None, required: Required, others: list[str]
) -> Iterator[Mismatch]:
    name = planned.op.name
    if seen is None:
        yield Mismatch(place, name, name, ", ".join(others) or "nothing in its place", _OTHER_OP)
        return
    if planned.breaks(required):
        ran = f"{planned.form}: {planned.why}"
        yield Mismatch(place, name, f"{required} (kernels.require)", ran, remedy_of(required))
    elif found := _ran_otherwise(planned, seen):
        is_required = required == planned.form and bool(planned.op.kernels)
        asked = planned.form + " (kernels.require)" * is_required
        setting = 'kernels.require = "none"' if is_required else 'kernels.cpu = "portable"'
        remedy = f"look at what reaches it (--json lists it), or set {setting}"
        yield Mismatch(place, name, asked, found, remedy)
    yield from _of_inputs(place, planned, seen)


def _ran_otherwise(planned: PlannedOp, seen: SeenOp) -> str | None:
    """What is not as planned of the form: what the op decided, and which kernels were really called."""
    if planned.form == "native":
        if seen.refusal is not None:
            return f"portable: {seen.refusal}"
        return None if seen.kernels else "no kernel of it"
    if None in seen.refusals:
        return "native"
    return f"native ({next(iter(seen.kernels))})" if seen.kernels else None


def _of_inputs(place: Place, planned: PlannedOp, seen: SeenOp) -> Iterator[Mismatch]:
    """The first that does not fit, of each input."""
    for name, wanted in planned.inputs.items():
        odd = next((given for given in seen.given.get(name, []) if not _fits(wanted, given)), None)
        if odd is None:
            continue
        narrowed = isinstance(odd, Tensor) and isinstance(wanted, Wanted) and odd.dtype != wanted.dtype
        remedy = _OTHER_DTYPE if narrowed else _OTHER_SIZE
        yield Mismatch(place, planned.op.name, f"{name} {wanted}", f"{name} {describe(odd)}", remedy)


def _fits(wanted: Wanted | int, given: Tensor | float | int) -> bool:
    if isinstance(wanted, Wanted):
        return isinstance(given, Tensor) and wanted.fits(given)
    return wanted == given


def _of_weights(model: Model, dtype: torch.dtype) -> Iterator[Mismatch]:
    """Weights and buffers in another dtype than the recipe's, gradients narrower than they are added up in."""
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        place, short = _place_of(name)
        wanted = wide_dtype(dtype) if keeps_float32(name) else dtype
        if weight.dtype != wanted:
            yield Mismatch(place, short, name_of(wanted), name_of(weight.dtype), _OTHER_DTYPE)
        gradient, wide = weight.grad, wide_dtype(wanted)
        if gradient is not None and gradient.dtype != wide:
            yield Mismatch(
                place, f"gradient of {short}", name_of(wide), name_of(gradient.dtype), _OTHER_DTYPE
            )


def _place_of(parameter: str) -> tuple[Place, str]:
    if not parameter.startswith("layers."):
        return HEAD, parameter
    _, index, short = parameter.split(".", 2)
    return int(index), short
