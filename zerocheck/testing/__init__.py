"""zerocheck in pytest: tests of the obligations of implementations, and of single cases.

- `checks.py`: tests of obligations (`parametrize_with_checks`), and of a case (`check`)
- `progress.py`: progress of the runs behind tests, in pytest's terminal
- `session.py`: options and runs of this pytest session
- `shared_run.py`: one run behind many tests, on any number of pytest's workers
- `single_case.py`: verdicts on single cases, on the shared rank processes
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checks import CheckFailed as CheckFailed
    from .checks import check as check
    from .checks import parametrize_with_checks as parametrize_with_checks

__all__ = ["CheckFailed", "check", "parametrize_with_checks"]


def __getattr__(name: str) -> Any:
    # On first use: the plugin, which every pytest session loads, imports this package.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".checks", __name__), name)
