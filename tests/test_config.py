"""A recipe is read strictly: whatever is not meant is refused, in one line that says what to write."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longstrand.config import (
    Recipe,
    dump_toml,
    example_recipe,
    load_recipe,
    parse_length,
    read_recipe_text,
    shipped_recipes,
)
from longstrand.config.fields import all_settings, field_at
from longstrand.errors import UserError

MINIMAL = """
[run]
out = "runs/x"
[model]
config = "toy"
[data]
length = "16k"
[[data.sources]]
path = "x.fa"
[train]
steps = 10
lr = 1e-5
"""


def refusal(text: str, *overrides: str) -> str:
    """The message of a recipe that must be refused; always one line."""
    with pytest.raises(UserError) as caught:
        read_recipe_text(text, list(overrides), name="r.toml")
    message = str(caught.value)
    assert "\n" not in message and message.startswith(("r.toml", "--set"))
    return message


def with_train(*lines: str) -> str:
    return MINIMAL + "\n".join(lines)


def test_lengths_are_powers_of_two_thousand_and_forty_eight():
    written = {
        "1M": 1048576,
        "512k": 524288,
        "131072": 131072,
        "16K": 16384,
        "2m": 2097152,
        " 1_000 ": 1000,
        77: 77,
    }
    assert {text: parse_length(text) for text in written} == written
    for wrong in ("", "k", "1.5M", "1e5", "-4", "12 kb", "1MB", 1.0, True, None):
        with pytest.raises(ValueError, match="whole number of tokens"):
            parse_length(wrong)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("learning_rat = 1e-4", 'train.learning_rat: unknown setting; did you mean "lr"?'),
        ("num-epochs = 3", 'train.num-epochs: unknown setting; did you mean "steps"?'),
        ("length = 4096", "train.length: unknown setting; it belongs to [data], as data.length"),
        ("Warmup-Steps = 5", 'train.Warmup-Steps: unknown setting; did you mean "warmup_steps"?'),
        ("weight_decai = 0.1", 'train.weight_decai: unknown setting; did you mean "weight_decay"?'),
        ("max_seq_len = 5", "train.max_seq_len: unknown setting; did you mean data.length?"),
        ("zzz = 1", "train.zzz: unknown setting; valid here: steps, sequences_per_step, lr,"),
    ],
)
def test_an_unknown_key_names_the_nearest_valid_one(line, says):
    assert says in refusal(with_train(line))


def test_an_unknown_section_names_the_sections_or_the_right_one():
    assert "did you mean" in refusal(MINIMAL + "[dat]\n") and '"data"' in refusal(MINIMAL + "[dat]\n")
    assert "valid sections: run, model, data, train" in refusal(MINIMAL + "[xyzzy]\na = 1\n")
    assert "steps belongs" not in refusal("steps = 3\n" + MINIMAL)
    assert "steps: unknown setting; it belongs to [train], as train.steps" in refusal("steps = 3\n" + MINIMAL)


def test_a_yaml_line_is_no_toml():
    assert "not valid TOML" in refusal("learning_rat: 1e-4\n" + MINIMAL)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-5", 0.00001), ("5e-4", 0.0005), ("1E-5", 0.00001), ("1e5", 100000.0), ("1_000", 1000.0)],
)
def test_numbers_stay_numbers_however_they_are_written(text, value):
    assert read_recipe_text(MINIMAL, [f"train.lr={text}"]).train.lr == value
    assert read_recipe_text(MINIMAL.replace("1e-5", text)).train.lr == value


def test_underscores_are_allowed_in_whole_numbers():
    assert read_recipe_text(MINIMAL, ["train.steps=1_000"]).train.steps == 1000


@pytest.mark.parametrize("text", ["12:30:45", "on", "no", '"1e-5"', "true", "[1]", "2024-01-01"])
def test_what_is_no_number_is_never_read_as_one(text):
    message = refusal(MINIMAL, f"train.lr={text}")
    assert "train.lr = " in message and "must be a number" in message


@pytest.mark.parametrize("text", ["on", "no", "yes", "True", "1", '"true"'])
def test_only_true_and_false_are_truth_values(text):
    message = refusal(MINIMAL, f"data.reverse_complement={text}")
    assert "data.reverse_complement = " in message and "must be true or false" in message


@pytest.mark.parametrize(
    ("override", "key_and_value", "rule", "remedy"),
    [
        ("train.lr=0", "train.lr = 0", "must be greater than 0", "for example 0.0001"),
        ('train.lr="1e-4"', 'train.lr = "1e-4"', "must be a number, without quotes", "write 0.0001"),
        ("train.lr=nan", "train.lr = nan", "must be a finite number", "for example 0.0001"),
        ("train.steps=1e5", "train.steps = 100000.0", "must be a whole number", "write 100000"),
        ("train.steps=0", "train.steps = 0", "must be at least 1", "for example 100"),
        ("train.eps=1e-46", "train.eps = 1e-46", "must be at least 1e-38", "the default is 1e-08"),
        ("train.betas=[0.9]", "train.betas = [0.9]", "a list of two numbers", "the default is [0.9, 0.95]"),
        ("train.betas=[0.9,1]", "train.betas.1 = 1", "a list of two numbers", "the default is [0.9, 0.95]"),
        ("run.dtype=float16", 'run.dtype = "float16"', '"bfloat16" or "float64"', 'the default is "float32"'),
        ("run.out=12", "run.out = 12", "must be text, in quotes", 'write "12"'),
        ('run.out=""', 'run.out = ""', "must not be empty", 'for example "runs/first"'),
        ("run.seed=-1", "run.seed = -1", "must be at least 0", "the default is 0"),
        ("data.length=1", "data.length = 1", "must be at least 2", 'for example "16k"'),
        ("data.length=12kb", 'data.length = "12kb"', "whole number of tokens", 'for example "16k"'),
        ("data.sources=[]", "data.sources = []", "1 or more entries", "config show"),
        (
            "data.sources.0.weight=0",
            "data.sources.0.weight = 0",
            "must be greater than 0",
            "the default is 1.0",
        ),
        ("data.case=1.5", "data.case = 1.5", '"ignore" or a number from 0 to 1', 'the default is "ignore"'),
        (
            "data.split.by=genus",
            'data.split.by = "genus"',
            '"record", "family" or "region"',
            'for example "region"',
        ),
        (
            "evaluate.buckets=0",
            "evaluate.buckets = 0",
            '"doubling" or a whole number',
            'the default is "doubling"',
        ),
        (
            'train.trainable=["kd"]',
            'train.trainable.0 = "kd"',
            "parameter groups: all, or embedding",
            "default",
        ),
        ("memory=3", "memory = 3", "must be a table of settings", "config show"),
    ],
)
def test_a_value_outside_its_rule_names_key_value_rule_and_remedy(override, key_and_value, rule, remedy):
    message = refusal(MINIMAL, override)
    assert f"r.toml with --set: {key_and_value}: " in message
    assert rule in message and remedy in message.split("; ", 1)[1]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["model.path=m"], 'model.path = "m" and config = "toy": exactly one of path and config'),
        (["model.config=none"], "model.neither is set"),
        (
            ["model.config=none", "model.path=m", "model.init=class"],
            'model.init = "class": weights are drawn only',
        ),
        (
            ["data.sources.0.regions=['c:1-2']", "data.sources.0.bed=b"],
            'data.sources.0.bed = "b": regions are set',
        ),
        (
            ["data.sources.0.bed=b", "data.sources.0.format=jsonl"],
            'data.sources.0.format = "jsonl": bed are places',
        ),
        (["data.families.kmer=12"], "data.families.kmer = 12: must be odd"),
        (
            ["data.split={by='record',validation=0.5,held_out=0.5}"],
            "data.split.validation + held_out = 1: must stay",
        ),
        (["data.cut=64"], "data.cut = 64: pieces are cut only before a BPE tokenizer"),
        (
            ["data.families={}", "data.split.by=record"],
            'data.split.by = "record": relatives would stand on both',
        ),
        (["train.warmup_steps=11"], "train.warmup_steps = 11: must not exceed steps = 10"),
        (
            ["train.schedule=constant", "train.min_lr=0.5"],
            "train.min_lr = 0.5: a constant schedule never falls",
        ),
        (["train.trainable=['all','kda']"], 'must be ["all"] or name groups once'),
        (["train.trainable=['indexer']"], 'train.indexer = "frozen": trainable names it'),
        (["train.indexer_weight=2"], "train.indexer_weight = 2.0: a frozen indexer has no loss"),
        (
            ["train.indexer=sparse", "train.trainable=['kda']"],
            'train.indexer = "sparse": trainable leaves the indexer',
        ),
        (
            ["train.indexer=warmup", "train.trainable=['kda']"],
            'train.indexer = "warmup": only the indexer learns',
        ),
        (["train.balance_rate=1"], "train.balance_rate = 1.0: nothing is balanced"),
        (
            ["train.balance=aux", "train.trainable=['kda']"],
            'train.balance = "aux": its loss moves the router',
        ),
        (["train.balance=bias", "train.indexer=warmup"], 'train.balance = "bias": only the indexer learns'),
        (
            ["memory.recompute=false", "train.balance=aux"],
            'recompute = false: train.indexer = "warmup" and train.balance = "aux" need a whole forward pass',
        ),
        (
            ["memory.recompute=false", "train.indexer=warmup"],
            "first gradient; set memory.recompute = true",
        ),
        (["kernels.cpu=native", "run.dtype=float64"], 'kernels.cpu = "native": run.dtype = "float64" has no'),
        (
            ["kernels.require=native", "run.dtype=float64"],
            'kernels.require = "native": run.dtype = "float64"',
        ),
        (
            ["kernels.require=native", "kernels.cpu=portable"],
            'require = "native": cpu = "portable" takes the other',
        ),
        (
            ["kernels.require=portable", "kernels.cpu=native"],
            'require = "portable": cpu = "native" takes the',
        ),
        (["evaluate.control=true"], "evaluate.control = true: needs [data.families]"),
        (["evaluate.buckets=32768"], "evaluate.buckets = 32768: exceeds the length of 16384 tokens"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_by_name(overrides, says):
    assert says in refusal(MINIMAL, *overrides)


def test_a_setting_that_is_missing_says_what_to_write():
    message = refusal(MINIMAL.replace("lr = 1e-5", ""))
    assert "train.lr: not set, and it has no default; for example 0.0001" in message


def test_further_problems_are_counted_and_typos_come_first():
    message = refusal(MINIMAL.replace("lr = 1e-5", "lrr = 1e-5").replace("steps = 10", "steps = -1"))
    assert "train.lrr: unknown setting" in message and "(2 more settings refused)" in message


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.lr", "must be section.name=value"),
        ("=3", "must be section.name=value"),
        ("train.lr=", "no value"),
        ("train.trainable=[1, 2", "not a valid TOML value"),
        ("run.out='x", "not a valid TOML value"),
        ("train.lr=1\nsteps=3", "one setting at a time"),
        ("train.lr.x=1", "train.lr is a single value"),
        ("train.lr.x.y=1", "train.lr is a single value"),
        ("data.sources.1.path=x", "data.sources is a list of 1"),
        ("data.sources.path=x", "data.sources is a list of 1"),
        ("trian.lr=1", "did you mean"),
    ],
)
def test_an_override_that_cannot_be_placed_is_refused(override, says):
    assert says in refusal(MINIMAL, override)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.steps=" + "9" * 30, "9: must be below 2**63; lower it"),
        ("train.steps=" + "9" * 5000, "not a valid TOML value"),
        ("train.betas=" + "[" * 20_000, "not a valid TOML value"),
        (f'data.length="{"9" * 5000}"', "must be a whole number of tokens"),
        ('data.length="99999999999999M"', "and below 2**63"),
        ("run.threads=2000", "run.threads = 2000: must be at most 1024"),
        ('run.out="a\\u0000b"', "must not hold the character U+0000"),
        ("data.sources.0.path=~nobody_has_this_name/x", "no home folder is known"),
    ],
)
def test_what_no_machine_can_use_is_refused_with_the_recipe(override, says):
    assert says in refusal(MINIMAL, override)


def test_numbers_and_nesting_beyond_every_limit_are_broken_toml():
    for text in ("a = " + "9" * 5000, "a = " + "[" * 20_000):
        assert "not valid TOML" in refusal(text)


def test_without_a_home_folder_the_cache_must_be_set(monkeypatch):
    def expanded(path: Path) -> Path:
        if str(path).startswith("~"):
            raise RuntimeError("Could not determine home directory.")
        return path

    monkeypatch.setattr(Path, "expanduser", expanded)
    assert 'data.cache = "~/.cache/longstrand": no home folder is known' in refusal(MINIMAL)


def test_overrides_reach_every_depth_and_a_bare_word_is_a_string():
    recipe = read_recipe_text(
        MINIMAL,
        [
            "data.sources.0.path=/data/chrX v2.fa.gz",
            "data.split.by=region",
            'data.families={order = "strangers"}',
            "data.split.by=family",
            "train.clip=none",
            "run.threads=2",
            "run.sinks=['tensorboard']",
            "data.length=1M",
        ],
    )
    assert recipe.data.sources[0].path == "/data/chrX v2.fa.gz"
    assert recipe.data.split is not None and recipe.data.split.by == "family"
    assert recipe.data.families is not None and recipe.data.families.order == "strangers"
    assert (recipe.train.clip, recipe.run.threads, recipe.run.sinks) == (None, 2, ["tensorboard"])
    assert recipe.data.length == 2**20


def test_a_record_that_is_absent_can_be_switched_off_by_an_override():
    recipe = read_recipe_text(MINIMAL + "[data.split]\nby = 'record'\n", ["data.split=none"])
    assert recipe.data.split is None


def test_what_is_written_reads_back_equal_and_lists_every_setting():
    recipe = example_recipe()
    text = dump_toml(recipe)
    assert read_recipe_text(text) == recipe
    assert max(map(len, text.splitlines())) <= 110
    for place in all_settings():
        name = place.rpartition(".")[2]
        assert f"\n{name} = " in text or f"# {name} = " in text or f"[{place}]" in text
        field = field_at(tuple(place.split(".")))
        assert "." not in place or (field is not None and field.description)


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
    lambda t: t != "none"
)
paths = texts.filter(lambda t: "\0" not in t and not t.startswith("~"))


@settings(deadline=None, max_examples=60)
@given(
    out=paths,
    path=paths,
    bed=st.none() | paths,
    title=st.none() | texts,
    lr=st.floats(1e-300, 1e300),
    clip=st.none() | st.floats(1e-9, 1e9),
    threads=st.none() | st.integers(1, 9),
    length=st.integers(2, 2**40),
    case=st.just("ignore") | st.floats(0, 1),
    split=st.none() | st.sampled_from(["record", "family", "region"]),
)
def test_any_recipe_survives_being_written(out, path, bed, title, lr, clip, threads, length, case, split):
    recipe = Recipe.model_validate(
        {
            "run": {"out": out, "threads": threads},
            "model": {"config": "toy"},
            "data": {
                "sources": [{"path": path, "bed": bed}, {"path": out, "regions": [path]}],
                "length": length,
                "case": case,
                "split": split and {"by": split},
            },
            "train": {"steps": 3, "lr": lr, "clip": clip},
            "report": {"title": title},
        }
    )
    assert read_recipe_text(dump_toml(recipe)) == recipe


def unreadable(folder: Path) -> list[tuple[Path, str]]:
    (folder / "latin.toml").write_bytes("# caf\xe9\n".encode("latin-1"))
    (folder / "binary.toml").write_bytes(bytes(range(256)))
    (folder / "broken.toml").write_text("[run\n")
    (folder / "twice.toml").write_text("[run]\nout = 'a'\nout = 'b'\n")
    (folder / "empty.toml").write_text("")
    (folder / "bom.toml").write_text("\ufeff[run]\n")
    (folder / "run").mkdir()
    (folder / "run" / "run.toml").write_text(MINIMAL)
    return [
        (folder / "missing.toml", "no such recipe; give a file"),
        (folder / "latin.toml", "byte 5 is not UTF-8"),
        (folder / "binary.toml", "is not UTF-8"),
        (folder / "broken.toml", "not valid TOML"),
        (folder / "twice.toml", "not valid TOML"),
        (folder / "empty.toml", "run: not set"),
        (folder / "bom.toml", "not valid TOML"),
        (folder / "run", f"a folder, where a recipe file is needed; give {folder / 'run' / 'run.toml'}"),
        (folder / "empty.toml" / "x", "cannot be read (Not a directory)"),
        (folder / "nul\0.toml", "no valid file name"),
        (folder / ("x" * 300), "cannot be read (File name too long)"),
    ]


def test_a_file_that_is_no_recipe_is_one_line(tmp_path):
    for path, says in unreadable(tmp_path):
        with pytest.raises(UserError) as caught:
            load_recipe(path)
        assert says in str(caught.value) and "\n" not in str(caught.value), path


def test_shipped_recipes_are_valid_and_reached_by_name():
    shipped = shipped_recipes()
    assert {"human_x", "hg38_chr1-2_chr22"} <= set(shipped)
    for name in shipped:
        assert load_recipe(name).run.out
    genome = load_recipe("hg38_chr1-2_chr22")
    assert genome.data.length == 524288 and genome.evaluate.buckets == 32768 and genome.train.steps == 80


def test_config_and_the_help_need_no_torch():
    code = "import sys, longstrand.config as c; c.load_recipe('human_x'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    code = (
        "import sys\nfrom longstrand.cli import main\nsys.argv = ['longstrand', '--help']\n"
        "try: main()\nexcept SystemExit: pass\nsys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0 and "train" in done.stdout
