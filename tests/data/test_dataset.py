"""A recipe's data end to end, against plain Python strings and sets."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from longstrand.config import DataSection, Source
from longstrand.data import Data, DocumentPacks, Pack, open_data, open_evaluation
from longstrand.errors import UserError

PAIRS = str.maketrans("ACGTNacgtn", "TGCANtgcan")


def drawn(rng: np.random.Generator, n: int, letters: str = "ACGT") -> str:
    return "".join(rng.choice(list(letters), n))


def write(path: Path, records: dict[str, str]) -> Path:
    path.write_text("".join(f">{name}\n{text}\n" for name, text in records.items()))
    return path


def opened(tmp_path: Path, *paths: Path, seed: int = 0, **section: object) -> Data:
    section.setdefault("sources", [{"path": str(path)} for path in paths])
    return open_data(DataSection.model_validate(section), seed=seed, cache_dir=tmp_path / "cache")


def text_of(pack: Pack) -> str:
    return bytes(pack.tokens.tolist()).decode()


def texts(packs: DocumentPacks) -> list[str]:
    return [text_of(pack) for pack in packs]


@settings(max_examples=60, deadline=None)
@given(
    records=st.lists(st.text("ACGTNacgtn", min_size=1, max_size=40), min_size=1, max_size=6),
    length=st.integers(2, 15),
    n_max=st.sampled_from([0.0, 0.5, 1.0]),
    case=st.sampled_from(["ignore", 0.5, 0.0]),
)
def test_windows_weights_and_counts_equal_those_of_plain_strings(
    tmp_path_factory: pytest.TempPathFactory, records: list[str], length: int, n_max: float, case: str | float
) -> None:
    lower = 1.0 if case == "ignore" else float(case)

    def weight(letter: str) -> float:
        return 0.0 if letter in "Nn" else lower if letter.islower() else 1.0

    tmp_path = tmp_path_factory.mktemp("windows")
    path = write(tmp_path / "x.fa", {f"r{i}": text for i, text in enumerate(records)})
    windows = [text[i : i + length] for text in records for i in range(0, len(text), length)]
    kept, skipped = [], {"one_token": [0, 0], "mostly_n": [0, 0], "no_target": [0, 0]}
    for window in windows:
        num_n = window.upper().count("N")
        cause = (
            "one_token" if len(window) < 2
            else "mostly_n" if num_n > n_max * len(window)
            else "no_target" if not any(map(weight, window[1:]))
            else None
        )  # fmt: skip
        if cause is None:
            kept.append(window)
        else:
            skipped[cause][0] += 1
            skipped[cause][1] += len(window)
    data = opened(tmp_path, path, length=length, n_max=n_max, case=case)
    if kept:
        packs = data.documents("train")
        assert texts(packs) == [window.upper() for window in kept]
        for pack, window in zip(packs, kept, strict=True):
            assert pack.weight.tolist() == [*map(weight, window[1:]), 0.0]
    else:
        with pytest.raises(UserError, match="the train part has no document"):
            data.documents("train")
    part = data.ledger.as_dict()["sources"][0]["split"]["train"]
    expected = {cause: {"documents": a, "tokens": b} for cause, (a, b) in skipped.items() if a}
    assert part["skipped"] == expected and part["documents"] == len(kept)
    targets = [letter for window in kept for letter in window[1:]]
    num_n, trained = sum(letter in "Nn" for letter in targets), sum(weight(letter) > 0 for letter in targets)
    num_lower = len(targets) - num_n - trained
    assert part["masked_per_epoch"] == {"n": num_n, "lower_case": num_lower, "not_supervised": 0}
    assert part["trained_per_epoch"] == trained
    assert data.ledger.missing() == 0


def test_every_letter_of_two_files_with_regions_and_splits_is_in_the_ledger(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("a1.fa", "a2.fa"):
        write(tmp_path / name, {name + c: drawn(rng, 700, "ACGTNRacgt-") for c in "xyz"} | {name: ""})
    (tmp_path / "x.bed").write_text("a1.fax\t5\t505\na1.fax\t400\t600\na2.faz\t1\t3\n")
    sources = [
        {"path": str(tmp_path / "a*.fa"), "bed": str(tmp_path / "x.bed")},
        {"path": str(tmp_path / "a2.fa"), "regions": ["a2.fay"]},
    ]
    data = opened(tmp_path, sources=sources, length=64, split={"by": "region", "held_out": 0.2})
    first, second = data.ledger.as_dict()["sources"]
    assert first["letters"] == 6 * 700 and second["letters"] == 3 * 700
    assert first["outside_regions"] == 6 * 700 - 595 - 2 and first["named_by_several_regions"] == 105
    text = "".join(
        (tmp_path / name).read_text().split("\n")[i] for name in ("a1.fa", "a2.fa") for i in (1, 3, 5)
    )
    assert first["read_as_n"] == {"R": text.count("R"), "-": text.count("-")}
    assert first["files"][0]["header_only"] == {"records": 1, "names": ["a1.fa (line 7)"]}
    assert [part["letters"] for part in second["split"].values()] == [490, 70, 140]
    assert data.ledger.missing() == 0
    data.ledger.sources[0].parts["train"].trained -= 1
    assert data.ledger.missing() == 1


def thirty_one_mers(text: str) -> set[str]:
    found = {text[i : i + 31] for i in range(len(text) - 30)}
    return found | {kmer.translate(PAIRS)[::-1] for kmer in found}


def family_records(rng: np.random.Generator, families: int, members: int) -> dict[str, str]:
    """Families of mutated copies, some of them on the other strand."""
    records = {}
    for family in range(families):
        core = drawn(rng, 200)
        for member in range(members):
            text = list(core)
            for at in rng.choice(200, 3, replace=False):
                text[at] = "ACGT"[rng.integers(4)]
            whole = drawn(rng, int(rng.integers(5, 60))) + "".join(text)
            records[f"f{family}m{member}"] = whole if rng.random() < 0.7 else whole.translate(PAIRS)[::-1]
    return records


@pytest.mark.parametrize("families", [None, {}])
def test_no_thirty_one_mer_stands_on_both_sides_of_a_family_split(
    tmp_path: Path, families: dict | None
) -> None:
    path = write(tmp_path / "x.fa", family_records(np.random.default_rng(1), 20, 4))
    data = opened(tmp_path, path, length=1200, split={"by": "family", "held_out": 0.2}, families=families)
    kmers = {
        part: set().union(*(thirty_one_mers(text) for text in texts(data.documents(part))))
        for part in ("train", "validation", "held_out")
    }
    assert all(len(found) > 1000 for found in kmers.values())
    assert not kmers["train"] & kmers["held_out"]
    assert not kmers["train"] & kmers["validation"]
    assert not kmers["validation"] & kmers["held_out"]


def test_relatives_stand_on_one_strand_in_one_document_and_strangers_do_not_share(tmp_path: Path) -> None:
    records = family_records(np.random.default_rng(2), 30, 4)
    path = write(tmp_path / "x.fa", records)
    data = opened(tmp_path, path, length=1000, split={"by": "family", "held_out": 0.5}, families={})
    held_out, control = data.documents("held_out"), data.documents("held_out", order="strangers")
    assert held_out.lengths.tolist() == control.lengths.tolist() and held_out.lengths.max() <= 1000
    assert all(pack.num_documents == 1 for pack in held_out)

    def repeats(text: str) -> int:
        words = [text[i : i + 31] for i in range(len(text) - 30)]
        return len(words) - len(set(words))

    relatives, strangers = (sum(map(repeats, texts(packs))) for packs in (held_out, control))
    assert strangers == 0 and relatives > 0.3 * held_out.lengths.sum()
    for original, replaced in zip(texts(held_out), texts(control), strict=True):
        assert original[:100] == replaced[:100]


def test_held_out_documents_do_not_depend_on_the_runs_seed(tmp_path: Path) -> None:
    path = write(tmp_path / "x.fa", family_records(np.random.default_rng(3), 12, 3))
    section = {"length": 1000, "split": {"by": "family"}, "families": {}}
    one, two = (opened(tmp_path, path, seed=seed, **section) for seed in (0, 1))
    assert texts(one.documents("held_out")) == texts(two.documents("held_out"))
    steps = [[text_of(pack) for pack in data.train_loader(4).next_step()] for data in (one, two)]
    assert steps[0] != steps[1]


def test_equal_records_are_never_split_even_on_the_other_strand(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    records = {}
    for i in range(12):
        text = drawn(rng, 50)
        records |= {f"a{i}": text, f"b{i}": text.translate(PAIRS)[::-1], f"c{i}": text.lower()}
    for seed in range(5):
        data = opened(
            tmp_path, write(tmp_path / "x.fa", records), length=64, split={"by": "record", "seed": seed}
        )
        sides = [
            {min(text, text.translate(PAIRS)[::-1]) for text in texts(data.documents(part))}
            for part in ("train", "validation", "held_out")
        ]
        assert len(sides[0]) + len(sides[1]) + len(sides[2]) == len(sides[0] | sides[1] | sides[2]) == 12


def test_the_same_text_is_not_split_because_other_parts_of_it_are_supervised(tmp_path: Path) -> None:
    rows = [{"text": "ACGTTGCA"}, {"prompt": "ACGT", "completion": "TGCA"}]
    rows += [{"text": drawn(np.random.default_rng(seed), 8)} for seed in range(6)]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for seed in range(8):
        split = {"by": "record", "validation": 0.2, "held_out": 0.2, "seed": seed}
        data = opened(tmp_path, tmp_path / "x.jsonl", length=8, split=split)
        sides = ["ACGTTGCA" in texts(data.documents(part)) for part in ("train", "validation", "held_out")]
        assert sum(sides) == 1


def test_copies_of_a_file_and_records_of_one_name_are_all_kept(tmp_path: Path) -> None:
    text = ">g 1\nACGTAC\n>g 2\nGGGTTT\n>g 1\nACGTAC\n"
    for name in ("a.fa", "b.fa"):
        (tmp_path / name).write_text(text)
    data = opened(tmp_path, tmp_path / "*.fa", length=10)
    assert texts(data.documents("train")) == ["ACGTAC", "GGGTTT", "ACGTAC"] * 2
    source = data.ledger.as_dict()["sources"][0]
    assert source["letters"] == 36 and source["split"]["train"]["records"] == 6
    assert [Path(file["path"]).name for file in source["files"]] == ["a.fa", "b.fa"]


def test_the_other_strand_turns_masks_with_their_letters(tmp_path: Path) -> None:
    text = "AACCNNGTacgtTTAGNC" * 4
    path = write(tmp_path / "x.fa", {"a": text})
    loader = opened(tmp_path, path, length=18, case=0.25, reverse_complement=True).train_loader(4)
    shown = set()
    for _ in range(10):
        for pack in loader.next_step():
            forward = text[:18]
            backward = forward.translate(PAIRS)[::-1]
            strand = forward if text_of(pack) == forward.upper() else backward
            shown.add(strand)
            assert text_of(pack) == strand.upper()
            expected = [0.0 if x in "Nn" else 0.25 if x.islower() else 1.0 for x in strand[1:]]
            assert pack.weight.tolist() == [*expected, 0.0]
    assert len(shown) == 2


def test_a_sequence_of_relatives_turns_as_a_whole(tmp_path: Path) -> None:
    path = write(tmp_path / "x.fa", family_records(np.random.default_rng(10), 6, 4))
    section = {"length": 1000, "families": {}}
    forward = opened(tmp_path, path, **section).train_loader(1)
    both = opened(tmp_path, path, reverse_complement=True, **section).train_loader(1)
    strands = set()
    for _ in range(12):
        (one,), (other,) = forward.next_step(), both.next_step()
        as_it_stands = text_of(other) == text_of(one)
        assert as_it_stands or text_of(other) == text_of(one).translate(PAIRS)[::-1]
        strands.add(as_it_stands)
    assert strands == {True, False}


def test_training_counts_what_it_has_shown_and_so_does_a_resumed_run(tmp_path: Path) -> None:
    path = write(tmp_path / "x.fa", {"a": drawn(np.random.default_rng(5), 500, "ACGTN")})
    data = opened(tmp_path, path, length=64)
    loader = data.train_loader(3)
    packs = [pack for _ in range(5) for pack in loader.next_step()]
    shown = data.ledger.as_dict()["sources"][0]["shown_in_training"]
    assert shown == {
        "sequences": 15,
        "documents": sum(pack.num_documents for pack in packs),
        "tokens": sum(map(len, packs)),
        "trained": sum(int((pack.weight > 0).sum()) for pack in packs),
        "masked": sum(int(((pack.weight == 0) & (pack.targets >= 0)).sum()) for pack in packs),
        "no_target": sum(int((pack.targets < 0).sum()) for pack in packs),
    }
    again = opened(tmp_path, path, length=64)
    again.train_loader(3).load_state_dict(loader.state_dict())
    assert again.ledger.as_dict() == data.ledger.as_dict()


def test_evaluation_files_must_not_share_letters_with_training(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    text = drawn(rng, 400)
    genome = write(tmp_path / "x.fa", {"chr1": text, "chr2": drawn(rng, 100)})
    copied = write(tmp_path / "y.fa", {"other": text.translate(PAIRS)[::-1].lower()})
    data = opened(tmp_path, sources=[{"path": str(genome), "regions": ["chr1:1-300"]}], length=64)
    cache = {"cache_dir": tmp_path / "cache", "apart_from": data}

    def evaluation(path: Path, region: str) -> Data:
        return open_evaluation([Source(path=str(path), regions=[region])], 50, like=data.section, **cache)

    assert texts(evaluation(genome, "chr1:301-400").documents()) == [text[300:350], text[350:]]
    assert evaluation(genome, "chr1:301-400").documents("validation")[0].tokens[0] == ord(text[300])
    assert len(evaluation(copied, "other:1-100").documents()) == 2
    for path, region in ((genome, "chr1:300-400"), (copied, "other:1-101")):
        with pytest.raises(UserError, match="training and evaluation must not share letters") as refusal:
            evaluation(path, region)
        assert "chr1:1-300 (training)" in str(refusal.value) and f"{region} (evaluation)" in str(
            refusal.value
        )


def test_some_documents_are_an_even_choice(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    data = opened(tmp_path, write(tmp_path / "x.fa", {"a": drawn(rng, 1000)}), length=100)
    packs = data.documents("train")
    assert texts(data.documents("train", sequences=3)) == [texts(packs)[i] for i in (0, 4, 9)]
    assert text_of(packs[-1]) == texts(packs)[9]
    assert len(data.documents("train", sequences=30)) == 10
    assert data.documents("train", length=400).lengths.tolist() == [400, 400, 200]
    with pytest.raises(IndexError):
        packs[10]


def test_a_text_tokenizer_reads_windows_of_tokens_with_the_letters_weights(
    tmp_path: Path, folder: Path
) -> None:
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = drawn(np.random.default_rng(8), 600, "ACGTNacgt")
    path = write(tmp_path / "x.fa", {"a": text})
    data = opened(tmp_path, path, length=50, tokenizer=str(folder), cut=9, case=0.5, n_max=1.0)
    ids, weights = [], []
    for at in range(0, 600, 9):
        found = plain.encode(text[at : at + 9].upper(), add_special_tokens=False)
        ids += found.ids
        for start, end in found.offsets:
            letters = text[at + start : at + end]
            weights.append(0.0 if "N" in letters else 0.5 if not letters.isupper() else 1.0)
    packs = data.documents("train")
    assert [pack.tokens.tolist() for pack in packs] == [ids[i : i + 50] for i in range(0, len(ids), 50)]
    expected = [[*weights[i + 1 : i + 50], 0.0] for i in range(0, len(ids), 50)]
    assert [pack.weight.tolist() for pack in packs] == expected
    source = data.ledger.as_dict()["sources"][0]
    assert source["letters"] == source["split"]["train"]["letters"] == 600
    assert source["split"]["train"]["tokens"] == len(ids) and data.ledger.missing() == 0
    assert data.max_token == max(ids)
    with pytest.raises(UserError, match="reverse_complement = true"):
        opened(tmp_path, path, length=50, tokenizer=str(folder), cut=9, reverse_complement=True)


def test_relatives_on_the_other_strand_are_turned_before_a_text_tokenizer(
    tmp_path: Path, folder: Path
) -> None:
    text = drawn(np.random.default_rng(9), 90)
    path = write(tmp_path / "x.fa", {"a": text, "b": text.translate(PAIRS)[::-1]})
    pack = opened(tmp_path, path, length=500, tokenizer=str(folder), cut=9, families={}).documents("train")[0]
    assert pack.num_documents == 1 and len(pack) % 2 == 0
    assert torch.equal(pack.tokens[: len(pack) // 2], pack.tokens[len(pack) // 2 :])


def test_letters_without_a_token_are_counted_and_only_read_tokens_bound_the_vocabulary(
    tmp_path: Path,
) -> None:
    vocabulary = {"<unk>": 0, "A": 1, "C": 2, "G": 3, "T": 4}
    Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")).save(str(tmp_path / "tokenizer.json"))
    path = write(tmp_path / "x.fa", {"a": "ACGTNNAC"})
    data = opened(tmp_path, path, length=8, tokenizer=str(tmp_path), cut=1)
    assert data.documents("train")[0].tokens.tolist() == [1, 2, 3, 4, 0, 0, 1, 2]
    assert data.ledger.as_dict()["sources"][0]["unknown_tokens"] == 2
    assert data.max_token == 4


def test_token_rows_pass_through_and_tell_their_largest_token(tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 900, 7], "loss_mask": [1, 0, 1]}, {"input_ids": [1, 2]}]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = opened(tmp_path, tmp_path / "x.jsonl", length=16)
    pack = data.documents("train")[0]
    assert data.max_token == 900 and torch.equal(pack.tokens, torch.tensor([5, 900, 7]))
    assert pack.weight.tolist() == [0.0, 1.0, 0.0] and pack.targets.tolist() == [900, 7, -1]


def refused(tmp_path: Path, said: str, **section: object) -> None:
    with pytest.raises(UserError, match=said) as refusal:
        opened(tmp_path, **section)
    assert "\n" not in str(refusal.value)


def test_settings_that_do_not_fit_the_files_are_refused(tmp_path: Path) -> None:
    fasta = str(write(tmp_path / "x.fa", {"a": "ACGTACGT", "b": "ACRT"}))
    (tmp_path / "x.jsonl").write_text('{"text": "ACGT"}')
    (tmp_path / "empty.fa").write_text("")
    (tmp_path / "x.txt").write_text("LOCUS AB1\n")
    rows = [{"path": str(tmp_path / "x.jsonl")}]
    refused(tmp_path, r"x\.jsonl is jsonl, and families", sources=rows, length=8, families={})
    refused(tmp_path, "reverse_complement is for FASTA", sources=rows, length=8, reverse_complement=True)
    refused(tmp_path, 'split.by = "region" is for FASTA', sources=rows, length=8, split={"by": "region"})
    (tmp_path / "t.jsonl").write_text('{"input_ids": [1, 2]}')
    tokens = [{"path": str(tmp_path / "t.jsonl")}]
    refused(tmp_path, r"data\.case = 0\.5: is about nucleotide letters", sources=tokens, length=8, case=0.5)
    assert opened(tmp_path, sources=[*tokens, {"path": fasta}], length=8, case=0.5).ledger.missing() == 0
    refused(
        tmp_path,
        "x.fa .fasta. and .*x.jsonl .jsonl.",
        sources=[{"path": str(tmp_path / "x.[fj]*")}],
        length=8,
    )
    refused(tmp_path, "no file matches", sources=[{"path": str(tmp_path / "*.fasta")}], length=8)
    refused(tmp_path, "No such file", sources=[{"path": str(tmp_path / "no.fa")}], length=8)
    refused(tmp_path, "the file is empty", sources=[{"path": str(tmp_path / "empty.fa")}], length=8)
    refused(tmp_path, "neither FASTA", sources=[{"path": str(tmp_path / "x.txt")}], length=8)
    refused(
        tmp_path, r"record 'b', letter 3: 'R' is refused", sources=[{"path": fasta}], length=8, iupac="error"
    )
    refused(
        tmp_path, "2 records cannot fill 3 parts", sources=[{"path": fasta}], length=8, split={"by": "record"}
    )
    refused(tmp_path, 'data.tokenizer = "none"', sources=[{"path": fasta}], length=8, tokenizer="none")
    opened(tmp_path, sources=[{"path": fasta, "regions": ["a"]}], length=8, iupac="error")
    data = opened(tmp_path, sources=[{"path": fasta}], length=8)
    with pytest.raises(UserError, match=r"no held_out part; add \[data\.split\]"):
        data.documents()
    with pytest.raises(UserError, match=r"needs \[data\.families\]"):
        data.documents("train", order="strangers")


def test_nothing_to_train_on_says_what_became_of_it(tmp_path: Path) -> None:
    data = opened(tmp_path, write(tmp_path / "x.fa", {"a": "N" * 50 + "ACGT"}), length=100)
    with pytest.raises(UserError, match=r"54 letters, skipped: 1 mostly n \(54 tokens\)"):
        data.train_loader(1)
