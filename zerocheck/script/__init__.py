"""From a case to a script that needs torch alone."""

from .injected import apart
from .write import LONGEST, script_of, write_script

__all__ = ["LONGEST", "apart", "script_of", "write_script"]
