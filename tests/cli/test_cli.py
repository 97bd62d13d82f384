"""The command line: what it starts, and how it refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from hand_made import ENVIRONMENT, VIOLATION, case, failed, held, started

from zerocheck import __version__
from zerocheck.case.schema import Case, Model, Optimizer, UserModel, UserOptimizer, UserParameter
from zerocheck.cli import main
from zerocheck.errors import HarnessError, UsageError
from zerocheck.protocol.verdicts import MEMORY, Status
from zerocheck.run import engine as run_engine
from zerocheck.run import replay
from zerocheck.run.execute import launch
from zerocheck.run.findings.case_file import write
from zerocheck.run.findings.findings import failures_of
from zerocheck.run.known_issues.entries import ours
from zerocheck.run.plan.options import RunOptions
from zerocheck.run.records.journal import Handler, Journal
from zerocheck.run.records.records import CaseFile, Record

Engine = Callable[[RunOptions, Sequence[Handler]], int]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def invoke(*args: str) -> Result:
    return CliRunner().invoke(main, args)


def no_ranks(*_: object, **__: object) -> nullcontext[None]:
    return nullcontext()


def with_engine(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> list[RunOptions]:
    """Replace the engine; returns the options that it is called with."""
    asked: list[RunOptions] = []

    def run(options: RunOptions, handlers: Sequence[Handler], *, ranks: object) -> int:
        asked.append(options)
        return engine(options, handlers)

    monkeypatch.setattr(run_engine, "run", run)
    monkeypatch.setattr(launch, "start_ranks", no_ranks)
    return asked


def emitting(records: Sequence[Record], code: int = 0, then: BaseException | None = None) -> Engine:
    def run(options: RunOptions, handlers: Sequence[Handler]) -> int:
        for record in records:
            for handler in handlers:
                handler.handle(record)
        if then is not None:
            raise then
        return code

    return run


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("rnu", "unknown command 'rnu'; did you mean 'run'?"),
        ("run --profil quick", "No such option '--profil'. Did you mean '--profile'?"),
        ("run --profile quik", "unknown profile 'quik'; did you mean 'quick'?"),
        ("run --profile", "Option '--profile' requires an argument."),
        ("run fsdp", "unknown implementation 'fsdp'; did you mean 'fsdp2'?"),
        (
            "run my.py",
            "'my.py' names a file; name the class or build function in it too: my.py:NAME",
        ),
        ("run --feature tyed", "unknown feature 'tyed'; did you mean 'tied'?"),
        ("run --obligations updates", "unknown obligation 'updates'; did you mean 'update'?"),
        ("run --ranks torchrn", "unknown kind of ranks 'torchrn'; did you mean 'torchrun'?"),
        ("run --device cuda", "--device cuda: there is no CUDA device here"),
        ("run --device cuda:x", "unknown device 'cuda:x'; did you mean 'cuda:0'?"),
        ("run --backend ncll", "unknown backend 'ncll'; did you mean 'nccl'?"),
        ("run --backend nccl", "--backend nccl is for GPUs, and the device is the cpu"),
        ("faults --device cuda", "--device cuda: there is no CUDA device here"),
        ("faults --device cdua", "unknown device 'cdua'; did you mean 'cuda'?"),
        ("run --device cuda --obligations peak", "--device cuda: there is no CUDA device here"),
        ("run --device cpus", "unknown device 'cpus'; did you mean 'cpu'?"),
        ("run --world-sizes 0", "world size 0 is out of range (allowed: 1 to 1024)"),
        ("run --world-sizes=-2", "world size -2 is out of range"),
        ("run --world-sizes 1,two", "world size 'two' is not a whole number"),
        ("run --world-sizes 2000", "world size 2000 is out of range"),
        ("run --seed x", "Invalid value for '--seed': 'x' is not a valid integer."),
        ("run --seed \uff12", "Invalid value for '--seed': '\uff12' is not a valid integer."),
        ("run --world-sizes \uff12", "world size '\uff12' is not a whole number"),
        ("run --world-sizes 1-\uff13", "world size '1-\uff13' is not a whole number"),
        ("run --report-dir=", "an empty text names no directory; . is the current one"),
        ("memory gpt2 --world-size \uff12", "'\uff12' is not a valid integer."),
        ("run --seed=-1", "seed -1 is out of range"),
        ("run --known-issues no.toml", "cannot read known issues no.toml: No such file"),
        ("run --max-cases 0", "max cases 0 is out of range"),
        ("replay", "Missing argument 'CASE.json'."),
        ("replay no.json", "there is no file 'no.json'"),
        ("run -q -v", "--quiet and --verbose are opposites"),
        ("replay no.json --implementation zero4", "unknown implementation 'zero4'; did you mean"),
        ("replay x --device cudo", "unknown device 'cudo'; did you mean 'cuda'?"),
        ("report", "Missing argument 'JOURNAL...'."),
        ("report no.ndjson", "there is no journal no.ndjson; give a journal.ndjson, or the"),
        ("report .", "there is no journal in '.'; give a journal.ndjson, or the directory"),
        ("run no.py:build", "there is no file 'no.py' (looked at "),
        ("run no.py:build+gather-stale", "there is no file 'no.py' (looked at "),
        ("run --model no.py:tiny", "there is no file 'no.py' (looked at "),
        ("run no.json", "there is no file 'no.json' (looked at "),
        ("run fsdp2 no.json+gather-stale", "there is no file 'no.json' (looked at "),
        ("run no.jsn", "or give package.module:Name, path/to/file.py:Name or the path of a config"),
        ("faults gather-stal", "unknown fault 'gather-stal'; did you mean 'gather-stale'?"),
        ("faults --profile cj", "unknown profile 'cj'; did you mean 'ci'?"),
        ("faults --obligations updates", "unknown obligation 'updates'; did you mean 'update'?"),
        ("faults --implementation fsdp", "unknown implementation 'fsdp'; did you mean 'fsdp2'?"),
        ("list all", "Got unexpected extra argument (all)"),
    ],
)
def test_wrong_usage(args: str, message: str, tmp_path: Path) -> None:
    result = invoke(*args.split())
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ") and message in result.stderr
    assert "Traceback" not in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("replay old/findings/cas.json", "did you mean 'old/findings/case.json'?"),
        ("replay odl/findings/cas.json", "did you mean 'old/findings/case.json'?"),
        ("replay x/y/z.json", "there is no file 'x/y/z.json'\n"),
        ("replay old", "'old' is a directory; replay takes a file: old/findings/case.json\n"),
        (
            "replay old/empty",
            "'old/empty' is a directory; replay takes a file: there is none in it",
        ),
        ("report odl", "there is no journal odl; did you mean 'old'? Or give a journal.ndjson"),
    ],
)
def test_the_nearest_file_is_named(args: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "old" / "findings").mkdir(parents=True)
    (tmp_path / "old" / "empty").mkdir()
    (tmp_path / "old" / "findings" / "case.json").write_text("{}")
    (tmp_path / "old" / "report.json").write_text("{}")
    result = invoke(*args.split())
    assert result.exit_code == 2 and message in result.stderr


def test_report_of_garbage(tmp_path: Path) -> None:
    (tmp_path / "j").write_text("garbage\n")
    result = invoke("report", "j")
    assert result.exit_code == 2 and "error: j, line 1: not a record" in result.stderr


def test_a_report_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = invoke("run", "--report-dir", "file/below")
    assert result.exit_code == 2 and "error: cannot write to file/below" in result.stderr


def test_help_and_version() -> None:
    assert invoke("--help").exit_code == 0 and "Exit codes:" in invoke("-h").stdout
    assert invoke("run", "--help").exit_code == 0
    assert invoke("--version").stdout == f"zerocheck, version {__version__}\n"
    assert invoke().exit_code == 2


def test_a_deepspeed_config_that_cannot_be_used() -> None:
    """At once, with the nearest spelling: DeepSpeed would ignore the key without a word."""
    Path("ds_config.json").write_text('{"gradient_cliping": 1.0}')
    result = invoke("run", "ds_config.json")
    assert result.exit_code == 2 and result.stderr == (
        "error: ds_config.json: DeepSpeed has no key 'gradient_cliping'; did you mean "
        "'gradient_clipping'? (it would ignore it without a word)\n"
    )


def test_what_a_run_makes_of_a_deepspeed_config(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = with_engine(monkeypatch, emitting(held()))
    Path("ds_config.json").write_text('{"scheduler": {}, "zero_optimization": {"stage": 2}}')
    result = invoke("run", "ds_config.json", "ds_config.json+gather-stale", "fsdp2")
    assert result.exit_code == 0 and len(asked) == 1
    assert result.stderr.splitlines() == [
        "note: ds_config.json runs as stage 2 of DeepSpeed, and clips at 1.0, DeepSpeed's default",
        "note: ds_config.json: left out: scheduler: each case sets the learning rate of each step "
        "itself",
    ]


def test_list() -> None:
    result = invoke("list")
    assert result.exit_code == 0
    for text in ("fsdp2 ", "ownership ", "padding-idx ", "thorough "):
        assert f"  {text}" in result.stdout
    listed = result.stdout.partition("\nknown issues\n")[2]
    assert listed.strip()
    for issue in ours():
        assert issue.fingerprint in listed and issue.reason in listed


def test_options_arrive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.py").touch()
    asked = with_engine(monkeypatch, emitting(held(), 0))
    result = invoke(
        *("run", "zero2", "a.py:My", "--profile", "ci", "--world-sizes", "3,2"),
        *("--seed", "7", "--max-cases", "5", "--obligations", "update,loss"),
        *("--feature", "tied", "--feature", "clip-tight", "--report-dir", "out"),
        *("--known-issues", "none"),
    )
    assert result.exit_code == 0, result.output
    (options,) = asked
    assert options == RunOptions(
        implementations=("zero2", "a.py:My"),
        profile="ci",
        world_sizes=(3, 2),
        seed=7,
        max_cases=5,
        obligations=("loss", "update"),
        features=("tied", "clip-tight"),
        report_dir=Path("out"),
        known_issues=("none",),
    )


def test_without_a_name_a_run_is_a_first_look(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It says so before anything is imported, and whoever chooses a profile gets that."""
    asked = with_engine(monkeypatch, emitting(held(), 0))
    alone, chosen, named = invoke("run"), invoke("run", "--profile", "quick"), invoke("run", "ddp")
    quiet = invoke("run", "--quiet")
    (tmp_path / "pyproject.toml").write_text('[tool.zerocheck]\nprofile = "ci"\n')
    of_project = invoke("run")
    assert [one.profile for one in asked] == ["smoke", "quick", "quick", "smoke", "ci"]
    assert "a first look at 9 implementations: about 45 s on two idle cores" in alone.stderr
    for other in (chosen, named, quiet, of_project):
        assert "a first look" not in other.output


