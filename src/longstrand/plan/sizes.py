"""What the pieces of a job's walk take on one rank, in bytes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Literal, NamedTuple

from longstrand.architecture import KDA, Architecture
from longstrand.plan.job import Job
from longstrand.plan.layers import HeadTape, LayerTape
from longstrand.plan.ops import Settings
from longstrand.plan.rows import rows_of
from longstrand.plan.shared_layers import SharedLayerTape
from longstrand.plan.streams import first_trained_layer, streams_at_once

PAGE = 4096
POSITIONS = 32
"""Bytes per token of a tile's offsets, slots and what it sees."""


class Tiles(NamedTuple):
    """The most that lives while one tile of a layer is computed, beside its input.

    Attributes:
        kept: of its graph, once it stands.
        meet: the first pass forward where ranks share a pack; 0 where they do not.
        front: what `keep_fronts` keeps of a tile.
        forward_kept: the second pass forward beside that.
        middle, left: the first stage of the way back, and what stays of it.
        halves, halved: the same where fronts are kept: with their graphs.
        rest: the second stage beside those.
        warm_up: where only indexers learn; 0 in a layer without one.
    """

    forward: int
    backward: int
    kept: int
    meet: int = 0
    front: int = 0
    forward_kept: int = 0
    middle: int = 0
    left: int = 0
    halves: int = 0
    halved: int = 0
    rest: int = 0
    warm_up: int = 0


