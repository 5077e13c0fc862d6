"""AdamW over the trained parameters, with float32 masters where the weights are narrower."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from longstrand.config import TrainSection
from longstrand.ops.precision import wide_dtype
from longstrand.parallel import Mesh, as_stored, like_sharded, local_part, one_process
from longstrand.plan.rules import groups_that_learn


def trained_names(groups: dict[str, list[str]], settings: TrainSection) -> list[str]:
    """Names of the parameters that learn, in the order of the groups.

    A frozen indexer is left out of "all", and in a warm-up of the indexer nothing else learns.

    Raises:
        UserError: a group that this model has not, or nothing is left to train.
    """
    present = [group for group, names in groups.items() if names]
    chosen = groups_that_learn(settings.trainable, settings.indexer, present)
    return [name for group in chosen for name in groups[group]]


def freeze_all_but(model: nn.Module, names: list[str]) -> None:
    """Sets `requires_grad` of every parameter: True for the named ones only."""
    trained = set(names)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)


class Optimizer:
    """AdamW over named parameters.

    A parameter narrower than float32 has a float32 master that takes the update and is rounded into the
    parameter afterwards: a bfloat16 weight of 1.0 alone would never move by steps of 1e-3 (half its spacing
    is 2e-3).

    Memory: 8 bytes per trained parameter for the two moments, 4 more with a master (float64: 16, 0).

    With `device`, its state lies there and AdamW runs there. The model's device then holds nothing beside parameters
    and gradients, the other one 12 bytes per trained parameter for the moments and a float32 copy, and 4 more for
    gradients during a step (float64: 24, 8). Per step the gradients go there and the parameters come back. The tensors
    of a checkpoint are the same.

    Of sharded parameters each rank keeps and moves its rows, and all of the above is per parameter of a rank.

    Args:
        device: of the state; None: that of each parameter.
        threads: CPU threads of the step; None: as many as torch runs with elsewhere.
        mesh: the ranks that the parameters are sharded over; None: this process alone.

    Attributes:
        parts: of each parameter, the rows of this rank; the parameter itself where it is not sharded.
        copies: what AdamW moves where it is not the part itself: the masters, and what lies on another device.
    """

    def __init__(
        self,
        model: nn.Module,
        names: list[str],
        settings: TrainSection,
        *,
        device: torch.device | None = None,
        threads: int | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        parameters = dict(model.named_parameters())
        self.mesh = one_process() if mesh is None else mesh
        self.parameters: dict[str, nn.Parameter] = {name: parameters[name] for name in names}
        self.parts = {name: local_part(parameter) for name, parameter in self.parameters.items()}
        self.copies: dict[str, Tensor] = {
            name: _wide_copy(part, device) for name, part in self.parts.items() if _needs_copy(part, device)
        }
        self.masters = {
            name: copy for name, copy in self.copies.items() if self.parts[name].element_size() < 4
        }
        self.updates, self._threads = 0, threads
        decayed = [name for name in names if _decays(name, parameters[name])]
        kept = [name for name in names if not _decays(name, parameters[name])]
        self._adamw = torch.optim.AdamW(
            [
                {"params": [self._updated(name) for name in decayed], "weight_decay": settings.weight_decay},
                {"params": [self._updated(name) for name in kept], "weight_decay": 0.0},
            ],
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            fused=True,
        )
        for name in names:
            self._adamw.state[self._updated(name)] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(self._updated(name)),
                "exp_avg_sq": torch.zeros_like(self._updated(name)),
            }

    def gradients(self) -> dict[str, Tensor]:
        """The gradient of each trained part; one that nothing reached becomes a tensor of zeros."""
        gradients: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                if parameter.element_size() < 4:
                    parameter.grad_dtype = torch.float32
                zeros = torch.zeros_like(
                    self.parts[name], dtype=wide_dtype(parameter.dtype), requires_grad=False
                )
                parameter.grad = like_sharded(zeros, parameter)
            gradients[name] = local_part(parameter.grad)
        return gradients

    def norms(self) -> dict[str, float]:
        """The norm of each parameter's gradient over all ranks: of all its parts, or of what is on every rank."""
        mine = {name: norm(gradient) for name, gradient in self.gradients().items()}
        if self.mesh.world.size == 1:
            return mine
        squares = [
            value**2 if self._is_sharded(name) or self.mesh.first else 0.0 for name, value in mine.items()
        ]
        device = next(iter(self.parts.values())).device
        total = self.mesh.world.sum(torch.tensor(squares, dtype=torch.float64, device=device), "norms").sqrt()
        return dict(zip(mine, total.tolist(), strict=True))

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Moves the trained parameters by their gradients."""
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        gradients = self.gradients()
        for name, copy in self.copies.items():
            # A checkpoint may have been loaded into the parameter; a master is loaded itself.
            if name not in self.masters:
                copy.copy_(self.parts[name])
        moved = {name: self._updated(name) for name in self.parameters}
        for name, tensor in moved.items():
            if tensor is not self.parameters[name]:
                tensor.grad = gradients[name].to(tensor)
        with _cpu_threads(self._threads):
            self._adamw.step()
        for name, tensor in moved.items():
            if tensor is not self.parameters[name]:
                tensor.grad = None
        for name, copy in self.copies.items():
            self.parts[name].copy_(copy)
        self.updates += 1

    def clear_gradients(self) -> None:
        """Frees all gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """The optimizer's own tensors (not copies): `exp_avg.NAME`, `exp_avg_sq.NAME`, `master.NAME`."""
        state: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            for moment in ("exp_avg", "exp_avg_sq"):
                rows = self._adamw.state[self._updated(name)][moment]
                state[f"{moment}.{name}"] = as_stored(rows, parameter, self.mesh)
        for name, master in self.masters.items():
            state[f"master.{name}"] = as_stored(master, self.parameters[name], self.mesh)
        return state

    def continue_from(self, updates: int) -> None:
        """Sets the number of updates taken, for AdamW's bias correction; the tensors are filled in place."""
        self.updates = updates
        for name in self.parameters:
            self._adamw.state[self._updated(name)]["step"].fill_(updates)

    def _updated(self, name: str) -> Tensor:
        return self.copies.get(name, self.parts[name])

    def _is_sharded(self, name: str) -> bool:
        return self.parts[name] is not self.parameters[name]


