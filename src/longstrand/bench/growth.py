"""The growth figure: a run of 200 small steps with disk offload holds as much at its end as soon after its start.

longstrand bench growth
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from longstrand.bench._arguments import command_line
from longstrand.bench._small_models import architecture
from longstrand.bench.figures import show
from longstrand.config import Recipe
from longstrand.peak_memory import resident_bytes
from longstrand.train.sft import train

STEPS, SETTLED = 200, 40  # after 40 steps caches and threads are there
LENGTH, TILE = 512, 128
SLACK_BYTES = 4 * 2**20  # of the allocator; a leak of one stream per step would be 30 MiB
EVERY_SECONDS = 0.02


@dataclass(frozen=True)
class Sample:
    """What the process held while a step ran: most memory, fewest descriptors and threads.

    Files and threads come and go within a step, and one look in 20 ms may miss them; what leaks is held all the time.
    """

    step: int
    resident_bytes: int
    descriptors: int
    threads: int

    def joined(self, other: Sample) -> Sample:
        """Of two looks at one step, or two steps."""
        return Sample(
            max(self.step, other.step),
            max(self.resident_bytes, other.resident_bytes),
            min(self.descriptors, other.descriptors),
            min(self.threads, other.threads),
        )


def measure() -> list[dict[str, Any]]:
    """Trains a tiny model in a process of its own, and compares its two halves."""
    with tempfile.TemporaryDirectory(prefix="longstrand-growth-") as folder:
        command = [sys.executable, "-m", "longstrand.bench.growth", folder]
        subprocess.run(command, stdout=sys.stderr, check=True)
        samples = [Sample(**one) for one in json.loads((Path(folder) / "samples.json").read_text())]
        left = sorted(str(path.relative_to(folder)) for path in Path(folder).glob("run/spool/*"))
    records = judge(samples)
    records.append(
        {
            "name": "files left in the spool",
            "asked": "none",
            "measured": ", ".join(left) or "none",
            "pass": not left,
        }
    )
    return records


def judge(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """The second half against the first, from step 40 on."""
    middle = (SETTLED + STEPS) // 2
    early = reduce(Sample.joined, (one for one in samples if SETTLED <= one.step < middle))
    late = reduce(Sample.joined, (one for one in samples if one.step >= middle))
    records = []
    rules = (
        ("resident_bytes", "resident memory, MiB", SLACK_BYTES, 2**20),
        ("descriptors", "file descriptors", 0, 1),
        ("threads", "threads", 0, 1),
    )
    for name, title, slack, unit in rules:
        before, after = getattr(early, name), getattr(late, name)
        records.append(
            {
                "name": f"{title}: steps {middle} to {STEPS} over steps {SETTLED} to {middle}",
                "asked": f"at most {slack // unit} more",
                "measured": (after - before) / unit,
                "pass": after - before <= slack,
                "detail": {"first half": before, "second half": after, "samples": len(samples)},
            }
        )
    return records


def main(arguments: Sequence[str]) -> int:
    """`longstrand bench growth`."""
    command_line("growth", __doc__).parse_args(list(arguments))
    return show(measure())


def _train(folder: Path) -> list[Sample]:
    """The run, looked at every 20 ms."""
    (folder / "model.json").write_text(json.dumps(architecture("KDK", vocab_size=256).to_hf()))
    draw = random.Random(0)
    letters = "".join(draw.choices("ACGT", k=40_000))
    (folder / "letters.fa").write_text(f">drawn\n{letters}\n")
    recipe = {
        "run": {"out": str(folder / "run"), "threads": 1},
        "model": {"config": str(folder / "model.json")},
        "data": {
            "sources": [{"path": str(folder / "letters.fa")}],
            "length": LENGTH,
            "split": {"by": "region"},
            "cache": str(folder / "cache"),
        },
        "train": {"steps": STEPS, "lr": 1e-3, "indexer": "sparse", "save_every": 20},
        "memory": {"tile": TILE, "offload": "disk"},
        "evaluate": {"sequences": 2},
    }
    samples: dict[int, Sample] = {}  # one per step, so that watching does not grow
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(EVERY_SECONDS):
            now = _sample(folder / "run" / "metrics.jsonl")
            samples[now.step] = now.joined(samples.get(now.step, now))

    watcher = threading.Thread(target=sample)
    watcher.start()
    try:
        train(Recipe.model_validate(recipe))
    finally:
        ended.set()
        watcher.join()
    return [
        one for one in samples.values() if 0 < one.step < STEPS
    ]  # the evaluations at both ends are left out


def _sample(metrics: Path) -> Sample:
    step = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
    own = Path("/proc/self")
    descriptors, threads = (len(list((own / name).iterdir())) for name in ("fd", "task"))
    return Sample(step, resident_bytes(), descriptors, threads)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    (place / "samples.json").write_text(json.dumps([vars(one) for one in _train(place)]))
