"""`longstrand generate`: from a model and prompts to a file of sequences."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from longstrand.atomic import write_atomic
from longstrand.data.letters import LetterPolicy
from longstrand.data.tokens import TextTokenizer, letter_ids
from longstrand.errors import UserError
from longstrand.generate.prompts import LetterCodec, Prompt, TextCodec, read_prompts
from longstrand.generate.rollout import BATCH, generate
from longstrand.generate.sampling import Sampling
from longstrand.generate.turns import Generated
from longstrand.parallel import all_ranks, by_first, together
from longstrand.trained import Trained, load_trained
from longstrand.wording import count, number, percent

_LINE_LETTERS = 80


@dataclass(frozen=True)
class Request:
    """What `longstrand generate` was asked for; see its options.

    Attributes:
        context, expert: sizes of these axes on several processes; None: as the run was trained.
        letters: what may be drawn where a token is a letter; None: ACGT.
        tokenizer: of a model folder; None: letters.
        tile: None: the run's, or that of `Levers`.
    """

    files: Sequence[Path] = ()
    texts: Sequence[str] = ()
    max_new_tokens: int = 256
    num_samples: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    letters: str | None = None
    tokenizer: str | None = None
    batch: int = BATCH
    tile: int | None = None
    out: Path | None = None
    with_prompt: bool = False
    context: int | None = None
    expert: int | None = None


def run_generation(target: Path, request: Request) -> str:
    """Generates, writes `request.out` (a whole file or none) or returns the text, and says on stderr what it did.

    FASTA where a token is a letter, JSONL where it is text. With several processes each calls it with the same
    arguments, and the first one alone writes and speaks.

    Args:
        target: a run, one of its checkpoints, or a Hugging Face folder.

    Raises:
        UserError: the target, a prompt or a setting cannot be used, or `out` exists.
        CheckFailed: a log-probability that is not finite; or an op would not run in the form that the run's
            `kernels.require` names.
    """
    world = all_ranks()
    by_first(world, lambda: _check_out(request.out))
    with together(world):
        trained = load_trained(target, outlined=world.size > 1)
        kernels = trained.use_settings()
        codec = _codec(trained, request)
        prompts = read_prompts(request.files, request.texts, codec)
        _check_tokens(trained, prompts)
        longest = max(len(prompt.tokens) for prompt in prompts) + request.max_new_tokens
        sampling = _sampling(trained, request, codec)
    mesh = trained.mesh(request.context, request.expert)
    trained.spread(mesh)
    trained.require_forms(longest)
    with _watching(len(prompts) * request.num_samples * request.max_new_tokens, mesh.first) as work:
        found = generate(
            trained.model,
            [prompt.tokens for prompt in prompts],
            request.max_new_tokens,
            sampling,
            num_samples=request.num_samples,
            batch=request.batch,
            tile=trained.tile if request.tile is None else request.tile,
            watch=work.add,
        )
    text = "".join(_written(prompts, found, request, codec))
    by_first(mesh.world, lambda: _write(request.out, text))
    if mesh.first:
        _say(work, found, request, codec, [f"CPU kernels: {kernels}", trained.beyond(longest)])
    return text


def _write(out: Path | None, text: str) -> None:
    if out is not None:
        _check_out(out)
        write_atomic(out, text)


def _codec(trained: Trained, request: Request) -> LetterCodec | TextCodec:
    """Tokens as the run's recipe makes them; for a model folder as `--tokenizer` says, or letters."""
    data = trained.recipe.data if trained.recipe is not None else None
    if data is not None and request.tokenizer is not None:
        raise UserError(
            f"--tokenizer {request.tokenizer}: {trained.name} has its own, {data.tokenizer}; remove it"
        )
    name = data.tokenizer if data is not None else request.tokenizer or "bases"
    if name != "bases":
        if request.letters is not None:
            raise UserError(f"--letters {request.letters}: the tokens of {name} are no letters; remove it")
        return TextCodec(TextTokenizer(name, data.cut if data is not None else None))
    policy = LetterPolicy() if data is None else LetterPolicy(data.case, data.n, data.iupac)
    return LetterCodec(policy, letter_ids(trained.folder))


def _sampling(trained: Trained, request: Request, codec: LetterCodec | TextCodec) -> Sampling:
    if isinstance(codec, LetterCodec):
        return replace(
            request.sampling, allowed=codec.allowed("ACGT" if request.letters is None else request.letters)
        )
    named = trained.model.architecture.eos_token_id
    ends = {codec.tokenizer.eos, *(named if isinstance(named, tuple) else (named,))}
    return replace(request.sampling, stop=tuple(sorted(end for end in ends if end is not None)))


