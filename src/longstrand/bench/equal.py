"""Several ranks against one: log-probabilities and every gradient by name, in float64.

python -m longstrand.bench.equal
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from longstrand.bench import _small_models as small
from longstrand.memory import Levers
from longstrand.parallel import Mesh, make_mesh, run_ranks


@dataclass(frozen=True)
class Case:
    """A model, a pack and how it is computed.

    Attributes:
        kinds: layers, see `_small_models.architecture`.
        lengths: of the pack's documents.
        segments: per rank; None: as few as balance.
    """

    lengths: tuple[int, ...] = (41,)
    kinds: str = "KDKD"
    mode: small.Mode = "sparse"
    segments: int | None = 2
    levers: Levers = field(default_factory=lambda: Levers(tile=5))


def one(case: Case) -> dict[str, Tensor]:
    """Log-probabilities, losses and gradients of one process."""
    return _pass(case, small.model(case.kinds), None)


def on_ranks(case: Case) -> dict[str, Tensor]:
    """The same on this rank of as many as there are, summed over them."""
    mesh = make_mesh(data=1, context=torch.distributed.get_world_size(), expert=1)
    model = small.model(case.kinds)
    model.mesh, model.segments = mesh, case.segments
    return _pass(case, model, mesh)


def _pass(case: Case, model: Any, mesh: Mesh | None) -> dict[str, Tensor]:
    given = small.pack(case.lengths)
    side = small.losses(given, case.mode)
    if not case.levers.recompute:
        side.aux_scale = 0.0
    small.train_only(model, *(["indexer"] if case.mode == "warmup" else []))
    logprobs = model.token_logprobs(given, levers=case.levers, side=side)
    if mesh is not None:
        _sum_counts(model, side, mesh)
    (logprobs * small.upstream(len(given))).sum().backward()
    found = {
        f"gradient of {name}": torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in model.named_parameters()
    }
    found |= {"logprobs": logprobs.detach(), "indexer_kl": torch.tensor(side.indexer_kl, dtype=torch.float64)}
    found |= {"aux": torch.tensor(side.aux, dtype=torch.float64)}
    if mesh is not None:
        for value in found.values():
            mesh.world.sum(value)
    return found


def _sum_counts(model: Any, side: Any, mesh: Mesh) -> None:
    """A rank without tokens has counted nothing."""
    shape = model.architecture
    side.num_active = shape.num_experts_per_tok
    for layer, kind in enumerate(shape.mlp_layer_types):
        if kind == "sparse":
            none = torch.zeros(shape.n_routed_experts, dtype=torch.int64)
            side.expert_counts[layer] = mesh.context.sum(side.expert_counts.get(layer, none))


def difference(case: Case, num_ranks: int) -> tuple[float, str]:
    """Largest relative difference of anything by name, and which it is."""
    ranks = run_ranks(num_ranks, on_ranks, case, start="fork", timeout=300)
    truth = one(case)
    return max(small.largest_difference(each, truth) for each in ranks)


def several(cases: Sequence[Case]) -> list[dict[str, Tensor]]:
    return [on_ranks(case) for case in cases]
