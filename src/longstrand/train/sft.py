"""Fine-tuning from a recipe: the whole of a run, top to bottom."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from longstrand.config import Recipe, TrainSection
from longstrand.data import Data, DocumentPacks, Loader, Pack, open_data
from longstrand.errors import CheckFailed
from longstrand.memory import Levers, levers_of
from longstrand.model import Model, load_model
from longstrand.model.load import open_weights, outline_model
from longstrand.model.parallelize import place_model
from longstrand.ops.native import native_state
from longstrand.parallel import Mesh, by_first, make_mesh, said_once, together
from longstrand.peak_memory import SOURCE, PeakMemory
from longstrand.state import checkpoint_bytes, require_space
from longstrand.train.evaluation import evaluate_once, evaluation_packs
from longstrand.train.fit import require_effect, require_vocabulary
from longstrand.train.forms import forms_of, write_forms
from longstrand.train.levers import check_levers, check_machine, check_spool, clean_spool
from longstrand.train.metrics import Metrics, open_sinks
from longstrand.train.optimizer import Optimizer, freeze_all_but, trained_names
from longstrand.train.phases import Phases
from longstrand.train.planning import write_plan
from longstrand.train.progress import Progress, logged_to
from longstrand.train.run_folder import Started, log_file, open_run, write_recipe
from longstrand.train.saving import Training, restore, save, write_ledger
from longstrand.train.signals import Stopped, StopRequests
from longstrand.train.step import StepResult, take_step
from longstrand.train.timing import StepTimer
from longstrand.trained import model_source

_log = logging.getLogger(__name__)


def train(
    recipe: Recipe, *, resume: bool = False, mesh: Mesh | None = None, started: Started = Started()
) -> Path:
    """Trains as the recipe says and returns the run's folder.

    With several processes, each calls it with the same arguments. What ends the run on one rank, an error or a signal,
    ends it on all; only the first one writes files, but for a log of each.

    Args:
        recipe: everything that defines the run.
        resume: go on from the newest whole checkpoint of `run.out`; begins a run where there is none.
        mesh: the ranks that share the run; None: as the recipe says, of the processes that torch.distributed knows.
        started: how they were started, for messages.

    Raises:
        UserError: the recipe, its inputs or the folder cannot be used.
        CheckFailed: a loss or gradient is not finite; the last checkpoint is kept. Or, before the first step, an op
            would not run in the form that `kernels.require` names.
        RunFailed: the disk does not take a file; the last checkpoint is kept.
        Stopped: SIGTERM or SIGINT came; the step was finished and saved.
    """
    # 1. The folder: made or reopened, for this run alone.
    with _opened(recipe, mesh or _mesh_of(recipe), resume=resume, started=started) as run:
        # 2. Data, model and optimizer, as they were where a stopped run was.
        training, packs = _begun(run)

        # 3. Held-out loss by position before the first step.
        _evaluate(run, training, packs, "before", f"no step was taken; {run.go_on}")

        # 4. The steps; each one that is due is saved.
        if training.step < run.recipe.train.steps:
            _take_steps(run, training)

        # 5. Held-out loss by position after the last step.
        _evaluate(
            run, training, packs, "after", f"all steps are saved, an evaluation is missing; {run.go_on}"
        )
        run.phases.write(run.folder, run.mesh.world)
        _log.info("done: %d steps", training.step)
    return run.folder


@dataclass(frozen=True)
class Prepared:
    """Data and model of a recipe, the same on every rank.

    Attributes:
        model: whole, or of shapes only, where `spread` fills each rank's part.
        trained: names of the parameters that learn.
    """

    model: Model
    data: Data
    loader: Loader
    trained: list[str]


def prepare(recipe: Recipe, *, outlined: bool = False) -> Prepared:
    """Data and model of a resolved recipe; waits for no other rank.

    Args:
        outlined: the model gets its numbers in `spread`, so that a rank never holds more than its part and a layer.

    Raises:
        UserError: an input cannot be used, or data and model do not fit each other.
    """
    if recipe.run.threads is not None:
        torch.set_num_threads(recipe.run.threads)
    torch.manual_seed(recipe.run.seed)
    source, dtype = model_source(recipe.model), getattr(torch, recipe.run.dtype)
    data = open_data(recipe.data, seed=recipe.run.seed, model_folder=source if source.is_dir() else None)
    loader = data.train_loader(recipe.train.sequences_per_step)
    if outlined:
        model = outline_model(source, dtype)
    else:
        model = load_model(source, dtype, seed=recipe.run.seed, init=recipe.model.init)
    require_vocabulary(recipe, data, model.architecture)
    require_effect(recipe, model.architecture)
    names = trained_names(model.groups(), recipe.train)
    freeze_all_but(model, names)
    check_levers(recipe, model)
    return Prepared(model, data, loader, names)


def spread(
    recipe: Recipe,
    prepared: Prepared,
    mesh: Mesh,
    loading: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Training:
    """This rank's part of the model, with its optimizer, at step 0; logs what they are.

    Args:
        loading: entered while a model that was only outlined is filled, which waits for no other rank.

    Raises:
        UserError: the model cannot be spread as `[parallel]` says.
        CheckFailed: an op would not run in the form that `kernels.require` names.
        RunFailed: the ranks' spools have no room.
    """
    _describe_model(recipe, prepared)
    if missing := -recipe.train.sequences_per_step % recipe.parallel.data:
        _log.warning(
            "train.sequences_per_step = %d does not go round parallel.data = %d: in the last pass of each step %d of "
            "these ranks have nothing to compute",
            recipe.train.sequences_per_step,
            recipe.parallel.data,
            missing,
        )
    model, source = prepared.model, model_source(recipe.model)
    weights = partial(open_weights, source, model, recipe.run.seed, recipe.model.init)
    place_model(model, mesh, weights, recipe.parallel, recipe.memory.tile, loading=loading)
    with said_once(mesh.world, CheckFailed):
        forms_of(recipe, model).require(recipe.kernels.require)
    check_machine(recipe, model)
    check_spool(recipe, model)
    optimizer = _optimizer(recipe, model, prepared.trained)
    training = Training(model, optimizer, prepared.data, prepared.loader)
    _log.info("CPU kernels: %s", native_state())
    _log.info("a checkpoint takes %.1f MB", checkpoint_bytes(training.tensors()) / 1e6)
    return training


def _optimizer(recipe: Recipe, model: Model, names: list[str]) -> Optimizer:
    device = torch.device("cpu") if recipe.memory.optimizer == "host" else None
    threads = recipe.run.threads
    return Optimizer(model, names, recipe.train, device=device, threads=threads, mesh=model.mesh)


def _mesh_of(recipe: Recipe) -> Mesh:
    sizes = recipe.parallel
    return make_mesh(data=sizes.data, context=sizes.context, expert=sizes.expert)


@dataclass(frozen=True)
class _Run:
    """A run whose folder is open.

    Attributes:
        recipe: with everything resolved.
        console: where the first rank shows what happens; None on the others.
        go_on: words with the command that goes on with it.
        resume: whether a checkpoint is looked for.
    """

    folder: Path
    recipe: Recipe
    mesh: Mesh
    console: Console | None
    stop: StopRequests
    phases: Phases
    go_on: str
    resume: bool


@contextmanager
def _opened(recipe: Recipe, mesh: Mesh, *, resume: bool, started: Started) -> Iterator[_Run]:
    """The folder with its lock and logs; signals are waited for, and memory is watched."""
    console = Console(stderr=True) if mesh.first else None
    with (
        open_run(recipe, resume=resume, mesh=mesh, started=started) as (folder, resolved),
        logged_to(console, log_file(folder, mesh.world.rank)),
        StopRequests(silent=not mesh.first) as stop,
        PeakMemory() as memory,
        clean_spool(resolved),
    ):
        imports = memory.baseline_bytes / 2**30
        _log.info("run %s; memory is %s; imports took %.2f GiB", folder, SOURCE, imports)
        started.log_warnings()
        phases = Phases(memory, torch.device("cpu"))
        if phases.why_not is not None:
            _log.info("living tensors are not counted: %s", phases.why_not)
        if phases.has_heap:
            _log.info(
                "tensors lie in the C library's heap, whose holes take memory: the system gives no range of addresses "
                "(ulimit -v) for pages of their own"
            )
        go_on = f"go on with {started.resume_command(folder, mesh.world.size)}"
        yield _Run(folder, resolved, mesh, console, stop, phases, go_on, resume)


def _begun(run: _Run) -> tuple[Training, dict[str, DocumentPacks]]:
    """The training at its last checkpoint, and what it is evaluated on; from here on the folder holds a run."""
    nothing_yet = "no step was taken; start it again"
    with run.stop.leaving(nothing_yet, run.mesh.world) as leave_if_asked:
        with together(run.mesh.world), run.stop.leaving_at_once(nothing_yet):
            prepared = prepare(run.recipe, outlined=run.mesh.world.size > 1)
            packs = evaluation_packs(run.recipe, prepared.data)
        training = spread(
            run.recipe, prepared, run.mesh, loading=partial(run.stop.leaving_at_once, nothing_yet)
        )
        leave_if_asked()
        restore(run.folder, training, run.recipe.train.steps, resume=run.resume)
        leave_if_asked()
        by_first(run.mesh.world, lambda: _write_start(run.folder, run.recipe, training))
    return training, packs


def _evaluate(
    run: _Run,
    training: Training,
    packs: dict[str, DocumentPacks],
    when: Literal["before", "after"],
    missing: str,
) -> None:
    """Held-out loss by position, "before" only where the recipe asks for it and no step was taken.

    Args:
        missing: what a signal that comes meanwhile leaves undone, and how to go on.
    """
    with run.stop.leaving(missing, run.mesh.world) as leave_if_asked:
        if when == "after" or (run.recipe.evaluate.before and training.step == 0):
            with run.phases.of("evaluate"):
                evaluate_once(run.folder, run.recipe, training, packs, when, leave_if_asked)


def _write_start(run: Path, recipe: Recipe, training: Training) -> None:
    """The files that say what the run is."""
    if training.step < recipe.train.steps:
        require_space(run, training.tensors(), training.step + 1)
    write_recipe(run, recipe)
    write_ledger(run, training)
    write_forms(run, recipe, training.model)
    model = training.model
    write_plan(run, recipe, model.architecture, model.norm.weight.device)


def _take_steps(run: _Run, training: Training) -> None:
    """The loop: data, step, record, and a checkpoint where one is due or a signal came to any rank."""
    settings, world = run.recipe.train, run.mesh.world
    levers = levers_of(run.recipe.memory, run.folder)
    gc.freeze()  # what is here stays: not to be searched for garbage at every step (5 % of a short one)
    timer = StepTimer(settings.steps, run.phases)
    measured_until = training.step + 2
    with _outputs(run, training) as write:
        while training.step < settings.steps:
            timer.start()
            step, packs = training.step + 1, training.loader.next_step()
            result = _step(training, packs, settings, step, levers, run.phases)
            training.step = step
            record = timer.record(step, result)
            record["peak_memory_bytes"] = world.largest(record["peak_memory_bytes"])
            signal = run.stop.of_all(world)
            due = step in (1, settings.steps) or step % settings.save_every == 0 or signal > 0
            by_first(world, partial(write, record, sync=due))
            if result.loss is None:
                _log.warning(
                    "step %d: no target in %d sequences; the weights stay as they are", step, len(packs)
                )
            if due:
                with run.phases.of("save"):
                    save(run.folder, training, settings.keep)
            if step <= measured_until or signal:
                run.phases.write(run.folder, world)
            if signal:
                with said_once(world, Stopped):
                    raise Stopped(signal, f"step {step} of {settings.steps} is saved; {run.go_on}")


def _step(
    training: Training,
    packs: list[Pack],
    settings: TrainSection,
    step: int,
    levers: Levers,
    phases: Phases,
) -> StepResult:
    with said_once(training.mesh.world, CheckFailed):  # what is not finite anywhere is known to all
        return take_step(
            training.model, packs, training.optimizer, settings, step=step, levers=levers, ended=phases.end
        )


@contextmanager
def _outputs(run: _Run, training: Training) -> Iterator[Callable[..., None]]:
    """A function for the record of a step: written and shown, and with `sync` on the disk; for the first rank."""
    with ExitStack() as held:
        metrics = progress = None
        with together(run.mesh.world):
            if run.console is not None:
                sinks = open_sinks(run.folder, run.recipe.run.sinks, training.step)
                metrics = held.enter_context(Metrics(run.folder, sinks))
                progress = held.enter_context(Progress(run.console, run.recipe.train.steps, training.step))

        def write(record: dict[str, Any], *, sync: bool) -> None:
            assert metrics is not None and progress is not None
            metrics.write(record)
            progress.show(record)
            if sync:
                metrics.sync()

        yield write


def _describe_model(recipe: Recipe, prepared: Prepared) -> None:
    sizes = {name: parameter.numel() for name, parameter in prepared.model.named_parameters()}
    trained = sum(sizes[name] for name in prepared.trained)
    _log.info(
        "%s parameters, %s of them trained; %d steps of %d sequences of %s tokens; %s, %d threads",
        f"{sum(sizes.values()):,}",
        f"{trained:,}",
        recipe.train.steps,
        recipe.train.sequences_per_step,
        f"{recipe.data.length:,}",
        recipe.run.dtype,
        torch.get_num_threads(),
    )
