"""One step of a rank, walked layer by layer as `memory/walk.py` and `shared_walk.py` do, with sizes for tensors."""

from __future__ import annotations

from longstrand.plan.held import Held
from longstrand.plan.sizes import PAGE, POSITIONS, Sizes
from longstrand.plan.streams import kept_inputs

TILE, PACK = "a tile in work", "pack"
INPUTS, MEAN, CHOICES, BORDERS = "layer inputs", "last mean", "choices", "carries at tile borders"
BUFFERS, D_BUFFERS = "latents and pool keys", "gradients of latents and pool keys"
MAPS, MIDDLE, FRONTS = "KDA's maps and states", "between a layer's two stages", "fronts"
GATHERED, D_GATHERED = "one layer's weights, gathered", "gradients of one layer, gathered"
ROOT, D_ROOT = "embedding and head, gathered", "gradients of embedding and head, gathered"
WEIGHTS, GRADIENTS = "weights", "gradients"
MOMENTS, COPIES = "moments", "float32 copies"
POOL_ROWS = "where each pool lies"
GRAPHS = "kept activations"


def walk_step(sizes: Sizes) -> dict[str, dict[str, int]]:
    """What is held at the peak of each phase."""
    walk = _Walk(sizes)
    walk.start()
    for number in range(min(sizes.job.passes, 2)):  # from the second one on all gradients are there
        walk.forward()
        walk.backward(first=number == 0)
    walk.held.phase("optimizer")
    return walk.held.peaks


