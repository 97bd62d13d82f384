"""Report report.html: the whole report in one file that needs nothing else."""

from .page import render

__all__ = ["render"]
