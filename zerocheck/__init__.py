"""Step-by-step checks of sharded-training code against a single-device reference."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attached.session import attach as attach
    from .contract.build import Built as Built
    from .contract.build import BuiltImplementation as BuiltImplementation
    from .contract.groups import groups as groups
    from .contract.implementation import Implementation as Implementation
    from .contract.implementation import Loader as Loader
    from .contract.implementation import Microbatch as Microbatch
    from .contract.implementation import Saving as Saving
    from .contract.implementation import Step as Step
    from .contract.implementation import StepReport as StepReport
    from .contract.semantics import Semantics as Semantics
    from .contract.shard import Shard as Shard
    from .errors import Unsupported as Unsupported
    from .errors import UsageError as UsageError
    from .errors import Violated as Violated
    from .testing import parametrize_with_checks as parametrize_with_checks

__version__ = "0.1.0"

# Where each public name lives. They are imported on first use, so that `zerocheck --help`, and
# every pytest session that only has the plugin installed, starts without torch.
_WHERE = {
    "Built": "contract.build",
    "BuiltImplementation": "contract.build",
    "Implementation": "contract.implementation",
    "Loader": "contract.implementation",
    "Microbatch": "contract.implementation",
    "Saving": "contract.implementation",
    "Semantics": "contract.semantics",
    "Shard": "contract.shard",
    "Step": "contract.implementation",
    "StepReport": "contract.implementation",
    "Unsupported": "errors",
    "UsageError": "errors",
    "Violated": "errors",
    "attach": "attached.session",
    "groups": "contract.groups",
    "parametrize_with_checks": "testing",
}

__all__ = [*_WHERE]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_WHERE[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
