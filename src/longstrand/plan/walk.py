"""One step of a rank, walked layer by layer as `memory/walk.py` walks it, with sizes in place of tensors."""

from __future__ import annotations

from functools import cache, cached_property

from longstrand.architecture import KDA
from longstrand.plan.held import Held
from longstrand.plan.job import Job
from longstrand.plan.layers import HeadTape, LayerTape
from longstrand.plan.ops import Settings

TILE = "a tile in work"
INPUTS, MEAN, CHOICES, BORDERS = "layer inputs", "last mean", "choices", "carries at tile borders"
BUFFERS, D_BUFFERS = "latents and pool keys", "their gradients"
PACK = "pack"


class WalkSizes:
    """What the pieces of a job's walk take, in bytes."""

    def __init__(self, job: Job) -> None:
        self.job, self.shape = job, job.shape
        self.settings = Settings.of(job)
        self.e, self.w = job.itemsize, job.wide
        self.tokens = job.length
        self.tile = min(job.memory.tile, self.tokens)
        self.num_layers = self.shape.num_hidden_layers
        self.weights = job.weights()

    @property
    def num_tiles(self) -> int:
        return -(-self.tokens // self.tile)

    @cached_property
    def first(self) -> int:
        """The lowest layer that is walked back."""
        if any(each.trains and each.layer is None and each.name.startswith("embed") for each in self.weights):
            return 0
        trained = [each.layer for each in self.weights if each.trains and each.layer is not None]
        return min(trained, default=self.num_layers)

    @property
    def stream(self) -> int:
        """One stream of layer inputs."""
        return self.tokens * self.shape.hc_mult * self.shape.hidden_size * self.e

    @property
    def mean(self) -> int:
        return self.tokens * self.shape.hidden_size * self.e

    def is_kda(self, layer: int) -> bool:
        return self.shape.layer_types[layer] == KDA

    def selects(self, layer: int) -> bool:
        return not self.is_kda(layer) and self.shape.indexer_types[layer] == "full"

    def choices(self, layer: int) -> int:
        """Pool ids of 4 bytes, expert ids of 1 or 2."""
        per_token = 0
        if self.selects(layer):
            per_token += self.shape.index_topk // self.shape.index_kpool * 4
        if self.shape.mlp_layer_types[layer] == "sparse":
            per_token += self.shape.num_experts_per_tok * (1 if self.shape.n_routed_experts <= 256 else 2)
        return per_token * self.tokens

    def border(self, layer: int) -> int:
        """A carry at a tile's border: the convolution's last inputs and the state; a DSA layer keeps none."""
        if not self.is_kda(layer):
            return 0
        inner = self.shape.linear_num_heads * self.shape.linear_head_dim
        return (
            self.shape.linear_conv_kernel_dim - 1
        ) * 3 * inner * self.e + inner * self.shape.linear_head_dim * self.w

    @property
    def pools(self) -> int:
        return -(-self.tokens // self.shape.index_kpool)

    def buffers(self, layer: int) -> int:
        """Latents of all tokens and the keys of their pools."""
        if self.is_kda(layer):
            return 0
        slots = self.pools * self.shape.index_kpool
        return (
            slots * self.shape.kv_lora_rank + self.pools * self.shape.index_head_dim * self.selects(layer)
        ) * self.e

    def d_buffers(self, layer: int) -> int:
        return self.buffers(layer) // self.e * self.w

    def tails(self, layer: int) -> int:
        """Keys and gates of the open pool at each tile's border."""
        return (
            self.num_tiles
            * (self.shape.index_kpool - 1)
            * 2
            * self.shape.index_head_dim
            * self.e
            * self.selects(layer)
        )

    def gradients(self, layer: int | None) -> int:
        """Of a layer's trained weights, or of what is no layer's."""
        return sum(each.num_values * self.w for each in self.weights if each.trains and each.layer == layer)

    def graph(self, layer: int) -> tuple[int, int]:
        """What a tile's graph keeps, and the most until its input's gradient is there."""
        return _graph(self.settings, self.kind(layer), self.tile)

    def forward(self, layer: int) -> int:
        return _forward(self.settings, self.kind(layer), self.tile)

    def kind(self, layer: int) -> int:
        """The first layer of the same kind."""

        def of(index: int) -> tuple[str, str, bool]:
            return self.shape.layer_types[index], self.shape.mlp_layer_types[index], self.selects(index)

        return next(index for index in range(self.num_layers) if of(index) == of(layer))

    @property
    def positions(self) -> int:
        """A tile's offsets, slots and what it sees, 8 bytes each."""
        return 32 * self.tile


@cache
def _graph(settings: Settings, layer: int, tokens: int) -> tuple[int, int]:
    return LayerTape(settings, layer, tokens).backward()


@cache
def _forward(settings: Settings, layer: int, tokens: int) -> int:
    return LayerTape(settings, layer, tokens).forward()


def walk_step(sizes: WalkSizes) -> dict[str, dict[str, int]]:
    """What is held at the peak of each phase."""
    held = Held()
    _start(held, sizes)
    passes = min(sizes.job.passes, 2)  # from the second one on all gradients are there
    for number in range(passes):
        _forward_pass(held, sizes)
        _backward_pass(held, sizes, first=number == 0)
    held.phase("optimizer")
    return held.peaks


def _start(held: Held, sizes: WalkSizes) -> None:
    held.phase("start")
    held.add("weights", sum(each.num_bytes for each in sizes.weights))
    trained = [each for each in sizes.weights if each.trains]
    held.add("moments", 2 * sum(each.num_values for each in trained) * sizes.w)
    held.add("float32 copies", sum(each.num_values * 4 for each in trained if each.itemsize < 4))
    held.add(PACK, 20 * sizes.tokens * sizes.job.sequences_per_step)


def _forward_pass(held: Held, sizes: WalkSizes) -> None:
    held.phase("forward")
    held.add(PACK, sizes.w * sizes.tokens)  # the output
    held.add(MEAN, sizes.mean)
    kept = _kept(sizes)
    running = False
    for layer in range(sizes.num_layers):
        on_the_way = layer < sizes.num_layers - 1
        above_is_kept = layer + 1 in kept
        held.add(CHOICES, sizes.choices(layer))
        held.add(BUFFERS, sizes.buffers(layer))
        reuses = running and layer not in kept and layer > 0
        if layer >= sizes.first:
            held.add(BORDERS, sizes.border(layer) * sizes.num_tiles)
        if on_the_way and not reuses:
            held.add(INPUTS, sizes.stream)
        work = sizes.forward(layer) + sizes.positions
        if layer == 0:
            work += sizes.tile * sizes.shape.hc_mult * sizes.shape.hidden_size * sizes.e
        held.at_once({TILE: work})
        if not on_the_way:
            y = sizes.tile * sizes.shape.hc_mult * sizes.shape.hidden_size * sizes.e
            head = HeadTape(sizes.settings, sizes.tile).forward()
            held.at_once({TILE: y + head + sizes.positions})
        held.take(BUFFERS)
        running = on_the_way and not above_is_kept
    held.at_once({PACK: 16 * sizes.tokens + 8 * sizes.tokens})


def _kept(sizes: WalkSizes) -> set[int]:
    """The layers whose input a pass keeps; see `memory.levers.kept_inputs`."""
    starts = range(sizes.first, sizes.num_layers, sizes.job.memory.keep_every)
    return {*starts, *range(starts[-1], sizes.num_layers)} - {0} if starts else set()


def _backward_pass(held: Held, sizes: WalkSizes, *, first: bool) -> None:
    held.phase("backward")
    held.add(PACK, 4 * sizes.tokens)  # the gradient of the output
    if first:
        held.add("gradients", sizes.gradients(None))
    for layer in range(sizes.num_layers - 1, sizes.first - 1, -1):
        if first:
            held.add("gradients", sizes.gradients(layer))
        held.add(BUFFERS, sizes.buffers(layer) + sizes.tails(layer))
        held.add(D_BUFFERS, sizes.d_buffers(layer))
        work = sizes.graph(layer)[1] + sizes.positions
        if layer == sizes.num_layers - 1:
            streams, most = HeadTape(sizes.settings, sizes.tile).backward()
            kept = sizes.graph(layer)[0] + sizes.positions
            held.at_once({TILE: kept + most})
            work += streams
        if layer == 0:
            work += sizes.tile * sizes.shape.hc_mult * sizes.shape.hidden_size * sizes.e
        held.at_once({TILE: work})
        held.take(BUFFERS)
        held.take(D_BUFFERS)
        held.take(CHOICES, sizes.choices(layer))
        held.take(BORDERS, sizes.border(layer) * sizes.num_tiles)
        if layer < sizes.num_layers - 1:
            held.take(INPUTS, sizes.stream)
    for name in (INPUTS, MEAN, CHOICES, BORDERS):
        held.take(name)
    held.take(PACK, (4 + sizes.w) * sizes.tokens)
