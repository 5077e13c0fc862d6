"""The report's sections as HTML, from what was read and found."""

from __future__ import annotations

import html
from collections.abc import Sequence
from importlib.resources import files
from statistics import median, quantiles
from string import Template

from longstrand import __version__
from longstrand.buckets import Comparison, Gain
from longstrand.report.certificate import certificate_html
from longstrand.report.drawing import Plot, inline_svg
from longstrand.report.findings import Findings
from longstrand.report.forms import forms_html
from longstrand.report.guide import how_to_read, limits
from longstrand.report.ledger import ledger_html
from longstrand.report.planned import planned_html
from longstrand.report.run_folder import KERNELS, LEDGER, STEPS, RunFolder
from longstrand.report.tables import pairs, table
from longstrand.series import Series
from longstrand.wording import Unit, count, duration, interval, number, percent, size_bytes, tokens_range


def page_html(run: RunFolder, findings: Findings, unit: Unit, plots: Sequence[Plot | None]) -> str:
    """The whole page: one file without links to others."""
    positions, loss, steps = plots
    sections = [
        _checks(findings),
        _tiles(run),
        _note(f"In {STEPS} is what no run writes:", run.odd),
        _note("Not as a run writes it:", run.formless),
        _note("Not in this report yet:", _missing(run, findings)),
        _section("Loss by position", _positions(run, findings, unit, positions)),
        _section("Training", _training(loss, unit)),
        _section("Memory and speed", _memory_and_speed(run, steps)),
        _section(
            "Memory and time: planned and measured",
            planned_html(
                run.plan, run.memory, run.damaged, run.column("seconds")[1], run.column("cpu_seconds")[1]
            ),
        ),
        _section("Which implementation ran", forms_html(run.kernels)),
        _section("Certificate", certificate_html(run.certificate)),
        _section("The data", _ledger(run)),
        _section("How to read this", _list(how_to_read(unit, findings.control is not None))),
        _section("What this does not show", _list(limits(run, findings))),
        _section("The recipe", _recipe(run)),
    ]
    here = files("longstrand.report")
    title = run.setting("report", "title")
    return Template(here.joinpath("page.html").read_text(encoding="utf-8")).substitute(
        version=html.escape(__version__),
        style=here.joinpath("style.css").read_text(encoding="utf-8"),
        title=html.escape(title if isinstance(title, str) else run.path.resolve().name),
        folder=html.escape(str(run.path)),
        headline=html.escape(findings.headline),
        sureness=f'<p class="sure">{html.escape(findings.sureness)}</p>' if findings.sureness else "",
        sections="\n".join(filter(None, sections)),
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2>{body}</section>" if body else ""


def _list(sentences: Sequence[str]) -> str:
    items = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences)
    return f"<ul>{items}</ul>" if items else ""


def _figure(plot: Plot, label: str, caption: str) -> str:
    wide = inline_svg(plot.wide_svg, label, f"{plot.name}-w")
    narrow = inline_svg(plot.narrow_svg, label, f"{plot.name}-n")
    return (
        f'<figure><div class="wide">{wide}</div><div class="narrow">{narrow}</div>'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
    )


def _checks(findings: Findings) -> str:
    words = {"yes": "\u2713 Yes", "no": "\u2717 No", "unclear": "? Not clear"}
    items = "".join(
        f'<li class="{check.answer}"><b>{html.escape(check.question)}</b><em>{words[check.answer]}</em>'
        f"{html.escape(check.numbers)}</li>"
        for check in findings.checks
    )
    return f'<ul class="checks">{items}</ul>' if items else ""


def _tiles(run: RunFolder) -> str:
    steps, tokens = run.column("tokens")
    total, length = run.setting("train", "steps"), run.setting("data", "length")
    tiles: list[tuple[str, str, str]] = []
    if run.metrics:
        of = f"of {count(total)}" if isinstance(total, int) else ""
        tiles.append(("Steps", count(run.metrics[-1]["step"]), of))
    if steps:
        tiles.append(("Tokens trained", count(round(sum(tokens))), ""))
    if length is not None:
        tiles.append(("Sequence length", f"{length:,}" if isinstance(length, int) else str(length), "tokens"))
    speed = run.column("tokens_per_second")[1]
    if speed:
        tiles.append(("Speed", number(median(speed), 0), "tokens/s, median"))
    memory = run.column("peak_memory_bytes")[1]
    if memory:
        tiles.append(("Peak memory", size_bytes(max(memory)), ""))
    seconds = run.column("seconds")[1]
    if seconds:
        tiles.append(("Time in steps", duration(sum(seconds)), ""))
    items = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}<small>{html.escape(small)}</small></dd></div>"
        for name, value, small in tiles
    )
    return f'<dl class="tiles">{items}</dl>' if items else ""


def _note(title: str, sentences: Sequence[str]) -> str:
    return f'<div class="note">{html.escape(title)}{_list(sentences)}</div>' if sentences else ""


def _missing(run: RunFolder, findings: Findings) -> list[str]:
    """What the report would show but the folder does not hold."""
    missing = list(findings.problems)
    total = run.setting("train", "steps")
    if run.recipe is None:
        missing.append("run.toml is absent: losses are in nats per token, and the recipe is not shown.")
    if not run.metrics:
        missing.append("metrics.jsonl has no step yet: there is no loss curve, memory or speed.")
    elif isinstance(total, int) and run.metrics[-1]["step"] < total:
        missing.append(
            f"The run stands at step {count(run.metrics[-1]['step'])} of {count(total)}: it is still going, or stopped."
        )
    if run.torn:
        missing.append("The last line of metrics.jsonl is incomplete and left out, as while a run writes it.")
    if run.first("before") is None:
        missing.append("The model before training was not evaluated: there is no gain to show.")
    if run.last("after") is None:
        missing.append("The model after training has not been evaluated yet.")
    said = {sentence.partition(":")[0] for sentence in run.formless}
    if run.kernels is None and KERNELS not in said:
        missing.append("kernels.json is absent: which implementations ran is not known.")
    if run.ledger is None and LEDGER not in said:
        missing.append("data.json is absent: the data is not accounted for.")
    return missing


