"""The crash figure: runs killed (-9) at moments drawn uniformly in time, half of them during a save.

Nothing in the product knows about it: another process watches the run's folder and kills. Each killed run is resumed
with the command a user would type, and must end as the run that was never killed: every bit of every tensor of the
last checkpoint, the position in the data, the evaluations, and all of metrics.jsonl but times, rates and memory.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader

from longstrand.bench._arguments import command_line, parsed_count
from longstrand.series import read_series
from longstrand.state import FOLDER, check_checkpoint, latest_checkpoint, load_checkpoint

NUM_RUNS = 20
NOT_COMPARED = {"seconds", "cpu_seconds", "tokens_per_second", "peak_memory_bytes", "remaining_seconds"}
_TINY = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 8,
    "v_head_dim": 8,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "linear_num_heads": 2,
    "linear_head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 32,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "indexed_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "indexer_types": ["full", "full"],
}
_RECIPE = """
[run]
out = "{folder}/never_killed"
threads = 1

[model]
config = "{folder}/tiny.json"

[data]
length = 128
reverse_complement = true
cache = "{folder}/cache"
sources = [{{path = "{folder}/random.fa"}}]
split = {{by = "record", validation = 0.0, held_out = 0.2}}

[train]
steps = {steps}
sequences_per_step = 2
lr = 1e-2
warmup_steps = 2
save_every = 3
indexer = "sparse"
balance = "bias"

[evaluate]
sequences = 4
"""


@dataclass(frozen=True)
class Kill:
    """One killed and resumed run.

    Args:
        during_save: a half-written checkpoint was there when the process had ended.
        seconds: from the process's start to the kill.
        resumed_from: the newest whole checkpoint, if there was one.
        exit_code: of the resumed run.
        different: what differs from the run that was never killed; empty is the aim.
    """

    during_save: bool
    seconds: float
    resumed_from: str | None
    exit_code: int
    different: list[str]

    @property
    def good(self) -> bool:
        return self.exit_code == 0 and not self.different


def measure(num_runs: int = NUM_RUNS, *, steps: int = 24, seed: int | None = None) -> dict[str, Any]:
    """Kills and resumes runs until half of `num_runs` were hit during a save and half elsewhere.

    Args:
        steps: of each run.
        seed: of the moments; drawn, and returned, where None.

    Returns:
        `asked`, `measured`, `pass`, `seed`, and one record per killed run.
    """
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    print(f"crash: seed {seed}", flush=True)
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = write_inputs(folder, steps)
        reference = watch(recipe, folder / "never_killed")
        if reference.exit_code:
            raise RuntimeError(f"the run that is never killed ended with exit code {reference.exit_code}")
        kills: list[Kill] = []
        attempts = 0
        wanted = [True] * (num_runs // 2) + [False] * (num_runs - num_runs // 2)
        while wanted:
            during_save = wanted[0]
            out = folder / f"killed_{attempts}"
            kill = kill_and_resume(recipe, folder / "never_killed", out, draw(rng, reference, during_save))
            print(f"crash: {kill or 'ended before it was killed; drawn again'}", flush=True)
            attempts += 1
            if kill is None:
                continue
            kills.append(kill)
            if kill.during_save in wanted:
                wanted.remove(kill.during_save)
    good = sum(kill.good for kill in kills)
    saves = sum(kill.during_save for kill in kills)
    asked = {"runs": num_runs, "during_save": num_runs // 2, "identical": "all"}
    measured = {"runs": len(kills), "during_save": saves, "identical": good}
    return {
        "asked": asked,
        "measured": measured,
        "pass": good == len(kills) >= num_runs and saves >= num_runs // 2,
        "seed": seed,
        "cases": [vars(kill) for kill in kills],
    }


@dataclass(frozen=True)
class Watched:
    """A run seen from outside: its length, and when each save began and how long it took, in seconds."""

    exit_code: int
    seconds: float
    saves: list[tuple[float, float]]


@dataclass(frozen=True)
class Moment:
    """When to kill: so many seconds after the start, or after the n-th save (from 0) began."""

    seconds: float
    save: int | None = None


def draw(rng: random.Random, reference: Watched, during_save: bool) -> Moment:
    """A moment uniform over the run's whole time, or over the time of all its saves."""
    if not during_save:
        return Moment(rng.uniform(0, reference.seconds))
    durations = [duration for _, duration in reference.saves]
    save = rng.choices(range(len(durations)), weights=durations)[0]
    return Moment(rng.uniform(0, durations[save]), save)


