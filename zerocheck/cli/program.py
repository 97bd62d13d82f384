"""Failures of the command line: one line for people, an exit code, a traceback in a file."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import click

from ..errors import ExitCode, HarnessError, RanksLost, UsageError, not_installed, unknown
from ..foreign_text import printable
from ..machine import launcher, signals
from ..machine.shortage import shortage
from ..machine.warning_filters import relax_warnings
from ..version import __version__
from .output import remark, say

LINGER_S = 10.0
"""Other ranks of a launcher wait so long with what rank 0 says too; it ends them before."""


class Program(click.Group):
    """A click group whose commands return exit codes and whose errors read alike."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise unknown("command", args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> NoReturn:
        """Run the program and exit."""
        if launcher.has_launcher():  # its signals have handlers of their own
            self._main(args, prog_name, **extra)
        handlers = signals.StopSignals()
        handlers.__enter__()
        try:
            self._main(args, prog_name, **extra)
        finally:
            signals.ignore()
            if args is not None:  # called from Python, which goes on
                handlers.__exit__(None, None, None)

    def _main(self, args: Sequence[str] | None, prog_name: str | None, **extra: Any) -> NoReturn:
        extra["standalone_mode"] = False
        given = list(sys.argv[1:] if args is None else args)
        relax_warnings()
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")  # a terminal may lack a character
        try:
            _check_directory()
            code = super().main(given, prog_name, **extra)
        except click.exceptions.NoArgsIsHelpError as error:
            say(error.format_message())
            code = ExitCode.USAGE
        except click.ClickException as error:
            code = _say(error.format_message(), ExitCode.USAGE)
        except UsageError as error:
            code = _say(str(error), ExitCode.USAGE)
        except click.Abort:
            signals.ignore()
            code = _say("interrupted", ExitCode.INTERRUPTED)
        except BrokenPipeError:  # who reads has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = ExitCode.INTERRUPTED
        except RanksLost as error:
            code = _say(str(error), ExitCode.BROKEN)
        except Exception as error:
            code = _harness_failed(error, given)
        _leave(code or 0)


def _check_directory() -> None:
    """Raise UsageError where the current directory was removed."""
    try:
        os.getcwd()
    except OSError as error:
        raise UsageError(
            f"the current directory cannot be used ({error.strerror}); change to one that exists"
        ) from error


def _say(message: str, code: int) -> int:
    """Print an error, and report the exit code to the launcher.

    If all ranks of a launch find the same error, only rank 0 prints it.
    """
    if launcher.is_rank_0() or code == ExitCode.BROKEN:
        remark(f"error: {message}")
    launcher.report_exit(code, printable(message))
    return code


def _leave(code: int) -> NoReturn:
    signals.ignore()
    exec("")  # Python would end itself by SIGINT where an interrupt once left another `exec`
    if code in (ExitCode.USAGE, ExitCode.INTERRUPTED) and not launcher.is_rank_0():
        launcher.wait_for_rank_0(code, LINGER_S)
    if launcher.has_launcher():
        # Process groups that broke take seconds to tear down, and the launcher ends us meanwhile.
        _flush()
        os._exit(code)
    if not _flush():
        code = code or ExitCode.USAGE
    sys.exit(code)


def _flush() -> bool:
    """Write what is left to be printed. False where it cannot be; Python then tries no more."""
    written = True
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):  # a full disk; ValueError if it was closed
            written = False
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return written


def _harness_failed(error: Exception, args: list[str]) -> int:
    if (message := not_installed(error)) is not None:
        return _say(message, ExitCode.USAGE)
    if "torch" not in sys.modules and _raised_in("torch", error):
        lines = [line.strip(" .,") for line in str(error).splitlines() if line.strip()]
        what = f"{type(error).__name__}: {'; '.join(lines[:2])}"
        return _say(f"torch cannot be imported here: {what}", ExitCode.USAGE)
    from ..machine.devices import NO_MEMORY, out_of_memory

    if out_of_memory(error):
        return _say(NO_MEMORY.format(device="the GPU"), ExitCode.USAGE)
    lacking = shortage(error)
    if lacking is not None:
        return _say(lacking, ExitCode.USAGE)
    what = str(error) if isinstance(error, HarnessError) else f"{type(error).__name__}: {error}"
    where = _write_traceback(error, args)
    return _say(
        f"zerocheck itself failed: {what}\n  the traceback is in {where}; please report it",
        ExitCode.BROKEN,
    )


def _raised_in(package: str, error: Exception) -> bool:
    """Return True if a frame of the error is in a package."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(str(one.f_globals.get("__name__")).split(".")[0] == package for one in frames)


def _write_traceback(error: Exception, args: list[str]) -> Path:
    """Write the traceback into the report directory, or a temporary file if that fails."""
    head = f"zerocheck {__version__}, arguments {args}\n"
    text = printable(head + "".join(traceback.format_exception(error)))
    directory = _report_dir(args)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "harness-error.txt"
        path.write_text(text, encoding="utf-8")
    except OSError:
        with tempfile.NamedTemporaryFile(
            "w", prefix="zerocheck-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            file.write(text)
        path = Path(file.name)
    return path


def _report_dir(args: list[str]) -> Path:
    """Find the report directory in the raw arguments: click's context is gone after an error."""
    for index, arg in enumerate(args):
        if arg == "--report-dir" and index + 1 < len(args):
            return Path(args[index + 1])
        if arg.startswith("--report-dir="):
            return Path(arg.partition("=")[2])
    return Path("zerocheck-report")
