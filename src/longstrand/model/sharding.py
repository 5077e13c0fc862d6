"""Weights sharded over all ranks by FSDP2, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from longstrand.model.ffn import MixtureOfExperts
from longstrand.model.layer import Layer
from longstrand.model.model import Model
from longstrand.model.shards import ShardedWeight, Shards
from longstrand.parallel import Axis, Mesh


class Sharding:
    """Leaves each rank its rows of every weight; a pass gathers one layer at a time, and the root around it.

    All ranks hold the same shapes before, and what is trained is set. In a bfloat16 model the small float32 tensors
    stay whole on every rank: a group of FSDP has one dtype, and they would silently arrive rounded. Experts that are
    spread over `mesh.expert` are sharded over the ranks that hold the same ones.

    Memory: 1/ranks of the weights, of their gradients and of what an optimizer keeps for them, and one layer and the
    root gathered. A layer is cut by itself, so that the others need not be whole, nor have numbers yet.

    Args:
        mesh: of several processes.
    """

    def __init__(self, model: Model, mesh: Mesh) -> None:
        assert mesh.devices is not None and mesh.expert_devices is not None
        self._model, self._mesh = model, mesh
        self._everywhere = mesh.view("world", mesh.devices.device_type)
        self._replicas = mesh.expert_devices["expert_replicas"]
        self._whole = {p for p in model.parameters() if p.dtype != model.embed_tokens.weight.dtype}

    def layer(self, layer: nn.Module) -> None:
        """Cuts a layer, whose experts are spread already."""
        assert isinstance(layer, Layer)
        groups: list[tuple[nn.Module, DeviceMesh, Axis]] = [(layer, self._everywhere, self._mesh.world)]
        if self._mesh.expert.size > 1 and isinstance(layer.mlp, MixtureOfExperts):
            groups.insert(0, (layer.mlp.experts, self._replicas, self._mesh.expert_replicas))
        layer.shards = _shard(groups, self._whole, self._mesh.world)

    def root(self) -> None:
        """Cuts what is no layer's, once all layers are cut."""
        groups: list[tuple[nn.Module, DeviceMesh, Axis]] = [(self._model, self._everywhere, self._mesh.world)]
        self._model.shards = _shard(groups, self._whole, self._mesh.world)


def _shard(groups: list[tuple[nn.Module, DeviceMesh, Axis]], whole: set[nn.Parameter], world: Axis) -> Shards:
    """Shards what no earlier call has; of nested modules the inner one comes first."""
    modules: list[FSDPModule] = []
    weights: list[ShardedWeight] = []
    replicated: list[nn.Parameter] = []
    for module, devices, axis in groups:
        places = list(_places(module))
        replicated += [getattr(owner, name) for owner, name in places if getattr(owner, name) in whole]
        fully_shard(module, mesh=devices, reshard_after_forward=False, ignored_params=whole)
        modules.append(cast(FSDPModule, module))
        weights += [
            ShardedWeight(owner, name, part, axis)
            for owner, name in places
            if (part := getattr(owner, name)) not in whole
        ]
    return Shards(modules, weights, replicated, world)


def _places(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The owner and name of each parameter that is not yet sharded; a tied one once."""
    seen: set[nn.Parameter] = set()
    for owner in _unsharded(module):
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter not in seen:
                seen.add(parameter)
                yield owner, name


def _unsharded(module: nn.Module) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _unsharded(child)
