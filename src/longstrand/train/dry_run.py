"""`longstrand train --dry-run`: what a run would find; of a recipe for more ranks than there are, its layout."""

from __future__ import annotations

import glob
import logging
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from longstrand.architecture import Architecture
from longstrand.config import Recipe
from longstrand.data import open_data
from longstrand.errors import UserError
from longstrand.model.hf import read_architecture, read_json
from longstrand.parallel import one_process
from longstrand.plan.host import this_machine
from longstrand.plan.room import PROCESS_BYTES
from longstrand.plan.summary import gib
from longstrand.plan.terms import Place, total
from longstrand.state import has_checkpoint
from longstrand.train.evaluation import evaluation_packs
from longstrand.train.fit import require_effect, require_vocabulary
from longstrand.train.layout import Layout, device_of, layout_of
from longstrand.train.progress import logged_to
from longstrand.train.run_folder import Started, check_unused, require_place, resolve_recipe
from longstrand.train.saving import say_nothing_to_resume
from longstrand.train.sft import prepare, spread
from longstrand.trained import model_source
from longstrand.wording import count

_log = logging.getLogger(__name__)

NOT_RUN = (
    "counted, not run: no weight was read, nothing was computed or exchanged, and no run of this code on GPUs has been "
    "made"
)


def check(recipe: Recipe, *, resume: bool = False, started: Started = Started(), here: bool = False) -> None:
    """Opens data, model and optimizer as `train` would, in one process, says what they are, and writes no run.

    A recipe for more ranks than there are is counted on pretended ones, without weights; see `check_layout`.

    Args:
        here: whether such a recipe is to run on this machine, which then must be able to write its folder.

    Raises:
        UserError: as `train`.
        RunFailed: the spool's disk has no room.
    """
    with logged_to(Console(stderr=True), None):
        started.log_warnings()
        _check_out(Path(recipe.run.out), resume=resume, here=here or recipe.parallel.world == 1)
        resolved = resolve_recipe(recipe)
        if resolved.parallel.world > 1:
            check_layout(resolved, Console(stderr=True, width=100))
        else:
            prepared = prepare(resolved)
            evaluation_packs(resolved, prepared.data)
            spread(resolved, prepared, one_process())
        _log.info("nothing was found that would stop this run; none was begun")


def check_layout(recipe: Recipe, console: Console) -> Layout:
    """Counts a recipe on its ranks, shows it, and checks the data where its files are here.

    Raises:
        UserError: the recipe cannot be spread like this, or the files that are here cannot be used.
    """
    source = model_source(recipe.model)
    shape = (
        read_architecture(source)
        if source.is_dir()
        else Architecture.from_file(read_json(source), str(source))
    )
    require_effect(recipe, shape)
    layout = layout_of(recipe, shape)
    _show(layout, recipe, console)
    _say_of_the_device(layout, recipe)
    _check_data(recipe, shape, source)
    if recipe.data.length > shape.max_position_embeddings:
        made_for = f"{shape.max_position_embeddings:,} tokens (max_position_embeddings)"
        _log.info("note: the model was made for %s, and is given %s", made_for, f"{recipe.data.length:,}")
    _log.info(NOT_RUN)
    return layout


def _check_out(run: Path, *, resume: bool, here: bool) -> None:
    """The run's folder, in which nothing is left."""
    check_unused(run.expanduser(), resume=resume)
    if resume and not has_checkpoint(run.expanduser()):
        say_nothing_to_resume(run, "the run would begin at step 0")
    try:
        require_place(run)
    except UserError as error:
        if here:
            raise
        _log.warning("if it is to run on this machine: %s", error)


def _say_of_the_device(layout: Layout, recipe: Recipe) -> None:
    """For which device bytes were counted, and that this machine has no room for them where that is so."""
    on_gpu = device_of(recipe).type == "cuda"
    which, other = ("a GPU", "another device") if on_gpu else ("this CPU", "a GPU")
    _log.info("counted as on %s; for %s: longstrand plan RECIPE --device NAME", which, other)
    if torch.cuda.is_available():
        return
    memory, machine = layout.memory, this_machine()
    needed = PROCESS_BYTES["cpu"] + memory.bytes_of("device") + memory.bytes_of("host")
    if needed > machine.memory_bytes:
        has = f"{gib(machine.memory_bytes)} GiB ({machine.memory_rule})"
        _log.info("a single rank would not fit this machine: it takes %s GiB of %s", gib(needed), has)


def _check_data(recipe: Recipe, shape: Architecture, source: Path) -> None:
    sources = [*recipe.data.sources, *recipe.evaluate.sources]
    missing = [each.path for each in sources if not glob.glob(str(Path(each.path).expanduser()))]
    if missing:
        _log.info("not checked: the data, since %s is not here", ", ".join(dict.fromkeys(missing)))
        return
    folder = source if source.is_dir() else None
    data = open_data(recipe.data, seed=recipe.run.seed, model_folder=folder)
    data.train_loader(recipe.train.sequences_per_step)
    require_vocabulary(recipe, data, shape)
    evaluation_packs(recipe, data)


def _show(layout: Layout, recipe: Recipe, console: Console) -> None:
    sizes = recipe.parallel
    table = Table(
        title=f"rank {layout.rank} of {layout.world}: data {sizes.data} x context {sizes.context}, "
        f"expert {sizes.expert}",
        title_justify="left",
        min_width=96,
    )
    for name, justify in (("", "left"), ("GiB", "right"), ("", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name, value in _facts(layout, recipe):
        table.add_row(name, "", value)
    memory = layout.memory
    places: tuple[Place, ...] = ("device", "host", "file")
    for place in places:
        terms = [term for term in (*memory.device, *memory.elsewhere) if term.place == place]
        if terms:
            table.add_section()
            for term in sorted(terms, key=lambda each: -each.num_bytes):
                estimated = ", estimated" * term.evidence.startswith("estimated")
                table.add_row(term.name, gib(term.num_bytes), term.why + estimated)
            why = f"at the peak: {memory.peak_phase}" if place == "device" else ""
            table.add_row(f"sum on the {place}", gib(total(terms)), why, style="bold")
    table.add_section()
    table.add_row("one layer and sequence:", "", "", style="bold")
    for (what, when), num_bytes in layout.received.items():
        table.add_row(what, gib(num_bytes), f"from other ranks, {when}")
    console.print(table)


def _facts(layout: Layout, recipe: Recipe) -> list[tuple[str, str]]:
    tokens, dealt = layout.tokens, layout.deal
    per_rank = len(dealt.owned_by(0))
    facts = [
        ("parameters", f"{count(layout.num_parameters)}, {count(layout.num_trained)} of them trained"),
        ("of this rank", f"{count(layout.own_parameters)}, {count(layout.own_trained)} of them trained"),
        (
            "tokens",
            f"{count(recipe.data.length)}, {count(min(tokens))} to {count(max(tokens))} per context rank",
        ),
        ("segments", f"{len(dealt.owners)}, {per_rank} per rank; attention {dealt.imbalance:.4f} x the mean"),
    ]
    if layout.experts:
        whose = f"; {layout.expert_replicas} ranks hold the same ones and share their weights"
        facts.append(("experts per layer", f"{layout.experts}{whose * (layout.expert_replicas > 1)}"))
    return facts
