"""The hybrid model: KDA and DSA mixers in a wide residual stream, scanned over tiles."""

from longstrand.memory import SideLosses
from longstrand.model.load import load_model, save_model
from longstrand.model.model import Model, kernels

__all__ = ["Model", "SideLosses", "kernels", "load_model", "save_model"]