def _check_tokens(trained: Trained, prompts: Sequence[Prompt]) -> None:
    shape = trained.model.architecture
    for prompt in prompts:
        if int(prompt.tokens.max()) >= shape.vocab_size:
            raise UserError(
                f"{prompt.where}: token {int(prompt.tokens.max())}, and the vocabulary of {trained.name} has "
                f"{shape.vocab_size}; give the model's own tokenizer with --tokenizer"
            )


def _check_out(out: Path | None) -> None:
    """Before hours of work: the file can be written, and nothing stands there."""
    if out is None:
        return
    if out.exists() or out.is_symlink():
        raise UserError(f"--out {out}: exists, and is never overwritten; remove it or choose another")
    try:
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written there ({error.strerror}); choose another") from error


def _written(
    prompts: Sequence[Prompt], found: Sequence[Generated], request: Request, codec: LetterCodec | TextCodec
) -> Iterator[str]:
    """The records of the file, sample after sample of prompt after prompt."""
    for place, each in enumerate(found):
        prompt, sample = prompts[place // request.num_samples], place % request.num_samples + 1
        text = codec.decode(each.tokens)
        mean = round(float(each.logprobs.mean()), 6)
        if isinstance(codec, LetterCodec):
            letters = codec.decode(prompt.tokens) + text if request.with_prompt else text
            yield (
                f">{prompt.name}_{sample} prompt={prompt.name} prompt_tokens={len(prompt.tokens)} sample={sample} "
                f"new_tokens={len(each.tokens)} mean_logprob={mean}\n"
            )
            yield from (
                letters[at : at + _LINE_LETTERS] + "\n" for at in range(0, len(letters), _LINE_LETTERS)
            )
            continue
        row = {
            "id": prompt.name,
            "sample": sample,
            "prompt": prompt.text,
            "completion": text,
            "mean_logprob": mean,
            "new_tokens": len(each.tokens),
            "stopped": each.stopped,
        }
        yield json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"


class _Work:
    """Tokens and seconds spent on prompts and on new tokens; moves the progress line."""

    def __init__(self, progress: Progress, total: int) -> None:
        self.tokens, self.seconds = {"prompt": 0, "new": 0}, {"prompt": 0.0, "new": 0.0}
        self._progress, self._task = progress, progress.add_task("generating", total=total, rate="")
        self._last = time.perf_counter()

    def add(self, kind: str, tokens: int) -> None:
        now = time.perf_counter()
        self.tokens[kind] += tokens
        self.seconds[kind] += now - self._last
        self._last = now
        self._progress.update(self._task, advance=tokens * (kind == "new"), rate=self.rate("new"))

    def rate(self, kind: str) -> str:
        return f"{number(self.tokens[kind] / max(self.seconds[kind], 1e-9), 0)} tokens/s"


@contextmanager
def _watching(total: int, shown: bool) -> Iterator[_Work]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} of at most {task.total:,.0f} tokens, {task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not (shown and console.is_terminal)
    ) as progress:
        yield _Work(progress, total)


def _say(
    work: _Work,
    found: Sequence[Generated],
    request: Request,
    codec: LetterCodec | TextCodec,
    notes: Sequence[str | None],
) -> None:
    console = Console(stderr=True, soft_wrap=True)
    console.print(
        f"{count(len(found))} sequences, {count(work.tokens['new'])} new tokens at {work.rate('new')}; "
        f"prompts: {count(work.tokens['prompt'])} tokens at {work.rate('prompt')}",
        highlight=False,
    )
    for note in filter(None, notes):
        console.print(note, markup=False, highlight=False)
    if isinstance(codec, LetterCodec):
        new = max(work.tokens["new"], 1)
        share = sum(each.excluded * len(each.tokens) for each in found) / new
        console.print(
            f"drawn from {request.letters or 'ACGT'}: the model gave {percent(share, 2)} of the probability to the "
            "tokens left out (mean over new tokens)",
            highlight=False,
        )
        if codec.read_as_n:
            console.print(
                f"letters of the prompts that were read as N: {count(codec.read_as_n)}", highlight=False
            )
    elif codec.unknown_tokens:
        console.print(
            f"tokens of the prompts that stand for unknown text: {count(codec.unknown_tokens)}",
            highlight=False,
        )
