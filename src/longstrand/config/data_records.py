"""The `[data]` section: where tokens come from, and every policy about them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from longstrand.config.base import Fraction, Length, Place, Record, has_its_home


class Source(Record):
    """One input file or glob."""

    path: Place = Field(
        description="file or glob, relative to the working directory", examples=["genome.fa.gz"]
    )
    weight: float = Field(
        1.0, gt=0, description="share of the tokens drawn from this source, relative to the others"
    )
    regions: list[str] = Field(
        [],
        description='parts of a FASTA, 1-based and inclusive: "chr1" or "chr1:1000-2000"; empty: everything',
    )
    bed: Place | None = Field(
        None,
        description="BED file with the regions (0-based, half-open)",
        examples=["genes.bed"],
    )
    format: Literal["auto", "fasta", "jsonl", "tokens"] = Field(
        "auto", description="auto: by the file's first bytes; tokens: JSONL with input_ids"
    )

    @model_validator(mode="after")
    def _regions_of_a_fasta(self) -> Source:
        if self.regions and self.bed is not None:
            raise ValueError(
                f'bed = "{self.bed}": regions are set too, and only one of them can choose; remove one'
            )
        if (self.regions or self.bed is not None) and self.format in ("jsonl", "tokens"):
            name = "regions" if self.regions else "bed"
            raise ValueError(
                f'format = "{self.format}": {name} are places in a FASTA; remove {name} or set "fasta"'
            )
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
            raise ValueError(
                f"kmer = {self.kmer}: must be odd, so that no k-mer is its own reverse complement; use 31"
            )
        return self


class Split(Record):
    """Which part of the data is never trained on."""

    by: Literal["record", "family", "region"] = Field(description="unit of the split", examples=["region"])
    validation: Fraction = Field(
        0.1, description="part of the bases kept for choices such as the number of steps"
    )
    held_out: Fraction = Field(0.1, description="part of the bases kept for the final evaluation")
    seed: int = Field(0, ge=0, lt=2**32, description="seed of the split; independent of run.seed")

    @model_validator(mode="after")
    def _something_left(self) -> Split:
        total = self.validation + self.held_out
        if total >= 1:
            raise ValueError(
                f"validation + held_out = {total:g}: must stay below 1, or nothing is trained on; lower one"
            )
        return self


class DataSection(Record):
    """Where tokens come from and what is done to them; every token not trained on is counted in data.json."""

    sources: list[Source] = Field(min_length=1, description="input files")
    tokenizer: Place = Field(
        "bases", description='"bases" (one token per letter), or a tokenizer.json or its folder'
    )
    cut: int | None = Field(
        None,
        ge=1,
        description="letters per piece before a BPE tokenizer, which is quadratic on unbroken text",
        examples=[64],
    )
    length: Length = Field(description='tokens of a sequence; "1M" is 1,048,576', examples=["16k"])
    case: Literal["ignore"] | Fraction = Field(
        "ignore",
        description='lower-case (soft-masked) letters: "ignore", or their weight in the loss',
        json_schema_extra={"rule": 'must be "ignore" or a number from 0 to 1'},
    )
    n: Literal["mask", "keep"] = Field("mask", description="letter N as a target: no loss, or like any other")
    n_max: Fraction = Field(0.5, description="windows with a larger part of N are skipped")
    iupac: Literal["n", "keep", "error"] = Field(
        "n", description="other ambiguity letters: read as N, kept, refused"
    )
    reverse_complement: bool = Field(False, description="show each window on a strand drawn at random")
    families: Families | None = Field(
        None, description="fill sequences with relatives; absent: windows of the sources"
    )
    split: Split | None = Field(None, description="held-out parts; absent: everything is trained on")
    cache: Place = Field(
        "~/.cache/longstrand",
        description="folder of the encoded inputs, keyed by content",
        examples=["/scratch/longstrand"],
    )

    @model_validator(mode="after")
    def _consistent(self) -> DataSection:
        if not has_its_home(self.cache):  # of the default, which is not checked as a value is
            raise ValueError(
                f'cache = "{self.cache}": no home folder is known for its "~"; set it to a folder in full'
            )
        if self.cut is not None and self.tokenizer == "bases":
            raise ValueError(
                f'cut = {self.cut}: pieces are cut only before a BPE tokenizer, not "bases"; remove cut'
            )
        if self.families is not None and self.split is not None and self.split.by != "family":
            raise ValueError(
                f'split.by = "{self.split.by}": relatives would stand on both sides; set "family"'
            )
        return self
