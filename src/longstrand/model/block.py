"""One layer: a mixer and a feed-forward part, each inside a hyper-connection; and how its tiles are recomputed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longstrand.architecture import Architecture
from longstrand.memory.borders import Borders
from longstrand.memory.scan import Choices, SideLosses, TileGraph
from longstrand.memory.tiles import PackLayout, Tile
from longstrand.model.dsa import Dsa, DsaCarry
from longstrand.model.ffn import Dense, MixtureOfExperts, aux_loss
from longstrand.model.index_keys import IndexKeys, gradient_of
from longstrand.model.kda import Kda, KdaCarry
from longstrand.model.linear import Norm
from longstrand.ops.mhc import mhc_gather, mhc_update
from longstrand.ops.norm import rms_norm

Site = tuple[Tensor, Tensor, Tensor]  # a sublayer's input [T, D], post [T, R], comb [T, R, R]


class _Layer(nn.Module):
    """What both kinds of layer share: the hyper-connections, the norms and the feed-forward part."""

    def __init__(self, shape: Architecture, index: int) -> None:
        super().__init__()
        self.shape = shape
        streams = shape.hc_mult
        outputs = streams * (2 + streams)
        for site in ("attn", "ffn"):
            self.register_parameter(
                f"hc_{site}_fn", nn.Parameter(torch.empty(outputs, streams * shape.hidden_size))
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

    def warm_up_tile(self, x: Tensor, tile: Tile, d_carry: Any, opened: Any, side: SideLosses) -> Any:
        raise AssertionError("a layer without an indexer has nothing to warm up")

    def step(
        self, x: Float[Tensor, "B R D"], mixer: Callable[[Tensor], tuple[Tensor, Any]], side: SideLosses
    ) -> tuple[Tensor, Any]:
        """One token of each of B documents, around a mixer that keeps their carries; returns also what it chose."""
        h, post, comb = self._enter_mixer(x)
        out, chosen = mixer(h)
        choices = self._expert_choices(len(x), x.device)
        return self._choose_and_feed_forward(mhc_update(x, out, post, comb), choices, side), chosen

    def _enter_mixer(self, x: Tensor) -> Site:
        return self._enter(x, "attn", self.input_layernorm)

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

    def _choose_and_feed_forward(self, x: Tensor, choices: Choices, side: SideLosses) -> Tensor:
        h, post, comb = self._enter(x, "ffn", self.post_attention_layernorm)
        out = self.mlp.choose(h, choices, side) if isinstance(self.mlp, MixtureOfExperts) else self.mlp(h)
        return mhc_update(x, out, post, comb)

    def _feed_forward_as_chosen(self, x: Tensor, choices: Choices) -> tuple[Tensor, Tensor | None]:
        """The same with the experts given; also the router's logits, where there is one."""
        h, post, comb = self._enter(x, "ffn", self.post_attention_layernorm)
        if not isinstance(self.mlp, MixtureOfExperts):
            return mhc_update(x, self.mlp(h), post, comb), None
        out, logits = self.mlp.recompute(h, choices)
        return mhc_update(x, out, post, comb), logits

    def _feed_forward_with_graph(
        self, x: Tensor, choices: Choices, side: SideLosses, ends: _Ends, choose: bool
    ) -> Tensor:
        """In recompute with the router's side loss; in the first pass its counts are not known yet."""
        if choose:
            return self._choose_and_feed_forward(x, choices, side)
        y, logits = self._feed_forward_as_chosen(x, choices)
        if side.aux_scale and logits is not None:
            loss = aux_loss(logits, side)
            side.aux += float(loss.detach())
            ends.add(loss * side.aux_scale, torch.ones_like(loss))
        return y

    def _expert_choices(self, num_tokens: int, device: torch.device) -> Choices:
        if isinstance(self.mlp, MixtureOfExperts):
            return self.mlp.new_choices(num_tokens, device)
        return {}


@dataclass
class _Ends:
    """The open ends of a recomputed tile, beside its output."""

    roots: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)

    def add(self, root: Tensor, grad: Tensor) -> None:
        if root.requires_grad:
            self.roots.append(root)
            self.grads.append(grad)

    def walk_back(self, y: Tensor, dy: Tensor) -> None:
        torch.autograd.backward([y, *self.roots], [dy, *self.grads])


