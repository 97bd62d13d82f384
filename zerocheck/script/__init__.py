"""Script of a case that needs torch alone."""

from .write import LONGEST, script_of, write_script

__all__ = ["LONGEST", "script_of", "write_script"]
