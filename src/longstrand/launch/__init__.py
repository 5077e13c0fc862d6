"""How the ranks of a run are started: one process, processes of this machine, torchrun, Ray Train."""

from longstrand.launch.starting import joined_ranks, start_training

__all__ = ["joined_ranks", "start_training"]
