"""Several ranks against one: loss, log-probabilities and every gradient by name, in float64.

longstrand bench equal
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from longstrand.bench import _small_models as small
from longstrand.bench._arguments import command_line
from longstrand.bench.figures import show
from longstrand.data.pack import Pack
from longstrand.memory import Levers
from longstrand.model import Model, SideLosses
from longstrand.model.parallelize import parallelize
from longstrand.ops.precision import wide_dtype
from longstrand.parallel import Mesh, as_stored, local_part, make_mesh, one_process, run_ranks

LIMIT = 1e-10

Axes = tuple[int, int, int]
"""Sizes of data, context and expert."""

AXES: tuple[Axes, ...] = (
    *((1, context, 1) for context in (2, 3, 4)),
    *((1, ranks, ranks) for ranks in (2, 4)),
    *((ranks, 1, ranks) for ranks in (2, 4)),
    (2, 1, 1),
    (1, 4, 2),
    (2, 2, 1),
    (2, 2, 2),
    (2, 2, 4),
)


@dataclass(frozen=True)
class Case:
    """A model, a step's packs and how it is computed.

    Attributes:
        kinds: layers, see `_small_models.architecture`.
        lengths: of each pack's documents.
        segments: per context rank; None: as few as balance.
    """

    lengths: tuple[tuple[int, ...], ...] = ((41,),)
    kinds: str = "KDKD"
    mode: small.Mode = "sparse"
    segments: int | None = 2
    levers: Levers = field(default_factory=lambda: Levers(tile=5))
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        levers = ", ".join(f"{n} {v}" for n, v in vars(self.levers).items() if v != getattr(Levers(), n))
        packs = " | ".join(" ".join(map(str, pack)) for pack in self.lengths)
        return f"{self.kinds}, {self.mode}, {packs}, {self.segments} segments, {levers}"


TWO: tuple[tuple[int, ...], ...] = ((41,), (9, 1, 30, 1, 4))
CASES: tuple[Case, ...] = (
    *(Case(TWO, mode=mode) for mode in small.MODES),
    Case(TWO, kinds="KDDK"),  # the second D shares what the first selected
    Case(((7,), (2,))),  # not divisible, and shorter than the number of ranks
    Case(((1,), (1, 1, 1))),
    Case(((16, 16, 16), (15, 17, 16))),  # edges of documents on those of segments, and one before and after
    Case(((17, 15, 16), (3, 40, 3, 2, 2)), segments=4),  # documents over three segments and more
    Case(((9, 1, 30, 1, 4), (5, 5)), segments=8),  # segments of one token
    Case(((63, 64, 65, 5),), segments=None),
    Case(TWO, levers=Levers(tile=1)),
    Case(TWO, levers=Levers(tile=100)),
    Case(TWO, levers=Levers(tile=5, keep_every=2)),
    Case(TWO, levers=Levers(tile=5, keep_fronts=True)),
    Case(TWO, kinds="KDDK", levers=Levers(tile=5, keep_fronts=True, keep_every=2)),
    Case(TWO, levers=Levers(tile=5, recompute=False)),
    Case(TWO, levers=Levers(tile=5, offload="disk", spool="/tmp")),
)


def one(case: Case) -> dict[str, Tensor]:
    """What one process computes of all packs, by name."""
    return _compute(case, one_process())


def on_ranks(cases: Sequence[Case], axes: Axes, receive: int = 16) -> list[dict[str, Tensor]]:
    """The same on the ranks of a mesh, whole on each; to be called on all of them."""
    mesh = make_mesh(data=axes[0], context=axes[1], expert=axes[2])
    return [_compute(case, mesh, receive) for case in cases]


def differences(cases: Sequence[Case], axes: Axes) -> list[tuple[float, str]]:
    """Of each case the largest relative difference between ranks and one process, and where it is."""
    ranks = run_ranks(max(axes[0] * axes[1], 1), on_ranks, cases, axes, start="fork", timeout=600)
    truths = [one(case) for case in cases]
    return [
        max(small.largest_difference(found[number], truth) for found in ranks)
        for number, truth in enumerate(truths)
    ]


def _compute(case: Case, mesh: Mesh, receive: int = 16) -> dict[str, Tensor]:
    model = small.model(case.kinds, dtype=case.dtype, n_routed_experts=8)  # that 2 and 4 ranks share
    small.train_only(model, *(["indexer"] if case.mode == "warmup" else []))
    parallelize(model, mesh, segments=case.segments, receive=receive)
    packs = [small.pack(lengths, seed=3 + number) for number, lengths in enumerate(case.lengths)]
    found: dict[str, Tensor] = {}
    kl, aux = 0.0, 0.0
    for first in range(0, len(packs), mesh.data.size):
        number = first + mesh.data.rank
        pack = packs[number] if number < len(packs) else small.pack((1,))
        weight = small.upstream(len(pack)) * (number < len(packs))
        side = _side(case, pack, number < len(packs))
        logprobs = model.token_logprobs(pack, levers=case.levers, side=side)
        _sum_counts(model, side, mesh)
        (logprobs * weight.to(logprobs.dtype)).sum().backward()
        kl, aux = kl + side.indexer_kl, aux + side.aux
        for other in range(first, min(first + mesh.data.size, len(packs))):
            held = logprobs.detach() if other == number else logprobs.new_zeros(len(packs[other]))
            found[f"log-probabilities {other}"] = mesh.world.sum(held.clone())
    for name, parameter in model.named_parameters():
        found[f"gradient of {name}"] = _whole_gradient(parameter, mesh)
    found["indexer_kl"] = torch.tensor(mesh.world.total(kl), dtype=torch.float64)
    found["aux"] = torch.tensor(mesh.world.total(aux), dtype=torch.float64)
    return found


def _side(case: Case, pack: Pack, counts: bool) -> SideLosses:
    side = small.losses(pack, case.mode)
    if not case.levers.recompute:
        side.aux_scale = 0.0
    return side if counts else replace(side, indexer_scale=0.0, aux_scale=0.0)


def _sum_counts(model: Model, side: SideLosses, mesh: Mesh) -> None:
    """Tokens per expert of the whole pack; a rank without tokens has counted nothing."""
    shape = model.architecture
    side.num_active = shape.num_experts_per_tok
    for layer, kind in enumerate(shape.mlp_layer_types):
        if kind == "sparse":
            none = torch.zeros(shape.n_routed_experts, dtype=torch.int64)
            side.expert_counts[layer] = mesh.context.sum(side.expert_counts.get(layer, none))


def _whole_gradient(parameter: Tensor, mesh: Mesh) -> Tensor:
    """Of a parameter, whatever part of it is here; zeros where nothing reached it."""
    part = local_part(parameter)
    nothing = torch.zeros_like(part, dtype=wide_dtype(part.dtype))
    grad = nothing if parameter.grad is None else local_part(parameter.grad).detach().clone()
    whole = as_stored(grad, parameter, mesh)
    return whole.full_tensor() if isinstance(whole, DTensor) else whole


def measure(axes: Sequence[Axes] = AXES, cases: Sequence[Case] = CASES) -> list[dict[str, Any]]:
    """One record per mesh, and one in bfloat16."""
    return [*(_record(each, cases) for each in axes), bfloat16_record()]


def bfloat16_record(axes: Axes = (1, 2, 1)) -> dict[str, Any]:
    """Ranks round as one process does: both against float64, and what is kept in float32 stays so.

    The error is the norm of the difference of all gradients together over that of the gradients.
    """
    case = Case(TWO, mode="frozen", dtype=torch.bfloat16)
    truth, single = one(replace(case, dtype=torch.float64)), one(case)
    ((found,), *_) = run_ranks(axes[0] * axes[1], on_ranks, [case], axes, start="fork", timeout=600)
    errors = [_error(each, truth) for each in (single, found)]
    narrow = [n for n, value in found.items() if n.startswith("gradient") and value.dtype != torch.float32]
    ratio = errors[1] / errors[0]
    return {
        "name": f"bfloat16, {_name(axes)}: error over that of one process",
        "asked": 2.0,
        "measured": ratio,
        "pass": ratio <= 2 and not narrow,
        "detail": {"error of one process, of ranks": errors, "gradients not in float32": narrow},
    }


def _error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    names = [name for name in truth if name.startswith("gradient")]
    wrong = sum(float((found[name].double() - truth[name]).square().sum()) for name in names)
    return float((wrong / sum(float(truth[name].square().sum()) for name in names)) ** 0.5)


def _name(axes: Axes) -> str:
    return " x ".join(
        f"{name} {size}" for name, size in zip(("data", "context", "expert"), axes, strict=True) if size > 1
    )


def _record(axes: Axes, cases: Sequence[Case]) -> dict[str, Any]:
    found = differences(cases, axes)
    value, where = max(found)
    by_case = {str(case): list(each) for case, each in zip(cases, found, strict=True)}
    return {
        "name": _name(axes),
        "asked": LIMIT,
        "measured": value,
        "pass": value <= LIMIT,
        "detail": {"worst": where} | by_case,
    }


def main(arguments: Sequence[str]) -> int:
    """`longstrand bench equal`."""
    command_line("equal", __doc__).parse_args(list(arguments))
    torch.set_num_threads(1)
    return show(measure())
