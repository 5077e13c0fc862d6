"""Ours against transformers' implementation, and the oracle against itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.models.glm5_next import modeling_glm5_next as theirs

from longstrand.bench.drawn import draw_architecture, draw_documents, draw_weights, lengths
from longstrand.bench.oracle import Oracle, Widened
from longstrand.bench.parity import (
    LIMITS,
    NUM_CASES,
    Difference,
    _measure_case,
    compare,
    export_difference,
    model_with,
)


def differ(
    case: int, document_lengths: list[int], dtype: torch.dtype = torch.float64, tile: int = 50
) -> Difference:
    architecture = draw_architecture(case)
    weights = draw_weights(architecture, seed=case, dtype=dtype)
    documents = draw_documents(architecture, document_lengths, seed=sum(document_lengths))
    return compare(model_with(architecture, weights, dtype), Oracle(architecture, weights), documents, tile)


@pytest.mark.parametrize(
    ("case", "length"),
    [(0, 65), (1, 2), (2, 7), (3, 33), (4, 1), (5, 5)],
    ids=["kpool 4", "kpool 1", "kpool 2, shared indexer", "kpool 16", "one token", "tied head"],
)
def test_hidden_states_logprobs_and_every_gradient_agree_in_float64(case: int, length: int) -> None:
    found = differ(case, [length])
    assert found.passes, (found.missing, found.gradient, found.errors)


@pytest.mark.parametrize("case", [6, 7])
def test_float32_agrees_to_its_own_precision(case: int) -> None:
    found = differ(case, [65], torch.float32)
    assert found.passes, (found.missing, found.gradient, found.errors)


@pytest.mark.parametrize("tile", [3, 1024])
def test_packed_documents_are_each_document_alone(tile: int) -> None:
    found = differ(2, [1, 5, 2, 21, 8], tile=tile)
    assert found.passes, (found.missing, found.gradient, found.errors)


def test_an_export_has_the_same_logprobs_in_transformers(tmp_path: Path) -> None:
    architecture = draw_architecture(2)
    model = model_with(architecture, draw_weights(architecture, seed=2), torch.float64)
    document = draw_documents(architecture, [19], seed=4)[0]
    assert export_difference(model, document, tmp_path / "export") <= LIMITS[torch.float64][0]


def test_the_cases_cover_what_they_must() -> None:
    drawn = [draw_architecture(case) for case in range(NUM_CASES)]
    assert len(set(drawn)) == NUM_CASES >= 12
    assert {each.index_kpool for each in drawn} == {1, 2, 4, 16}
    assert (
        {each.num_attention_heads for each in drawn}
        == {each.linear_num_heads for each in drawn}
        == set(range(1, 9))
    )
    assert {each.n_routed_experts for each in drawn} >= {2, 16}
    assert any(each.qk_nope_head_dim != each.v_head_dim for each in drawn)
    assert {frozenset(each.mlp_layer_types) for each in drawn} >= {
        frozenset({"dense"}),
        frozenset({"sparse"}),
    }
    assert any("shared" in each.indexer_types for each in drawn)
    assert all(each.index_n_heads == 16 for each in drawn)
    assert all(each.index_topk + each.index_kpool in lengths(each) for each in drawn)


def kda_inputs(length: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(1, length, 2, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    decay = -5 * torch.rand(1, length, 2, 8, generator=generator, dtype=torch.float64)
    return q, k, v, decay, torch.rand(1, length, 2, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("length", [1, 65])
def test_the_oracles_chunks_are_its_recurrence(length: int) -> None:
    inputs = kda_inputs(length)
    with Widened():
        chunked, _ = theirs.chunk_kimi_delta_attention(*inputs, use_qk_l2norm_in_kernel=True)
        stepped, _ = theirs.recurrent_kimi_delta_attention(*inputs, None, False, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(chunked, stepped, rtol=0, atol=5e-15)


def test_the_oracle_decodes_what_it_prefills() -> None:
    architecture = draw_architecture(8)
    model = Oracle(architecture, draw_weights(architecture, seed=0)).model
    document = draw_documents(architecture, [23], seed=0)[0][None]
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), Widened():
        whole = model(input_ids=document, use_cache=False).last_hidden_state
        steps = [
            model(input_ids=token, use_cache=True, past_key_values=cache).last_hidden_state
            for token in document.split(1, dim=1)
        ]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=0, atol=1e-12)


def test_without_widening_the_oracle_rounds_to_float32() -> None:
    architecture = draw_architecture(0)
    weights = draw_weights(architecture, seed=0)
    document = draw_documents(architecture, [9], seed=0)
    oracle, rounded = Oracle(architecture, weights), Oracle(architecture, weights, torch.float32)
    difference = (oracle.run(document).hidden - rounded.run(document).hidden).abs().max()
    assert 1e-8 < difference < 1e-4
    assert torch.equal(oracle.run(document).hidden, oracle.run(document).hidden)


def test_the_oracle_attends_to_the_ids_it_is_given() -> None:
    architecture = draw_architecture(4)
    oracle = Oracle(architecture, draw_weights(architecture, seed=1))
    document = draw_documents(architecture, [40], seed=1)
    free = oracle.run(document)
    assert torch.equal(oracle.run(document, selected=free.selected).hidden, free.hidden)
    only_self = {0: [torch.arange(40)[:, None]]}
    given = oracle.run(document, selected=only_self)
    assert torch.equal(given.selected[0][0], only_self[0][0].int())
    assert (given.hidden - free.hidden)[1:].abs().amax(-1).min() > 1e-6


def test_equal_scores_select_the_lowest_pool() -> None:
    with Widened():
        assert torch.tensor([1.0, 2.0, 1.0, 2.0, 0.0]).topk(3).indices.tolist() == [1, 3, 0]
        assert torch.topk(torch.zeros(2, 4), k=2, dim=-1)[1].tolist() == [[0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("layers.3.self_attn.A_log", lambda value: value.add_(1e-6)),
        ("layers.0.hc_attn_base", lambda value: value.add_(1e-6)),
        ("layers.2.mlp.gate.e_score_correction_bias", lambda value: value.copy_(value.roll(1))),
        ("layers.1.self_attn.indexer.index_kpool_compress_ape", lambda value: value.copy_(value.flip(0))),
    ],
    ids=["decay", "hyper-connection", "router", "indexer"],
)
def test_a_small_fault_is_seen(name: str, change: Callable[[Tensor], object]) -> None:
    architecture = draw_architecture(14)
    weights = draw_weights(architecture, seed=14)
    model = model_with(architecture, weights, torch.float64)
    change({**dict(model.named_parameters()), **dict(model.named_buffers())}[name].data)
    found = compare(
        model, Oracle(architecture, weights), draw_documents(architecture, [40], seed=2), tile=1024
    )
    assert found.errors["hidden"] > 1e-9
    assert found.gradient[1] > 1e-8


@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(LIMITS), ids=["float64", "float32"])
@pytest.mark.parametrize("case", range(NUM_CASES))
def test_the_whole_grid_agrees(case: int, dtype: torch.dtype) -> None:
    record = _measure_case(case, dtype)
    assert record["pass"], record
