"""The records of a recipe: every setting with its unit, default and bounds, and the rules between settings."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

Group = Literal["embedding", "head", "norms", "mhc", "kda", "mla", "indexer", "router", "experts", "dense"]
GROUPS: tuple[str, ...] = get_args(Group)
"""Parameter groups of a model that `train.trainable` can name."""

_LENGTH = re.compile(r"([0-9][0-9_]*)([kKmM]?)")
_LENGTH_RULE = "must be a whole number of tokens, k (1,024) or M (1,048,576)"


def parse_length(value: object) -> int:
    """Tokens in a length: an integer, or text such as "131072", "512k" (524,288) or "1M" (1,048,576).

    Raises:
        ValueError: anything else.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _LENGTH.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(_LENGTH_RULE)
    return int(match[1].replace("_", "")) * {"": 1, "k": 1024, "m": 1024**2}[match[2].lower()]


Length = Annotated[int, BeforeValidator(parse_length), Field(ge=2)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]


def _is_optional(field: FieldInfo) -> bool:
    return type(None) in get_args(field.annotation)


class Record(BaseModel):
    """A strict, frozen part of a recipe; `"none"` stands for an absent value, which TOML cannot write."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _read_none(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        absent = {n for n, field in cls.model_fields.items() if _is_optional(field) and values.get(n) == "none"}
        return {name: None if name in absent else value for name, value in values.items()}

    def _changed(self, name: str) -> bool:
        """Whether a setting differs from its default (a written-out default is no request)."""
        return bool(getattr(self, name) != type(self).model_fields[name].default)


class RunSection(Record):
    """Where a run is written and how it computes."""

    out: str = Field(min_length=1, description="folder of the run; made by train", examples=["runs/first"])
    seed: int = Field(0, ge=0, lt=2**32, description="seed of drawn weights and of the order of the data")
    threads: int | None = Field(None, ge=1, description="CPU threads of torch; absent: as torch was started", examples=[2])
    dtype: Literal["float32", "bfloat16", "float64"] = Field(
        "float32", description="dtype of the weights; gradients and optimizer state are float32 or wider"
    )
    sinks: list[Literal["tensorboard"]] = Field(
        [], description="copies of metrics.jsonl for other tools; tensorboard needs the extra [tensorboard]"
    )


class ModelSection(Record):
    """The model to train: either a folder with weights or a config whose weights are drawn."""

    path: str | None = Field(
        None, min_length=1, description="Hugging Face folder with config.json and safetensors", examples=["models/mine"]
    )
    config: str | None = Field(
        None, min_length=1, description='config.json, or a shipped one: "toy" (1.2M), "wide" (232M)', examples=["toy"]
    )
    init: Literal["fan_in", "class"] = Field(
        "fan_in", description="drawn weights: std 1/sqrt(fan-in), or the class default (initializer_range)"
    )

    @model_validator(mode="after")
    def _one_source_of_weights(self) -> ModelSection:
        if (self.path is None) == (self.config is None):
            state = "neither is set" if self.path is None else f'path = "{self.path}" and config = "{self.config}"'
            raise ValueError(f"{state}: exactly one of path and config names the model; set one, remove the other")
        if self.path is not None and self._changed("init"):
            raise ValueError(f'init = "{self.init}": weights are drawn only with config, not with path; remove init')
        return self


class Source(Record):
    """One input file or glob."""

    path: str = Field(
        min_length=1, description="file or glob, relative to the working directory", examples=["genome.fa.gz"]
    )
    weight: float = Field(1.0, gt=0, description="share of the tokens drawn from this source, relative to the others")
    regions: list[str] = Field(
        [], description='parts of a FASTA, 1-based and inclusive: "chr1" or "chr1:1000-2000"; empty: everything'
    )
    bed: str | None = Field(
        None, min_length=1, description="BED file with the regions (0-based, half-open)", examples=["genes.bed"]
    )
    format: Literal["auto", "fasta", "jsonl", "tokens"] = Field(
        "auto", description="auto: by the file's name and first bytes; tokens: JSONL with input_ids"
    )

    @model_validator(mode="after")
    def _regions_of_a_fasta(self) -> Source:
        if self.regions and self.bed is not None:
            raise ValueError(f'bed = "{self.bed}": regions are set too, and only one of them can choose; remove one')
        if (self.regions or self.bed is not None) and self.format in ("jsonl", "tokens"):
            name = "regions" if self.regions else "bed"
            raise ValueError(f'format = "{self.format}": {name} are places in a FASTA; remove {name} or set "fasta"')
        return self


class Families(Record):
    """Sequences made of related records: components of records that share a k-mer on either strand."""

    kmer: int = Field(31, ge=5, le=31, description="letters of the k-mer that makes two records relatives")
    order: Literal["relatives", "strangers"] = Field(
        "relatives", description="what fills a sequence; strangers is the control: one record per family"
    )
    members: int = Field(2, ge=2, description="a sequence holds at least this many relatives")

    @model_validator(mode="after")
    def _own_reverse(self) -> Families:
        if self.kmer % 2 == 0:
            raise ValueError(f"kmer = {self.kmer}: must be odd, so that no k-mer is its own reverse complement; use 31")
        return self


class Split(Record):
    """Which part of the data is never trained on."""

    by: Literal["record", "family", "region"] = Field(description="unit of the split", examples=["region"])
    validation: Fraction = Field(0.1, description="part of the bases kept for choices such as the number of steps")
    held_out: Fraction = Field(0.1, description="part of the bases kept for the final evaluation")
    seed: int = Field(0, ge=0, lt=2**32, description="seed of the split; independent of run.seed")

    @model_validator(mode="after")
    def _something_left(self) -> Split:
        total = self.validation + self.held_out
        if total >= 1:
            raise ValueError(
                f"validation + held_out = {total:g}: must stay below 1 so that data is left to train on; lower one"
            )
        return self


class DataSection(Record):
    """Where tokens come from and what is done to them; every token not trained on is counted in data.json."""

    sources: list[Source] = Field(min_length=1, description="input files")
    tokenizer: str = Field(
        "bases", min_length=1, description='"bases" (one token per letter), or a tokenizer.json or its folder'
    )
    cut: int | None = Field(
        None, ge=1, description="letters per piece before a BPE tokenizer, which is quadratic on unbroken text", examples=[64]
    )
    length: Length = Field(description='tokens of a sequence; "1M" is 1,048,576', examples=["16k"])
    case: Literal["ignore"] | Fraction = Field(
        "ignore",
        description='lower-case (soft-masked) letters: "ignore", or their weight in the loss',
        json_schema_extra={"rule": 'must be "ignore" or a number from 0 to 1'},
    )
    n: Literal["mask", "keep"] = Field("mask", description="letter N as a target: no loss, or like any other")
    n_max: Fraction = Field(0.5, description="windows with a larger part of N are skipped")
    iupac: Literal["n", "keep", "error"] = Field("n", description="other ambiguity letters: read as N, kept, refused")
    reverse_complement: bool = Field(False, description="show each window on a strand drawn at random")
    families: Families | None = Field(None, description="fill sequences with relatives; absent: windows of the sources")
    split: Split | None = Field(None, description="held-out parts; absent: everything is trained on")
    cache: str = Field("~/.cache/longstrand", min_length=1, description="folder of the encoded inputs, keyed by content")

    @model_validator(mode="after")
    def _consistent(self) -> DataSection:
        if self.cut is not None and self.tokenizer == "bases":
            raise ValueError(f'cut = {self.cut}: pieces are cut only before a BPE tokenizer, not "bases"; remove cut')
        if self.families is not None and self.split is not None and self.split.by != "family":
            raise ValueError(
                f'split.by = "{self.split.by}": relatives would stand on both sides of the split; set split.by = "family"'
            )
        return self


class TrainSection(Record):
    """The optimizer (AdamW), its schedule, and what learns."""

    steps: int = Field(ge=1, description="optimizer steps", examples=[100])
    sequences_per_step: int = Field(1, ge=1, description="sequences in one optimizer step, over all devices")
    lr: float = Field(gt=0, description="peak learning rate", examples=[1e-4])
    schedule: Literal["constant", "linear", "cosine"] = Field("cosine", description="learning rate after warm-up")
    warmup_steps: int = Field(0, ge=0, description="steps over which the learning rate rises from 0")
    min_lr: Fraction = Field(0.1, description="last learning rate as a part of lr (linear, cosine)")
    betas: Annotated[tuple[Decay, Decay], BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)] = (
        Field((0.9, 0.95), description="AdamW's two decay rates")
    )
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's weight decay; matrices only")
    clip: float | None = Field(1.0, gt=0, description='largest gradient norm; "none": never clipped')
    indexer: Literal["frozen", "warmup", "sparse"] = Field(
        "frozen", description="the indexer: as loaded; alone, under dense attention; with everything, over its own choice"
    )
    indexer_weight: float = Field(1.0, gt=0, description="weight of the indexer's loss (warmup, sparse)")
    balance: Literal["none", "bias", "aux"] = Field("none", description="what evens out the load of the experts")
    balance_rate: float = Field(1e-3, gt=0, description="step of the bias, or weight of the auxiliary loss")
    trainable: list[Literal["all"] | Group] = Field(
        ["all"],
        min_length=1,
        description="parameter groups that learn: all, or " + ", ".join(GROUPS),
        json_schema_extra={"rule": "must be a list of parameter groups: all, or " + ", ".join(GROUPS)},
    )
    save_every: int = Field(100, ge=1, description="steps between checkpoints; the first and last step are saved too")
    keep: int = Field(2, ge=1, description="newest checkpoints kept")

    @model_validator(mode="after")
    def _schedule_fits(self) -> TrainSection:
        if self.warmup_steps > self.steps:
            raise ValueError(
                f"warmup_steps = {self.warmup_steps}: must not exceed steps = {self.steps}; lower it or raise steps"
            )
        if self.schedule == "constant" and self._changed("min_lr"):
            raise ValueError(
                f'min_lr = {self.min_lr}: a constant schedule never falls; remove min_lr or set schedule = "cosine"'
            )
        if len(set(self.trainable)) < len(self.trainable) or ("all" in self.trainable and len(self.trainable) > 1):
            raise ValueError(f'trainable = {self.trainable}: must name each group once, or be ["all"]; remove the rest')
        return self

    @model_validator(mode="after")
    def _indexer_learns_or_not(self) -> TrainSection:
        named = "indexer" in self.trainable
        if self.indexer == "frozen" and named:
            raise ValueError(
                'indexer = "frozen": trainable names the indexer, which has no loss then; set "warmup" or "sparse"'
            )
        if self.indexer == "frozen" and self._changed("indexer_weight"):
            raise ValueError(
                f"indexer_weight = {self.indexer_weight}: a frozen indexer has no loss; remove it or set indexer"
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
                f'balance_rate = {self.balance_rate}: nothing is balanced; remove it or set balance = "bias" or "aux"'
            )
        if self.balance == "aux" and self.trainable != ["all"] and "router" not in self.trainable:
            raise ValueError('balance = "aux": its loss moves the router, which trainable leaves out; add "router"')
        if self.balance != "none" and self.indexer == "warmup":
            raise ValueError(f'balance = "{self.balance}": only the indexer learns in a warm-up; set balance = "none"')
        return self


class MemorySection(Record):
    """What bounds memory."""

    tile: int = Field(1024, ge=1, description="tokens computed at once; changes speed and memory, not results")


class EvaluateSection(Record):
    """Held-out loss by position, before and after training."""

    sources: list[Source] = Field([], description="held-out files; empty: the split's held-out part of data.sources")
    length: Length | None = Field(None, description="tokens of a sequence; absent: data.length", examples=["16k"])
    buckets: Literal["doubling"] | Annotated[int, Field(ge=1)] = Field(
        "doubling",
        description='positions: "doubling" (0, 1024, 2048, 4096, ...), or the width of equal buckets in tokens',
        json_schema_extra={"rule": 'must be "doubling" or a whole number of tokens from 1'},
    )
    sequences: int | None = Field(None, ge=1, description="sequences scored; absent: all", examples=[16])
    split: Literal["held_out", "validation"] = Field("held_out", description="part of the split that is scored")
    before: bool = Field(True, description="score the model before the first step too")
    control: bool = Field(False, description="score sequences of strangers too (needs data.families)")


class ReportSection(Record):
    """What report.html shows."""

    title: str | None = Field(None, min_length=1, description="title; absent: the run's folder", examples=["My run"])


class Recipe(Record):
    """Everything that defines a run."""

    run: RunSection
    model: ModelSection
    data: DataSection
    train: TrainSection
    memory: MemorySection = MemorySection()
    evaluate: EvaluateSection = EvaluateSection()
    report: ReportSection = ReportSection()

    @model_validator(mode="after")
    def _evaluation_possible(self) -> Recipe:
        if self.evaluate.control and self.data.families is None:
            raise ValueError(
                "evaluate.control = true: the control replaces relatives, so it needs [data.families]; add it or set false"
            )
        length = self.evaluate.length or self.data.length
        if self.evaluate.buckets != "doubling" and self.evaluate.buckets > length:
            raise ValueError(
                f"evaluate.buckets = {self.evaluate.buckets}: must not exceed the length of {length} tokens; lower it"
            )
        return self
