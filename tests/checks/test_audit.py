"""An audit of a small recipe: it passes, and fails where something else runs than what was asked."""

import json

import pytest
import torch
from called import caller

from longstrand.architecture import Architecture
from longstrand.bench.audited import MISFITS, audited, audited_recipe, measure
from longstrand.checks.audit import audit, written_sizes
from longstrand.config import KernelsSection, dump_toml, load_recipe
from longstrand.errors import CheckFailed
from longstrand.model.forms import plan_forms
from longstrand.model.given import Pass
from longstrand.ops import native
from longstrand.ops.padding import Tiles
from longstrand.report.forms import forms_html
from longstrand.train.sft import train
from longstrand.wording import places

SEEN_TILES = 8  # the step is of 115 tokens, in tiles of 16


@pytest.fixture(autouse=True)
def kernels_in_use():
    state = native.use_native("auto")
    if not state.used:
        pytest.skip(f"the CPU kernels cannot be built: {state.reason}")


@pytest.fixture
def recipe_file(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(dump_toml(audited_recipe(tmp_path)))
    return path


@pytest.fixture
def call(monkeypatch, capsys):
    return caller(monkeypatch, capsys)


@pytest.mark.parametrize("name", MISFITS)
def test_what_runs_in_place_of_what_was_asked_is_named(name, tmp_path):
    code, said = audited(tmp_path, MISFITS[name])
    assert (code, said.partition(":")[0]) == (3, MISFITS[name].where)


def test_a_message_says_what_was_asked_what_ran_and_what_to_do(tmp_path):
    _, said = audited(tmp_path, MISFITS["padded head"])
    assert said.startswith(
        "layer 2, kda: asked q float32 [1, any, 2, 8]; ran q float32 [1, 16, 2, 16]; make the model"
    )
    _, said = audited(tmp_path, MISFITS["wrong pool size"])
    assert "asked num_selected 8; ran num_selected 2" in said
    _, said = audited(tmp_path, MISFITS["fallback under require"])
    assert "ran portable: rows at uneven distances; look at what reaches it (--json lists it), or set" in said
    _, said = audited(tmp_path, MISFITS["dense fallback"])
    assert "asked sparse_attention; ran dense_attention" in said


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.indexer=warmup", "train.balance=none"],
        ["train.balance=aux", "run.dtype=bfloat16", "kernels.require=native"],
        ["memory.recompute=false", "run.dtype=float64", "kernels.require=portable"],
        ["kernels.cpu=portable", "run.dtype=bfloat16"],
    ],
    ids=" ".join,
)
def test_the_product_runs_what_it_plans(recipe_file, overrides):
    assert audit(load_recipe(recipe_file, overrides)).mismatches == []


def test_the_kernels_that_were_called_are_counted(recipe_file):
    found = audit(load_recipe(recipe_file)).record["observed"]
    seen = {layer["layer"]: {op["op"]: op for op in layer["ops"]} for layer in found["layers"]}
    assert found["tokens"] == 115 and list(seen) == [0, 1, 2, 3, "head"] and found["cuda_kernels"] == {}
    # a tile is computed twice, the second time with a graph, and walked back once
    both_ways = {"kda_forward": 2 * SEEN_TILES, "kda_backward": SEEN_TILES}
    assert seen[0]["kda"]["kernels"] == seen[2]["kda"]["kernels"] == both_ways
    assert seen[1]["select_pools"]["kernels"] == {"select_pools_float32": SEEN_TILES}  # chosen once
    assert seen[3]["selected_indexer_loss"]["kernels"] == {}
    assert seen[1]["sparse_attention"]["given"]["kpool"] == ["4"]
    assert seen[0]["log_decay"]["given"]["a_log"] == ["float32 [2]"]


def test_the_command_prints_a_table_of_100_columns_and_ends_with_0(call, recipe_file):
    code, out, _ = call("audit", recipe_file)
    assert code == 0 and max(map(len, out.splitlines())) <= 100
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "layers 1, 3: DSA, experts" in lines
    assert any(
        line.startswith("short_conv native C++ its kernel takes it 0 forward 16, backward 8")
        for line in lines
    )
    assert any(line.startswith("token_logprobs torch chunked it has no kernel 0 none") for line in lines)


