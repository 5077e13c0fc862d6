"""The hybrid model: KDA and DSA mixers in a wide residual stream, scanned over tiles."""

from longstrand.memory import SideLosses
from longstrand.model.load import load_model, save_model
from longstrand.model.model import Model

__all__ = ["Model", "SideLosses", "load_model", "save_model"]