def norm(values: Tensor) -> float:
    """Rows of 1,024 in the tensor's dtype, their norms in float64.

    One float32 sum over all is 4e-4 too small at 10M values and 1 % at 100M; a float64 one takes 28 times as long
    (measured, 1 thread). This one is exact to 4e-7 and as fast as the first.
    """
    flat = values.flatten()
    whole = len(flat) // 1024 * 1024
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, 1024), dim=1)
    return math.hypot(
        *map(float, (torch.linalg.vector_norm(rows.double()), torch.linalg.vector_norm(flat[whole:])))
    )


def _needs_copy(parameter: Tensor, device: torch.device | None) -> bool:
    """Narrower than float32, or on another device."""
    return parameter.element_size() < 4 or (device is not None and parameter.device != device)


@torch.no_grad()
def _wide_copy(parameter: Tensor, device: torch.device | None) -> Tensor:
    """Moved as it is and widened there: the parameter's own device holds no wide copy on the way."""
    copy = torch.empty_like(parameter, device=device, dtype=wide_dtype(parameter.dtype), requires_grad=False)
    return copy.copy_(parameter.to(copy.device))


@contextmanager
def _cpu_threads(number: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if number is not None:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        if number is not None:
            torch.set_num_threads(before)


def _decays(name: str, parameter: Tensor) -> bool:
    """Decay is for matrices: not for norms, biases, A_log, dt_bias, hc base and scale, pool positions."""
    return parameter.ndim >= 2 and not name.endswith("index_kpool_compress_ape")