def test_json_is_the_record_and_a_failure_is_code_3_with_the_reason(call, recipe_file):
    config = recipe_file.parent / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"hc_mult": 5}))
    code, out, _ = call("audit", recipe_file, "--json")
    found = json.loads(out)
    (gather,) = (op for op in found["layers"][0]["ops"] if op["op"] == "mhc_gather")
    assert code == 0 and found["passed"] and gather["form"] == "portable"
    assert gather["refused"]["native C++ (cpu)"] == "5 streams: the kernel takes 1 to 4"
    code, out, err = call("audit", recipe_file, "--json", "--set", "kernels.require=native")
    assert code == 3 and not json.loads(out)["passed"]
    assert err.startswith(
        "error: layer 0, mhc_gather: asked native (kernels.require); ran portable: 5 streams: the kernel takes 1 to 4;"
    )
    assert [(m["layer"], m["op"]) for m in json.loads(out)["mismatches"]] == [
        (layer, op) for layer in range(4) for op in ("mhc_gather", "mhc_update")
    ]


def test_training_that_would_not_run_as_required_does_not_begin(recipe_file):
    config = recipe_file.parent / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"hc_sinkhorn_iters": 65}))
    with pytest.raises(
        CheckFailed, match=r"layer 0, mhc_gather: asked native .*65 iterations: .*up to 64; 4 ops"
    ) as no:
        train(load_recipe(recipe_file, ["kernels.require=native"]))
    assert no.value.exit_code == 3
    assert not (recipe_file.parent / "run" / "run.toml").exists()


def test_a_requirement_is_kept_by_a_resumed_run_and_may_change(tmp_path):
    recipe = audited_recipe(tmp_path, KernelsSection(cpu="portable"))
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": 1})})
    run = train(recipe)
    more = ["train.steps=2", "kernels.require=native", "kernels.cpu=auto"]
    with pytest.raises(CheckFailed, match=r"asked native .* runs portable: asked for portable"):
        train(load_recipe(run / "run.toml", more), resume=True)
    train(load_recipe(run / "run.toml", ["train.steps=2", "kernels.require=portable"]), resume=True)
    assert load_recipe(run / "run.toml").kernels.require == "portable"
    assert json.loads((run / "kernels.json").read_text())["require"] == "portable"


@pytest.fixture
def run_that_requires(tmp_path):
    """A trained run whose run.toml then asks for kernels of a model of 65 iterations, which they do not take."""
    recipe = audited_recipe(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"hc_sinkhorn_iters": 65}))
    run = train(recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": 1})}))
    text = (run / "run.toml").read_text()
    assert text.count('require = "none"') == 1
    (run / "run.toml").write_text(text.replace('require = "none"', 'require = "native"'))
    return run


@pytest.mark.parametrize(
    "command",
    [("evaluate", "{run}", "--data", "{fasta}", "--length", "64"), ("generate", "{run}", "--prompt", "ACGT")],
    ids=["evaluate", "generate"],
)
def test_what_does_not_run_as_required_neither_scores_nor_generates(
    call, run_that_requires, tmp_path, command
):
    fasta = tmp_path / "held_out.fa"
    fasta.write_text(">a\nACGTTGCAACCGTATGCAGG\n")
    asked = [word.format(run=run_that_requires, fasta=fasta) for word in command]
    code, out, err = call(*asked)
    assert (code, out) == (3, "")
    assert "error: layer 0, mhc_gather: asked native (kernels.require), runs portable: 65 iterations" in err
    text = (run_that_requires / "run.toml").read_text()
    (run_that_requires / "run.toml").write_text(text.replace('require = "native"', 'require = "none"'))
    assert call(*asked).code == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text.replace("config.json", "gone.json"), "gone.json: no such file"),
        (lambda text: text.replace("config = ", "path = ").replace("config.json", "gone"), "gone: no such folder"),
        (lambda text: text.replace("[kernels]", "[kernel]"), 'did you mean "kernels"?'),
        (lambda text: text.replace('require = "none"', 'require = "nativ"'), 'must be "none", "native" or'),
    ],
    ids=["no config", "no folder", "unknown section", "unknown form"],
)  # fmt: skip
def test_a_recipe_that_cannot_be_audited_is_one_line_and_code_2(call, recipe_file, change, says):
    before = recipe_file.read_text()
    recipe_file.write_text(change(before))
    assert recipe_file.read_text() != before
    code, out, err = call("audit", recipe_file)
    assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith("error: ") and says in err