def test_many_ranks_are_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    with_engine(monkeypatch, emitting(held(), 0))
    monkeypatch.setattr("zerocheck.machine.host.processors", lambda: 2)
    text = "64 ranks share 2 processors: a case takes about 5 s"
    assert text in invoke("run", "ddp", "--world-sizes", "2,64").stderr
    assert "share" not in invoke("run", "ddp", "--world-sizes", "2,16").stderr


def test_the_project_has_defaults_and_the_command_line_goes_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = '[tool.zerocheck]\nprofile = "ci"\nseed = 7\nknown_issues = ["none"]\nshrink = false\n'
    (tmp_path / "pyproject.toml").write_text(
        text + 'obligations = ["memory"]\nreport_dir = "out"\n'
    )
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    asked = with_engine(monkeypatch, emitting(held(), 0))
    assert invoke("run", "zero2").exit_code == 0
    args = ("--seed", "0", "--shrink", "--obligations", "loss", "--report-dir", "here")
    assert invoke("run", "zero2", *args).exit_code == 0
    of_project, of_both = asked
    assert of_project == RunOptions(
        implementations=("zero2",), profile="ci", seed=7, known_issues=("none",), shrink=False,
        obligations=MEMORY, report_dir=tmp_path / "out",
    )  # fmt: skip
    assert of_both == RunOptions(
        implementations=("zero2",), profile="ci", known_issues=("none",), obligations=("loss",),
        report_dir=Path("here"),
    )  # fmt: skip
    assert (tmp_path / "out" / "report.md").is_file()


