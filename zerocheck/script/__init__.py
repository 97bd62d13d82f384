"""Script of a case that needs torch alone.

- `checks.py`: comparisons that a script makes: those of the finding's obligation
- `model.py`: text of a case's model: the blocks and options that occur in it, and no others
- `script.py.j2`: template of a script
- `source.py`: parts of a script's source text: imports, tuples and docstrings
- `step.j2`: template of its training step
- `user.py`: a user's `build` function in a script: its module is imported, and zerocheck is not
- `write.py`: script of torch alone that shows the fault of a case
"""

from .write import LONGEST, script_of, scripts, write_script

__all__ = ["LONGEST", "script_of", "scripts", "write_script"]
