"""The demo, the checkpoint it starts from, and how that was made."""

from longstrand.demo.run import run_demo

__all__ = ["run_demo"]
