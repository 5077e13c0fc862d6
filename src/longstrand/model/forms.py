"""Which form each op of a model runs in, as the ops decide it themselves, and why: what kernels.json holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from longstrand.architecture import KDA, Architecture
from longstrand.errors import CheckFailed
from longstrand.model.given import Call, Pass, Wanted, head_calls, layer_calls
from longstrand.ops.native import Op, name_of, native_state
from longstrand.ops.padding import Padding

Form = Literal["native", "portable"]
Required = Literal["none", "native", "portable"]
Place = int | str
HEAD = "head"
"""The place of what comes after the last layer."""
NATIVE, TAKEN = "native C++ (cpu)", "its kernel takes it"


@dataclass(frozen=True)
class PlannedOp:
    """An op of a layer.

    Attributes:
        inputs: what it is given, by name.
        refusal: why its kernel does not take these; None where it runs in its kernel.
        padding: what this form computes beyond what is needed.
    """

    op: Op
    inputs: Mapping[str, Wanted | int]
    refusal: str | None
    padding: Padding

    @property
    def form(self) -> Form:
        return "native" if self.refusal is None else "portable"

    @property
    def why(self) -> str:
        """Of its form."""
        return self.refusal or TAKEN

    def breaks(self, required: Required) -> bool:
        """Whether it runs in another form than this one; an op without a kernel has but one."""
        return required not in ("none", self.form) and bool(self.op.kernels)

    def as_dict(self, device: str) -> dict[str, Any]:
        portable = f"torch {self.op.portable} ({device})"
        taken, other = (NATIVE, portable) if self.refusal is None else (portable, NATIVE)
        return {
            "op": self.op.name,
            "form": self.form,
            "runs_in": taken,
            "why": self.why,
            "padding_percent": self.padding.percent,
            "padding": self.padding.of,
            "refused": {
                other: self.why,
                "CUDA": "this project has no CUDA kernel of its own",
            },
        }


@dataclass(frozen=True)
class PlannedLayer:
    """A layer's ops by name, in the order of its forward pass; `kind` is such as "KDA, experts"."""

    place: Place
    kind: str
    ops: Mapping[str, PlannedOp]


@dataclass(frozen=True)
class Plan:
    """All layers in order, the head last."""

    layers: Sequence[PlannedLayer]
    of: Pass

    def __iter__(self) -> Iterator[tuple[Place, PlannedOp]]:
        for layer in self.layers:
            for op in layer.ops.values():
                yield layer.place, op

    def require(self, required: Required) -> None:
        """Refuses to begin where an op would not run in the form that the recipe requires.

        Raises:
            CheckFailed: naming the first such layer and op, and why.
        """
        found = [(place, op) for place, op in self if op.breaks(required)]
        if found:
            place, op = found[0]
            raise CheckFailed(
                f"{place_name(place)}, {op.op.name}: asked {required} (kernels.require), runs {op.form}: {op.why}; "
                f"{len(found)} ops do; {remedy_of(required)}"
            )

    def as_dict(self) -> dict[str, Any]:
        """What kernels.json holds: equal layers together."""
        device, layers = self.of.device, list[dict[str, Any]]()
        for each in self.layers:
            alike = {"kind": each.kind, "ops": [op.as_dict(device) for op in each.ops.values()]}
            known = next((k for k in layers if alike.items() <= k.items()), None)
            if known is None:
                layers.append({"layers": [each.place], **alike})
            else:
                known["layers"].append(each.place)
        return {
            "dtype": name_of(self.of.dtype),
            "device": device,
            "cpu": str(native_state()),
            "tile": self.of.tiles.size,
            "tokens": self.of.tiles.num_tokens,
            "layers": layers,
        }


def plan_forms(shape: Architecture, of: Pass) -> Plan:
    """The form of each op of each layer for a training pass; equal layers are asked once."""
    asked: dict[tuple[str, ...], dict[str, PlannedOp]] = {}
    layers = []
    for index in range(shape.num_hidden_layers):
        of_layer = (shape.layer_types[index], shape.mlp_layer_types[index], shape.indexer_types[index])
        if of_layer not in asked:
            asked[of_layer] = _planned(layer_calls(shape, index, of), of)
        mixer = "KDA" if of_layer[0] == KDA else "DSA"
        ending = "experts" if of_layer[1] == "sparse" else "dense"
        layers.append(PlannedLayer(index, f"{mixer}, {ending}", asked[of_layer]))
    return Plan([*layers, PlannedLayer(HEAD, HEAD, _planned(head_calls(shape, of), of))], of)


def remedy_of(required: Required) -> str:
    """What to do where this form is required and another one runs."""
    other = 'set kernels.cpu = "portable"' if required == "portable" else "remove that reason"
    return f'{other}, or set kernels.require = "none"'


def place_name(place: Place) -> str:
    """As messages name it."""
    return f"layer {place}" if isinstance(place, int) else place


def _planned(calls: Iterable[Call], of: Pass) -> dict[str, PlannedOp]:
    """Asks each op with empty tensors of what it will be given."""
    found = {}
    for call in calls:
        given = {n: w.empty(of.device) if isinstance(w, Wanted) else w for n, w in call.inputs.items()}
        refusal = call.op.refusal(**given)
        padding = call.padding(native=refusal is None)
        found[call.op.name] = PlannedOp(call.op, call.inputs, refusal, padding)
    return found
