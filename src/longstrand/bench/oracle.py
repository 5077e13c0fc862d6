"""The independent implementation that ours is compared with: transformers' text model, in float64.

transformers casts to float32 inside KDA, the hyper-connections, the router and the indexer; `Widened` turns
those casts into float64, so that the oracle agrees with itself and any difference is ours. It ignores packs:
every document runs alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextIndexer, Glm5NextTextModel

from longstrand.architecture import Architecture
from longstrand.plan.parameters import parameter_shapes

_TOPK = (torch.topk, torch.Tensor.topk)
_RENAMED = (  # ours -> transformers' module names
    (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
    (r"\.self_attn\.(f_a_proj|f_b_proj|dt_bias|A_log)", r".self_attn.forget_gate.\1"),
)
_CONV = re.compile(r"\.([qkv])_conv1d\.weight$")


class Widened(TorchFunctionMode):
    """float32 becomes float64 wherever it is asked for, and the lowest index wins a tie in top-k.

    Args:
        widen: False leaves the casts as they are (the oracle in float32), and settles ties only.
    """

    def __init__(self, widen: bool = True) -> None:
        super().__init__()
        self.widen = widen

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _TOPK:
            return _stable_topk(*args, **kwargs)
        if self.widen:
            if func is torch.Tensor.float:
                func = torch.Tensor.double
            args = tuple(_wide(arg) for arg in args)
            kwargs = {name: _wide(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


@dataclass
class Answer:
    """What the oracle says about some documents in a row."""

    hidden: Tensor  # [T, D] after the last norm
    logprobs: Tensor  # [T], 0 at the end of a document
    gradients: dict[str, Tensor]  # by our names; absent where the oracle has none (indexer)
    selected: dict[int, list[Tensor]] = field(
        default_factory=dict
    )  # layer -> per document [T, ids], -1 unused


class Oracle:
    """transformers' text model with our weights.

    Args:
        weights: every parameter and buffer under our names; cast to `dtype`.
        dtype: float64, or float32 for the comparison at float32's own precision.
    """

    def __init__(
        self, architecture: Architecture, weights: Mapping[str, Tensor], dtype: torch.dtype = torch.float64
    ) -> None:
        self.architecture = architecture
        self.dtype = dtype
        config = Glm5NextTextConfig(**architecture.to_hf())
        with _default_dtype(dtype):
            self.model = Glm5NextTextModel._from_config(
                config, attn_implementation="eager", experts_implementation="eager"
            )
        theirs = _to_theirs({name: value.detach().to(dtype) for name, value in weights.items()})
        head = theirs.pop("lm_head.weight", theirs["embed_tokens.weight"])
        self.model.load_state_dict(theirs, strict=True)
        self.model.train()
        tied = architecture.tie_word_embeddings
        self.head = self.model.embed_tokens.weight if tied else nn.Parameter(head.clone())

    def run(
        self,
        documents: Sequence[Tensor],
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
        selected: Mapping[int, Sequence[Tensor]] | None = None,
    ) -> Answer:
        """Runs each document alone.

        Args:
            loss: of (hidden [T, D], logprobs [T]) of all documents in a row; its gradients are returned.
            selected: layer -> per document [T, ids], -1 unused: replaces the oracle's own choice of tokens.
        """
        self.model.zero_grad(set_to_none=True)
        self.head.grad = None
        hidden, logprobs, chosen = [], [], []
        widened = Widened(self.dtype == torch.float64)
        with widened, torch.enable_grad() if loss else torch.no_grad():
            for number, document in enumerate(documents):
                given = None if selected is None else {layer: ids[number] for layer, ids in selected.items()}
                with _indexers(given) as seen:
                    state = self.model(input_ids=document[None], use_cache=False).last_hidden_state[0]
                chosen.append(seen)
                scores = (state @ self.head.T).log_softmax(-1)
                picked = scores[:-1].gather(-1, document[1:, None])[:, 0]
                hidden.append(state)
                logprobs.append(torch.cat([picked, picked.new_zeros(1)]))
            answer = Answer(torch.cat(hidden), torch.cat(logprobs), {})
            if loss is not None:
                loss(answer.hidden, answer.logprobs).backward()
                answer.gradients = self._gradients()
        answer.selected = {layer: [each[layer] for each in chosen] for layer in chosen[0]}
        return Answer(answer.hidden.detach(), answer.logprobs.detach(), answer.gradients, answer.selected)

    def _gradients(self) -> dict[str, Tensor]:
        found = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        if not self.architecture.tie_word_embeddings and self.head.grad is not None:
            found["lm_head.weight"] = self.head.grad
        return {ours: found[theirs][at] for ours, theirs, at in _names(self.architecture) if theirs in found}


def _stable_topk(x: Tensor, k: int, dim: int = -1, **kwargs: bool) -> Any:
    values, indices = torch.sort(x, dim=dim, descending=True, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _indexers(given: Mapping[int, Tensor] | None) -> Iterator[dict[int, Tensor]]:
    """Notes what each indexer selects, and puts the given ids in its place."""
    seen: dict[int, Tensor] = {}
    indexer: Any = Glm5NextTextIndexer
    own = indexer.forward

    def forward(self: Any, **kwargs: Any) -> Tensor:
        ids = own(self, **kwargs) if given is None else given[self.layer_idx][None].to(torch.int32)
        seen[self.layer_idx] = ids[0]
        return ids

    indexer.forward = forward
    try:
        yield seen
    finally:
        indexer.forward = own


def _their_name(ours: str) -> str:
    for pattern, replacement in _RENAMED:
        ours = re.sub(pattern, replacement, ours)
    return _CONV.sub(".conv1d.weight", ours)


def _names(architecture: Architecture) -> Iterator[tuple[str, str, slice]]:
    """Our name, theirs, and our rows of theirs."""
    for ours, shape in parameter_shapes(architecture).items():
        conv = _CONV.search(ours)
        first = "qkv".index(conv[1]) * shape[0] if conv else 0
        yield ours, _their_name(ours), slice(first, first + shape[0])


def _to_theirs(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    theirs: dict[str, Tensor] = {}
    for ours, value in weights.items():  # q, k and v convolutions come in this order
        name = _their_name(ours)
        theirs[name] = torch.cat([theirs[name], value]) if name in theirs else value
    return theirs