def test_a_recipe_without_kernels_is_audited_with_the_defaults(call, recipe_file):
    text = recipe_file.read_text()
    start = text.index("[kernels]")
    recipe_file.write_text(text[:start] + text[text.index("\n[", start) + 1 :])
    code, out, _ = call("audit", recipe_file)
    assert code == 0 and 'kernels.require = "none"' in out
    code, _, err = call("audit", recipe_file.parent / "gone.toml")
    assert code == 2 and "gone.toml: no such recipe" in err


def test_the_report_shows_equal_layers_once(recipe_file):
    page = forms_html(audit(load_recipe(recipe_file)).record)
    assert page.count("layers 1, 3: DSA, experts") == 1 and page.count("sparse_attention") == 1
    assert (
        page.count("<tr>") == 1 + 8 + 8 + 9 + 2
    )  # head, KDA dense, DSA experts, KDA experts, head of the model
    assert "at 128 tokens in tiles of 16" in page and "required: none" in page


def test_a_record_of_an_older_run_is_shown_as_it_is():
    page = forms_html({"kda": "native C++ (cpu)", "token_logprobs": "torch chunked (cpu)"})
    assert "<dt>kda</dt><dd>native C++ (cpu)</dd>" in page and "required" not in page
    assert forms_html(None) == ""


def test_weights_and_gradients_are_counted_by_dtype(recipe_file):
    """Of KDA A_log, dt_bias, three convolutions and six of hyper-connections; of DSA six and its pools' bias."""
    seen = audit(load_recipe(recipe_file, ["run.dtype=bfloat16"])).record["observed"]
    assert seen["weights"]["float32"] == 2 * (2 + 3 + 6) + 2 * (6 + 1)
    assert set(seen["weights"]) == {"float32", "bfloat16"}
    assert seen["gradients"] == {"float32": sum(seen["weights"].values())}


def test_on_another_device_every_op_says_that_it_has_no_kernel_there():
    shape = Architecture.from_hf({"num_hidden_layers": 4})
    plan = plan_forms(shape, Pass(torch.bfloat16, Tiles([(0, 64)], 64), device="meta"))
    found = {op.op.name: op.as_dict("meta") for _, op in plan if op.op.kernels}
    assert {op["why"] for op in found.values()} == {"device is meta: no kernel of ours"}
    assert found["kda"]["runs_in"] == "torch chunked (meta)"


def test_the_figure_has_a_record_for_each_and_a_table():
    plain, padded = measure(["padded head"])
    assert plain["pass"] and padded["pass"] and padded["measured"] == "exit code 3: layer 2, kda"
    assert [row[0] for row in plain["detail"]["table"]["rows"]] == ["as it is", "padded head"]


def test_layers_are_named_by_their_ranges():
    assert places([0, 1, 2, 4, "head"]) == "layers 0-2, 4, head"
    assert (places([3]), places(["head"])) == ("layer 3", "head")


def test_sizes_are_read_as_they_are_written():
    assert written_sizes({"text_config": {"index_kpool": 4, "num_local_experts": 7, "mhc": True}}) == {
        "index_kpool": 4,
        "n_routed_experts": 7,
    }
    assert written_sizes({"linear_attn_config": {"head_dim": 64}, "hc_eps": 1e-6}) == {"linear_head_dim": 64}
