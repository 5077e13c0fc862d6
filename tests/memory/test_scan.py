"""The scan itself, with a layer of one line: its tiles, its carry and its order against plain autograd."""

import weakref
from itertools import pairwise

import pytest
import torch

from longstrand.memory import Levers, SideLosses, TileGraph, scan_layers
from longstrand.memory.tiles import PackLayout

STREAMS, WIDTH = 2, 3


class Leaky:
    """y[t] = w x[t] + c[t];  c[t + 1] = (a c[t] + x[t]) within a document, c = 0 at its start."""

    def __init__(self, generator, trained=True):
        self.w = torch.randn(WIDTH, generator=generator, dtype=torch.float64).requires_grad_(trained)
        self.a = (0.9 * torch.rand(WIDTH, generator=generator, dtype=torch.float64)).requires_grad_(trained)
        self.calls = []

    def trains(self):
        return self.w.requires_grad

    def parameters(self):
        return iter((self.w, self.a))

    def learns_to_select(self):
        return False

    def gather_weights(self):
        """Nothing is sharded; nor in the two below."""

    reduce_gradients = free_weights = gather_weights

    def idle(self, side, *, choose):
        raise AssertionError("there are no other ranks")

    def warm_up_tile(self, x, tile, d_carry, opened, side):
        raise AssertionError("nothing to warm up")

    def start(self, layout):
        return torch.zeros(STREAMS, WIDTH, dtype=torch.float64)

    def new_choices(self, num_tokens, device, before):
        return {}

    def rows(self, x, offsets, carry):
        y = []
        for row, offset in zip(x, offsets.tolist(), strict=True):
            carry = carry * (offset > 0)
            y.append(self.w * row + carry)
            carry = self.a * carry + row
        return torch.stack(y), carry

    def forward_tile(self, x, tile, carry, choices, side, *, choose):
        self.calls.append(("forward" if choose else "again", tile.start, tile.stop))
        assert not torch.is_grad_enabled()
        return self.rows(x, tile.offsets, carry)

    def keep(self, carry):
        return [carry]

    def reopen(self, read, tiles, layout):
        return None

    def open(self, carry):
        return None

    def entering(self, kept, opened):
        return kept[0]

    def tile_graph(self, x, tile, carry, choices, opened, side, *, choose):
        self.calls.append(("forward" if choose else "back", tile.start, tile.stop))
        with torch.enable_grad():
            x, carry = x.data.requires_grad_(), carry.detach().requires_grad_()
            y, after = self.rows(x, tile.offsets, carry)

        def back(dy, d_carry):
            known = d_carry is not None
            torch.autograd.backward([y, *([after] if known else [])], [dy, *([d_carry] if known else [])])
            return x.grad, torch.zeros_like(carry) if carry.grad is None else carry.grad

        return TileGraph(y, after.detach(), back)


def plain(embedding, tokens, layers, starts):
    """The same without tiles, under one graph."""
    offsets = torch.cat([torch.arange(stop - start) for start, stop in pairwise(starts)])
    x = embedding[tokens].unsqueeze(1).expand(-1, STREAMS, -1)
    for layer in layers:
        x, _ = layer.rows(x, offsets, layer.start(None))
    return x.mean(1)


@pytest.fixture
def setting():
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(5, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
    starts = [0, 1, 4, 17, 19]
    tokens = torch.randint(5, (starts[-1],), generator=generator)
    layers = [Leaky(generator) for _ in range(3)]
    upstream = torch.randn(len(tokens), WIDTH, generator=generator, dtype=torch.float64)
    return embedding, tokens, layers, starts, upstream


def scanned(setting, tile):
    embedding, tokens, layers, starts, _ = setting
    layout = PackLayout(torch.tensor(starts), 4, torch.device("cpu"))
    levers = Levers(tile)
    return scan_layers(embedding, tokens, layers, layout, hc_mult=STREAMS, levers=levers, side=SideLosses())


def gradients(setting):
    embedding, _, layers, _, _ = setting
    leaves = [embedding, *(leaf for layer in layers for leaf in (layer.w, layer.a))]
    found = [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return found


@pytest.mark.parametrize("tile", [1, 2, 5, 18, 19, 100])
def test_the_scan_is_the_plain_stack_with_all_gradients(setting, tile):
    embedding, tokens, layers, starts, upstream = setting
    truth = plain(embedding, tokens, layers, starts)
    truth.backward(upstream)
    wanted = gradients(setting)
    out = scanned(setting, tile)
    out.backward(upstream)
    assert torch.allclose(out, truth, rtol=0, atol=1e-13)
    for ours, theirs in zip(gradients(setting), wanted, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def test_tiles_run_left_to_right_and_are_walked_back_right_to_left(setting):
    _, _, layers, _, upstream = setting
    scanned(setting, 8).backward(upstream)
    bounds = [(0, 8), (8, 16), (16, 19)]
    expected = [("forward", *b) for b in bounds] + [("back", *b) for b in reversed(bounds)]
    assert all(layer.calls == expected for layer in layers)


def test_a_frozen_embedding_does_not_end_the_walk_back(setting):
    embedding, _, _, _, upstream = setting
    scanned(setting, 8).backward(upstream)
    wanted = gradients(setting)
    embedding.requires_grad_(False)
    scanned(setting, 8).backward(upstream)
    found = gradients(setting)
    assert found[0] is None
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found[1:], wanted[1:], strict=True))


def test_the_walk_back_ends_at_the_lowest_layer_with_something_to_train(setting):
    embedding, _, layers, _, upstream = setting
    for leaf in (embedding, layers[0].w, layers[0].a):
        leaf.requires_grad_(False)
    scanned(setting, 8).backward(upstream)
    assert [call for call in layers[0].calls if call[0] == "back"] == []
    assert [call for call in layers[1].calls if call[0] == "back"] != []
    assert all(grad is not None for grad in gradients(setting)[3:])


def test_without_a_graph_no_tile_is_walked_back_or_kept(setting):
    _, _, layers, _, _ = setting
    with torch.no_grad():
        out = scanned(setting, 8)
    assert out.grad_fn is None
    assert all(kind == "forward" for layer in layers for kind, *_ in layer.calls)


class Counting(Leaky):
    """Counts how many of its carries are alive at once."""

    alive, most = (), 0

    def forward_tile(self, *arguments, **options):
        y, carry = super().forward_tile(*arguments, **options)
        self.alive = [ref for ref in (*self.alive, weakref.ref(carry)) if ref() is not None]
        self.most = max(self.most, len(self.alive))
        return y, carry


def test_without_a_graph_a_carry_is_dropped_once_the_next_tile_has_taken_it(setting):
    embedding, tokens, _, starts, upstream = setting
    layer = Counting(torch.Generator().manual_seed(1))
    with torch.no_grad():
        scanned((embedding, tokens, [layer], starts, upstream), 1)
    assert layer.most <= 2


def test_the_upstream_gradient_is_left_as_it_was(setting):
    upstream = setting[-1]
    kept = upstream.clone()
    scanned(setting, 8).backward(upstream)
    assert torch.equal(upstream, kept)


def test_an_empty_tile_size_is_refused():
    from longstrand.bench._small_models import model, pack

    with pytest.raises((ValueError, RuntimeError)):
        model("K").token_logprobs(pack((3,)), levers=Levers(tile=0))
