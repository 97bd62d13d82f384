"""Rank processes of a command: started here, or by a launcher.

Imports no torch: rank processes that are started here import it while the command does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ...catalogue import modules_of
from ...errors import ExitCode, RanksLost, UsageError
from ...machine import launcher
from ...machine.devices import CPU
from ...machine.signals import StopSignals
from ...ranks.pool import Pool
from ...session_objects import session_code
from .machine import check_machine
from .rank_pool import TARGET, RankPool

if TYPE_CHECKING:
    from ..plan.options import RunOptions

PATIENCE_S = 5.0
"""Seconds without any sign of life after which ranks count as hung."""


def with_ranks_of(options: RunOptions, do: Callable[[RankPool], int]) -> int:
    """Call `do` with the rank processes that a run of these options needs, as `with_ranks`."""
    return with_ranks(
        options.ranks,
        do,
        most_ranks=max(options.world_sizes),
        device=options.device,
        backend=options.backend,
        timeout_s=options.timeout,
        implementations=options.implementations,
    )


def with_ranks(
    kind: str,
    do: Callable[[RankPool], int],
    *,
    most_ranks: int = 1,
    device: str = CPU,
    backend: str | None = None,
    timeout_s: float,
    implementations: Iterable[str] = (),
) -> int:
    """Call `do` with rank processes of this kind; return its exit code.

    most_ranks: the largest world size, where they are started here; implementations: that will
    run, so that their libraries are imported once for all ranks.

    On ranks of a launcher other than 0 the same code is returned, and `do` is not called: they
    serve until rank 0 is through with it. Raises what `do` raises, RanksLost, and UsageError for a
    device that is not there.
    """
    if kind == "processes":
        with start_ranks(device, backend, implementations, most_ranks=most_ranks) as pool:
            return do(pool)
    launcher.check_environment()
    if launcher.is_rank_0():
        return _on_rank_0(do, device, backend, timeout_s)
    from ...ranks.torchrun import TorchrunPool

    # Rank 0 prints all messages, that on Ctrl-C too.
    launcher.leave_at_once(ExitCode.INTERRUPTED)
    with TorchrunPool(TARGET, device=device, backend=backend, timeout_s=timeout_s) as pool:
        code = pool.serve()
    launcher.leave_at_once(code)
    launcher.report_exit(code, launcher.SEE_RANK_0)
    return code


def start_ranks(
    device: str = CPU,
    backend: str | None = None,
    implementations: Iterable[str] = (),
    *,
    most_ranks: int = 1,
) -> Pool:
    """Start rank processes on this machine.

    most_ranks: the largest world size. Raises UsageError for a missing device, and for a machine on
    which so many ranks cannot start.
    """
    check_machine(most_ranks)
    if device != CPU:
        from ...ranks.device import check_there

        check_there(device)
    return Pool(
        TARGET,
        device=device,
        backend=backend,
        patience_s=PATIENCE_S,
        warm=modules_of(implementations),
        preparation=session_code(),
    )


def device_for(was: str) -> str:
    """Return the device for a replay without a given one. was: cpu or cuda, where it was found.

    It is that kind, if this machine has it; else the CPU, which the verdict says.
    """
    if was == CPU:
        return CPU
    from ...ranks.device import check_there

    try:
        check_there(was)
    except UsageError:
        return CPU
    return was


def sharing_note(device: str, most: int) -> str:
    """Return a note on ranks that share a GPU, `most` of them at once; empty if none does.

    Raises UsageError for a device that is not there.
    """
    from ...ranks.device import check_there, shares

    check_there(device)
    if not shares(device, most):
        return ""
    return f"up to {most} ranks share the GPUs of {device}: with gloo, since nccl refuses that"


def _on_rank_0(
    do: Callable[[RankPool], int], device: str, backend: str | None, timeout_s: float
) -> int:
    from ...ranks.torchrun import TorchrunPool

    code: int = ExitCode.BROKEN
    StopSignals(launcher.INTERRUPTS).__enter__()  # until the process ends
    with TorchrunPool(TARGET, device=device, backend=backend, timeout_s=timeout_s) as pool:
        try:
            code = do(pool)
        except UsageError:
            code = ExitCode.USAGE
            raise
        except KeyboardInterrupt:
            code = ExitCode.INTERRUPTED
            raise
        except RanksLost as lost:
            pool.give_up(str(lost))
            raise
        finally:
            pool.code = code
            launcher.leave_at_once(code)
    return code
