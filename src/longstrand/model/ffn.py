"""Feed-forward parts: dense, and a mixture of experts with a shared one."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from longstrand.architecture import Architecture
from longstrand.memory.protocol import Choices, SideLosses
from longstrand.model.linear import Linear
from longstrand.ops.experts import experts
from longstrand.ops.precision import wide, wide_dtype
from longstrand.ops.swiglu import swiglu
from longstrand.parallel import Spread, experts_over


class Dense(nn.Module):
    """down(silu(min(gate, limit)) * clamp(up)); also the shared expert."""

    def __init__(self, width: int, inner: int, limit: float) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = Linear(width, inner), Linear(width, inner)
        self.down_proj = Linear(inner, width)
        self.limit = limit

    def forward(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        # Joined outputs take 4 to 8 % longer for the toy's 1,024 rows, and round dx twice; they would halve the time of
        # one row of the wide model (measured, one thread).
        both = F.linear(x, torch.cat([self.gate_proj.weight, self.up_proj.weight]))
        return self.down_proj(swiglu(both, self.limit))


class Router(nn.Module):
    """Sigmoid scores in float32; the correction bias takes part in the selection only."""

    def __init__(self, shape: Architecture) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.n_routed_experts, shape.hidden_size))
        self.e_score_correction_bias: Tensor
        self.register_buffer("e_score_correction_bias", torch.zeros(shape.n_routed_experts))
        self.num_active, self.factor = shape.num_experts_per_tok, shape.routed_scaling_factor

    def logits(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T E"]:
        return wide(x) @ wide(self.weight).T

    def choose(self, logits: Float[Tensor, "T E"]) -> Int[Tensor, "T A"]:
        scores = logits.sigmoid() + self.e_score_correction_bias
        return scores.topk(self.num_active, dim=-1).indices

    def weigh(self, logits: Float[Tensor, "T E"], ids: Int[Tensor, "T A"]) -> Float[Tensor, "T A"]:
        """Normalised scores of the chosen experts, times the routed scaling factor."""
        scores = logits.gather(-1, ids).sigmoid()
        return scores / (scores.sum(-1, keepdim=True) + 1e-20) * self.factor


class Experts(nn.Module):
    """Weights of the routed experts: gate and up [E, 2F, D], gate first; down [E, D, F].

    All of them, or this rank's where `model.parallelize.spread_experts` has cut them.
    """

    def __init__(self, shape: Architecture) -> None:
        super().__init__()
        num, inner, width = shape.n_routed_experts, shape.moe_intermediate_size, shape.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(num, 2 * inner, width))
        self.down_proj = nn.Parameter(torch.empty(num, width, inner))


class MixtureOfExperts(nn.Module):
    """Routed experts plus one shared expert that every token uses.

    Attributes:
        spread: where the routed experts are; None: all of them here.
    """

    def __init__(self, shape: Architecture, layer: int) -> None:
        super().__init__()
        self.layer, self.limit = layer, shape.swiglu_limit
        self.num_experts, self.num_active = shape.n_routed_experts, shape.num_experts_per_tok
        self.gate, self.experts = Router(shape), Experts(shape)
        inner = shape.moe_intermediate_size * shape.n_shared_experts
        self.shared_experts = Dense(shape.hidden_size, inner, shape.swiglu_limit)
        self.spread: Spread | None = None

    def new_choices(self, num_tokens: int, device: torch.device) -> Choices:
        """Expert ids, 2 bytes each (1 up to 256 experts)."""
        dtype = torch.uint8 if self.num_experts <= 256 else torch.int16
        return {"experts": torch.empty(num_tokens, self.num_active, dtype=dtype, device=device)}

    def choose(self, x: Float[Tensor, "T D"], choices: Choices, side: SideLosses) -> Float[Tensor, "T D"]:
        """First pass: makes and counts the choice."""
        logits = self.gate.logits(x)
        ids = self.gate.choose(logits)
        choices["experts"].copy_(ids)
        side.count_experts(self.layer, ids, self.num_experts)
        return self._mix(x, logits, ids)

    def recompute(self, x: Float[Tensor, "T D"], choices: Choices) -> tuple[Tensor, Tensor]:
        """Later passes: the choice as it was made; also the router's logits."""
        logits = self.gate.logits(x)
        return self._mix(x, logits, choices["experts"].long()), logits

    def idle(self, side: SideLosses, *, choose: bool) -> Callable[[], None]:
        """Takes part, without a token, in what the other ranks of `spread` exchange for one tile on its way there.

        Args:
            choose: in the first pass, which counts that nothing was chosen here.

        Returns: the same for the tile's way back, on which the experts of this rank receive others' gradients.
        """
        if choose:
            none = torch.empty(0, self.num_active, dtype=torch.long)
            side.count_experts(self.layer, none, self.num_experts)
        if self.spread is None:
            return lambda: None
        with torch.enable_grad():
            weight = self.experts.down_proj
            x = weight.new_empty(0, weight.shape[1]).requires_grad_()
            ids = torch.empty(0, self.num_active, dtype=torch.long, device=x.device)
            routed = self._routed(x, ids, wide(x.new_empty(0, self.num_active)))
        return lambda: torch.autograd.backward([routed], [torch.empty_like(routed)])

    def _mix(self, x: Tensor, logits: Tensor, ids: Tensor) -> Tensor:
        return self._routed(x, ids, self.gate.weigh(logits, ids)) + self.shared_experts(x)

    def _routed(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        own = self.experts.gate_up_proj, self.experts.down_proj
        if self.spread is None:
            return experts(x, ids, weights, *own, self.limit)
        return experts_over(self.spread, x, ids, weights, self._of_here, own)

    def _of_here(self, rows: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """Each row's expert, of those here, applied to it."""
        one = torch.ones(len(rows), 1, dtype=wide_dtype(rows.dtype), device=rows.device)
        return experts(rows, ids[:, None], one, gate_up, down, self.limit)


def aux_loss(logits: Float[Tensor, "T E"], side: SideLosses) -> Float[Tensor, ""]:
    """This tile's and layer's part of the balance loss: E sum_e f_e P_e.

    f_e: tokens per expert over all layers of the pack, divided by their rows; P_e: mean softmax of the logits over the
    same rows. f_e comes from the first pass, so the gradient is per token.

    Source: Switch Transformer (arXiv 2101.03961), eq. 4-6; transformers `load_balancing_loss_func`.
    """
    counts = torch.stack(list(side.expert_counts.values())).sum(0).to(logits.dtype)
    num_active_rows = counts.sum()  # layers x tokens x active experts
    rows = num_active_rows / side.num_active
    share = counts / rows
    return len(counts) * (share * logits.softmax(-1).sum(0)).sum() / rows
