"""AdamW over the trained parameters, with float32 masters where the weights are narrower."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from longstrand.config import TrainSection
from longstrand.errors import UserError
from longstrand.ops.precision import wide_dtype


def trained_names(groups: dict[str, list[str]], settings: TrainSection) -> list[str]:
    """Names of the parameters that learn, in the order of the groups.

    A frozen indexer is left out of "all", and in a warm-up of the indexer nothing else learns.

    Raises:
        UserError: a group that this model has not, or nothing is left to train.
    """
    chosen = list(groups) if settings.trainable == ["all"] else list(settings.trainable)
    if unknown := [group for group in chosen if not groups.get(group) and settings.trainable != ["all"]]:
        present = ", ".join(group for group, names in groups.items() if names)
        raise UserError(
            f'train.trainable: this model has no parameters in group "{unknown[0]}"; its groups are {present}'
        )
    if settings.indexer == "frozen":
        chosen = [group for group in chosen if group != "indexer"]
    elif settings.indexer == "warmup":
        chosen = ["indexer"]
    names = [name for group in chosen for name in groups.get(group, [])]
    if not names:
        raise UserError(
            f"train.trainable = {settings.trainable} with train.indexer = {settings.indexer!r}: nothing "
            "is left to train in this model; name another group"
        )
    return names


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

    Args:
        device: of the state; None: that of each parameter.
        threads: CPU threads of the step; None: as many as torch runs with elsewhere.

    Attributes:
        copies: what AdamW moves where it is not the parameter itself: the masters, and what lies on another device.
    """

    def __init__(
        self,
        model: nn.Module,
        names: list[str],
        settings: TrainSection,
        *,
        device: torch.device | None = None,
        threads: int | None = None,
    ) -> None:
        parameters = dict(model.named_parameters())
        self.parameters: dict[str, nn.Parameter] = {name: parameters[name] for name in names}
        self.copies: dict[str, Tensor] = {
            name: _wide_copy(parameter, device)
            for name, parameter in self.parameters.items()
            if _needs_copy(parameter, device)
        }
        self.masters = {
            name: copy for name, copy in self.copies.items() if self.parameters[name].element_size() < 4
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
        """The gradient of each trained parameter; one that nothing reached becomes a tensor of zeros."""
        for parameter in self.parameters.values():
            if parameter.grad is None:
                if parameter.element_size() < 4:
                    parameter.grad_dtype = torch.float32
                parameter.grad = torch.zeros_like(parameter, dtype=wide_dtype(parameter.dtype))
        return {name: parameter.grad for name, parameter in self.parameters.items()}  # type: ignore[misc]

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Moves the trained parameters by their gradients."""
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        gradients = self.gradients()
        for name, copy in self.copies.items():
            # A checkpoint may have been loaded into the parameter; a master is loaded itself.
            if name not in self.masters:
                copy.copy_(self.parameters[name])
            copy.grad = gradients[name].to(copy)
        with _cpu_threads(self._threads):
            self._adamw.step()
        for name, copy in self.copies.items():
            copy.grad = None
            self.parameters[name].copy_(copy)
        self.updates += 1

    def clear_gradients(self) -> None:
        """Frees all gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """The optimizer's own tensors (not copies): `exp_avg.NAME`, `exp_avg_sq.NAME`, `master.NAME`."""
        state = {
            f"{moment}.{name}": self._adamw.state[self._updated(name)][moment]
            for name in self.parameters
            for moment in ("exp_avg", "exp_avg_sq")
        }
        return state | {f"master.{name}": master for name, master in self.masters.items()}

    def continue_from(self, updates: int) -> None:
        """Sets the number of updates taken, for AdamW's bias correction; the tensors are filled in place."""
        self.updates = updates
        for name in self.parameters:
            self._adamw.state[self._updated(name)]["step"].fill_(updates)

    def _updated(self, name: str) -> Tensor:
        return self.copies.get(name, self.parameters[name])


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
