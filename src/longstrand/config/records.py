"""The sections of a recipe: every setting with its unit, default and bounds, and the rules between them."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from longstrand.config.base import Decay, Fraction, Length, Place, Record
from longstrand.config.data_records import DataSection, Source

Group = Literal["embedding", "head", "norms", "mhc", "kda", "mla", "indexer", "router", "experts", "dense"]
GROUPS: tuple[str, ...] = get_args(Group)
"""Parameter groups of a model that `train.trainable` can name."""


class RunSection(Record):
    """Where a run is written and how it computes."""

    out: Place = Field(description="folder of the run; made by train", examples=["runs/first"])
    seed: int = Field(0, ge=0, lt=2**32, description="seed of drawn weights and of the order of the data")
    threads: int | None = Field(
        None, ge=1, le=1024, description="CPU threads of torch; absent: as torch was started", examples=[2]
    )
    dtype: Literal["float32", "bfloat16", "float64"] = Field(
        "float32", description="dtype of the weights; gradients and optimizer state are float32 or wider"
    )
    sinks: list[Literal["tensorboard"]] = Field(
        [], description="copies of metrics.jsonl for other tools; tensorboard needs the extra [tensorboard]"
    )


class ModelSection(Record):
    """The model to train: either a folder with weights or a config whose weights are drawn."""

    path: Place | None = Field(
        None,
        description="Hugging Face folder with config.json and safetensors",
        examples=["models/mine"],
    )
    config: Place | None = Field(
        None,
        description='config.json, or a shipped one: "toy" (1.2M), "wide" (232M), "glm-5.3-flash" (313B)',
        examples=["toy"],
    )
    init: Literal["fan_in", "class"] = Field(
        "fan_in", description="drawn weights: std 1/sqrt(fan-in), or the class default (initializer_range)"
    )

    @model_validator(mode="after")
    def _one_source_of_weights(self) -> ModelSection:
        if (self.path is None) == (self.config is None):
            state = (
                "neither is set"
                if self.path is None
                else f'path = "{self.path}" and config = "{self.config}"'
            )
            raise ValueError(
                f"{state}: exactly one of path and config names the model; set one, remove the other"
            )
        if self.path is not None and self._changed("init"):
            raise ValueError(
                f'init = "{self.init}": weights are drawn only with config, not with path; remove init'
            )
        return self


class TrainSection(Record):
    """The optimizer (AdamW), its schedule, and what learns."""

    steps: int = Field(ge=1, description="optimizer steps", examples=[100])
    sequences_per_step: int = Field(1, ge=1, description="sequences in one optimizer step, over all devices")
    lr: float = Field(gt=0, description="peak learning rate", examples=[1e-4])
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "cosine", description="learning rate after warm-up"
    )
    warmup_steps: int = Field(0, ge=0, description="steps over which the learning rate rises from 0")
    min_lr: Fraction = Field(0.1, description="last learning rate as a part of lr (linear, cosine)")
    betas: Annotated[
        tuple[Decay, Decay], BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)
    ] = Field(
        (0.9, 0.95),
        description="AdamW's two decay rates",
        json_schema_extra={"rule": "must be a list of two numbers from 0 to below 1"},
    )
    eps: float = Field(1e-8, ge=1e-38, description="AdamW's epsilon; float32 must not round it to 0")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's weight decay; matrices only")
    clip: float | None = Field(1.0, gt=0, description='largest gradient norm; "none": never clipped')
    indexer: Literal["frozen", "warmup", "sparse"] = Field(
        "frozen",
        description="the indexer: as loaded, alone under dense attention, or with everything over its choice",
    )
    indexer_weight: float = Field(1.0, gt=0, description="weight of the indexer's loss (warmup, sparse)")
    balance: Literal["none", "bias", "aux"] = Field(
        "none", description="what evens out the load of the experts"
    )
    balance_rate: float = Field(1e-3, gt=0, description="step of the bias, or weight of the auxiliary loss")
    trainable: list[Literal["all"] | Group] = Field(
        ["all"],
        min_length=1,
        description="parameter groups that learn: all, or " + ", ".join(GROUPS),
        json_schema_extra={"rule": "must be a list of parameter groups: all, or " + ", ".join(GROUPS)},
    )
    save_every: int = Field(
        100, ge=1, description="steps between checkpoints; the first and last step are saved too"
    )
    keep: int = Field(2, ge=1, description="newest checkpoints kept")

    @model_validator(mode="after")
    def _schedule_fits(self) -> TrainSection:
        if self.warmup_steps > self.steps:
            raise ValueError(
                f"warmup_steps = {self.warmup_steps}: must not exceed steps = {self.steps}; lower it"
            )
        if self.schedule == "constant" and self._changed("min_lr"):
            raise ValueError(f"min_lr = {self.min_lr}: a constant schedule never falls; remove it")
        if len(set(self.trainable)) < len(self.trainable) or (
            "all" in self.trainable and len(self.trainable) > 1
        ):
            raise ValueError(
                f'trainable = {self.trainable}: must be ["all"] or name groups once; remove the rest'
            )
        return self

    @model_validator(mode="after")
    def _indexer_learns_or_not(self) -> TrainSection:
        named = "indexer" in self.trainable
        if self.indexer == "frozen" and named:
            raise ValueError(
                'indexer = "frozen": trainable names it, but it has no loss; set "warmup" or "sparse"'
            )
        if self.indexer == "frozen" and self._changed("indexer_weight"):
            raise ValueError(
                f"indexer_weight = {self.indexer_weight}: a frozen indexer has no loss; remove it"
            )
        if self.indexer == "sparse" and not named and self.trainable != ["all"]:
            raise ValueError('indexer = "sparse": trainable leaves the indexer out; add "indexer" to it')
        if self.indexer == "warmup" and self.trainable not in (["all"], ["indexer"]):
            raise ValueError('indexer = "warmup": only the indexer learns then; set trainable = ["indexer"]')
        return self

    @model_validator(mode="after")
    def _balance_acts(self) -> TrainSection:
        if self.balance == "none" and self._changed("balance_rate"):
            raise ValueError(
                f"balance_rate = {self.balance_rate}: nothing is balanced; remove it, or set balance"
            )
        if self.balance == "aux" and self.trainable != ["all"] and "router" not in self.trainable:
            raise ValueError(
                'balance = "aux": its loss moves the router, which trainable leaves out; add "router"'
            )
        if self.balance != "none" and self.indexer == "warmup":
            raise ValueError(
                f'balance = "{self.balance}": only the indexer learns in a warm-up; set balance = "none"'
            )
        return self


class MemorySection(Record):
    """What bounds memory; nothing here changes a result.

    Bytes per token of L layers with R streams of width D, e bytes per value: docs/memory.md has all terms.
    """

    tile: int = Field(
        1024, ge=1, description="tokens computed at once; changes speed and memory, not results"
    )
    recompute: bool = Field(
        True,
        description="recompute each tile in backward; false: keep its activations, about 12 times the bytes per token "
        "and no second forward, for sequences that fit",
    )
    keep_fronts: bool = Field(
        False,
        description="with context ranks: keep the first half of a layer's tiles between its two passes each way, "
        "in place of computing it twice; of one layer at a time, about as many bytes per token as 4 layer inputs",
    )
    keep_every: int = Field(
        1,
        ge=1,
        description="layer inputs kept: of layers 0, k, 2k, ...; (L / k + k - 2) R D e bytes per token instead of "
        "(L - 1) R D e, for one more forward of most layers between",
    )
    offload: Literal["none", "host", "disk"] = Field(
        "none",
        description="where layer inputs, last mean and running gradient live: the device, a GPU's host, or a file; "
        "the same bytes per token leave the device, or memory",
    )
    optimizer: Literal["device", "host"] = Field(
        "device",
        description="where AdamW's moments and float32 masters live and move: host takes 8 to 12 bytes per "
        "parameter off a GPU",
    )
    spool: Place | None = Field(
        None,
        description='folder of the file of offload = "disk", best on a local disk; absent: spool in run.out',
        examples=["/scratch/spool"],
    )

    @model_validator(mode="after")
    def _spool_is_used(self) -> MemorySection:
        if self.spool is not None and self.offload != "disk":
            raise ValueError(
                f'spool = "{self.spool}": offload = "{self.offload}" writes no file; set offload = "disk", or remove '
                "spool"
            )
        return self

    @model_validator(mode="after")
    def _something_is_recomputed(self) -> MemorySection:
        if not self.recompute and (self.keep_every > 1 or self.offload != "none" or self.keep_fronts):
            raise ValueError(
                "recompute = false: keeps all activations on the device, so that keep_every, offload and keep_fronts "
                "would save nothing; set recompute = true, or remove them"
            )
        return self


class ParallelSection(Record):
    """How a run spreads over processes; nothing here changes a result beyond rounding.

    data x context processes take part; expert is another view of the same ones.
    """

    data: int = Field(1, ge=1, description="ranks that compute different sequences of a step")
    context: int = Field(1, ge=1, description="ranks that share each sequence")
    expert: int = Field(1, ge=1, description="ranks that share the routed experts; divides data x context")
    segments: Literal["auto"] | Annotated[int, Field(ge=2, multiple_of=2)] = Field(
        "auto",
        description="pieces of a sequence per context rank: 2, 4, 8, 16; auto: the fewest that balance attention",
        json_schema_extra={"rule": 'must be "auto" or an even number of segments from 2'},
    )
    receive: Length | None = Field(
        None,
        description="most tokens (with each expert a token of its own) that a rank receives at once from the others of "
        "its expert axis; absent: 4 x memory.tile",
        examples=["16k"],
    )

    @property
    def world(self) -> int:
        """Processes of the run."""
        return self.data * self.context

    @property
    def segments_per_rank(self) -> int | None:
        """None: as few as balance attention."""
        return None if self.segments == "auto" else self.segments

    def receive_rows(self, tile: int) -> int:
        """Most rows that a rank receives at once, for tiles of this many tokens."""
        return self.receive or 4 * tile


class KernelsSection(Record):
    """Which form of the ops runs; what ran stands in kernels.json."""

    cpu: Literal["auto", "native", "portable"] = Field(
        "auto",
        description="ops on a CPU in float32 or bfloat16: compiled C++ kernels (native) or plain torch (portable); "
        "auto: native where g++ is and the dtype has kernels; the log says which, and why",
    )
    require: Literal["none", "native", "portable"] = Field(
        "none",
        description="a form that every op that has it must run in: train, evaluate and generate do not begin, and "
        "audit fails, where one would not",
    )

    @model_validator(mode="after")
    def _required_can_be(self) -> KernelsSection:
        if self.require != "none" and self.cpu not in ("auto", self.require):
            raise ValueError(
                f'require = "{self.require}": cpu = "{self.cpu}" takes the other form; set both alike, or remove one'
            )
        return self


class EvaluateSection(Record):
    """Held-out loss by position, before and after training."""

    sources: list[Source] = Field(
        [], description="held-out files; empty: the split's held-out part of data.sources"
    )
    length: Length | None = Field(
        None, description="tokens of a sequence; absent: data.length", examples=["16k"]
    )
    buckets: Literal["doubling"] | Annotated[int, Field(ge=1)] = Field(
        "doubling",
        description='positions: "doubling" (0, 1024, 2048, 4096, ...), or the width of equal ones in tokens',
        json_schema_extra={"rule": 'must be "doubling" or a whole number of tokens from 1'},
    )
    sequences: int | None = Field(None, ge=1, description="sequences scored; absent: all", examples=[16])
    split: Literal["held_out", "validation"] = Field(
        "held_out", description="part of the split that is scored"
    )
    before: bool = Field(True, description="score the model before the first step too")
    control: bool = Field(False, description="score sequences of strangers too (needs data.families)")


class ReportSection(Record):
    """What report.html shows."""

    title: str | None = Field(
        None, min_length=1, description="title; absent: the run's folder", examples=["My run"]
    )


class Recipe(Record):
    """Everything that defines a run."""

    run: RunSection
    model: ModelSection
    data: DataSection
    train: TrainSection
    memory: MemorySection = MemorySection()
    parallel: ParallelSection = ParallelSection()
    kernels: KernelsSection = KernelsSection()
    evaluate: EvaluateSection = EvaluateSection()
    report: ReportSection = ReportSection()

    @model_validator(mode="after")
    def _sections_agree(self) -> Recipe:
        if flaw := flaw_of_kept_graphs(self.memory.recompute, self.train.balance, self.train.indexer):
            raise ValueError(flaw)
        if self.memory.keep_fronts and self.parallel.context == 1:
            raise ValueError(
                "memory.keep_fronts = true: with parallel.context = 1 a layer takes each tile once, so that there is "
                "nothing to keep; remove it, or raise parallel.context"
            )
        if self.kernels.cpu == "native" and self.run.dtype == "float64":
            raise ValueError(
                'kernels.cpu = "native": run.dtype = "float64" has no kernels; set kernels.cpu = "portable"'
            )
        if self.kernels.require == "native" and self.run.dtype == "float64":
            raise ValueError(
                'kernels.require = "native": run.dtype = "float64" has no kernels; remove it, or set another run.dtype'
            )
        if self.evaluate.control and self.data.families is None:
            raise ValueError(
                "evaluate.control = true: needs [data.families], whose relatives it replaces; add it"
            )
        length = self.evaluate.length or self.data.length
        if self.evaluate.buckets != "doubling" and self.evaluate.buckets > length:
            raise ValueError(
                f"evaluate.buckets = {self.evaluate.buckets}: exceeds the length of {length} tokens; lower it"
            )
        return self


def flaw_of_kept_graphs(recompute: bool, balance: str, indexer: str) -> str | None:
    """Why a layer's graphs cannot be kept as they come; None: they can, or are computed again.

    They are of the only pass, before what some losses need of all of it is known.
    """
    if recompute or (indexer != "warmup" and balance != "aux"):
        return None
    return (
        'memory.recompute = false: train.indexer = "warmup" and train.balance = "aux" need a whole forward pass '
        "before the first gradient; set memory.recompute = true"
    )