def _positions(run: RunFolder, findings: Findings, unit: Unit, plot: Plot | None) -> str:
    if plot is None:
        return ""
    caption = (
        f"Above: mean loss ({unit.name}) of held-out tokens, by how many tokens of the same sequence stand before "
        "them. "
    )
    if findings.gain:
        caption += "Below: by how much it fell. "
    caption += (
        "Bars with caps are 95 % intervals over sequences; points without one come from a single sequence."
    )
    parts = [_figure(plot, "Held-out loss and gain by position; the table below holds the numbers", caption)]
    before, after = run.first("before"), run.last("after")
    main = [series for series in (before, after) if series is not None]
    if main:
        parts.append(_series_table(main, findings.gain, unit, ""))
    control = [s for s in (run.first("control before"), run.last("control after")) if s is not None]
    if control:
        parts.append("<h3>The control: strangers in place of relatives</h3>")
        parts.append(_series_table(control, findings.control, unit, "control "))
    return "".join(parts)


def _series_table(series: list[Series], comparison: Comparison | None, unit: Unit, prefix: str) -> str:
    head = ["context tokens", "tokens scored", "sequences"]
    head += [one["name"].removeprefix(prefix) for one in series]
    head += ["gain", "95 % interval"] if comparison else []
    rows = []
    for place, bucket in enumerate(series[0]["buckets"]):
        row = [
            tokens_range(bucket["start"], bucket["end"]),
            count(bucket["tokens"]),
            count(bucket["sequences"]),
        ]
        row += [
            unit.show(one["buckets"][place]["nats"]) if place < len(one["buckets"]) else "" for one in series
        ]
        if comparison:
            row += _gain_cells(comparison.buckets[place])
        rows.append(row)
    total = ["all", count(series[0]["tokens"]), count(series[0]["sequences"])]
    total += [unit.show(one["nats"]) for one in series]
    total += _gain_cells(comparison.overall) if comparison else []
    caption = f"Loss in {unit.name}; the gain is how much lower it is than before."
    return table(head, [*rows, total], caption=caption, last_is_total=True) + _not_scored(series)


def _not_scored(series: list[Series]) -> str:
    masked, beyond = max(one["masked"] for one in series), max(one["beyond"] for one in series)
    parts = [f"{count(masked)} masked targets"] if masked else []
    parts += [f"{count(beyond)} targets with more context than the last bucket"] if beyond else []
    return f'<p class="aside">Not scored: {" and ".join(parts)}.</p>' if parts else ""


def _gain_cells(gain: Gain) -> list[str]:
    if gain.relative is None:
        return ["\u2013", "nothing scored"]
    return [percent(gain.relative.value), interval(gain.relative, gain.sequences)]


def _training(plot: Plot | None, unit: Unit) -> str:
    if plot is None:
        return ""
    return _figure(plot, "Training loss over steps", f"Training loss ({unit.name}) at each optimizer step.")


def _memory_and_speed(run: RunFolder, plot: Plot | None) -> str:
    facts: list[tuple[str, str]] = []
    memory, speed = run.column("peak_memory_bytes")[1], run.column("tokens_per_second")[1]
    if memory:
        facts.append(("peak memory, measured", size_bytes(max(memory))))
    if speed:
        spread = ""
        if len(speed) >= 20:
            cuts = quantiles(speed, n=20)
            spread = f" (90 % of steps: {number(cuts[0], 0)} to {number(cuts[-1], 0)})"
        facts.append(("tokens per second, median", number(median(speed), 0) + spread))
    for section, key, name in (
        ("memory", "tile", "tile, tokens"),
        ("memory", "recompute", "tiles recomputed in backward"),
        ("memory", "keep_every", "layer inputs kept: every"),
        ("memory", "offload", "offload"),
        ("memory", "optimizer", "optimizer on"),
        ("parallel", "data", "ranks with sequences of their own (data)"),
        ("parallel", "context", "ranks that share a sequence (context)"),
        ("parallel", "expert", "ranks that share the experts (expert)"),
        ("run", "dtype", "weights' type"),
        ("run", "threads", "threads"),
        ("train", "sequences_per_step", "sequences per step"),
    ):
        value = run.setting(section, key)
        if value is not None:
            shown = ("no", "yes")[value] if isinstance(value, bool) else value
            facts.append((name, f"{shown:,}" if isinstance(shown, int) else str(shown)))
    text = pairs(facts) if memory or speed else ""
    if plot is not None:
        text += _figure(plot, "The run step by step", "What was recorded at each step.")
    return text


def _ledger(run: RunFolder) -> str:
    if run.ledger is None:
        return ""
    return "<p>Everything that was read, and what became of it.</p>" + ledger_html(run.ledger)


def _recipe(run: RunFolder) -> str:
    if run.recipe_text is None:
        return ""
    return (
        "<p>Running this again is what reproducing this run means.</p>"
        f"<details><summary>run.toml, everything resolved</summary><pre>{html.escape(run.recipe_text)}</pre></details>"
    )
