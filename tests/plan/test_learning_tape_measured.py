"""What a tape adds up for a DSA layer whose indexer or router learns, against what torch allocates for a tile.

As in test_tape_measured.py, small constants are left out: 1.5 % of what is kept and walked back, 4 % of forward.
"""

import gc

import pytest
import torch

from longstrand.bench._steps import architecture
from longstrand.memory.counted import CountedMemory
from longstrand.memory.protocol import SideLosses
from longstrand.memory.tiles import PackLayout
from longstrand.memory.walk import rows_of
from longstrand.model import Model
from longstrand.ops.native import use_native
from longstrand.plan.layers import LayerTape
from longstrand.plan.ops import Settings
from longstrand.plan.parameters import GROUPS

TILE = 606
SHAPE = architecture("toy")
DSA = 3
CASES = [(form, dtype) for form in ("native", "portable") for dtype in (torch.float32, torch.bfloat16)]


class Measured:
    """A DSA layer on a pack of some tiles, its most living bytes of a tile."""

    def __init__(self, form, dtype, num_tiles, side, learns):
        self.memory = CountedMemory(torch.device("cpu"))
        if self.memory.why_not:
            pytest.skip(f"nothing counts allocations: {self.memory.why_not}")
        torch.manual_seed(0)
        model = Model(SHAPE)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.02)
        self.layer, self.side = model.convert(dtype).layers[DSA], side
        for name, parameter in self.layer.named_parameters():
            parameter.requires_grad_(learns(name))
            parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
        self.layout = PackLayout(torch.tensor([0, num_tiles * TILE]), SHAPE.index_kpool, torch.device("cpu"))
        self.stream = torch.randn(num_tiles * TILE, SHAPE.hc_mult, SHAPE.hidden_size).to(dtype)
        self.choices = self.layer.new_choices(num_tiles * TILE, torch.device("cpu"), {})
        groups = frozenset({"indexer"} if side.indexer == "warmup" else GROUPS)
        pools = num_tiles * TILE // SHAPE.index_kpool
        self.tape = LayerTape(
            Settings(
                SHAPE, dtype.itemsize, 4, form == "native", groups, pools,
                indexer=side.indexer, aux=side.aux_scale > 0,
            ),
            DSA,
            TILE,
        )  # fmt: skip

    def most(self, step):
        gc.collect()
        self.memory.take()
        base = self.memory.live()
        found = step()
        return self.memory.take() - base, found

    def forward(self):
        """Of the last tile."""
        carry, most = self.layer.start(self.layout), 0
        for tile in self.layout.tiles(TILE):
            x, rows = self.stream[tile.rows], rows_of(self.choices, tile)
            with torch.no_grad():
                most, (_, carry) = self.most(
                    lambda x=x, tile=tile, carry=carry, rows=rows: self.layer.forward_tile(
                        x, tile, carry, rows, self.side, choose=True
                    )
                )
        return most


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1]}".replace("torch.", ""))
def form(request):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    use_native(request.param[0])
    yield request.param
    use_native("auto")
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "side", [{"indexer": "sparse", "indexer_scale": 1e-3}, {"aux_scale": 1e-3}], ids=["indexer", "router"]
)
def test_a_tile_with_a_side_loss(form, side):
    given = SideLosses(**side)
    found = Measured(*form, 2, given, lambda name: given.indexer == "sparse" or "indexer" not in name)
    found.forward()
    layer, stream = found.layer, found.stream
    opened, d_carry, first = layer.reopen(lambda tile: stream[tile.rows], found.layout, TILE), None, True
    for tile in found.layout.tiles_back(TILE):
        rows, entered = rows_of(found.choices, tile), layer.entering((), opened)

        def made(tile=tile, rows=rows, entered=entered):
            x = stream[tile.rows]
            return layer.tile_graph(x, tile, entered, rows, opened, found.side, choose=False)

        gc.collect()
        before = found.memory.live()
        _, graph = found.most(made)
        kept = found.memory.live() - before
        back, (_, d_carry) = found.most(lambda graph=graph, d=d_carry, t=tile: graph.back(stream[t.rows], d))
        if first:
            planned_kept, planned = found.tape.backward()
            assert planned_kept == pytest.approx(kept, rel=0.015)
            assert planned == pytest.approx(kept + back, rel=0.015)
        first = False
        del graph


@pytest.mark.parametrize("num_tiles", [1, 2, 4], ids=["one block", "a part of another", "two blocks"])
def test_a_tile_of_warm_up(form, num_tiles):
    """Dense attention looks at 256 pools at once: 151, 303 and 606 are there."""
    found = Measured(*form, num_tiles, SideLosses("warmup", 1e-3), lambda name: "indexer" in name)
    assert found.tape.forward() == pytest.approx(found.forward(), rel=0.04)
    layer, stream = found.layer, found.stream
    opened = layer.reopen(lambda tile: stream[tile.rows], found.layout, TILE)
    last = next(iter(found.layout.tiles_back(TILE)))
    most, _ = found.most(lambda: layer.warm_up_tile(stream[last.rows], last, None, opened, found.side))
    assert found.tape.warm_up() == pytest.approx(most, rel=0.015)
