"""Every number of a run: typed, strict records, read from and written to TOML; no torch."""

from longstrand.config.base import parse_length
from longstrand.config.data_records import DataSection, Families, Source, Split
from longstrand.config.reading import load_recipe, read_recipe_text, shipped_recipes
from longstrand.config.records import (
    GROUPS,
    EvaluateSection,
    KernelsSection,
    MemorySection,
    ModelSection,
    ParallelSection,
    Recipe,
    ReportSection,
    RunSection,
    TrainSection,
    flaw_of_kept_graphs,
)
from longstrand.config.writing import dump_toml, example_recipe

__all__ = [
    "GROUPS",
    "DataSection",
    "EvaluateSection",
    "Families",
    "KernelsSection",
    "MemorySection",
    "ModelSection",
    "ParallelSection",
    "Recipe",
    "ReportSection",
    "RunSection",
    "Source",
    "Split",
    "TrainSection",
    "dump_toml",
    "example_recipe",
    "flaw_of_kept_graphs",
    "load_recipe",
    "parse_length",
    "read_recipe_text",
    "shipped_recipes",
]
