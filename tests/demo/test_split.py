"""What the demo trains on and what it is scored on share no 31-mer, on either strand."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from longstrand.data import open_data
from longstrand.demo.kin import generate
from longstrand.demo.pretrain import SHIPPED, stages
from longstrand.demo.run import demo_recipe

K = 31
OTHER_STRAND = str.maketrans("ACGTN", "TGCAN")


def kmers(text: str) -> set[str]:
    return {text[at : at + K] for at in range(len(text) - K + 1) if "N" not in text[at : at + K]}


def letters(documents: object) -> list[str]:
    return [bytes(pack.tokens.tolist()).decode() for pack in documents]  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory):
    recipe = demo_recipe(Path(tmp_path_factory.mktemp("demo")), seed=0)
    alone = recipe.data.model_copy(
        update={"families": None}
    )  # the same split, each record a document of its own
    return recipe, open_data(recipe.data, seed=recipe.run.seed), open_data(alone, seed=recipe.run.seed)


@pytest.fixture(scope="module")
def forbidden(opened) -> set[str]:
    """31-mers of all held-out records and of the sequences that are scored, both strands."""
    _, data, records = opened
    orders = ("relatives", "strangers")
    scored = [t for o in orders for t in letters(data.documents("held_out", order=o))]
    scored += letters(records.documents("held_out"))
    return {
        k for text in scored for strand in (text, text.translate(OTHER_STRAND)[::-1]) for k in kmers(strand)
    }


def test_no_held_out_kmer_is_trained_on_or_seen_in_a_choice(opened, forbidden: set[str]):
    """Compared letter by letter in plain Python, joins between two records of a sequence included."""
    _, data, records = opened
    for part in ("train", "validation"):
        for text in letters(records.documents(part)):
            assert kmers(text).isdisjoint(forbidden)
        for order in ("relatives", "strangers"):
            for text in letters(data.documents(part, order=order)):
                assert kmers(text).isdisjoint(forbidden)


def test_every_record_stands_in_one_part_of_the_split(opened):
    _, _, records = opened
    text = gzip.decompress((SHIPPED / "resfinder_alleles.fa.gz").read_bytes()).decode()
    shipped = ["".join(record.split("\n")[1:]) for record in text.split(">")[1:]]
    split = [t for part in ("train", "validation", "held_out") for t in letters(records.documents(part))]
    assert sorted(split) == sorted(shipped)


def test_the_steps_of_the_demo_hold_no_held_out_kmer(opened, forbidden: set[str]):
    recipe, data, _ = opened
    loader = data.train_loader(recipe.train.sequences_per_step)
    for _ in range(recipe.train.steps):
        for pack in loader.next_step():
            for start, end in zip(pack.starts[:-1].tolist(), pack.starts[1:].tolist(), strict=True):
                assert kmers(bytes(pack.tokens[start:end].tolist()).decode()).isdisjoint(forbidden)


def test_the_sequences_that_made_the_checkpoint_hold_no_held_out_kmer(forbidden: set[str]):
    for stage in stages():
        for number in range(min(stage.sequences, 200)):
            text = generate(stage.kin, stage.seed, number)[0].tobytes().decode()
            assert kmers(text).isdisjoint(forbidden)