def test_a_wrong_setting_of_the_project(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.zerocheck]\nsead = 1\n")
    result = invoke("run", "zero2")
    assert result.exit_code == 2
    message = "pyproject.toml, [tool.zerocheck]: unknown key 'sead'; did you mean 'seed'?"
    assert result.stderr.startswith("error: ") and message in result.stderr


def test_in_github_actions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    with_engine(monkeypatch, emitting(failed(), 1))
    message = invoke("run").stdout
    assert "::error title=VIOLATED zero2%3A the reduced gradient is 4 times too large::" in message
    report = (tmp_path / "zerocheck-report" / "report.md").read_text()
    assert (tmp_path / "summary.md").read_text() == report
    invoke("report", "zerocheck-report", "--against", "zerocheck-report")
    changes = (tmp_path / "zerocheck-report" / "against.md").read_text()
    assert (tmp_path / "summary.md").read_text() == report + changes
    monkeypatch.setenv("GITHUB_ACTIONS", "")
    assert "::error" not in invoke("run").stdout


def test_report_against_an_earlier_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, records in (("good", held()), ("bad", failed())):
        with_engine(monkeypatch, emitting(records))
        invoke("run", "--report-dir", name)
    result = invoke("report", "bad", "--against", "good", "--report-dir", "out")
    assert result.exit_code == 1, result.output
    assert "VIOLATED zero2: the reduced gradient" in result.stdout  # whole, with its replay line
    assert "  replay      zerocheck replay " in result.stdout
    assert "Newly violated" in result.stdout and "comparison: out/against.md" in result.stdout
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "report.html", "report.json", "report.md", "conformance.md", "junit.xml", "against.json",
        "against.md", "comment.md",
    }  # fmt: skip
    # What was violated before does not count, though the run itself exits with 1.
    assert invoke("report", "bad", "--against", "bad/report.json").exit_code == 0
    assert invoke("report", "bad").exit_code == 1
    fixed = invoke("report", "good", "--against", "bad")
    assert fixed.exit_code == 0 and "Fixed" in fixed.stdout
    missing = invoke("report", "good", "--against", "no")
    assert missing.exit_code == 2 and "cannot read no: No such file" in missing.stderr


