"""Bytes that come to a rank from the others in one pass of a sequence, one layer at a time; no torch.

`train/layout.py` shows them for a recipe, `plan/operations.py` divides them by what a link carries.
Left out is what no length and no width makes large: counts, tails, the few rows before a DSA layer's segments.
"""

from __future__ import annotations

from longstrand.architecture import Architecture

Received = dict[tuple[str, str], int]
"""Bytes by (what, when)."""

SUMMARIES, TAILS = "KDA: summaries and states", "KDA: convolution inputs"
LATENTS, TOKENS = "DSA: latents and pool keys", "MoE: tokens"


def kda_received(shape: Architecture, segments: int, ranks: int, itemsize: int, wide: int) -> Received:
    """Of a KDA layer.

    Forward, per segment of this rank: A and B of its heads' share go out and the state comes back, H K V values each;
    backward the gradients of two states. Each rank exchanges with all but itself. The convolution's inputs before
    each segment come once, and their gradients go back.

    Args:
        segments: of this rank.
        ranks: that share the sequence.
    """
    inner = shape.linear_num_heads * shape.linear_head_dim
    states = segments * inner * shape.linear_head_dim * wide
    halo = segments * (shape.linear_conv_kernel_dim - 1) * 3 * inner * itemsize
    return {
        (SUMMARIES, "forward"): 3 * states * (ranks - 1) // ranks,
        (SUMMARIES, "backward"): 2 * states * (ranks - 1) // ranks,
        (TAILS, "there and back"): 2 * halo,
    }


def dsa_received(
    latents: int,
    keys: int,
    ranks: int,
    itemsize: int,
    wide: int,
    *,
    indexer_learns: bool,
    latents_learn: bool = True,
    recompute: bool = True,
) -> Received:
    """Of a DSA layer: latents and pool keys are gathered in each direction, and their gradients summed.

    Args:
        latents: values of all latents of the whole sequence.
        keys: values of all its pool keys.
        latents_learn: False in a warm-up of the indexer.
        recompute: whether backward gathers them again; otherwise they have stayed.
    """
    gathered = (latents + keys) * itemsize
    summed = (latents * latents_learn + keys * indexer_learns) * wide
    return {
        (LATENTS, "forward"): gathered * (ranks - 1) // ranks,
        (LATENTS, "backward"): (gathered * recompute + summed) * (ranks - 1) // ranks,
    }


def moe_received(
    shape: Architecture, tokens: int, ranks: int, itemsize: int, *, recompute: bool = True
) -> Received:
    """Of a MoE layer, as if tokens chose experts evenly: rows to their experts and back; backward five times, or three.

    Backward: with recompute the tile's forward once more (2); rows and the gradients of their outputs there (2), those
    of the rows back (1).

    Args:
        tokens: of this rank.
        ranks: that share the experts.
    """
    row = shape.hidden_size * itemsize
    away = tokens * shape.num_experts_per_tok * (ranks - 1) // ranks
    return {(TOKENS, "forward"): 2 * away * row, (TOKENS, "backward"): (3 + 2 * recompute) * away * row}
