"""The oracle of the tests is the one that the figures are measured with."""

from longstrand.bench.drawn import draw_architecture, draw_documents, draw_weights
from longstrand.bench.oracle import Answer, Oracle, Widened

__all__ = ["Answer", "Oracle", "Widened", "draw_architecture", "draw_documents", "draw_weights"]