class _Walk:
    def __init__(self, sizes: Sizes) -> None:
        self.s, self.held, self.job = sizes, Held(), sizes.job
        self.memory = sizes.job.memory
        self.last = sizes.num_layers - 1
        self.inputs: set[int] = set()
        self.kept = kept_inputs(sizes.num_layers, sizes.first, self.memory.keep_every)
        self.stays = self.memory.offload == "none"
        self.stream = sizes.stream(sizes.tokens) * self.stays
        # A tile that was read, and the one read ahead; whole pages of their own, where they come from a file.
        self.under_way = 0 if self.stays else 2 * (sizes.stream(sizes.tile) + PAGE)

    def start(self) -> None:
        """Weights, what the optimizer keeps, and the step's sequences, all of them on every rank."""
        held, s = self.held, self.s
        held.phase("start")
        held.add(WEIGHTS, s.rows.own_bytes)
        if self.memory.optimizer == "device":
            held.add(MOMENTS, 2 * s.rows.own_trained * s.w)
            held.add(COPIES, 4 * s.rows.own_narrow)
        held.add(PACK, 20 * self.job.length * self.job.sequences_per_step)

    def forward(self) -> None:
        """The pass there; what backward needs stays."""
        held, s = self.held, self.s
        held.phase("forward")
        self._gather(None, ROOT)
        held.add(PACK, s.w * self.job.length)  # the output
        if s.shared:
            held.add(POOL_ROWS, 8 * s.pools())
        held.add(MEAN, s.mean * self.stays)
        running = False  # a stream that no one keeps: the next layer writes over what it reads
        for layer in range(s.num_layers):
            held.add(CHOICES, s.choices(layer))
            if layer < s.first:  # of frozen layers only the last one's stay
                held.take(CHOICES, s.choices_left(layer))
            if layer >= s.first and self.memory.recompute:
                held.add(BORDERS, s.border(layer) * s.num_tiles)
            if layer in self.kept:
                self.inputs.add(layer)
                running = False
            if layer < self.last and not running:
                held.add(INPUTS, self.stream)
                running = True
            self._layer_forward(layer)
        if running:
            held.take(INPUTS, self.stream)
        held.take(ROOT)
        held.at_once({PACK: 24 * self.job.length})

    def _layer_forward(self, layer: int, *, again: bool = False) -> None:
        """One walk over a layer's tiles; again where its output was not kept."""
        held, s = self.held, self.s
        self._gather(layer, GATHERED)
        if s.shared:
            self._meet(layer)
        else:
            held.add(BUFFERS, s.buffers(layer))
        self._tiles_forward(layer)
        if self.memory.recompute or layer < s.first:
            held.take(BUFFERS)
        if again or layer < s.first:
            held.take(MAPS, s.maps(layer))
        held.take(GATHERED)

    def backward(self, *, first: bool) -> None:
        """The pass back; gradients of this rank's weights are new in the first one."""
        held, s = self.held, self.s
        held.phase("backward")
        held.add(PACK, s.w * self.job.length)  # the output's gradient
        self._gather(None, ROOT)
        self._new_gradients(None, D_ROOT, first=first)
        if self.job.indexer == "warmup":
            self._warm_up(first=first)
        else:
            self._layers_back(first=first)
        for name in (INPUTS, MEAN, CHOICES, BORDERS, POOL_ROWS):
            held.take(name)
        self._reduce(None, D_ROOT, first=first)
        held.take(ROOT)
        held.take(PACK, 2 * s.w * self.job.length)

    def _layers_back(self, *, first: bool) -> None:
        """From the last layer to the lowest one that trains; where none does, the head alone."""
        held, s = self.held, self.s
        if s.first == s.num_layers:
            held.at_once({TILE: s.head()[2] + s.positions})
        dy = False
        for layer in range(self.last, s.first - 1, -1):
            self._rebuild(layer)
            self._gather(layer, GATHERED)
            self._layer_back(layer, first=first)
            self._reduce(layer, D_GATHERED, first=first)
            held.take(GATHERED)
            held.take(CHOICES, s.choices(layer))
            held.take(BORDERS, s.border(layer) * s.num_tiles * self.memory.recompute)
            held.take(INPUTS, self.stream * dy)
            dy = layer in self.inputs  # dx stands where the input was
            self.inputs.discard(layer)

    def _warm_up(self, *, first: bool) -> None:
        """Only indexers learn: no gradient goes from layer to layer."""
        held, s = self.held, self.s
        for layer in range(self.last, s.first - 1, -1):
            if s.selects(layer):
                self._rebuild(layer)
                self._gather(layer, GATHERED)
                self._open(layer)
                self._new_gradients(layer, D_GATHERED, first=first)
                held.at_once({TILE: s.tiles(layer).warm_up + self._fed(layer)})
                self._keys_back(layer)
                self._reduce(layer, D_GATHERED, first=first)
                for name in (BUFFERS, D_BUFFERS, GATHERED):
                    held.take(name)
            held.take(INPUTS, self.stream * (layer in self.inputs))
            self.inputs.discard(layer)
            held.take(CHOICES, s.choices(layer))
            held.take(BORDERS, s.border(layer) * s.num_tiles)
            held.take(MAPS, s.maps(layer))

    def _rebuild(self, layer: int) -> None:
        """A layer's input that was not kept, with all of its group's below it."""
        if layer == 0 or layer in self.inputs:
            return
        start = layer - (layer - self.s.first) % self.memory.keep_every
        for below in range(start, layer):
            self.held.add(INPUTS, self.stream)
            self._layer_forward(below, again=True)
            self.inputs.add(below + 1)

    def _layer_back(self, layer: int, *, first: bool) -> None:
        held, s = self.held, self.s
        if self.memory.recompute:  # otherwise its buffers are there since it went forward
            self._open(layer)
        self._new_gradients(layer, D_GATHERED, first=first)
        if s.shared:
            self._two_stages(layer)
        else:
            self._tiles_back(layer, s.tiles(layer).backward)
        if self.memory.recompute:
            held.take(BUFFERS)
            held.take(D_BUFFERS)
        else:
            held.take(GRAPHS, self._graphs(layer))
            held.take(BUFFERS, s.buffers(layer))
            held.take(D_BUFFERS, s.d_buffers(layer))

    def _open(self, layer: int) -> None:
        """A layer's buffers once more, with their gradients."""
        held, s = self.held, self.s
        if s.shared:
            self._exchange(layer)
            held.add(BUFFERS, s.buffers(layer, own=True))
        held.add(BUFFERS, s.buffers(layer) + s.tails(layer))
        held.add(D_BUFFERS, s.d_buffers(layer))

    def _tiles_forward(self, layer: int) -> None:
        s, held = self.s, self.held
        tiles, fed = s.tiles(layer), self._fed(layer)
        if layer >= s.first and not self.memory.recompute:
            self._keep_graphs(layer)
            most = tiles.backward if s.shared else tiles.kept
            held.at_once({TILE: max(0, most - tiles.kept)})
        elif self.memory.keep_fronts:
            with held.during(FRONTS, s.of_all_tiles(layer, "front")):
                held.at_once({TILE: tiles.forward_kept + fed})
        else:
            held.at_once({TILE: tiles.forward + fed})
        if layer == self.last:
            held.at_once({TILE: s.stream(s.tile) + s.head()[0] + fed})

    def _fed(self, layer: int) -> int:
        """A tile's positions, and its input where that is no view: of the embedding, or from outside the device."""
        s = self.s
        return s.positions + (s.stream(s.tile) if layer == 0 else self.under_way)

    def _keep_graphs(self, layer: int) -> None:
        """All tiles of a layer with their graphs, and the gradients of its buffers."""
        self.held.add(GRAPHS, self._graphs(layer))
        self.held.add(D_BUFFERS, self.s.d_buffers(layer))

    def _graphs(self, layer: int) -> int:
        """Of the first layer with their inputs too, which are no views."""
        s = self.s
        fed = POSITIONS * s.tokens + (s.stream(s.tokens) if layer == 0 else 0)
        return s.of_all_tiles(layer, "kept") + fed

    def _tiles_back(self, layer: int, most: int) -> None:
        """A tile's way back; of the last layer, beside the gradient of the head."""
        s, kept, fed = self.s, self.s.tiles(layer).kept, self._fed(layer)
        if not self.memory.recompute:  # the graph is counted with all others
            most, kept, fed = most - kept, 0, 0
        if layer < self.last:
            self.held.at_once({TILE: most + fed + self.under_way})
            return
        _, streams, head = s.head()
        self.held.at_once({TILE: max(most + streams, kept + head) + fed})

    def _meet(self, layer: int) -> None:
        """The first pass forward over a layer's tiles, and what it exchanges and keeps."""
        s, held = self.s, self.held
        own = s.buffers(layer, own=True) + s.tails(layer)
        held.add(BUFFERS, own)
        fronts = (s.of_all_tiles(layer, "front") - s.tiles(layer).front) * self.memory.keep_fronts
        meet = s.tiles(layer, begins=not fronts).meet  # beside fronts it is a later tile
        held.at_once({TILE: meet + self._fed(layer), FRONTS: fronts})
        self._exchange(layer)
        held.add(BUFFERS, s.buffers(layer))
        held.add(MAPS, s.maps(layer))

    def _exchange(self, layer: int) -> None:
        """Summaries [A | B] of KDA, put together, sent and come; pool keys of DSA before they are in order."""
        s = self.s
        ordered = (s.buffers(layer) - s.keys(layer)) * (self.job.indexer == "warmup")  # latents too
        self.held.at_once({MAPS: 8 * s.states(layer), BUFFERS: max(s.keys(layer), ordered)})

    def _keys_back(self, layer: int) -> None:
        """Gradients of a learning indexer's pool keys in the order of ranks, and those of this rank's own."""
        s, held = self.s, self.held
        if s.shared and s.learns_to_select(layer):
            held.add(D_BUFFERS, s.keys(layer, own=True) // s.e * s.w)
            held.at_once({D_BUFFERS: s.keys(layer) // s.e * s.w})

    def _two_stages(self, layer: int) -> None:
        s, held, tiles = self.s, self.held, self.s.tiles(layer)
        held.add(MAPS, 2 * s.states(layer))
        own = s.d_buffers(layer, own=True) - s.keys(layer, own=True) // s.e * s.w
        if not self.memory.recompute:  # fronts are there, with all else
            self._tiles_back(layer, tiles.halves)
        elif self.memory.keep_fronts:
            held.add(
                FRONTS, s.of_all_tiles(layer, "halved") + POSITIONS * s.tokens - tiles.halved - s.positions
            )
            self._tiles_back(layer, tiles.halves)
            held.add(FRONTS, tiles.halved + s.positions)
            held.add(D_BUFFERS, own)
            self._keys_back(layer)
            held.at_once({TILE: tiles.rest})
            held.take(FRONTS)
        else:
            own_stream = self.stream if layer == self.last else 0
            held.add(INPUTS, own_stream)
            held.add(MIDDLE, s.of_all_tiles(layer, "left") - tiles.left)
            self._tiles_back(layer, tiles.middle)
            held.add(MIDDLE, tiles.left)
            held.add(D_BUFFERS, own)
            self._keys_back(layer)
            held.at_once({TILE: tiles.backward + self._fed(layer) + self.under_way})
            held.take(MIDDLE)
            held.take(INPUTS, own_stream)
        held.take(MAPS, 2 * s.states(layer) + s.maps(layer))

    def _gather(self, layer: int | None, name: str) -> None:
        """Whole weights, beside the buffer that they arrive in."""
        size = self.s.rows.gathered[layer]
        self.held.at_once({name: 2 * size})
        self.held.add(name, size)

    def _new_gradients(self, layer: int | None, name: str, *, first: bool) -> None:
        """Of whole weights where they are gathered; otherwise of this rank's, which stay."""
        s = self.s
        if self.job.world > 1:
            self.held.add(name, s.rows.gathered_trained[layer] * s.w)
        elif first:
            self.held.add(GRADIENTS, s.rows.trained[layer] * s.w)

    def _reduce(self, layer: int | None, name: str, *, first: bool) -> None:
        """Gradients of whole weights, put side by side for their exchange; this rank's part stays."""
        s, held = self.s, self.held
        if self.job.world == 1:
            return
        held.at_once({name: 2 * held.now.get(name, 0)})
        held.take(name)
        own = s.rows.trained[layer] * s.w
        held.at_once({name: s.rows.gathered_trained[layer] * s.w + own})
        if first:
            held.add(GRADIENTS, own)