def test_one_page_of_several_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, records in (("old", held()), ("new", failed())):
        with_engine(monkeypatch, emitting(records))
        invoke("run", "--report-dir", name)
    result = invoke("report", "--matrix", "old", "new/journal.ndjson")
    assert result.exit_code == 0, result.output
    assert result.stdout == "report: zerocheck-report/releases.md\n"
    text = (tmp_path / "zerocheck-report" / "releases.md").read_text()
    assert "torch 2.13.0 (2)" in text and "ddp / crashed" in text
    assert invoke("report", "--matrix", "old", "new").exit_code == 0  # in its own place again
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "releases.md").write_text("what we release")
    for given, message in (
        (("old", "new"), "takes one journal; of several releases --matrix makes one page"),
        (("--matrix", "old", "--against", "new"), "--against compares two runs"),
        (("--matrix", "old", "no"), "there is no journal no"),
        (("--matrix", "old", "--report-dir", "mine"), "was not written by zerocheck"),
    ):
        refused = invoke("report", *given)
        assert refused.exit_code == 2 and message in refused.stderr, refused.output


@pytest.mark.parametrize(("records", "code"), [(held(), 0), (failed(), 1)])
def test_a_run_writes_all_reports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, records: list[Record], code: int
) -> None:
    with_engine(monkeypatch, emitting(records, code))
    result = invoke("run")
    assert result.exit_code == code
    assert {path.name for path in (tmp_path / "zerocheck-report").iterdir()} == {
        "journal.ndjson", "report.html", "report.json", "report.md", "conformance.md",
        "junit.xml", "comment.md",
    }  # fmt: skip
    assert "report: zerocheck-report/report.html" in result.stdout
    again = invoke("report", "zerocheck-report/journal.ndjson", "--report-dir", "again")
    assert again.exit_code == code
    for name in ("report.html", "report.json", "report.md", "conformance.md", "junit.xml"):
        first = (tmp_path / "zerocheck-report" / name).read_bytes()
        assert (tmp_path / "again" / name).read_bytes() == first
    assert invoke("report", "zerocheck-report").exit_code == code


def test_a_refusal_of_the_engine_leaves_no_journal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a.py").touch()
    with_engine(monkeypatch, emitting([], then=UsageError("a.py does not import")))
    result = invoke("run", "a.py:My")
    assert result.exit_code == 2 and result.stderr == "error: a.py does not import\n"
    assert not list((tmp_path / "zerocheck-report").iterdir())


