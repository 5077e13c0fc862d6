"""`longstrand evaluate` on files: what it loads, scores, prints and refuses."""

import gzip
import json
import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from longstrand.config import dump_toml, load_recipe
from longstrand.data import Pack
from longstrand.errors import UserError
from longstrand.evaluate import run_evaluation
from longstrand.model import load_model, save_model
from longstrand.state import save_checkpoint
from longstrand.trained import load_trained

RECIPE = """
[run]
out = "{run}"
[model]
config = "toy"
[data]
length = 64
case = 0.5
cache = "{cache}"
[[data.sources]]
path = "{fasta}"
[train]
steps = 9
lr = 1e-3
[memory]
tile = 32
"""
FIRST = "ACGTTGCANNACCGTATGCAGGATTACAGATTACA" * 2
SECOND = "ggattacaGGATTACA" * 4


@pytest.fixture
def fasta(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    path = tmp_path / "two.fa.gz"
    path.write_bytes(gzip.compress(f">first\n{FIRST}\n>second\n{SECOND}\n".encode()))
    return path


@pytest.fixture
def run(tmp_path: Path, fasta: Path) -> Path:
    """A run of the toy with checkpoints of steps 2 and 5, whose weights differ."""
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "recipe.toml").write_text(RECIPE.format(run=folder, fasta=fasta, cache=tmp_path / "cache"))
    (folder / "run.toml").write_text(dump_toml(load_recipe(tmp_path / "recipe.toml", [])))
    for step in (2, 5):
        state = load_model(toy(), seed=step).state_dict()
        tensors = {f"model.{name}": tensor for name, tensor in state.items()}
        save_checkpoint(folder, step, {**tensors, "optimizer.x": torch.ones(3)}, {})
    return folder


def toy() -> Path:
    import longstrand

    return Path(longstrand.__file__).parent / "configs" / "toy.json"


def expected_nats(model, *, lower_case_weight: float) -> tuple[float, float]:
    """Summed weighted nats and weights of both records in windows of 64 letters, N masked."""
    total = weights = 0.0
    for record in (FIRST, SECOND):
        for start in range(0, len(record), 64):
            window = record[start : start + 64]
            if len(window) < 2:
                continue
            pack = Pack.from_documents([torch.tensor(list(window.upper().encode()))])
            logprobs = model.token_logprobs(pack).detach()
            for place, letter in enumerate(window[1:]):
                weight = 0.0 if letter == "N" else lower_case_weight if letter.islower() else 1.0
                total -= weight * float(logprobs[place])
                weights += weight
    return total, weights


def test_a_model_folder_is_scored_with_the_defaults(tmp_path: Path, fasta: Path, capsys):
    folder = save_model(load_model(toy(), seed=3), tmp_path / "model [b]")
    series = run_evaluation(folder, [str(fasta)], 64)
    total, weights = expected_nats(load_model(toy(), seed=3), lower_case_weight=1.0)
    assert series["nats"] == pytest.approx(total / weights, rel=1e-5)
    assert (series["tokens"], series["masked"], series["step"]) == (round(weights), 4, 0)
    printed = capsys.readouterr().out
    assert f"{total / weights / math.log(2):.3f}" in printed
    assert "bits per base" in printed
    assert "4 masked targets" in printed and "[b]" in printed
    assert max(map(len, printed.splitlines())) <= 100


def test_a_run_is_scored_at_its_newest_checkpoint_by_its_own_policies(run: Path, fasta: Path, capsys):
    series = run_evaluation(run, [str(fasta)], 64, as_json=True)
    total, weights = expected_nats(load_model(toy(), seed=5), lower_case_weight=0.5)
    assert series["nats"] == pytest.approx(total / weights, rel=1e-5)
    assert series["step"] == 5
    printed = json.loads(capsys.readouterr().out)
    assert printed["nats"] == series["nats"]
    assert (printed["unit"], printed["length"], printed["version"]) == ("nats", 64, 1)


def test_what_was_trained_on_is_said_and_so_is_what_cannot_be_compared(
    run: Path, fasta: Path, tmp_path: Path, capsys
):
    other = tmp_path / "other.fa"
    other.write_text(">third\n" + "ACCGT" * 20 + "\n")

    def said(path: Path) -> str:
        run_evaluation(run, [str(path)], 64)
        return capsys.readouterr().err.replace("\n", " ")

    assert "(training) and" in said(fasta) and "must not share letters" in said(fasta)
    plain = said(other)
    assert "note" not in plain and "CPU kernels: " in plain and "targets in" in plain and "GiB" in plain
    fasta.unlink()
    assert "note: not compared with the training data (" in said(other)