class _Cut:
    """A tile's graph cut between the hyper-connection and the mixer.

    The mixer's input may be reached twice (from the output, and once its latents' gradient is complete), the costly
    hyper-connection must be walked back once: so it is cut there, and joined again at the end.
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


class KdaLayer(_Layer):
    """A linear-attention layer: the carry is a state of fixed size."""

    def __init__(self, shape: Architecture, index: int) -> None:
        super().__init__(shape, index)
        self.self_attn = Kda(shape)

    def start(self, layout: PackLayout) -> KdaCarry:
        return self.self_attn.start()

    def new_choices(self, num_tokens: int, device: torch.device, before: Choices) -> Choices:
        return self._expert_choices(num_tokens, device)

    def forward_tile(
        self, x: Float[Tensor, "T R D"], tile: Tile, carry: KdaCarry, choices: Choices, side: SideLosses
    ) -> tuple[Tensor, KdaCarry]:
        x, carry = self._mix(x, tile, carry)
        return self._choose_and_feed_forward(x, choices, side), carry

    def repeat_tile(
        self, x: Float[Tensor, "T R D"], tile: Tile, carry: KdaCarry, choices: Choices, side: SideLosses
    ) -> tuple[Tensor, KdaCarry]:
        x, carry = self._mix(x, tile, carry)
        return self._feed_forward_as_chosen(x, choices)[0], carry

    def _mix(self, x: Tensor, tile: Tile, carry: KdaCarry) -> tuple[Tensor, KdaCarry]:
        h, post, comb = self._enter_mixer(x)
        out, carry = self.self_attn(h, tile, carry)
        return mhc_update(x, out, post, comb), carry

    def keep(self, carry: KdaCarry) -> tuple[Tensor, Tensor]:
        return carry.tail, carry.state

    def reopen(self, read: Callable[[Tile], Tensor], layout: PackLayout, tile_size: int) -> None:
        return None

    def open(self, carry: KdaCarry) -> None:
        return None

    def recompute_tile(
        self,
        x: Float[Tensor, "T R D"],
        tile: Tile,
        kept: Sequence[Tensor],
        choices: Choices,
        opened: None,
        side: SideLosses,
    ) -> TileGraph:
        return self._with_graph(x, tile, KdaCarry(*kept), choices, side, choose=False)

    def record_tile(
        self,
        x: Float[Tensor, "T R D"],
        tile: Tile,
        carry: KdaCarry,
        choices: Choices,
        opened: None,
        side: SideLosses,
    ) -> TileGraph:
        return self._with_graph(x, tile, carry, choices, side, choose=True)

    @torch.enable_grad()
    def _with_graph(
        self, x: Tensor, tile: Tile, carry: KdaCarry, choices: Choices, side: SideLosses, choose: bool
    ) -> TileGraph:
        cut, before, ends = _Cut(x, self._enter_mixer), carry.leaf(), _Ends()
        h, post, comb = cut.leaves
        out, after = self.self_attn(h, tile, before)
        x = mhc_update(cut.x, out, post, comb)
        y = self._feed_forward_with_graph(x, choices, side, ends, choose)

        def back(dy: Tensor, d_carry: KdaCarry | None) -> tuple[Tensor, KdaCarry]:
            if d_carry is not None:
                ends.add(after.tail, d_carry.tail)
                ends.add(after.state, d_carry.state)
            ends.walk_back(y, dy)
            grads = (gradient_of(before.tail), gradient_of(before.state))
            return cut.join(), KdaCarry(*grads)

        return TileGraph(y, KdaCarry(after.tail.detach(), after.state.detach()), back)


@dataclass(frozen=True)
class _Opened:
    """A DSA layer's buffers during its walk back, and their gradients in float32."""

    appended: DsaCarry  # after the last tile
    tails: Borders | None  # None while tiles are recorded: they come with their carries
    latents: Tensor  # gradient of the latents, complete for a tile once all later tiles are done
    pool_keys: Tensor

    def enter_last(self) -> DsaCarry:
        """The carry that the last tile not yet walked back enters."""
        assert self.tails is not None
        return replace(self.appended, tail=self.tails.pop()[0])


