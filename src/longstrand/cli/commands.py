"""The commands. Each imports what it needs when it is called: `--help` and `config` load no torch."""

from __future__ import annotations

import ast
import importlib
import json
import os
import shlex
import signal
import textwrap
from pathlib import Path
from typing import Annotated

import typer

import longstrand
from longstrand.cli.arguments import tokens_of
from longstrand.cli.plan import plan
from longstrand.config import Recipe, dump_toml, example_recipe, load_recipe
from longstrand.console import say
from longstrand.errors import UserError
from longstrand.plan.host import check_address_space
from longstrand.rank_process import under_torchrun

app = typer.Typer(
    help="Train open hybrid language models on sequences of a million tokens and more.",
    pretty_exceptions_enable=False,
    add_completion=False,
)
config_app = typer.Typer(help="Show what a recipe can set.", no_args_is_help=False)
app.add_typer(config_app, name="config")

Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="a.b=c", help="Override a setting; values are TOML, a bare word is a string."
    ),
]
RecipeFile = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A TOML file, or the name of a shipped recipe.")
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]


ContextRanks = Annotated[
    int | None,
    typer.Option(
        "--context", min=1, help="Under torchrun: ranks that share each sequence; by default as in training."
    ),
]
ExpertRanks = Annotated[
    int | None,
    typer.Option("--expert", min=1, help="Under torchrun: ranks that share the routed experts."),
]


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Train open hybrid language models on sequences of a million tokens and more."""
    if version:
        typer.echo(f"longstrand {longstrand.__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def init(
    data: Annotated[str, typer.Option(help="FASTA or JSONL to train on, or a glob.")],
    length: Annotated[str, typer.Option(help='Tokens of a sequence: "131072", "512k", "1M".')],
    model: Annotated[
        str, typer.Option(help="Hugging Face folder, config.json, or a shipped config.")
    ] = "toy",
    out: Annotated[
        Path | None, typer.Option(help="The recipe's file; by default named after the data.")
    ] = None,
) -> None:
    """Write a commented recipe for your data."""
    from longstrand.cli.starting import write_recipe

    path = write_recipe(data, tokens_of("--length", length), model, out)
    typer.echo(f"{path}: written; edit it, then: longstrand train {path}")


app.command()(plan)


@app.command()
def train(
    recipe: RecipeFile,
    overrides: Overrides = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on from the newest whole checkpoint; begin where there is none."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, train nothing.")] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes: parallel.data x parallel.context of the recipe.")
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help='Start them through Ray Train: "local", or a cluster\'s address.'
        ),
    ] = None,
) -> None:
    """Train as a recipe says, evaluate, and write the report; also under torchrun."""

    def load() -> Recipe:
        settings = load_recipe(recipe, overrides)
        if resume and not any(override.strip().startswith("run.") for override in overrides or []):
            _check_place(Path(recipe), settings)
        return settings

    if not under_torchrun(os.environ):
        load()  # a wrong recipe is refused before torch is imported
    check_address_space()
    from longstrand.launch import start_training

    run = start_training(load, os.environ, resume=resume, dry_run=dry_run, workers=workers, ray=ray)
    if run is not None and not dry_run:
        report(run)


@app.command()
def certify(
    recipe: RecipeFile,
    overrides: Overrides = None,
    tokens: Annotated[str, typer.Option(help='Tokens of the data in all: "2048", "8k".')] = "2k",
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks that share a sequence; by default the recipe's axes.")
    ] = None,
) -> None:
    """Compare ranks, packs, tiles, levers and a resumed run with one plain process, on your model and data."""
    settings, number = load_recipe(recipe, overrides), tokens_of("--tokens", tokens)
    from longstrand.checks.certify import run_certification

    typer.echo(run_certification(settings, tokens=number, ranks=ranks))


@app.command()
def evaluate(  # noqa: PLR0913 (the options of a command)
    target: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT_OR_RUN", help="A run, a checkpoint, or a model folder.")
    ],
    data: Annotated[list[str], typer.Option(help="FASTA or JSONL to score, or a glob; files may follow it.")],
    length: Annotated[str, typer.Option(help='Tokens of a sequence: "131072", "512k", "1M".')],
    more_data: Annotated[
        list[str] | None, typer.Argument(metavar="[FILE]...", help="More files to score.")
    ] = None,
    buckets: Annotated[str, typer.Option(help='"doubling", or the width of equal buckets.')] = "doubling",
    tokenizer: Annotated[
        str | None, typer.Option(help="Of a model folder of text: a tokenizer.json or its folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    context: ContextRanks = None,
    expert: ExpertRanks = None,
) -> None:
    """Score a model on held-out data by position."""
    tokens = tokens_of("--length", length)
    width = buckets if buckets == "doubling" else tokens_of("--buckets", buckets)
    from longstrand.evaluate import run_evaluation
    from longstrand.launch import joined_ranks

    files = [*data, *(more_data or [])]
    with joined_ranks(os.environ):
        run_evaluation(
            target,
            files,
            tokens,
            buckets=width,
            tokenizer=tokenizer,
            as_json=as_json,
            context=context,
            expert=expert,
        )


@app.command()
def generate(  # noqa: PLR0913 (the options of a command)
    target: Annotated[
        Path, typer.Argument(metavar="MODEL_OR_RUN", help="A run, a checkpoint, or a model folder.")
    ],
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="PROMPTS", help="FASTA, or JSONL with prompt or text; a record is a prompt."),
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt, such as ACGT; may be repeated.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write here instead of stdout; must not exist yet.")
    ] = None,
    max_new_tokens: Annotated[str, typer.Option(help='Tokens of a sequence at most: "256", "16k".')] = "256",
    num_samples: Annotated[int, typer.Option(help="Sequences per prompt.")] = 1,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k most likely tokens only.")] = None,
    top_p: Annotated[
        float, typer.Option(help="Draw from the smallest set of most likely tokens with this probability.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same sequences.")] = 0,
    letters: Annotated[
        str | None,
        typer.Option(help="What a model of bases may draw; by default ACGT, so no N and no other letter."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Of a model folder of text: a tokenizer.json or its folder.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Sequences that grow together, by default 32; memory grows with it.")
    ] = None,
    tile: Annotated[
        int | None, typer.Option(help="Tokens of a prompt computed at once; by default the run's, or 1024.")
    ] = None,
    with_prompt: Annotated[
        bool, typer.Option("--with-prompt", help="FASTA: the prompt stands first.")
    ] = False,
    context: ContextRanks = None,
    expert: ExpertRanks = None,
) -> None:
    """Continue prompts with a model: FASTA out (JSONL for a model of text)."""
    tokens = tokens_of("--max-new-tokens", max_new_tokens, least=1)
    from longstrand.generate import Sampling
    from longstrand.generate.command import Request, run_generation
    from longstrand.generate.rollout import BATCH
    from longstrand.launch import joined_ranks
    from longstrand.train.signals import Stopped

    sampling = Sampling(temperature, top_k, top_p, seed)
    drawn = letters if letters is None else letters.upper()
    request = Request(
        files=files or (),
        texts=prompt or (),
        max_new_tokens=tokens,
        num_samples=num_samples,
        sampling=sampling,
        letters=drawn,
        tokenizer=tokenizer,
        batch=BATCH if batch is None else batch,
        tile=tile,
        out=out,
        with_prompt=with_prompt,
        context=context,
        expert=expert,
    )
    with joined_ranks(os.environ) as world:
        try:
            text = run_generation(target, request)
        except KeyboardInterrupt:
            raise Stopped(signal.SIGINT, "nothing was written") from None
        if world.rank == 0 and out is not None:
            say(out)
        elif world.rank == 0:
            typer.echo(text, nl=False)


@app.command()
def report(run: Run) -> None:
    """Write a run's report.html and plots."""
    from rich.console import Console

    from longstrand.report import write_report
    from longstrand.train.progress import logged_to

    with logged_to(Console(stderr=True), None):
        path = write_report(run)
    say(path)


