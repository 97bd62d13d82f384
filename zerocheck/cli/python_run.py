"""`zerocheck.run`: the command `zerocheck run`, called from Python."""

from __future__ import annotations

import html
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

from ..catalogue import SESSION, maker_of
from ..errors import ExitCode, UsageError, unknown
from ..foreign_text import printable
from ..machine import launcher, signals
from ..machine.devices import CPU
from ..session_objects import available, session_code, unpacked
from ..user_code import UNDER_MAIN, Nameable, described, importable_name
from .journal import start_replay, start_run
from .options import detail_of
from .run import run_options

if TYPE_CHECKING:
    from ..protocol.verdicts import Obligation
    from ..run.records.records import CaseFile, Finding

File = str | PathLike[str]


class RunFinding:
    """One finding of a run.

    record: all that the run says of it.
    """

    def __init__(self, record: Finding, case: CaseFile | None, code: bytes) -> None:
        self.record = record
        self._case = case
        self._code = code

    @property
    def title(self) -> str:
        """Sentence on what is wrong."""
        return self.record.title

    @property
    def obligation(self) -> Obligation | None:
        """Obligation that is violated; None for a crash or a hang."""
        return self.record.obligation

    @property
    def causes(self) -> tuple[str, ...]:
        """Known bugs that explain it."""
        return self.record.causes

    @property
    def case_file(self) -> Path | None:
        """File for `zerocheck replay`."""
        return Path(self.record.case_file) if self.record.case_file else None

    def __str__(self) -> str:
        """Return the finding as the command line prints it."""
        from ..run.records.finding_text import finding_text

        return finding_text(self.record)

    def __repr__(self) -> str:
        return f"<finding: {printable(self.title)}>"

    def replay(self, implementation: Nameable | None = None) -> int:
        """Run the case again in fresh rank processes, and print the result.

        implementation: run it on this one, such as the function with a fix; None for the one that
        was checked, as it was then. Returns 0 if the case holds now, and 1 if it fails again.
        """
        if self._case is None:
            raise UsageError("this finding has no case to replay")
        case = self._case
        own = self.record.model or None, self.record.optimizer or None
        needed = (*own, case.implementation if implementation is None else None)
        pickled = unpacked(self._code)
        objects = SessionObjects({name: pickled[name] for name in needed if name in pickled})
        name = case.implementation if implementation is None else objects.name_of(implementation)
        with signals.StopSignals(), available(objects.by_name):
            return start_replay(lambda: case, name, own)


class RunResult:
    """Result of `zerocheck.run`.

    exit_code: 0 if all obligations hold, and 1 for a finding or if nothing was checked, as of the
    command line; verdict: why the run fails, or that all obligations hold; findings: those that
    fail the run; page: the report, to open in a browser.
    """

    def __init__(
        self, exit_code: int, verdict: str, findings: Sequence[RunFinding], page: Path
    ) -> None:
        self.exit_code = exit_code
        self.verdict = verdict
        self.findings = tuple(findings)
        self.page = page

    def __str__(self) -> str:
        """Return the findings and the verdict."""
        return "\n\n".join([*map(str, self.findings), self.verdict])

    def __repr__(self) -> str:
        count = len(self.findings)
        return (
            f"<zerocheck.run: {count} finding{'s'[: count != 1]}, exit code {self.exit_code}, "
            f"{self.page}>"
        )

    def _repr_html_(self) -> str:
        """Return the verdict, the findings and a link to the page, for a notebook."""
        color = "#c62828" if self.exit_code else "#2e7d32"
        parts = [f'<p style="color: {color}; font-weight: bold">{_escaped(self.verdict)}</p>']
        for finding in self.findings:
            parts.append(f"<pre>{_escaped(finding)}</pre>")
        parts.append(f'<p><a href="{_escaped(self.page)}">{_escaped(self.page)}</a></p>')
        return "\n".join(parts)


def _escaped(text: object) -> str:
    return html.escape(printable(str(text)))


class SessionObjects:
    """Objects of a call and the names under which rank processes have them.

    An object that can be imported keeps its name. Any other one gets `__main__:NAME`, and goes to
    rank processes by its code.
    """

    def __init__(self, by_name: Mapping[str, Any]) -> None:
        self.by_name = dict(by_name)

    def name_of(self, value: Any, needed: str = "") -> str:
        """Return the name of an object.

        Raises UsageError for what is neither a name, a function nor a class. needed: what a message
        asks for, if it is no implementation.
        """
        function = value.func if isinstance(value, partial) else value
        if isinstance(value, str):
            return value
        if not (inspect.isclass(function) or inspect.isfunction(function)):
            if needed:
                raise UsageError(f"got {described(value)}; needed is {needed}")
            if maker_of(value) is None:
                return importable_name(value)  # which says what is needed
        elif function is value and value.__module__ != SESSION:
            with suppress(UsageError):
                return importable_name(value)
        label = getattr(function, "__name__", type(value).__name__)
        label = label if label.isidentifier() else "function"
        numbers = ("", *(f"_{number}" for number in range(2, len(self.by_name) + 3)))
        names = (f"{SESSION}:{label}{number}" for number in numbers)
        name = next(name for name in names if self.by_name.get(name, value) is value)
        self.by_name[name] = value
        return name


