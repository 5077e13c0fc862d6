"""What both kinds of layer share: hyper-connections around a mixer and a feed-forward part, tile by tile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longstrand.architecture import Architecture
from longstrand.memory.protocol import Choices, SideLosses
from longstrand.memory.tiles import Tile
from longstrand.model.ffn import Dense, MixtureOfExperts, aux_loss
from longstrand.model.linear import Norm
from longstrand.model.shards import Shards
from longstrand.ops.mhc import mhc_gather, mhc_update
from longstrand.ops.norm import rms_norm

Site = tuple[Tensor, Tensor, Tensor]  # a sublayer's input [T, D], post [T, R], comb [T, R, R]


class Layer(nn.Module):
    """A mixer, which the kinds of layer bring, and a feed-forward part, each inside a hyper-connection."""

    shards: Shards | None = None  # where ranks hold parts of the weights

    def __init__(self, shape: Architecture, index: int) -> None:
        super().__init__()
        self.shape = shape
        outputs = shape.hc_mult * (2 + shape.hc_mult)
        for site in ("attn", "ffn"):
            self.register_parameter(
                f"hc_{site}_fn", nn.Parameter(torch.empty(outputs, shape.hc_mult * shape.hidden_size))
            )
            self.register_parameter(f"hc_{site}_base", nn.Parameter(torch.empty(outputs)))
            self.register_parameter(f"hc_{site}_scale", nn.Parameter(torch.empty(3)))
        self.input_layernorm = Norm(shape.hidden_size)
        self.post_attention_layernorm = Norm(shape.hidden_size)
        self.mlp: Dense | MixtureOfExperts
        if shape.mlp_layer_types[index] == "sparse":
            self.mlp = MixtureOfExperts(shape, index)
        else:
            self.mlp = Dense(shape.hidden_size, shape.intermediate_size, shape.swiglu_limit)

    def trains(self) -> bool:
        return any(parameter.requires_grad for parameter in self.parameters())

    def learns_to_select(self) -> bool:
        return False

    def idle(self, side: SideLosses, *, choose: bool) -> Callable[[], None]:
        """Takes part in a tile of other ranks' experts; see `MixtureOfExperts.idle`."""
        if isinstance(self.mlp, MixtureOfExperts):
            return self.mlp.idle(side, choose=choose)
        return lambda: None

    def gather_weights(self) -> None:
        if self.shards is not None:
            self.shards.gather()

    def reduce_gradients(self) -> None:
        if self.shards is not None:
            self.shards.reduce()

    def free_weights(self) -> None:
        if self.shards is not None:
            self.shards.free()

    def forward_tile(
        self,
        x: Float[Tensor, "T R D"],
        tile: Tile,
        carry: Any,
        choices: Choices,
        side: SideLosses,
        *,
        choose: bool,
    ) -> tuple[Tensor, Any]:
        site = self.enter_mixer(x)
        out, carry = self.mix(site[0], tile, carry, choices, side, choose=choose)
        return self.leave_mixer(x, site, out, choices, side, choose=choose), carry

    def leave_mixer(
        self,
        x: Float[Tensor, "T R D"],
        site: Site,
        out: Tensor,
        choices: Choices,
        side: SideLosses,
        *,
        choose: bool,
    ) -> Float[Tensor, "T R D"]:
        """From the mixer's output [T, D] to the layer's, without a graph."""
        _, post, comb = site
        return self.feed_forward(mhc_update(x, out, post, comb), choices, side, choose=choose)

    def mix(
        self,
        h: Float[Tensor, "T D"],
        tile: Tile,
        carry: Any,
        choices: Choices,
        side: SideLosses,
        *,
        choose: bool,
    ) -> tuple[Tensor, Any]:
        """The mixer's output [T, D] and the next carry."""
        raise NotImplementedError

    def warm_up_tile(self, x: Tensor, tile: Tile, d_carry: Any, opened: Any, side: SideLosses) -> Any:
        raise AssertionError("a layer without an indexer has nothing to warm up")

    def step(
        self, x: Float[Tensor, "B R D"], mixer: Callable[[Tensor], tuple[Tensor, Any]], side: SideLosses
    ) -> tuple[Tensor, Any]:
        """One token of each of B documents, around a mixer that keeps their carries; returns also what it chose."""
        h, post, comb = self.enter_mixer(x)
        out, chosen = mixer(h)
        choices = self.expert_choices(len(x), x.device)
        return self.feed_forward(mhc_update(x, out, post, comb), choices, side, choose=True), chosen

    def enter_mixer(self, x: Float[Tensor, "T R D"]) -> Site:
        return self._enter(x, "attn", self.input_layernorm)

    def feed_forward(
        self,
        x: Float[Tensor, "T R D"],
        choices: Choices,
        side: SideLosses,
        *,
        choose: bool,
        ends: Ends | None = None,
    ) -> Float[Tensor, "T R D"]:
        """The second sublayer.

        Args:
            choose: makes and counts the choice of experts; otherwise it is read.
            ends: of a recomputed tile: receives the router's side loss, whose counts are those of the whole pass.
        """
        h, post, comb = self._enter(x, "ffn", self.post_attention_layernorm)
        if not isinstance(self.mlp, MixtureOfExperts):
            return mhc_update(x, self.mlp(h), post, comb)
        if choose:
            return mhc_update(x, self.mlp.choose(h, choices, side), post, comb)
        out, logits = self.mlp.recompute(h, choices)
        y = mhc_update(x, out, post, comb)
        if ends is not None and side.aux_scale:
            loss = aux_loss(logits, side)
            side.aux += float(loss.detach())
            ends.add(loss * side.aux_scale, torch.ones_like(loss))
        return y

    def expert_choices(self, num_tokens: int, device: torch.device) -> Choices:
        """Empty rows for the experts of each token, where there are any."""
        if isinstance(self.mlp, MixtureOfExperts):
            return self.mlp.new_choices(num_tokens, device)
        return {}

    def _enter(self, x: Tensor, site: str, norm: Norm) -> Site:
        fn, base, scale = (getattr(self, f"hc_{site}_{part}") for part in ("fn", "base", "scale"))
        shape = self.shape
        h, post, comb = mhc_gather(
            x,
            fn,
            base,
            scale,
            norm_eps=shape.rms_norm_eps,
            eps=shape.hc_eps,
            iterations=shape.hc_sinkhorn_iters,
        )
        return rms_norm(h, norm.weight, shape.rms_norm_eps), post, comb


