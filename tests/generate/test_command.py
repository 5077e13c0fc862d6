"""`longstrand generate`: what it reads, draws, writes and refuses."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from longstrand.bench._small_models import architecture
from longstrand.cli import main
from longstrand.config import dump_toml, load_recipe
from longstrand.data import Pack
from longstrand.errors import UserError
from longstrand.generate import Sampling
from longstrand.generate.command import Request, run_generation
from longstrand.model import load_model, save_model
from longstrand.state import save_checkpoint

SHORT = {"max_new_tokens": 7}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A small model of bytes, made for at most 200 tokens."""
    shape = architecture("KD", vocab_size=256, max_position_embeddings=200)
    return save_model(load_model(shape, seed=4), tmp_path_factory.mktemp("models") / "model")


@pytest.fixture
def fasta(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.fa"
    path.write_text(">chr1 a chromosome\nACGTac\ngtNR\n>chr2\nGATTACA\n")
    return path


def records(text: str) -> list[tuple[str, dict[str, str], str]]:
    """(name, what the header says, letters) of each record."""
    found = []
    for record in text.split(">")[1:]:
        header, *lines = record.splitlines()
        name, *facts = header.split()
        found.append((name, dict(fact.split("=") for fact in facts), "".join(lines)))
    return found


def mean_logprob(model, prompt: str, letters: str) -> float:
    tokens = torch.tensor(list((prompt + letters).encode()))
    with torch.no_grad():
        logprobs = model.token_logprobs(Pack.from_documents([tokens]))[len(prompt) - 1 : -1]
    return float(logprobs.mean())


def test_each_record_is_continued_and_scored_as_the_model_scores_it(folder, fasta, capsys):
    text = run_generation(folder, Request([fasta], num_samples=2, **SHORT))
    found = records(text)
    assert [name for name, _, _ in found] == ["chr1_1", "chr1_2", "chr2_1", "chr2_2"]
    for (_, facts, letters), prompt in zip(found, ["ACGTACGTNN"] * 2 + ["GATTACA"] * 2, strict=True):
        assert len(letters) == 7 and set(letters) <= set("ACGT")
        expected = mean_logprob(load_model(folder), prompt, letters)
        assert float(facts["mean_logprob"]) == pytest.approx(expected, abs=1e-5)
        assert (facts["prompt_tokens"], facts["new_tokens"]) == (str(len(prompt)), "7")
    said = capsys.readouterr().err
    assert "4 sequences, 28 new tokens" in said and "letters of the prompts that were read as N: 1" in said


def test_how_much_probability_the_letters_left_out_had_is_said(folder, capsys):
    """A drawn model knows nothing of letters: 252 of 256 ids are left out."""
    run_generation(folder, Request(texts=["ACGT"], max_new_tokens=40))
    share = float(capsys.readouterr().err.split("the model gave ")[1].split("\u202f")[0])
    assert 90 < share < 100


def test_letters_that_are_asked_for_are_drawn(folder):
    text = run_generation(folder, Request(texts=["ACGT"], max_new_tokens=60, letters="NA"))
    assert set(records(text)[0][2]) == {"N", "A"}


def test_long_sequences_are_wrapped_and_may_bring_their_prompt(folder):
    plain, whole = (
        run_generation(folder, Request(texts=["ACGT" * 5], max_new_tokens=85, with_prompt=each))
        for each in (False, True)
    )
    assert [len(line) for line in plain.splitlines()[1:]] == [80, 5]
    assert records(whole)[0][2] == "ACGT" * 5 + records(plain)[0][2]


def test_records_without_a_name_or_with_the_same_one_are_told_apart(folder, tmp_path):
    path = tmp_path / "names.fa"
    path.write_text(">x\nA\n>\nC\n>x\nG\n>x.2\nT\n")
    names = [name for name, _, _ in records(run_generation(folder, Request([path], **SHORT)))]
    assert names == ["x.1_1", "prompt2_1", "x.3_1", "x.2_1"]


def test_more_tokens_than_the_model_was_made_for_are_said(folder, capsys):
    run_generation(folder, Request(texts=["ACG"], max_new_tokens=198))
    errors = capsys.readouterr().err
    assert f"{folder} was made for 200 tokens (max_position_embeddings), and is given 201" in errors.replace(
        "\n", ""
    )
    assert "CPU kernels: " in errors


def test_a_run_generates_with_its_newest_checkpoint_and_its_own_letters(folder, tmp_path, fasta, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    run = tmp_path / "run"
    run.mkdir()
    recipe = (
        f'[run]\nout = "{run}"\n[model]\npath = "{folder}"\n[data]\nlength = 64\niupac = "error"\n'
        f'[[data.sources]]\npath = "{fasta}"\n[train]\nsteps = 9\nlr = 1e-3\n[memory]\ntile = 3\n'
    )
    (tmp_path / "recipe.toml").write_text(recipe)
    (run / "run.toml").write_text(dump_toml(load_recipe(tmp_path / "recipe.toml", [])))
    other = load_model(architecture("KD", vocab_size=256), seed=9)
    save_checkpoint(run, 5, {f"model.{name}": value for name, value in other.state_dict().items()}, {})
    ((_, facts, letters),) = records(run_generation(run, Request(texts=["ACGTA"], **SHORT)))
    assert float(facts["mean_logprob"]) == pytest.approx(mean_logprob(other, "ACGTA", letters), abs=1e-5)
    with pytest.raises(UserError, match=r"prompts.fa:1, record chr1: letter 10, 'R', is not"):
        run_generation(run, Request([fasta], **SHORT))
    with pytest.raises(UserError, match=r"--tokenizer x: .* has its own, bases; remove it"):
        run_generation(run, Request(texts=["A"], tokenizer="x"))


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A tokenizer of words with an end token."""
    vocabulary = {"[UNK]": 0, "one": 1, "two": 2, "three": 3, "[END]": 4} | {
        f"w{n}": n for n in range(5, 256)
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "[END]"}')
    return tmp_path


def test_a_model_of_text_reads_and_writes_rows(folder, words, capsys):
    path = words / "prompts.jsonl"
    path.write_text('{"prompt": "one two", "id": "a"}\n\n{"text": "three what"}\n')
    request = Request([path], texts=["two"], tokenizer=str(words), max_new_tokens=5)
    rows = [json.loads(line) for line in run_generation(folder, request).splitlines()]
    assert [(row["id"], row["prompt"]) for row in rows] == [
        ("a", "one two"),
        ("row3", "three what"),
        ("prompt1", "two"),
    ]
    assert all(row["new_tokens"] == len(row["completion"].split()) == 5 for row in rows)
    assert "tokens of the prompts that stand for unknown text: 1" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"--letters ACGT: the tokens of .* are no letters"):
        run_generation(folder, Request(texts=["one"], tokenizer=str(words), letters="ACGT"))


def test_the_end_token_of_the_tokenizer_ends_a_sequence(folder, words):
    model = load_model(folder)
    model.lm_head.weight.data[4] = 3 * model.lm_head.weight.data.abs().sum(0)
    model.lm_head.weight.data[4] *= torch.sign(model.hidden(Pack.from_documents([torch.tensor([1])])))[
        0
    ].detach()
    leaning = save_model(model, words / "leaning")
    request = Request(texts=["one"], tokenizer=str(words), max_new_tokens=50)
    (row,) = [json.loads(line) for line in run_generation(leaning, request).splitlines()]
    assert row["stopped"] and row["new_tokens"] < 50


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no prompt: name a file of prompts"),
        (["empty.fa"], "empty.fa: the file is empty"),
        (["half.fa"], "half.fa:1, record a: the prompt is empty"),
        (["letters.fa"], "letters.fa:2: 'Z' is not a nucleotide letter"),
        (["nowhere.fa"], "nowhere.fa: cannot be read"),
        (["tokens.jsonl"], "tokens.jsonl: holds input_ids"),
        (["other.jsonl"], 'other.jsonl:1: a row of prompts is an object with "prompt" or "text"'),
        (["--prompt", ""], "--prompt 1: the prompt is empty"),
        (["--prompt", "A", "--prompt", "ACGZ"], "--prompt 2: letter 4, 'Z', is not a nucleotide letter"),
        (["--prompt", "ACGé"], "--prompt 1: letter 4, 'é', is not a nucleotide letter"),
        (["--prompt", "ACG", "--num-samples", "0"], "num_samples = 0: must be at least 1"),
        (["--prompt", "ACG", "--temperature", "-1"], "temperature = -1: must be 0"),
        (["--prompt", "ACG", "--top-p", "0"], "top_p = 0: must be above 0"),
        (["--prompt", "ACG", "--max-new-tokens", "0"], "--max-new-tokens 0: must be at least 1 token"),
        (["--prompt", "ACG", "--batch", "0"], "batch = 0"),
        (["--prompt", "ACG", "--letters", ""], '--letters "": no letter could be drawn'),
        (["--prompt", "ACG", "--letters", "AXC"], "--letters AXC: 'X' is no nucleotide letter"),
        (["--prompt", "ACG", "--letters", "AA"], "--letters AA: 'A' stands twice"),
        (["lines.jsonl"], r"""lines.jsonl:1: "id" = 'x\n>y': must be a text of one line or a number"""),
        (["list.jsonl"], """list.jsonl:1: "id" = ['l']: must be a text of one line or a number"""),
        (["words.jsonl"], """words.jsonl:1: "id" = 'two words': a FASTA name is one word"""),
        (["--prompt", "ACG", "--out", "half.fa"], "--out half.fa: exists, and is never overwritten"),
        (["--prompt", "ACG", "--out", "no/x.fa"], "--out no/x.fa: cannot be written there"),
        (["--prompt", "ACG", "--tokenizer", "nowhere"], "nowhere cannot be read"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_code_2(folder, tmp_path, monkeypatch, capsys, arguments, says):
    monkeypatch.chdir(tmp_path)
    Path("empty.fa").write_text("")
    Path("half.fa").write_text(">a\n>b\nACG\n")
    Path("letters.fa").write_text(">a\nACGZ\n")
    Path("tokens.jsonl").write_text('{"input_ids": [1]}\n')
    Path("other.jsonl").write_text('{"messages": []}\n')
    Path("lines.jsonl").write_text('{"id": "x\\n>y", "prompt": "A"}\n')
    Path("list.jsonl").write_text('{"id": ["l"], "prompt": "A"}\n')
    Path("words.jsonl").write_text('{"id": "two words", "prompt": "A"}\n')
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(
        sys, "argv", ["longstrand", "generate", str(folder), "--max-new-tokens", "5", *arguments]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    captured = capsys.readouterr()
    assert (ended.value.code, captured.out) == (2, "")
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1 and says in captured.err
    assert sorted(tmp_path.iterdir()) == before


def test_the_command_writes_a_whole_file_that_the_same_seed_gives_again(
    folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for out in ("a.fa", "b.fa"):
        line = [
            "generate",
            str(folder),
            "--prompt",
            "ACG",
            "--max-new-tokens",
            "20",
            "--seed",
            "5",
            "--top-k",
            "3",
        ]
        monkeypatch.setattr(sys, "argv", ["longstrand", *line, "--temperature", "0.8", "--out", out])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code and capsys.readouterr().out == f"{out}\n"
    sampling = Sampling(temperature=0.8, top_k=3, seed=5)
    direct = run_generation(folder, Request(texts=["ACG"], max_new_tokens=20, sampling=sampling))
    assert Path("a.fa").read_text() == Path("b.fa").read_text() == direct
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["a.fa", "b.fa"]


def test_an_interrupt_writes_nothing_and_leaves_code_130(folder, tmp_path):
    wide = save_model(load_model(architecture("KD", vocab_size=256)), tmp_path / "model")
    line = [
        "generate",
        str(wide),
        "--prompt",
        "ACG",
        "--max-new-tokens",
        "900k",
        "--out",
        str(tmp_path / "x.fa"),
    ]
    code = (
        "import longstrand.generate.rollout as r, longstrand.cli as c, sys\n"
        "grow = r._grow\n"
        "def begun(*a): print('begun', flush=True); grow(*a)\n"
        "r._grow = begun; c.main()"
    )
    command = [
        sys.executable,
        "-c",
        f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n{code}",
    ]
    process = subprocess.Popen(
        [*command, *line], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "stopped by SIGINT: nothing was written\n")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
