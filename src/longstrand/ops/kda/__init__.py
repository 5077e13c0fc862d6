"""Kimi delta attention: a gated delta rule with per-channel decay."""

from longstrand.ops.kda.chunked import CHUNK, KDA, kda
from longstrand.ops.kda.gate import LOG_DECAY, log_decay
from longstrand.ops.kda.reference import kda_reference, l2_normalise
from longstrand.ops.kda.step import kda_step

__all__ = ["CHUNK", "KDA", "LOG_DECAY", "kda", "kda_reference", "kda_step", "l2_normalise", "log_decay"]