class Sizes:
    """Of one rank, the one with most tokens."""

    def __init__(self, job: Job) -> None:
        self.job, self.shape = job, job.shape
        self.settings = self.later = Settings.of(job)
        if not self.settings.native:  # only plain torch has masks where a document begins
            self.later = replace(self.settings, begins=False)
        self.e, self.w = job.itemsize, job.wide
        self.num_layers = self.shape.num_hidden_layers
        self.rows = rows_of(job)
        self.shared = job.parallel.context > 1
        self.num_segments = job.segments
        self.segment = -(-job.length // (job.parallel.context * self.num_segments))
        self.tokens = self.segment * self.num_segments
        self.tile = min(job.memory.tile, self.segment)
        self.num_tiles = -(-self.segment // self.tile) * self.num_segments
        self.first = first_trained_layer(job)
        self.kinds = _kinds(self.shape)
        # By kind of layer: a walk asks for them hundreds of times.
        self._whole_tiles = dict[tuple[int, bool], Tiles]()
        self._all_tiles = dict[tuple[int, str], int]()

    # Streams, choices, carries

    def stream(self, tokens: int) -> int:
        """R x D values for each token."""
        return tokens * self.shape.hc_mult * self.shape.hidden_size * self.e

    @property
    def mean(self) -> int:
        return self.tokens * self.shape.hidden_size * self.e

    @property
    def num_streams(self) -> int:
        """That live at the same time; where ranks share a sequence one more, the middle of a layer's way back."""
        return streams_at_once(self.num_layers, self.first, self.job.memory.keep_every) + self.shared

    @property
    def slots(self) -> tuple[int, int]:
        """Layer inputs and last mean where they leave the device: whole pages for each tile of each stream."""
        mean = self.tile * self.shape.hidden_size * self.e
        return self.num_streams * self.num_tiles * pages(self.stream(self.tile)), self.num_tiles * pages(mean)

    def choices(self, layer: int) -> int:
        """Pool ids of 4 bytes, expert ids of 1 or 2."""
        return self.tokens * choice_bytes(self.job, layer)

    def choices_left(self, layer: int) -> int:
        """Those of the layer below that go once this one's are there: pools that it shares stay."""
        if layer == 0:
            return 0
        below, shape = layer - 1, self.shape
        experts = self.tokens * expert_choice_bytes(self.shape, below)
        if self.is_kda(below) or shape.indexer_types[layer] != "full":
            return experts
        while not self.selects(below):
            below -= 1
        return experts + self.tokens * pool_choice_bytes(shape)

    def border(self, layer: int) -> int:
        """A carry at a tile's border; a DSA layer keeps none."""
        return carry_bytes(self.job, layer)

    # DSA's buffers: of all tokens, on every rank

    def is_kda(self, layer: int) -> bool:
        return self.shape.layer_types[layer] == KDA

    def selects(self, layer: int) -> bool:
        return not self.is_kda(layer) and self.shape.indexer_types[layer] == "full"

    def pools(self, *, own: bool = False) -> int:
        """Of the whole sequence, or of this rank's segments."""
        per_rank = self.num_segments * -(-self.segment // self.shape.index_kpool)
        return per_rank * (1 if own else self.job.parallel.context)

    def buffers(self, layer: int, *, own: bool = False) -> int:
        """Latents and the keys of their pools."""
        if self.is_kda(layer):
            return 0
        pools = self.pools(own=own)
        latents = pools * self.shape.index_kpool * self.shape.kv_lora_rank
        return (latents + pools * self.shape.index_head_dim * self.selects(layer)) * self.e

    def tails(self, layer: int) -> int:
        """Keys and gates of the open pool at each tile's border."""
        row = 2 * self.shape.index_head_dim * self.e * self.selects(layer)
        return self.num_tiles * (self.shape.index_kpool - 1) * row

    def d_buffers(self, layer: int, *, own: bool = False) -> int:
        """Their gradients, float32 or wider."""
        return self.buffers(layer, own=own) // self.e * self.w

    def learns_to_select(self, layer: int) -> bool:
        return self.selects(layer) and "indexer" in self.settings.groups

    def keys(self, layer: int, *, own: bool = False) -> int:
        """Pool keys alone, of the whole sequence or of this rank's segments."""
        return self.pools(own=own) * self.shape.index_head_dim * self.selects(layer) * self.e

    # KDA's passage between ranks

    def maps(self, layer: int) -> int:
        """What a KDA layer's passage keeps from forward to backward."""
        if not self.is_kda(layer) or not self.shared:
            return 0
        shape, ranks = self.shape, self.job.parallel.context
        heads, key = shape.linear_num_heads, shape.linear_head_dim
        maps = ranks * self.num_segments * -(-heads // ranks) * key * key * self.w
        rows = min(shape.linear_conv_kernel_dim - 1, self.segment) * self.num_segments
        return maps + self.num_segments * self.border(layer) + self.stream(rows)

    def states(self, layer: int) -> int:
        """A state for each segment of this rank."""
        inner = self.shape.linear_num_heads * self.shape.linear_head_dim
        return self.num_segments * inner * self.shape.linear_head_dim * self.w * self.is_kda(layer)

    # Tiles in work

    def tiles(self, layer: int, *, begins: bool = True) -> Tiles:
        """Of a whole tile; `begins`: in which a document does."""
        key = (self.kinds[layer], begins)
        if key not in self._whole_tiles:
            settings = self.settings if begins else self.later
            self._whole_tiles[key] = _tiles(settings, key[0], self.tile, self.shared)
        return self._whole_tiles[key]

    def of_all_tiles(self, layer: int, part: Literal["kept", "front", "left", "halved"]) -> int:
        """What all tiles of a layer keep together: a document begins in one; the last of a segment may be shorter."""
        key = (self.kinds[layer], part)
        if key in self._all_tiles:
            return self._all_tiles[key]
        whole, rest = divmod(self.segment, self.tile)
        first, later = (getattr(self.tiles(layer, begins=begins), part) for begins in (True, False))
        last = getattr(_tiles(self.later, self.kinds[layer], rest, self.shared), part) if rest else 0
        self._all_tiles[key] = int(self.num_segments * (whole * later + last) + first - later)
        return self._all_tiles[key]

    def head(self) -> tuple[int, int, int]:
        """Most going forward; the gradient of the last output; most until it is there."""
        tape = HeadTape(self.settings, self.tile)
        return tape.forward(), *tape.backward()

    @property
    def positions(self) -> int:
        """Of a whole tile."""
        return POSITIONS * self.tile


def pages(num_bytes: int) -> int:
    """In whole pages, as direct I/O and pinning ask."""
    return -(-num_bytes // PAGE) * PAGE


def choice_bytes(job: Job, layer: int) -> int:
    """Of one token: 4 for each pool id of a layer that selects, 1 or 2 for each expert id."""
    shape = job.shape
    selects = shape.layer_types[layer] != KDA and shape.indexer_types[layer] == "full"
    return pool_choice_bytes(shape) * selects + expert_choice_bytes(shape, layer)


def pool_choice_bytes(shape: Architecture) -> int:
    """Of one token: 4 for each pool."""
    return shape.index_topk // shape.index_kpool * 4


def expert_choice_bytes(shape: Architecture, layer: int) -> int:
    """Of one token: 1 or 2 for each expert."""
    if shape.mlp_layer_types[layer] != "sparse":
        return 0
    return shape.num_experts_per_tok * (1 if shape.n_routed_experts <= 256 else 2)


def carry_bytes(job: Job, layer: int) -> int:
    """Of one tile border: the convolution's last inputs, (J - 1) 3 H K e, and the state, H K V w; none for DSA."""
    shape = job.shape
    if shape.layer_types[layer] != KDA:
        return 0
    inner = shape.linear_num_heads * shape.linear_head_dim
    tail = (shape.linear_conv_kernel_dim - 1) * 3 * inner * job.itemsize
    return tail + inner * shape.linear_head_dim * job.wide


@cache
def _tiles(settings: Settings, layer: int, tokens: int, shared: bool) -> Tiles:
    warms_up = settings.indexer == "warmup"
    if not shared:
        alone = LayerTape(settings, layer, tokens)
        kept, most = alone.backward()
        warm_up = alone.warm_up() if alone.has_indexer and warms_up else 0
        return Tiles(alone.forward(), most, kept, warm_up=warm_up)
    tape = SharedLayerTape(settings, layer, tokens)
    middle, halves = tape.to_the_middle(), tape.to_the_middle(keeps_front=True)
    return Tiles(
        tape.forward(),
        tape.to_the_input(),
        halves.stands,
        tape.meet(),
        tape.meet_keeping(),
        tape.forward_kept(),
        *(middle.most, middle.left, halves.most, halves.left, halves.rest),
        tape.warm_up() if tape.has_indexer and warms_up else 0,
    )


@cache
def _kinds(shape: Architecture) -> tuple[int, ...]:
    """For each layer the first one of its kind, which takes the same."""
    selects = (
        kind != KDA and indexer == "full"
        for kind, indexer in zip(shape.layer_types, shape.indexer_types, strict=True)
    )
    of = list(zip(shape.layer_types, shape.mlp_layer_types, selects, strict=True))
    return tuple(map(of.index, of))
