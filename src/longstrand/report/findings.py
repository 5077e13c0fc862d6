"""What a run showed and how sure that is, in plain sentences and three checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from longstrand.buckets import Comparison, Estimate, Gain, compare, loses_late_gain
from longstrand.errors import UserError
from longstrand.report.run_folder import RunFolder
from longstrand.series import Series, sums_from
from longstrand.wording import Unit, count, interval, number, percent, tokens_range

FEW_SEQUENCES = 10

Answer = Literal["yes", "no", "unclear"]


@dataclass(frozen=True)
class Check:
    """One question that the report answers, with the numbers behind the answer."""

    question: str
    answer: Answer
    numbers: str


@dataclass(frozen=True)
class Findings:
    """What the report says first.

    Args:
        headline: one sentence.
        sureness: how sure it is, and from what.
        checks: the questions that this run can answer.
        gain: after against before on the held-out sequences.
        control: the same on sequences of strangers.
        problems: why a comparison could not be made.
    """

    headline: str
    sureness: str
    checks: tuple[Check, ...]
    gain: Comparison | None
    control: Comparison | None
    problems: tuple[str, ...]


def find(run: RunFolder, unit: Unit) -> Findings:
    """Compares what the run evaluated and says what follows from it."""
    problems: list[str] = []
    gain = _compared(run, "before", "after", problems)
    control = _compared(run, "control before", "control after", problems)
    if gain is None or gain.overall.relative is None:
        return Findings(_without_gain(run, unit), "", (), None, control, tuple(problems))
    answers = (_fell(run, gain, unit), _late(gain), _control_loses(gain, control))
    checks = tuple(check for check in answers if check)
    return Findings(_headline(gain, control), _sureness(gain), checks, gain, control, tuple(problems))


def early_name(gain: Gain) -> str:
    """The early buckets in words."""
    if gain.start == 0 and gain.end == 1024:
        return "the first 1,024 tokens"
    return f"the earliest positions ({tokens_range(gain.start, gain.end)} tokens)"


def late_name(gain: Gain) -> str:
    """The late buckets in words."""
    return f"the last octave ({tokens_range(gain.start, gain.end)} tokens of context)"


def sign(estimate: Estimate, sequences: int) -> int:
    """1 or -1 where the interval lies on one side of 0; else 0, as with one sequence, without interval."""
    return (estimate.low > 0) - (estimate.high < 0) if sequences > 1 else 0


def _compared(run: RunFolder, before: str, after: str, problems: list[str]) -> Comparison | None:
    first, last = run.first(before), run.last(after)
    if first is None or last is None:
        return None
    try:
        return compare(sums_from(first), sums_from(last))
    except UserError as error:
        problems.append(f"{before} and {after} cannot be compared: {error}.")
        return None


def _headline(gain: Comparison, control: Comparison | None) -> str:
    overall = gain.overall.relative
    assert overall is not None
    direction = sign(overall, gain.overall.sequences)
    moved = f"held-out loss {'fell' if overall.value >= 0 else 'rose'} by {percent(abs(overall.value))}"
    if gain.overall.sequences > 1 and not direction:
        moved = f"held-out loss did not change measurably (gain {percent(overall.value)})"
    late, early, difference = _late_early(gain)
    if late is None or early is None or difference is None:
        return f"{_upper_first(moved)}."
    gains = "gains of " if min(late.value, early.value) < 0 else ""
    sides = f"{gains}{percent(late.value)} where there is most context, {percent(early.value)} in "
    sides += early_name(gain.early)
    if gain.overall.sequences < 2:
        return f"On the one sequence scored, {moved}: {sides}."
    if gain.apart and late.low > 0:
        check = _control_loses(gain, control)
        start, end = {
            None: ("The model learned to use long context", ""),
            "yes": (
                "The model learned to use long context",
                "; with strangers for relatives that lead is lost",
            ),
            "no": (
                "Late positions gained most",
                "; but a control with strangers for relatives keeps that lead",
            ),
            "unclear": ("Late positions gained most", "; the control with strangers does not settle why"),
        }[check.answer if check else None]
        return f"{start}: {moved}, {sides}{end}."
    ordered = sign(difference, gain.overall.sequences)
    if ordered == 1:
        more = "more" if overall.value >= 0 else "less"
        return f"{_upper_first(moved)}, {more} late than early ({sides}), though the two intervals overlap."
    if ordered == -1:
        least = "least" if overall.value >= 0 else "most"
        return f"{_upper_first(moved)}, and {least} where there is most context: {sides}."
    return f"{_upper_first(moved)}, with no sign that long context helped: {sides}."


def _sureness(gain: Comparison) -> str:
    overall = gain.overall.relative
    assert overall is not None
    sequences = gain.overall.sequences
    text = (
        f"{count(gain.overall.tokens)} tokens of {count(sequences)} held-out sequence{'s' * (sequences != 1)}"
    )
    if sequences < 2:
        return f"Measured on {text}: one sequence gives no interval, so how sure this is cannot be said."
    text = (
        f"Measured on {text}. Ranges are {percent(0.95, 0)} bootstrap intervals over sequences, before and "
        f"after paired: the overall gain lies in {interval(overall, sequences)}."
    )
    if sequences < FEW_SEQUENCES:
        text += f" With {sequences} sequences they are rough."
    return f"{text} They cover the choice of sequences, not another seed or another training run."


def _fell(run: RunFolder, gain: Comparison, unit: Unit) -> Check:
    overall, before, after = gain.overall.relative, run.first("before"), run.last("after")
    assert overall is not None and before is not None and after is not None
    answers: dict[int, Answer] = {1: "yes", -1: "no", 0: "unclear"}
    return Check(
        "Did held-out loss fall?",
        answers[sign(overall, gain.overall.sequences)],
        f"Gain {percent(overall.value)} ({interval(overall, gain.overall.sequences)}): from "
        f"{unit.show(before['nats'])} to {unit.show(after['nats'])} {unit.name}.",
    )


def _late(gain: Comparison) -> Check | None:
    late, early, difference = _late_early(gain)
    if late is None or early is None or difference is None or gain.late is None:
        return None
    answer: Answer = "unclear"
    if gain.apart is not None:
        more = sign(difference, gain.overall.sequences) == 1
        answer = "yes" if gain.apart and late.low > 0 else "unclear" if more else "no"
    ending = "One sequence has no interval."
    if gain.apart is not None:
        ratio = "The early gain is not surely above 0, so there is no ratio"
        if gain.late_over_early is not None and early.low > 0:
            ratio = f"That is {number(gain.late_over_early, 1)} times as much"
        overlap = "do not overlap" if gain.apart or early.low > late.high else "overlap"
        ending = f"{ratio}; the intervals {overlap}."
    return Check(
        "Did late positions gain more than early ones?",
        answer,
        f"Gain {percent(late.value)} ({interval(late, gain.late.sequences)}) in {late_name(gain.late)}, "
        f"{percent(early.value)} ({interval(early, gain.early.sequences)}) in {early_name(gain.early)}. "
        f"{ending}",
    )


def _control_loses(gain: Comparison, control: Comparison | None) -> Check | None:
    """Whether strangers in place of relatives take away what late positions gained beyond early ones.

    None without a control, and where there is no such gain to lose.
    """
    if control is None or control.late_minus_early is None or gain.late_minus_early is None:
        return None
    mine, theirs = gain.late_minus_early, control.late_minus_early
    if mine.low <= 0:
        return None
    lost = loses_late_gain(gain, control)
    answer: Answer = (
        "yes" if lost else "no" if lost is False and theirs.value >= mine.value / 2 else "unclear"
    )
    return Check(
        "Does the control lose the late gain?",
        answer,
        f"What the late gain is above the early one: {_points(mine, gain)} with relatives, "
        f"{_points(theirs, control)} with strangers in their place.",
    )


def _without_gain(run: RunFolder, unit: Unit) -> str:
    before, after = run.first("before"), run.last("after")
    if after is not None:
        return f"After {_steps(after)} held-out loss is {_loss(after, unit)}."
    steps, losses = run.column("loss")
    total = run.setting("train", "steps")
    of = f" of {count(total)}" if isinstance(total, int) else ""
    if len(steps) > 1:
        return (
            f"Training is at step {count(run.metrics[-1]['step'])}{of}; its loss went from {unit.show(losses[0])} "
            f"to {unit.show(losses[-1])} {unit.name}."
        )
    if steps:
        return (
            f"Training is at step {count(steps[-1])}{of}, with a loss of {unit.show(losses[0])} {unit.name}."
        )
    if before is not None:
        return f"Before training, held-out loss is {_loss(before, unit)}; no step is recorded yet."
    return "No training step and no evaluation is recorded yet."


def _loss(series: Series, unit: Unit) -> str:
    if series["nats"] is None:
        return "not known, as nothing was scored"
    if series["sequences"] < 2:
        return f"{unit.show(series['nats'])} {unit.name} (one sequence, so no interval)"
    low, high = unit.show(series["low"]), unit.show(series["high"])
    return f"{unit.show(series['nats'])} {unit.name} ({low} to {high})"


def _late_early(gain: Comparison) -> tuple[Estimate | None, Estimate | None, Estimate | None]:
    return (gain.late.relative if gain.late else None), gain.early.relative, gain.late_minus_early


def _points(estimate: Estimate, comparison: Comparison) -> str:
    text = f"{number(100 * estimate.value, 1)} points"
    if comparison.overall.sequences < 2:
        return text
    return f"{text} ({number(100 * estimate.low, 1)} to {number(100 * estimate.high, 1)})"


def _steps(series: Series) -> str:
    return f"{count(series['step'])} step{'s' * (series['step'] != 1)}"


def _upper_first(text: str) -> str:
    return text[0].upper() + text[1:]