@app.command()
def export(
    run: Run, out: Annotated[Path, typer.Option(help="The Hugging Face folder to write; must not exist yet.")]
) -> None:
    """Write the weights of a run's newest checkpoint as a Hugging Face folder."""
    from longstrand.export import export_run

    export_run(run, out)
    say(out)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the demo writes.")] = Path("runs/demo"),
    seeds: Annotated[int, typer.Option(min=1, help="How often it is repeated, with other seeds.")] = 1,
) -> None:
    """Fine-tune a small shipped model on related sequences and show the report (about 10 minutes)."""
    from longstrand.demo import run_demo

    say(run_demo(out, seeds))


@app.command(
    add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def bench(context: typer.Context) -> None:
    """Measure against a reference: longstrand bench NAME ...; without a name, lists them."""
    measurements = _measurements()
    name, arguments = (context.args[0], context.args[1:]) if context.args else ("--help", [])
    if name in ("--help", "-h"):
        for known, summary in measurements.items():
            typer.echo(textwrap.fill(f"{known:10} {summary}", 100, subsequent_indent=" " * 11))
        typer.echo("\nlongstrand bench NAME --help shows the options of one.")
        return
    if name not in measurements:
        raise UserError(f"bench {name}: no such measurement; one of: {', '.join(measurements)}")
    try:
        code = importlib.import_module(f"longstrand.bench.{name}").main(arguments)
    except ModuleNotFoundError as error:
        raise UserError(
            f'bench {name}: needs {error.name}, which is not installed; pip install "longstrand[oracle]"'
        ) from error
    raise typer.Exit(code)


@app.command()
def doctor() -> None:
    """Show this machine and what will and will not work on it."""
    from longstrand.doctor import examine, show

    show(examine(Path.cwd(), os.environ))


@config_app.command()
def schema() -> None:
    """Print the JSON schema of a recipe."""
    typer.echo(json.dumps(Recipe.model_json_schema(), indent=2))


@config_app.command()
def show(
    recipe: Annotated[str | None, typer.Argument(metavar="[RECIPE]", help="By default an example.")] = None,
    overrides: Overrides = None,
) -> None:
    """Print a recipe with every setting, its meaning and its default."""
    typer.echo(dump_toml(load_recipe(recipe, overrides) if recipe else example_recipe()), nl=False)


def _check_place(recipe: Path, settings: Recipe) -> None:
    """The run.toml of a folder that was moved or copied still names the old one: going on there is not meant."""
    folder, out = recipe.absolute().parent, Path(settings.run.out).expanduser()
    if recipe.name == "run.toml" and (folder / "checkpoints").exists() and folder.resolve() != out.resolve():
        raise UserError(
            f"run.out = {out}: {recipe} stands in another folder, which was moved or copied; go on in that one "
            f"with --set run.out={shlex.quote(str(folder))}"
        )


def _measurements() -> dict[str, str]:
    """Modules of `bench` that have a `main` and their first line, without importing them: that would load torch."""
    found = {}
    for path in sorted((Path(longstrand.__file__).parent / "bench").glob("[a-z]*.py")):
        text = path.read_text("utf-8")
        if "\ndef main(" in text:
            found[path.stem] = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return found
