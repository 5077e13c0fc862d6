"""What a reader should know: how to read the numbers, and what they do not show."""

from __future__ import annotations

from longstrand.report.findings import FEW_SEQUENCES, Findings
from longstrand.report.run_folder import RunFolder
from longstrand.wording import BITS_PER_BASE, Unit, count


def how_to_read(unit: Unit, has_control: bool) -> list[str]:
    """The terms of the report, one sentence or two each."""
    if unit == BITS_PER_BASE:
        loss = (
            "Loss is in bits per base: how many yes-or-no questions the model still needs for the next "
            "letter. Guessing among four letters costs 2; 0 is certainty. Lower is better."
        )
    else:
        loss = (
            "Loss is in nats per token: minus the natural log of the probability of the right token. "
            "Lower is better."
        )
    sentences = [
        loss,
        "A position is the number of tokens of the same sequence that stand before the one to be predicted. "
        "Local patterns help every position alike; a gain that grows with position can only come from "
        "context.",
        "A gain is how much lower the loss is than before training, on the same held-out tokens. The late "
        "gain is that of the last octave of positions (half the length and up), to be set against the first "
        "1,024 tokens.",
        "Intervals are 95 % bootstrap intervals: sequences drawn again with replacement, before and after "
        "together. If two do not overlap, the difference is not an accident of which sequences were held "
        "out.",
    ]
    if has_control:
        sentences.append(
            "The control replaces the relatives in each sequence by strangers. If the late gain comes from "
            "relatives, it must be gone there."
        )
    return sentences


def limits(run: RunFolder, findings: Findings) -> list[str]:
    """What the numbers do not show, as far as the run folder tells."""
    return [*_limits_of_data(run), *(_limits_of_gain(findings) if findings.gain is not None else [])]


def _limits_of_data(run: RunFolder) -> list[str]:
    sentences: list[str] = []
    families, split = run.setting("data", "families"), run.setting("data", "split")
    if isinstance(families, dict):
        sentences.append(
            "The sequences are natural, their order is constructed: relatives were placed one after another. "
            "A late gain here is copying of relatives; it does not show that long context helps on natural "
            "order."
        )
    elif run.recipe is not None:
        sentences.append(
            "Single genomes have little to gain from long context: a flat gain there is a property of the "
            "data, not a fault of the run."
        )
    by = split.get("by") if isinstance(split, dict) else None
    if by == "family":
        kmer = families.get("kmer", 31) if isinstance(families, dict) else 31
        sentences.append(
            f"Training and held-out families share no {kmer}-mer on either strand, which is a rule about "
            "close relatives: more distant ones may stand on both sides."
        )
    elif by in ("record", "region"):
        sentences.append(
            f"Held-out data was split by {by}: related or repeated sequence may stand on both sides of the "
            "split."
        )
    if run.setting("evaluate", "split") == "validation":
        sentences.append(
            "The loss is on the validation part, on which choices may have been made; it is not a held-out "
            "result."
        )
    return sentences


def _limits_of_gain(findings: Findings) -> list[str]:
    sequences = findings.gain.overall.sequences if findings.gain is not None else 0
    sentences: list[str] = []
    if findings.control is None:
        sentences.append("No control was evaluated: what in the context makes the gain is not shown.")
    if sequences < FEW_SEQUENCES:
        noun = "sequence was" if sequences == 1 else "sequences were"
        sentences.append(f"Only {count(sequences)} {noun} scored: intervals from so few are rough.")
    return [
        *sentences,
        "Sequences of one family, or windows of one genome, are not independent of each other: intervals over "
        "sequences may be too narrow for that.",
        "This is one training run with one seed; another may differ by more than the intervals say.",
    ]
