"""The loader: every document once per epoch, the same order again, and a resume that changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longstrand.config import DataSection
from longstrand.data import Loader, Pack, open_data
from longstrand.data.loader import fill_packs
from longstrand.errors import UserError


def tiny_documents(path: Path, count: int, first: int = 1000) -> Path:
    """Token rows with a first token of their own and lengths 2..6."""
    rows = [{"input_ids": [first + i, *range(1 + i % 5)]} for i in range(count)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def open_tiny(tmp_path: Path, seed: int = 0, sequences_per_step: int = 2, **more: object) -> Loader:
    path = tiny_documents(tmp_path / "x.jsonl", 20)
    section = {"sources": [{"path": str(path)}], "length": 10, **more}
    data = open_data(DataSection.model_validate(section), seed=seed, cache_dir=tmp_path / "cache")
    return data.train_loader(sequences_per_step)


def firsts(packs: list[Pack]) -> list[tuple[int, int]]:
    """(first token, offset) of every document, in order."""
    return [(int(pack.tokens[start]), int(start)) for pack in packs for start in pack.starts[:-1]]


def same(a: list[Pack], b: list[Pack]) -> bool:
    fields = ("tokens", "targets", "weight", "starts")
    return len(a) == len(b) and all(
        torch.equal(getattr(x, f), getattr(y, f)) for x, y in zip(a, b, strict=True) for f in fields
    )


def test_each_document_is_shown_once_per_epoch_and_none_is_dropped(tmp_path: Path) -> None:
    loader = open_tiny(tmp_path, sequences_per_step=1)
    orders = []
    for _ in range(3):
        epoch = []
        epochs_done = loader.state_dict()["sources"][0]["epoch"]
        while loader.state_dict()["sources"][0]["epoch"] == epochs_done:
            epoch += [token for token, _ in firsts(loader.next_step())]
        assert sorted(epoch) == list(range(1000, 1020))
        orders.append(tuple(epoch))
    assert len(set(orders)) == 3


def test_packs_are_filled_with_several_documents_and_never_beyond_the_length(tmp_path: Path) -> None:
    loader = open_tiny(tmp_path)
    packs = [pack for _ in range(10) for pack in loader.next_step()]
    assert max(map(len, packs)) == 10 and max(pack.num_documents for pack in packs) > 1


@pytest.mark.parametrize("stop", [1, 3, 4, 7, 13])
def test_a_resumed_loader_continues_as_if_never_stopped(tmp_path: Path, stop: int) -> None:
    loader = open_tiny(tmp_path)
    for _ in range(stop):
        loader.next_step()
    state = json.loads(json.dumps(loader.state_dict()))
    expected = [loader.next_step() for _ in range(15)]
    resumed = open_tiny(tmp_path)
    resumed.load_state_dict(state)
    assert resumed.step == stop
    assert all(same(resumed.next_step(), packs) for packs in expected)
    assert resumed.state_dict() == loader.state_dict()


def test_a_state_of_other_data_or_another_seed_is_refused(tmp_path: Path) -> None:
    state = open_tiny(tmp_path).state_dict()
    others = [
        open_tiny(tmp_path, seed=1),
        open_tiny(tmp_path, sequences_per_step=3),
        open_tiny(tmp_path, split={"by": "record"}),
    ]
    tiny_documents(tmp_path / "y.jsonl", 20, first=3000)
    section = DataSection.model_validate({"sources": [{"path": str(tmp_path / "y.jsonl")}], "length": 10})
    others.append(open_data(section, cache_dir=tmp_path / "cache").train_loader(2))
    for other in others:
        with pytest.raises(UserError, match="stands in other data"):
            other.load_state_dict(state)


def test_the_order_follows_the_seed_and_nothing_else(tmp_path: Path) -> None:
    a, b, c = open_tiny(tmp_path), open_tiny(tmp_path), open_tiny(tmp_path, seed=1)
    shown = [[firsts(loader.next_step()) for _ in range(9)] for loader in (a, b, c)]
    assert shown[0] == shown[1] != shown[2]
    one = open_tiny(tmp_path, sequences_per_step=1)
    assert [firsts(one.next_step())[0] for _ in range(18)] == [
        firsts([pack])[0] for pack in _packs(open_tiny(tmp_path), 9)
    ]


def _packs(loader: Loader, steps: int) -> list[Pack]:
    return [pack for _ in range(steps) for pack in loader.next_step()]


def test_sources_share_the_tokens_by_their_weights(tmp_path: Path) -> None:
    sources = [
        {"path": str(tiny_documents(tmp_path / "a.jsonl", 9, 1000)), "weight": 3.0},
        {"path": str(tiny_documents(tmp_path / "b.jsonl", 14, 2000)), "weight": 1.0},
    ]
    section = DataSection.model_validate({"sources": sources, "length": 10})
    loader = open_data(section, cache_dir=tmp_path / "cache").train_loader(1)
    tokens = {1: 0, 2: 0}
    for pack in _packs(loader, 400):
        (source,) = {int(pack.tokens[start]) // 1000 for start in pack.starts[:-1]}
        tokens[source] += len(pack)
    assert abs(tokens[1] - 3 * tokens[2]) <= 4 * 10


@given(st.lists(st.integers(1, 20), min_size=1, max_size=120), st.integers(0, 5))
def test_filling_packs_keeps_every_document_whole(lengths: list[int], seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(lengths))
    packs = fill_packs(order, np.array(lengths), 20)
    assert sorted(np.concatenate(packs).tolist()) == list(range(len(lengths)))
    assert all(sum(lengths[document] for document in pack) <= 20 for pack in packs)


def test_rows_with_a_prompt_are_never_cut(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(
        '{"text": "ACGT"}\n{"prompt": "' + "A" * 60 + '", "completion": "CGTAC"}\n'
    )
    section = {"sources": [{"path": str(tmp_path / "x.jsonl")}], "length": 50}
    with pytest.raises(
        UserError, match=r"x\.jsonl:2: 65 tokens with a prompt or loss_mask exceed length = 50"
    ):
        open_data(DataSection.model_validate(section), cache_dir=tmp_path / "cache")


def test_a_row_without_any_target_is_skipped_and_counted(tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 2, 3], "loss_mask": [1, 0, 0]}, {"input_ids": [4, 5, 6]}, {"input_ids": [7]}]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    section = DataSection.model_validate({"sources": [{"path": str(tmp_path / "x.jsonl")}], "length": 50})
    data = open_data(section, cache_dir=tmp_path / "cache")
    part = data.ledger.as_dict()["sources"][0]["split"]["train"]
    assert part["skipped"] == {
        "one_token": {"documents": 1, "tokens": 1},
        "no_target": {"documents": 1, "tokens": 3},
    }
    assert data.train_loader(1).next_step()[0].tokens.tolist() == [4, 5, 6]
