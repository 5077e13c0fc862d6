"""A probe as it is shown in a terminal of 100 columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from longstrand.checks.probed import Probe
from longstrand.wording import number, percent, tokens_range

WIDTH = 100
_KINDS = ("real", "random", "difference")
_OF_A_LOAD = {"step": "all tokens", "median_tile": "median tile", "largest_tile": "largest tile"}


def show(probe: Probe, console: Console) -> None:
    """Tables, `data_skew` in words, and warnings."""
    found = probe.as_dict()
    for line in _subject(probe, found):
        _say(console, line)
    for title, table in _tables(found):
        _say(console, f"\n{title}", style="bold")
        console.print(table)
    console.print()
    if found["data_skew"] is not None:
        for line in _skew(found["data_skew"]):
            _say(console, line)
    for line in found["left_out"]:
        _say(console, f"Left out: {line}.")
    for line in found["warnings"]:
        _say(console, f"Warning: {line}.", style="bold yellow")


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, highlight=False, markup=False, style=style)


def _subject(probe: Probe, found: Mapping[str, Any]) -> Iterator[str]:
    subject, loss = probe.subject, found["loss_nats"]
    number_of, several = len(subject.lengths), "s" * (len(subject.lengths) > 1)
    lengths = " and ".join(f"{length:,}" for length in dict.fromkeys(sorted(subject.lengths, reverse=True)))
    cut = "" if subject.cut is None else f", cut to {subject.cut:,} at the most (--tokens)"
    yield (
        f"{subject.model}, {subject.parameters:,} parameters in {subject.dtype}; weights {subject.weights}. "
        f"{number_of} real sequence{several} of {lengths} tokens{cut}, and as many of tokens drawn uniformly from "
        f"{subject.letters} (seed {subject.seed}); tiles of {subject.tile:,}."
    )
    shown = ["no target" if loss[kind] is None else number(loss[kind], 3) for kind in _KINDS[:2]]
    yield f"Loss: {shown[0]} nats per token on real sequences, {shown[1]} on random ones."


def _tables(found: Mapping[str, Any]) -> Iterator[tuple[str, Table]]:
    experts, pools = found["experts"], found["pools"]
    if experts is not None:
        yield "Expert load: busiest over mean", _loads(experts, found["data_skew"]["expert_ranks"])
    if pools is not None:
        yield "Selected pools by distance, all layers", _distances(pools)
        if len(pools["layers"]) > 1:
            far = f"Selected pools {pools['index_topk']:,} tokens (index_topk) or more back, by layer"
            yield far, _far(pools)


def _loads(experts: Mapping[str, Any], ranks: int) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("layer")
    table.add_column("of", no_wrap=True)
    for name in _OF_A_LOAD.values():
        for kind in ("real", "random", "diff."):
            table.add_column(f"{name}\n{kind}" if kind == "real" else f"\n{kind}", justify="right")
    singles = str(experts["num_experts"])
    for layer in experts["layers"]:
        for n in dict.fromkeys((singles, *([str(ranks)] if ranks > 1 else []))):
            of = {kind: layer[kind]["busiest_over_mean"][n] for kind in _KINDS}
            table.add_row(str(layer["layer"]), _of(n, singles), *_load_cells(of))
    for n in sorted(map(str, experts["ranks"]), key=int, reverse=True):
        of = {kind: experts["largest"][kind][n] for kind in _KINDS}
        table.add_row("most", _of(n, singles), *_load_cells(of), style="bold")
    return table


def _of(n: str, singles: str) -> str:
    return f"{n} experts" if n == singles else f"{n} ranks"


def _load_cells(of: Mapping[str, Mapping[str, float]]) -> list[str]:
    cells = []
    for name in _OF_A_LOAD:
        cells += [number(of["real"][name], 2), number(of["random"][name], 2)]
        cells.append(_signed(number(of["difference"][name], 2)))
    return cells


def _distances(pools: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("tokens back")
    for name in (*_KINDS, "uniform choice"):
        table.add_column(name, justify="right")
    of = pools["all"]
    for at, bucket in enumerate(of["real"]["buckets"]):
        parts = {kind: of[kind]["buckets"][at] for kind in _KINDS}
        table.add_row(tokens_range(bucket["start"], bucket["end"]), *_share_cells(parts))
    beyond = {kind: of[kind]["beyond_index_topk"] for kind in _KINDS}
    table.add_row(f"{pools['index_topk']:,} (index_topk) or more", *_share_cells(beyond), style="bold")
    return table


def _far(pools: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("layer")
    for name in (*_KINDS, "uniform choice"):
        table.add_column(name, justify="right")
    for layer in pools["layers"]:
        shared = " (pools of the layer below)" if layer["shares_pools_of_layer_below"] else ""
        parts = {kind: layer[kind]["beyond_index_topk"] for kind in _KINDS}
        table.add_row(f"{layer['layer']}{shared}", *_share_cells(parts))
    return table


def _share_cells(parts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    values = [parts["real"]["share"], parts["random"]["share"], parts["difference"]["share"]]
    cells = [
        "\u2013" if value is None else percent(value, 2) for value in (*values, parts["real"]["uniform"])
    ]
    return [*cells[:2], _signed(cells[2]), cells[3]]


def _signed(shown: str) -> str:
    return (
        shown
        if shown[0] in "\u2212\u2013" or not any(digit in shown for digit in "123456789")
        else f"+{shown}"
    )


def _skew(skew: Mapping[str, Any]) -> Iterator[str]:
    """What the planner should assume, and why."""
    ranks, rounds = skew["expert_ranks"], skew["rounds_per_tile"]
    value, random = number(skew["data_skew"], 2), number(skew["random"], 2)
    most, ratio = number(skew["at_most_with_any_ranks"], 2), skew["real_over_random"]
    if rounds is None:
        yield (
            "data_skew = 1: the one expert rank receives everything. With more of them it is at most "
            f"{most}, the busiest single expert of any layer and tile; --expert-ranks N counts it."
        )
        return
    yield (
        f"data_skew = {value} with {ranks} expert ranks (random tokens: {random}; at most {most} with any number): "
        f"of a tile, the busiest rank receives {value} times the mean. "
        f"Plan as many ranks with it: longstrand plan RECIPE --data-skew {skew['data_skew']:.2f}; of a multiple of "
        f"{ranks} it can only be larger, so probe that with --expert-ranks."
    )
    counted = (
        f"{rounds['real']['median']:g} in the median and {rounds['real']['most']} at most on real tokens, "
        f"{rounds['random']['median']:g} and {rounds['random']['most']} on random ones"
    )
    bound = f"parallel.receive ({rounds['receive']:,} rows)"
    if ratio >= 1.005:
        yield (
            f"Without bounded rounds, buffers planned on random tokens would be {number(ratio, 2)} times too small. "
            f"{bound} bounds them, at the price of more rounds per tile and layer: {counted}."
        )
    else:
        yield f"Random tokens are no more even here. Rounds per tile and layer under {bound}: {counted}."
