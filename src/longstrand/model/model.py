"""The model: embedding, a scan over hybrid layers, one chunked log-probability head."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from longstrand.architecture import Architecture
from longstrand.data.pack import Pack
from longstrand.memory import Levers, ScanEnd, ScanLayer, SideLosses, prefix_of, scan_layers
from longstrand.memory.slots import Demand
from longstrand.memory.store import pass_demand
from longstrand.memory.tiles import PackLayout, Shard
from longstrand.model.dsa_layer import DsaLayer
from longstrand.model.head import LogprobEnd
from longstrand.model.hf import SourceInfo
from longstrand.model.kda_layer import KdaLayer
from longstrand.model.linear import Linear, Norm
from longstrand.model.shards import Shards
from longstrand.ops.norm import rms_norm
from longstrand.ops.precision import wide_dtype
from longstrand.parallel import deal, one_process
from longstrand.plan.parameters import GROUPS, group_of, keeps_float32


class Model(nn.Module):
    """A `glm5_next` text model; parameters carry the checkpoint's names."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.architecture = shape = architecture
        self.shards: Shards | None = None  # of what is no layer's, where ranks hold parts of the weights
        self.source: SourceInfo | None = None  # where the weights came from: dtypes, tensors kept aside
        self.mesh = one_process()  # see `parallelize`
        self.segments: int | None = None  # per rank; None: as many as balance attention
        self.embed_tokens = Linear(shape.hidden_size, shape.vocab_size)
        kinds = {"linear_attention": KdaLayer, "indexed_attention": DsaLayer}
        self.layers = nn.ModuleList(kinds[kind](shape, index) for index, kind in enumerate(shape.layer_types))
        self.norm = Norm(shape.hidden_size)
        self.lm_head = Linear(shape.hidden_size, shape.vocab_size)
        if shape.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def gathered(self) -> AbstractContextManager[None]:
        """Inside, what is no layer's is whole; nothing happens where it is already, or on one process."""
        return nullcontext() if self.shards is None else self.shards.gathered()

    def prefix(self, document: Int[Tensor, "T"], tile: int) -> tuple[Float[Tensor, "D"], list[Any]]:
        """The last hidden state of a document and each layer's carry after it, on every rank that shares it."""
        with torch.no_grad(), self.gathered():
            layout = self._layout(torch.tensor([0, len(document)]), tile)
            mean, carries = prefix_of(
                self.embed_tokens.weight,
                document.to(layout.device),
                self._scan_layers(),
                layout,
                hc_mult=self.architecture.hc_mult,
                tile=tile,
            )
            return self.last_norm(mean)[0], carries

    def last_norm(self, mean: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        """The last hidden state, from the mean of the streams."""
        return rms_norm(mean, self.norm.weight, self.architecture.rms_norm_eps)

    def hidden(
        self, pack: Pack, levers: Levers = Levers(), side: SideLosses | None = None
    ) -> Float[Tensor, "T D"]:
        """The last hidden state, after the final norm, of every token of the pack."""

        def run() -> Tensor:
            mean = self._scan(pack, levers, side or SideLosses(), None)
            scale = self.norm.weight.detach() if _warms_up(side) else self.norm.weight
            return rms_norm(mean, scale, self.architecture.rms_norm_eps)

        return run() if self.shards is None else self.shards.around(run)

    def token_logprobs(
        self, pack: Pack, levers: Levers = Levers(), side: SideLosses | None = None
    ) -> Float[Tensor, "T"]:
        """Natural-log probability of each target given its document so far; 0 where there is no target.

        Differentiable: call `.backward()` on a function of it, and every trained parameter's `.grad` (float32 or
        wider) holds its gradient. The result does not depend on the tile beyond rounding, nor on the other levers.

        Args:
            pack: documents in a row; they never see each other.
            levers: what bounds memory, such as the number of tokens computed at once.
            side: side losses and counts of this pass; see `SideLosses`.

        Returns:
            float32, or float64 for a float64 model; where ranks share the pack, 0 for the tokens of the others.
        """

        def run() -> Tensor:
            scale: Tensor = self.norm.weight
            head: Tensor = self.lm_head.weight
            if _warms_up(side):
                scale, head = scale.detach(), head.detach()
            end = LogprobEnd(scale, head, pack.targets.to(head.device), self.architecture.rms_norm_eps)
            return self._scan(pack, levers, side or SideLosses(), end)

        return run() if self.shards is None else self.shards.around(run)

    def _scan(self, pack: Pack, levers: Levers, side: SideLosses, end: ScanEnd | None) -> Tensor:
        largest = max(int(pack.tokens.max()), int(pack.targets.max()))
        if largest >= self.architecture.vocab_size:
            raise ValueError(f"token {largest} is beyond the vocabulary of {self.architecture.vocab_size}")
        return scan_layers(
            self.embed_tokens.weight,
            pack.tokens.to(self.norm.weight.device),
            self._scan_layers(),
            self._layout(pack.starts, levers.tile),
            hc_mult=self.architecture.hc_mult,
            levers=levers,
            side=side,
            end=end,
        )

    def _layout(self, starts: Tensor, tile: int) -> PackLayout:
        """This rank's part of a pack."""
        device = self.norm.weight.device
        layout = PackLayout(starts, self.architecture.index_kpool, device, self._shard(starts))
        layout.most_tiles = self._most_tiles(layout.num_tiles(tile))
        return layout

    def _most_tiles(self, num_tiles: int) -> int | None:
        """Of any rank that this one shares weights or experts with; None where there is none."""
        if self.shards is None and self.mesh.expert.size == 1:
            return None
        return self.mesh.expert.largest(num_tiles)

    def _shard(self, starts: Tensor) -> Shard | None:
        """This rank's part of a pack; None where no other rank shares it."""
        context = self.mesh.context
        if context.size == 1:
            return None
        return Shard(context, deal(starts.tolist(), context.size, self.segments))

    def spans(self, num_tokens: int) -> Sequence[tuple[int, int]]:
        """First and last position (exclusive) of each part of one document that this rank computes."""
        shard = self._shard(torch.tensor([0, num_tokens]))
        return [(0, num_tokens)] if shard is None else shard.deal.owned_by(shard.axis.rank)

    def stream_demand(self, num_tokens: int, levers: Levers) -> Demand:
        """The streams of this rank's training pass of one document, wherever the levers put them."""
        return pass_demand(
            self.embed_tokens.weight,
            self._scan_layers(),
            [stop - start for start, stop in self.spans(num_tokens)],
            levers,
            hc_mult=self.architecture.hc_mult,
            keeps_mean=True,
            shared=self.mesh.context.size > 1,
        )

    def _scan_layers(self) -> list[ScanLayer]:
        return [cast(ScanLayer, layer) for layer in self.layers]

    def groups(self) -> dict[str, list[str]]:
        """Parameter names by the group that a recipe trains or freezes."""
        groups: dict[str, list[str]] = {name: [] for name in GROUPS}
        for name, _ in self.named_parameters():
            groups[group_of(name, self.architecture)].append(name)
        return {group: names for group, names in groups.items() if names}

    def convert(self, dtype: torch.dtype) -> Model:
        """Casts to a dtype; what is kept in float32 stays so (float64 casts everything). Gradients are float32."""
        wide = wide_dtype(dtype)
        for name, tensor in [*self.named_parameters(), *self.named_buffers()]:
            tensor.data = tensor.data.to(wide if keeps_float32(name) else dtype)
        self._widen_gradients()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy or an unpickled model adds up its gradients as the first one does; torch forgets that."""
        super().__setstate__(state)
        self._widen_gradients()

    def _widen_gradients(self) -> None:
        for parameter in self.parameters():
            parameter.grad_dtype = wide_dtype(parameter.dtype)


def _warms_up(side: SideLosses | None) -> bool:
    """In warm-up nothing but the indexer learns."""
    return side is not None and side.indexer == "warmup"