def write_inputs(folder: Path, steps: int) -> Path:
    """Writes random bases, a tiny config and the recipe; returns the recipe."""
    rng = random.Random(0)
    records = [f">r{number}\n{''.join(rng.choices('ACGT', k=700))}\n" for number in range(10)]
    (folder / "random.fa").write_text("".join(records))
    toy = json.loads((resources.files("longstrand") / "configs/toy.json").read_text())
    (folder / "tiny.json").write_text(json.dumps(toy | _TINY))
    recipe = folder / "recipe.toml"
    recipe.write_text(_RECIPE.format(folder=folder, steps=steps))
    return recipe


def watch(recipe: Path, out: Path) -> Watched:
    """Runs to the end and notes when saves began and ended."""
    saves: list[tuple[float, float]] = []
    started, began = time.monotonic(), None
    process = start(recipe, out)
    while process.poll() is None:
        now = time.monotonic() - started
        saving = is_saving(out)
        if saving and began is None:
            began = now
        elif not saving and began is not None:
            saves.append((began, now - began))
            began = None
        time.sleep(0.0005)
    return Watched(process.returncode, time.monotonic() - started, saves)


def kill_and_resume(recipe: Path, reference: Path, out: Path, moment: Moment) -> Kill | None:
    """Starts a run, kills it at the moment, resumes it, and compares it; None where it had already ended."""
    started = time.monotonic()
    process = start(recipe, out)
    if moment.save is not None:
        _wait_for_save(process, out, moment.save)
    _wait(process, time.monotonic() + moment.seconds if moment.save is not None else started + moment.seconds)
    process.kill()
    if process.wait() != -signal.SIGKILL:
        return None
    seconds = time.monotonic() - started
    during_save = is_saving(out)
    newest = latest_checkpoint(out)
    resumed = start(recipe, out, "--resume")
    return Kill(
        during_save=during_save,
        seconds=round(seconds, 3),
        resumed_from=newest.name if newest is not None else None,
        exit_code=resumed.wait(),
        different=differences(reference, out) if resumed.returncode == 0 else [],
    )


def start(recipe: Path, out: Path, *options: str) -> subprocess.Popen[bytes]:
    """The command a user types, in a process of its own; its output goes to `OUT.output`."""
    command = ("train", str(recipe), "--set", f"run.out={out}", *options)
    with out.with_suffix(".output").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-c", "from longstrand.cli import main; main()", *command],
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def is_saving(out: Path) -> bool:
    """Whether a checkpoint is half-written."""
    return any((out / FOLDER).glob(".saving_*"))


def differences(reference: Path, other: Path) -> list[str]:
    """Names of what is not bit-identical in two finished runs, apart from times, rates and memory."""
    found = []
    tensors, others = _last_tensors(reference), _last_tensors(other)
    if tensors.keys() != others.keys():
        found.append("names of tensors")
    found += [name for name in tensors.keys() & others.keys() if not _same_bits(tensors[name], others[name])]
    if _last_position(reference) != _last_position(other):
        found.append("trainer.json")
    if _metrics(reference) != _metrics(other):
        found.append("metrics.jsonl")
    if read_series(reference / "evaluate.json") != read_series(other / "evaluate.json"):
        found.append("evaluate.json")
    if (reference / "data.json").read_bytes() != (other / "data.json").read_bytes():
        found.append("data.json")
    return found


def _wait_for_save(process: subprocess.Popen[bytes], out: Path, number: int) -> None:
    """Until the save with this number begins, or the run ends."""
    seen, before = -1, False
    while process.poll() is None:
        saving = is_saving(out)
        seen += saving and not before
        if seen == number:
            return
        before = saving
        time.sleep(0.0005)


def _wait(process: subprocess.Popen[bytes], until: float) -> None:
    while process.poll() is None and time.monotonic() < until:
        time.sleep(0.0005)


def _last(run: Path) -> Path:
    newest = latest_checkpoint(run)
    if newest is None:
        raise FileNotFoundError(f"{run} has no whole checkpoint")
    return newest


def _last_tensors(run: Path) -> dict[str, Tensor]:
    folder = _last(run)
    held: dict[str, Any] = FileSystemReader(folder / "state").read_metadata().state_dict_metadata
    tensors = {name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in held.items()}
    load_checkpoint(folder, tensors)
    return tensors


def _last_position(run: Path) -> dict[str, Any]:
    return check_checkpoint(_last(run))


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and _bytes(one) == _bytes(other)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _metrics(run: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if name not in NOT_COMPARED} for line in lines]


def main(arguments: Sequence[str] = ()) -> int:
    """`longstrand bench crash`: prints the figure as JSON."""
    options_of = command_line("crash", __doc__)
    options_of.add_argument(
        "runs", type=parsed_count, nargs="?", default=NUM_RUNS, help="how many are killed"
    )
    options_of.add_argument("seed", type=int, nargs="?", help="of the moments; by default another each time")
    options = options_of.parse_args(list(arguments))
    result = measure(options.runs, seed=options.seed)
    print(json.dumps(result, indent=1))
    return 0 if result["pass"] else 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