@pytest.mark.parametrize("error", [HarnessError("the pool is gone"), ZeroDivisionError("oh")])
def test_a_failure_of_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
) -> None:
    with_engine(monkeypatch, emitting([started(), case()], then=error))
    result = invoke("run", "--report-dir", "out")
    assert result.exit_code == 3
    assert "zerocheck itself failed: " in result.stderr and str(error) in result.stderr
    assert "out/harness-error.txt" in result.stderr and "Traceback" not in result.stderr
    text = (tmp_path / "out" / "harness-error.txt").read_text()
    assert "Traceback" in text and str(error) in text
    assert "1 of 4 cases" in (tmp_path / "out" / "report.md").read_text()


def test_ctrl_c_leaves_a_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_engine(monkeypatch, emitting([started(), case()], then=KeyboardInterrupt()))
    result = invoke("run")
    assert result.exit_code == 130 and "interrupted" in result.stderr
    assert "the same command with --reuse zerocheck-report/journal.ndjson goes on" in result.stderr
    report = (tmp_path / "zerocheck-report" / "report.md").read_text()
    assert "did not finish: 1 of 4 cases" in report
    again = invoke("report", "zerocheck-report")
    assert again.exit_code == 130 and "interrupted after 1 of 4 cases" in again.stdout


def test_report_notes_a_torn_line(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        for record in held():
            journal.handle(record)
    (tmp_path / "j").write_bytes((tmp_path / "j").read_bytes()[:-5])
    result = invoke("report", "j")
    assert result.exit_code == 130 and "line 4 is torn" in result.stderr


def test_only_rank_0_of_torchrun_reports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def serve(
        kind: str,
        do: Callable[..., int],
        *,
        device: str,
        backend: str | None,
        timeout_s: float,
        **_: object,
    ) -> int:
        assert (kind, device, backend, timeout_s) == ("torchrun", "cpu", None, 7.0)
        return 1  # what rank 0 said, at its end

    monkeypatch.setattr(launch, "with_ranks", serve)
    assert invoke("run", "--ranks", "torchrun", "--timeout", "7").exit_code == 1
    assert invoke("replay", "x.json", "--ranks", "torchrun", "--timeout", "7").exit_code == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("status", "code"), [("violated", 1), ("holds", 0)])
def test_replay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: Status, code: int) -> None:
    asked: list[Any] = []
    record = case(0, status=status)
    if status == "violated":
        assert record.judgement is not None
        judgement = msgspec.structs.replace(record.judgement, violations=(VIOLATION,))
        record = msgspec.structs.replace(record, judgement=judgement)
    failures = failures_of(record)
    replayed = SimpleNamespace(findings=failures, verdict="[b]again", exit_code=code)

    def note(file: CaseFile, **given: Any) -> Any:
        asked.append((file, given))
        return replayed

    monkeypatch.setattr(replay, "replay", note)
    monkeypatch.setattr(launch, "start_ranks", no_ranks)
    weight = UserParameter(name="weight", shape=(2, 2))
    file = CaseFile(
        implementation="zero2",
        case=Case(
            model=Model(user=UserModel(factory="m.py:tiny", parameters=(weight,))),
            optimizer=Optimizer(kind="user", user=UserOptimizer(location="o.py:Lion")),
        ),
        status=status,
        judgement=None,
        environment=ENVIRONMENT,
    )
    write(tmp_path, "case", file)
    names = ("--implementation", "a.py:My", "--model", "m.py:tiny", "--optimizer", "o.py:Lion")
    result = invoke("replay", "case.json", *names)
    assert result.exit_code == code
    own = {"implementation": "a.py:My", "model": "m.py:tiny", "optimizer": "o.py:Lion"}
    assert asked == [(file, {**own, "ranks": None})]
    assert ("VIOLATED zero2" in result.stdout) == (status == "violated")
    assert result.stdout.endswith("[b]again\n")


def test_a_closed_pipe_is_no_failure_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: object, **__: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("zerocheck.cli.list._section", closed)
    result = invoke("list")
    assert result.exit_code == 1 and "zerocheck itself failed" not in result.output
