"""What a probe runs: real sequences, cut where asked for, and random ones of the same lengths."""

import pytest
import torch

from longstrand.bench._small_models import architecture, documents
from longstrand.bench.caught import small_recipe
from longstrand.checks.probe import Asked, probe
from longstrand.checks.sequences import Letters, cut
from longstrand.data import Pack, open_data
from longstrand.data.pack import NO_TARGET


def test_a_pack_is_cut_within_a_document():
    pack = Pack.from_documents(documents((5, 6, 3)))
    short = cut(pack, 7)
    again = Pack.from_documents([pack.tokens[:5], pack.tokens[5:7]])
    for name in ("tokens", "targets", "weight", "starts"):
        assert torch.equal(getattr(short, name), getattr(again, name))
    assert cut(pack, 5).starts.tolist() == [0, 5] and cut(pack, 14) is pack
    assert int(short.targets[-1]) == NO_TARGET


def test_random_documents_have_the_lengths_of_real_ones_and_every_base_alike(tmp_path):
    recipe = small_recipe(tmp_path)
    letters = Letters.of(recipe, open_data(recipe.data), architecture(), None)
    real = Pack.from_documents(documents((3000, 1, 5000)))
    drawn = letters.like(real, torch.Generator().manual_seed(0))
    assert torch.equal(drawn.starts, real.starts) and letters.words == "A, C, G and T"
    counts = torch.bincount(drawn.tokens)
    assert counts.nonzero()[:, 0].tolist() == sorted(b"ACGT") and counts[counts > 0].min() > 1850
    again = letters.like(real, torch.Generator().manual_seed(0))
    assert torch.equal(drawn.tokens, again.tokens)


def test_without_letters_or_a_tokenizer_the_ids_of_the_model_are_drawn(tmp_path):
    (tmp_path / "some.jsonl").write_text('{"input_ids": [1, 2, 3, 4, 5, 6, 7]}\n' * 4)
    recipe = small_recipe(tmp_path)
    source = recipe.data.sources[0].model_copy(update={"path": str(tmp_path / "some.jsonl")})
    data = recipe.data.model_copy(update={"sources": [source]})
    recipe = recipe.model_copy(update={"data": data})
    letters = Letters.of(recipe, open_data(data), architecture(), None)
    assert letters.ids.tolist() == list(range(19)) and letters.words == "the 19 tokens of the model"


def test_a_text_tokenizer_is_drawn_from_as_far_as_the_model_knows_it(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(("the", "cat", "sat", "on", "a", "mat", "[UNK]"))} | {
        "far": 40
    }
    built = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    built.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    built.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "some.jsonl").write_text('{"text": "the cat sat on a mat"}\n' * 3)
    recipe = small_recipe(tmp_path)
    source = recipe.data.sources[0].model_copy(update={"path": str(tmp_path / "some.jsonl")})
    update = {"sources": [source], "tokenizer": str(tmp_path / "tokenizer.json")}
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update=update)})
    letters = Letters.of(recipe, open_data(recipe.data), architecture(), None)
    assert letters.ids.tolist() == list(range(7))
    found = probe(recipe, Asked(sequences=1, expert_ranks=1)).as_dict()
    assert (
        found["subject"]["lengths"] == [18]
        and found["subject"]["letters"] == "the 8 tokens of tokenizer.json"
    )
