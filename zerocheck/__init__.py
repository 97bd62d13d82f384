"""Step-by-step checks of sharded-training code against a single-device reference.

- `__main__.py`: `python -m zerocheck`
- `catalogue.py`: registry of implementations by name, and of faults to inject
- `compat.py`: private torch API that zerocheck needs, probed in this one place
- `compat_compiler.py`: torch's compiler, left alone where nobody compiles
- `compat_device.py`: device without hardware in torch's place for private backends: its tensors
  have no data
- `compat_memory.py`: private torch API for the measurement and simulation of memory, in one place
- `errors.py`: errors of zerocheck, and hints that help a user to fix them
- `floating_point.py`: model of rounding: formats, enclosures, and the last rounding of a result
- `foreign_text.py`: foreign text, made safe for a terminal, a report or a shell
- `pytest_plugin.py`: pytest plugin: options, report directories, terminal summary
- `session_objects.py`: objects that no file has, such as functions of a notebook
- `sizes.py`: sizes in bytes, as people write them
- `strategies.py`: hypothesis strategies for cases
- `user_code.py`: import of the user's code by name, and the name by which to import an object
- `version.py`: version of zerocheck
- `adapters/`: built-in implementations: DDP, FSDP, DeepSpeed, the textbook ZeRO
- `attached/`: checks of chosen steps of a real training run (`zerocheck.attach`)
- `case/`: case: everything that determines a run, as data
- `causes/`: registry of the causes that the judge names
- `checkpoint/`: checks of existing checkpoints
- `cli/`: command line, one file per command
- `contract/`: contract between zerocheck and the code under test
- `drive/`: execution of one job in one rank
- `execution/`: properties of an execution that decide the last bits
- `faults/`: bugs planted on purpose, and their catalogue
- `integrations/`: checks of steps in trainers of other libraries, in one line each
- `job_metrics/`: metrics of a running job, and the failure patterns that they show
- `judge/`: verdicts on what ranks observed, and their causes
- `kill_matrix/`: kill matrix (`zerocheck faults`): proof that each planted bug is caught
- `machine/`: machine on which ranks run: memory, devices, signals, launcher
- `memory/`: memory of a rank in advance (`zerocheck memory`)
- `models/`: model and samples of a case
- `optimizers/`: optimizers: what a step of each computes, and what can go wrong in it
- `protocol/`: data that crosses the border of a rank process, and verdicts
- `ranks/`: rank processes: pool, transport, watchdog, torchrun
- `report/`: reports, one file per format
- `run/`: engine of a run: choice of cases, execution, findings, records
- `script/`: script of a case that needs torch alone
- `testing/`: zerocheck in pytest: tests of obligations, and of single cases
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import __version__ as __version__

if TYPE_CHECKING:
    from .attached.attach import attach as attach
    from .attached.record.axes import SequenceAxis as SequenceAxis
    from .attached.saves.published import compare_weights as compare_weights
    from .cli.python_run import run as run
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
    from .job_metrics.options import JobMetrics as JobMetrics
    from .testing.checks import parametrize_with_checks as parametrize_with_checks

# Where each public name lives. They are imported on first use, so that `zerocheck --help`, and
# every pytest session that only has the plugin installed, starts without torch.
_WHERE = {
    "Built": "contract.build",
    "BuiltImplementation": "contract.build",
    "Implementation": "contract.implementation",
    "JobMetrics": "job_metrics.options",
    "Loader": "contract.implementation",
    "Microbatch": "contract.implementation",
    "Saving": "contract.implementation",
    "Semantics": "contract.semantics",
    "SequenceAxis": "attached.record.axes",
    "Shard": "contract.shard",
    "Step": "contract.implementation",
    "StepReport": "contract.implementation",
    "Unsupported": "errors",
    "UsageError": "errors",
    "Violated": "errors",
    "attach": "attached.attach",
    "compare_weights": "attached.saves.published",
    "groups": "contract.groups",
    "parametrize_with_checks": "testing.checks",
    "run": "cli.python_run",
}

# The import of the package `run` binds this name to it, once. From then on the name is the
# function, and modules of the package are imported by `from zerocheck.run import ...`.
import_module(".run", __name__)
del globals()["run"]

__all__ = [*_WHERE]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_WHERE[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