@dataclass
class Ends:
    """The open ends of a tile's graph, beside its output."""

    roots: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)

    def add(self, root: Tensor, grad: Tensor) -> None:
        if root.requires_grad:
            self.roots.append(root)
            self.grads.append(grad)

    def walk_back(self, y: Tensor, dy: Tensor) -> None:
        torch.autograd.backward([y, *self.roots], [dy, *self.grads])


class Cut:
    """A tile's graph cut between the hyper-connection and the mixer.

    The mixer's input may be reached twice (from the output, and once its latents' gradient is complete), the costly
    hyper-connection must be walked back once: so it is cut there, and joined again at the end.

    Kept per token in plain torch, the norm behind it too, beside the input and gradients: (R D + 2 D) e bytes, (4 R^2 +
    5 R + (2 I - 1) R + 2) w of I iterations, and 32 of its tile's places.
    """

    def __init__(self, x: Tensor, enter: Callable[[Tensor], Site]) -> None:
        # A version of its own: the walk writes dx over x, tile by tile, while graphs of earlier tiles are kept.
        self.x = x.data.requires_grad_()
        self.site = enter(self.x)
        self.leaves = tuple(part.detach().requires_grad_() for part in self.site)

    def join(self) -> Tensor:
        """Walks back from the leaves to x and returns its gradient."""
        pairs = [(out, leaf.grad) for out, leaf in zip(self.site, self.leaves, strict=True)]
        known = [(out, grad) for out, grad in pairs if grad is not None]
        torch.autograd.backward([out for out, _ in known], [grad for _, grad in known])
        assert self.x.grad is not None
        return self.x.grad