class DsaLayer(_Layer):
    """A sparse-attention layer: the carry is all that it has appended so far."""

    def __init__(self, shape: Architecture, index: int) -> None:
        super().__init__(shape, index)
        self.self_attn = Dsa(shape, index)

    def start(self, layout: PackLayout) -> DsaCarry:
        return self.self_attn.start(layout)

    def new_choices(self, num_tokens: int, device: torch.device, before: Choices) -> Choices:
        pools = self.self_attn.new_choices(num_tokens, device, before)
        return {**pools, **self._expert_choices(num_tokens, device)}

    def forward_tile(
        self, x: Float[Tensor, "T R D"], tile: Tile, carry: DsaCarry, choices: Choices, side: SideLosses
    ) -> tuple[Tensor, DsaCarry]:
        x, carry = self._mix(x, tile, carry, choices, side, choose=True)
        return self._choose_and_feed_forward(x, choices, side), carry

    def repeat_tile(
        self, x: Float[Tensor, "T R D"], tile: Tile, carry: DsaCarry, choices: Choices, side: SideLosses
    ) -> tuple[Tensor, DsaCarry]:
        x, carry = self._mix(x, tile, carry, choices, side, choose=False)
        return self._feed_forward_as_chosen(x, choices)[0], carry

    def _mix(
        self, x: Tensor, tile: Tile, carry: DsaCarry, choices: Choices, side: SideLosses, choose: bool
    ) -> tuple[Tensor, DsaCarry]:
        attention = self.self_attn
        h, post, comb = self._enter_mixer(x)
        carry = attention.append(h, tile, carry)
        q_resid = attention.query_residual(h)
        if side.indexer == "warmup":
            out = attention.attend_dense(attention.queries(q_resid), carry, tile).out
        else:
            if choose and attention.indexer is not None:
                choices["pools"].copy_(attention.select(h, q_resid, tile, carry))
            out, _ = attention.attend(attention.queries(q_resid), carry, None, choices["pools"], tile)
        return mhc_update(x, attention.project(out), post, comb), carry

    def keep(self, carry: DsaCarry) -> tuple[()]:
        """Nothing: `reopen` appends again."""
        return ()

    def reopen(self, read: Callable[[Tile], Tensor], layout: PackLayout, tile_size: int) -> _Opened:
        attention, carry, tails = self.self_attn, self.start(layout), Borders(layout.num_tiles(tile_size))
        with torch.no_grad():
            for tile in layout.tiles(tile_size):
                tails.push([carry.tail])
                carry = attention.append(self._enter_mixer(read(tile))[0], tile, carry)
        return replace(self.open(carry), tails=tails)

    def open(self, carry: DsaCarry) -> _Opened:
        grads = map(self.self_attn.new_gradient, (carry.latents, carry.pool_keys))
        return _Opened(carry, None, *grads)

    def recompute_tile(
        self,
        x: Float[Tensor, "T R D"],
        tile: Tile,
        kept: Sequence[Tensor],
        choices: Choices,
        opened: _Opened,
        side: SideLosses,
    ) -> TileGraph:
        return self._with_graph(x, tile, opened.enter_last(), choices, opened, side)

    def record_tile(
        self,
        x: Float[Tensor, "T R D"],
        tile: Tile,
        carry: DsaCarry,
        choices: Choices,
        opened: _Opened,
        side: SideLosses,
    ) -> TileGraph:
        # Versions of their own: later tiles write to rows that this one does not read.
        carry = replace(carry, latents=carry.latents.data, pool_keys=carry.pool_keys.data)
        return self._with_graph(x, tile, carry, choices, opened, side, choose=True)

    @torch.enable_grad()
    def _with_graph(
        self,
        x: Tensor,
        tile: Tile,
        carry: DsaCarry,
        choices: Choices,
        opened: _Opened,
        side: SideLosses,
        choose: bool = False,
    ) -> TileGraph:
        attention, cut, ends, entered = self.self_attn, _Cut(x, self._enter_mixer), _Ends(), carry
        h, post, comb = cut.leaves
        latents = attention.latents(h)
        q_resid = attention.query_residual(h)
        if choose:
            with torch.no_grad():
                carry = attention.append(h, tile, carry)
                if attention.indexer is not None:
                    choices["pools"].copy_(attention.select(h, q_resid, tile, carry))
        out, mass = attention.attend(
            attention.queries(q_resid), carry, opened.latents, choices["pools"], tile
        )
        keys = None
        if side.indexer == "sparse" and self.learns_to_select():
            keys = IndexKeys(attention, h.detach(), tile, entered, opened.pool_keys)
            loss = keys.selected_loss(q_resid.detach(), choices["pools"], mass)
            side.indexer_kl += float(loss.detach())
            ends.add(loss, loss.new_tensor(side.indexer_scale))
        x = mhc_update(cut.x, attention.project(out), post, comb)
        y = self._feed_forward_with_graph(x, choices, side, ends, choose)

        def back(dy: Tensor, d_carry: Tensor | None) -> tuple[Tensor, Tensor | None]:
            ends.walk_back(y, dy)
            grad = opened.latents.index_select(0, tile.slots)
            torch.autograd.backward(latents, grad.to(latents.dtype))
            return cut.join(), None if keys is None else keys.walk_back(d_carry)

        return TileGraph(y, carry, back)

    @torch.enable_grad()
    def warm_up_tile(
        self, x: Float[Tensor, "T R D"], tile: Tile, d_carry: Tensor | None, opened: _Opened, side: SideLosses
    ) -> Tensor:
        attention, carry = self.self_attn, opened.enter_last()
        with torch.no_grad():
            h = self._enter_mixer(x)[0]
            q_resid = attention.query_residual(h)
        keys = IndexKeys(attention, h, tile, carry, opened.pool_keys)
        torch.autograd.backward(*keys.dense_loss(q_resid, side))
        return keys.walk_back(d_carry)

    def learns_to_select(self) -> bool:
        indexer = self.self_attn.indexer
        return indexer is not None and any(weight.requires_grad for weight in indexer.parameters())
