"""The files of a rank that the parent reads. Apart from worker.py, which needs torch."""

from __future__ import annotations

import os


def log_path(directory: str, rank: int) -> str:
    """Where the rank's stdout and stderr go."""
    return os.path.join(directory, f"output-{rank}")


def stack_path(directory: str, rank: int) -> str:
    """Where the rank writes its Python stacks on SIGUSR1."""
    return os.path.join(directory, f"stack-{rank}")


def rendezvous_path(directory: str) -> str:
    """Where the ranks of a team find each other."""
    return os.path.join(directory, "rendezvous")
