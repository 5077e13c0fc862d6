"""The oracle of the tests is the one that the figures are measured with."""

from longstrand.bench.oracle import Answer, Oracle, Widened, draw_documents, draw_weights

__all__ = ["Answer", "Oracle", "Widened", "draw_documents", "draw_weights"]