def test_a_checkpoint_is_scored_with_the_recipe_of_its_run(run: Path, fasta: Path):
    series = run_evaluation(run / "checkpoints" / "step_000002", [str(fasta)], 64, as_json=True)
    total, weights = expected_nats(load_model(toy(), seed=2), lower_case_weight=0.5)
    assert series["nats"] == pytest.approx(total / weights, rel=1e-5)


def test_a_checkpoint_is_found_from_inside_its_folder(run: Path, monkeypatch):
    monkeypatch.chdir(run / "checkpoints" / "step_000002")
    assert load_trained(Path(".")).step == 2


def test_a_damaged_newest_checkpoint_is_passed_over(run: Path):
    next((run / "checkpoints" / "step_000005" / "state").glob("*.distcp")).write_bytes(b"")
    assert load_trained(run).step == 2


def test_what_the_readers_skip_is_shown(tmp_path: Path, fasta: Path, run: Path, capsys):
    (tmp_path / "more.fa").write_text(f">n\n{'N' * 40}\n>a\n{'ACGT' * 9}\n")
    run_evaluation(run, [str(fasta), str(tmp_path / "more.fa")], 64)
    assert "skipped, mostly n: 1 documents, 40 tokens" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("kind", ["absent", "empty", "no checkpoint"])
def test_a_target_that_is_no_model_is_refused(tmp_path: Path, fasta: Path, run: Path, kind: str):
    target = {"absent": tmp_path / "absent", "empty": tmp_path / "empty", "no checkpoint": run}[kind]
    (tmp_path / "empty").mkdir()
    if kind == "no checkpoint":
        for manifest in run.glob("checkpoints/*/manifest.json"):
            manifest.unlink()
    with pytest.raises(UserError, match=r"no such folder|not a run|no whole checkpoint") as caught:
        run_evaluation(target, [str(fasta)], 64)
    assert "\n" not in str(caught.value)


def test_tokens_beyond_the_vocabulary_are_refused(run: Path, tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"input_ids": [1, 2, 300], "loss_mask": [0, 1, 1]}\n')
    with pytest.raises(UserError, match="token 300, and the model's vocabulary has 256"):
        run_evaluation(run, [str(tmp_path / "rows.jsonl")], 64)


def test_tokens_are_shown_in_nats(run: Path, tmp_path: Path, capsys):
    (tmp_path / "rows.jsonl").write_text('{"input_ids": [1, 2, 30], "loss_mask": [0, 1, 1]}\n')
    run_evaluation(run, [str(tmp_path / "rows.jsonl")], 64)
    assert "nats per token" in capsys.readouterr().out


def test_what_the_tokenizer_does_not_know_is_shown(run: Path, fasta: Path, tmp_path: Path, capsys):
    vocabulary = {"<unk>": 0, "A": 1, "C": 2, "G": 3, "T": 4}
    Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")).save(str(tmp_path / "tokenizer.json"))
    recipe = load_recipe(run / "run.toml", [f"data.tokenizer={tmp_path}", "data.cut=1"])
    (run / "run.toml").write_text(dump_toml(recipe))
    run_evaluation(run, [str(fasta)], 64)
    assert f"read as the unknown token: {FIRST.count('N')}" in capsys.readouterr().out


def test_text_is_scored_with_the_tokenizer_that_a_model_folder_lacks(run: Path, tmp_path: Path):
    vocabulary = {"<unk>": 0, "one": 7, "two": 8, "three": 9}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "rows.jsonl").write_text('{"text": "one two three one"}\n')
    (tmp_path / "ids.jsonl").write_text('{"input_ids": [7, 8, 9, 7]}\n')
    folder = save_model(load_model(toy(), seed=3), tmp_path / "model")
    found = run_evaluation(
        folder, [str(tmp_path / "rows.jsonl")], 64, tokenizer=str(tmp_path / "tokenizer.json"), as_json=True
    )
    expected = run_evaluation(folder, [str(tmp_path / "ids.jsonl")], 64, as_json=True)
    assert (found["nats"], found["tokens"]) == (expected["nats"], 3)
    with pytest.raises(UserError, match=r"--tokenizer x: step 5 of .* has its own, bases; remove it"):
        run_evaluation(run, [str(tmp_path / "rows.jsonl")], 64, tokenizer="x")