def run(
    *implementations: Nameable | Sequence[Nameable],
    profile: str | None = None,
    world_sizes: Iterable[int] | str | None = None,
    seed: int | None = None,
    max_cases: int | None = None,
    obligations: Iterable[str] | str | None = None,
    optimizer: Nameable | None = None,
    known_issues: File | Iterable[File] | None = None,
    shrink: bool | None = None,
    report_dir: File | None = None,
    model: str | Callable[[], Any] | None = None,
    features: Iterable[str] | str = (),
    device: str | None = None,
    backend: str | None = None,
    shard: str | None = None,
    reuse: File | Iterable[File] = (),
    quiet: bool = False,
    verbose: bool = False,
    **misspelled: Never,
) -> RunResult:
    """Check implementations of sharded training, as `zerocheck run` does.

        result = zerocheck.run(my_fsdp, world_sizes=(1, 2, 3))
        result.exit_code, result.verdict, result.findings, result.page

    It prints what the command line prints. Functions and classes may be defined anywhere: in a
    notebook, in the script that runs, or in a function. Rank processes import those that stand at
    the top of a module, and get the others by their code. They never run the script again, so that
    it needs no `if __name__ == "__main__":`.

    Args:
        implementations: Functions `build(model, case, mesh)`, classes, or names as on the command
            line; several of them, or a list. None for all built-in implementations.
        model: Your own model in every case: a function that returns (model, batch) or (model,
            batch, loss), or its name `path/to/file.py:factory`.
        optimizer: Optimizer of every case: "sgd", a class of your own, or its name
            `path/to/file.py:Class`.

    The other arguments are the options of `zerocheck run`, with the same defaults; options that are
    left out come from `[tool.zerocheck]` in pyproject.toml, and then from the profile.

    Returns:
        RunResult: exit code, verdict, findings, and the page of the report.

    Raises:
        UsageError: For arguments that cannot be used, and for code that cannot be loaded.
        KeyboardInterrupt: After an interrupt, when the report of what was judged is written.
    """
    for name in misspelled:
        raise unknown("argument of zerocheck.run,", name, _ARGUMENTS)
    if launcher.has_launcher():
        raise UsageError(
            "zerocheck.run starts rank processes, and this process is one of several already. If "
            f"it imports this file, {UNDER_MAIN} For torchrun: torchrun ... -m zerocheck run"
        )
    from ..run.plan.settings import of_python

    objects = SessionObjects({})
    names = [objects.name_of(implementation) for implementation in _flat(implementations)]
    if implementations and not names:
        raise UsageError("zerocheck.run got an empty list; needed is at least one implementation")
    model_name = None if model is None else objects.name_of(model, _MODEL)
    if optimizer is not None:
        optimizer = objects.name_of(optimizer, _OPTIMIZER)
    settings = of_python(
        {
            "profile": profile,
            "world_sizes": world_sizes,
            "seed": seed,
            "max_cases": max_cases,
            "obligations": obligations,
            "optimizer": optimizer,
            "known_issues": known_issues,
            "shrink": shrink,
            "report_dir": report_dir,
        }
    )
    detail = detail_of(quiet, verbose)
    with signals.StopSignals(), available(objects.by_name):
        options = run_options(
            names,
            settings,
            features=_texts(features),
            model=model_name,
            device=device or CPU,
            backend=backend,
            shard=shard,
            reuse=tuple(map(Path, _texts(reuse))),
        )
        code = start_run(options, detail=detail)
        pickled = session_code()
    if code == ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    return _result(options.report_dir, code, pickled)


_MODEL = (
    "a function that returns (model, batch) or (model, batch, loss), or its name "
    "path/to/file.py:factory, as the model"
)
_OPTIMIZER = "a class, its name path/to/file.py:Class, or a name such as 'sgd', as the optimizer"
_ARGUMENTS = [
    name
    for name, parameter in inspect.signature(run).parameters.items()
    if parameter.kind == inspect.Parameter.KEYWORD_ONLY
]


def _flat(implementations: Iterable[Nameable | Sequence[Nameable]]) -> Iterator[Nameable]:
    for implementation in implementations:
        if isinstance(implementation, list | tuple):
            yield from implementation
        else:
            yield implementation  # type: ignore[misc]


def _texts(values: File | Iterable[File]) -> tuple[str, ...]:
    """Return several texts, of which one may come alone."""
    several = (values,) if isinstance(values, str | PathLike) else values
    return tuple(fspath(value) for value in several)


def _result(directory: Path, exit_code: int, pickled: bytes) -> RunResult:
    """Return the result that the journal of a run has. pickled: the objects that it had."""
    from ..report.known_issues import all_hold
    from ..report.progress import reasons_of
    from ..run.findings.case_file import read as read_case
    from ..run.records.journal import read
    from ..run.records.tally import tally

    counted = tally(read(directory / "journal.ndjson"))
    findings = []
    for record in counted.findings:
        # Now, since the next run in the directory moves the file.
        case = read_case(Path(record.case_file)) if record.case_file else None
        findings.append(RunFinding(record, case, pickled))
    verdict = "\n".join(reasons_of(counted)) or all_hold(counted)
    return RunResult(exit_code, verdict, findings, directory / "report.html")
