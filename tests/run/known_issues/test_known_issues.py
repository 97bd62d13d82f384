"""Files of known issues: how they are read, and what they match."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import msgspec
import pytest
from entry_text import entry
from hand_made import VIOLATION, case

from zerocheck.case.schema import Case, Training, TrainingSegment
from zerocheck.catalogue import LIBRARIES
from zerocheck.contract.shard import Role
from zerocheck.errors import UsageError
from zerocheck.protocol.layout import Term
from zerocheck.protocol.verdicts import EQUIVALENCE, RESUME, Obligation, Status, Violation
from zerocheck.run.findings.issue_matcher import KnownIssueMatcher
from zerocheck.run.known_issues.entries import OURS, ROLES, KnownIssue, load, ours, read
from zerocheck.run.known_issues.releases import Releases, library_of
from zerocheck.run.plan.options import RunOptions
from zerocheck.run.records.records import CaseFinished, Unverified


def issues_of(tmp_path: Path, text: str) -> tuple[KnownIssue, ...]:
    path = tmp_path / "known.toml"
    path.write_text(text)
    return read(path)


def test_every_field_is_read(tmp_path: Path) -> None:
    text = entry(
        "fsdp2 / crashed / RuntimeError",
        features=["clip-inf", "world-3"],
        says="infinity norm",
        torch=">=2.11,<2.14",
        link="https://example.org/7",
        page="reports/findings/a.md",
        case='{ mesh = [3], training = { clip = 1.0, norm = "inf" } }',
    )
    (issue,) = issues_of(tmp_path, text)
    assert issue.implementation == "fsdp2" and issue.obligation is None and not issue.hangs
    assert issue.case == Case(mesh=(3,), training=Training(clip=1.0, norm="inf"))
    assert issue.source.endswith("known.toml, entry 1")
    assert issue.record.page == "reports/findings/a.md"
    assert issues_of(tmp_path, "# nothing\n") == ()


def test_roles_of_shards_and_memory_are_known() -> None:
    assert {*get_args(Role), *get_args(Term)} <= ROLES


GOOD = entry("zero2 / gradient / gradient x W")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            GOOD + entry("fsdp / gradient"),
            r"entry 2 \(line 4\): unknown implementation 'fsdp'; did",
        ),
        (entry("fsdp2"), r"names an implementation only; a finding prints its fingerprint"),
        (
            entry("fsdp2 / gradient / gradeint x W"),
            r"'gradeint x W'; did you mean 'gradient x W'\?",
        ),
        (entry("fsdp2 / clip / norm / locl norm"), r"'locl norm'; did you mean 'local norm'\?"),
        (entry("fsdp2 / clip / nrm"), r"unknown cause 'nrm'"),
        (entry("fsdp2 / gradeint"), r"fingerprint 'gradeint'; did you mean 'gradient'\?"),
        (entry("my.py / gradient"), r"'my.py' names a file; name the class"),
        (entry("fsdp2 / clip", features=["cliping"]), r"feature 'cliping'; did you mean 'clip'\?"),
        (entry("fsdp2 / clip", feature=["clip"]), r"field 'feature'; did you mean 'features'\?"),
        (entry("fsdp2 / clip", link=7), r"line 1\): link: expected str, got int"),
        (entry("fsdp2 / clip", torch="2.13"), r"torch: '2.13' is neither a list of versions nor a"),
        (entry("fsdp2 / clip", torch=["new"]), r"torch: \['new'\] is neither a list"),
        (entry("fsdp2 / clip", case="{ mesh = [0] }"), r"entry 1 \(line 1\): case: mesh\[0\] is 0"),
        (entry("fsdp2 / clip", case="{ model = { tied = true } }"), r"tied needs the stem 'embed"),
        (entry("fsdp2 / clip", case="{ meshes = [2] }"), r"no field 'meshes'; did you mean 'mesh'"),
        (
            entry("fsdp2 / clip", case="{ mesh = [3] }", features=["world-3", "clip"]),
            r"its case lacks clip of the entry's features",
        ),
        (entry("fsdp2 / hung"), r"a hang needs `features`"),
        ("[[issue]]\nfingerprint = 'fsdp2 / clip'\n", r"entry 1 \(line 1\): it lacks .* 'reason'"),
        ("[[issue]]\nreason = 'so'\n", r"it lacks the field 'fingerprint'"),
        ("[issue]\nreason = 'so'\n", r"each entry starts with \[\[issue\]\], in two brackets"),
        ("measured = 1\n" + GOOD, r"measured: it is a table"),
        ('[measured]\ntorh = ["1"]\n' + GOOD, r"'torh'; did you mean 'torch'\?"),
        ('[measured]\ntorch = "2.13.0"\n' + GOOD, r"measured.torch: it is a list of versions"),
        ('[measured]\ntorch = ["new"]\n' + GOOD, r"measured.torch: .*'new'"),
        ("avoid = 1\n" + GOOD, r"\[avoid\] maps the page of a fault, or its reason, to a sentence"),
        ("[avoid]\nsoo = 'Do not.'\n" + GOOD, r"no entry has the page or reason 'soo'"),
        (entry("deepspeed1 / clip", deepspeed="0.19"), r"deepspeed: '0.19' is neither a list"),
        ("issues = 1\n", r"unknown field 'issues'; did you mean 'issue'\?"),
        ("[[issue]\n", r"is not TOML: .*line 1"),
    ],
)
def test_refusals(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        issues_of(tmp_path, text)
    assert "known.toml" in str(error.value)


def test_ours_are_there_unless_they_are_switched_off(tmp_path: Path) -> None:
    assert OURS.is_file() and load(()) == ours()
    assert load(("none",)) == ()
    path = tmp_path / "known.toml"
    path.write_text(GOOD)
    assert load((str(path),)) == (*read(path), *ours())
    assert RunOptions(known_issues=("none", str(path))).issues == read(path)
    for issue in ours():
        assert ":" not in issue.implementation
        assert (issue.case is None) == issue.sometimes
        # When a writer dies depends on the clock, and who wins a race; all else shows every time.
        races = issue.reason.endswith("gloo ends them in any order.")
        assert issue.sometimes == (races or issue.obligation == "durability")
        assert not issue.page or (Path(__file__).parents[3] / issue.page).is_file()
        assert issue.avoid.endswith("."), issue.record.fault


@pytest.mark.parametrize(
    ("torch", "version", "known"),
    [
        ("", "2.13.0+cpu", True),
        (">=2.11,<2.14", "2.13.0+cpu", True),
        (">=2.11,<2.14", "2.14.0.dev20261101+cpu", False),
        (">=2.11,<2.14", "2.10.1", False),
        (["2.12.0", "2.13.0"], "2.13.0+cu130", True),
        (["2.12.0", "2.13.0"], "2.13.1", False),
        ([], "2.13.0", False),
    ],
)
def test_versions_of_torch(
    tmp_path: Path, torch: str | list[str], version: str, known: bool
) -> None:
    (issue,) = issues_of(tmp_path, entry("fsdp2 / clip", torch=torch))
    assert issue.known_in(Releases({"torch": version})) is known


@pytest.mark.parametrize(
    ("deepspeed", "version", "known"),
    [("<0.18", "0.17.6", True), ("<0.18", "0.19.8", False), ("<0.18", "", True), ([], "1", False)],
)
def test_versions_of_deepspeed(
    tmp_path: Path, deepspeed: str | list[str], version: str, known: bool
) -> None:
    (issue,) = issues_of(tmp_path, entry("deepspeed1 / clip", deepspeed=deepspeed))
    assert issue.known_in(Releases({"torch": "2.13.0", "deepspeed": version})) is known


MEASURED = '[measured]\ntorch = ["2.12.1", "2.13.0"]\ndeepspeed = ["0.19.8"]\n'


@pytest.mark.parametrize(
    ("implementation", "releases", "library"),
    [
        ("fsdp2", Releases({"torch": "2.13.0+cpu"}), ""),
        ("fsdp2", Releases({"torch": "2.13.1", "deepspeed": "0.19.8"}), "torch"),
        ("deepspeed1", Releases({"torch": "2.13.1", "deepspeed": "0.19.8"}), ""),
        ("deepspeed1", Releases({"torch": "2.13.0", "deepspeed": "0.18.9"}), "deepspeed"),
    ],
)
def test_what_was_not_measured(
    tmp_path: Path, implementation: str, releases: Releases, library: str
) -> None:
    text = entry(f"{implementation} / gradient / gradient x W")
    (measured,) = issues_of(tmp_path, MEASURED + text)
    assert measured.unmeasured(releases) == library
    (anywhere,) = issues_of(tmp_path, text)
    assert anywhere.unmeasured(releases) == ""


@pytest.mark.parametrize(("version", "stale"), [("2.13.0", True), ("2.16.0", False)])
def test_what_was_not_measured_is_never_stale(tmp_path: Path, version: str, stale: bool) -> None:
    (issue,) = issues_of(tmp_path, MEASURED + entry("zero2 / gradient", torch=">=2.12"))
    options = RunOptions(
        implementations=("zero2",), known_issues=("none", str(tmp_path / "known.toml"))
    )
    matcher = KnownIssueMatcher(options, Releases({"torch": version}))
    assert matcher.issues == [issue]
    matcher.marked(case(status="holds", gradient="holds"))
    assert matcher.unseen() == ([(issue, None)] if stale else [])
    assert matcher.unverified == (
        () if stale else (Unverified(release=f"torch {version}", known=(issue.record,)),)
    )


@pytest.mark.parametrize(("status", "stale"), [("holds", True), ("unsupported", False)])
def test_an_own_case_that_cannot_be_run_says_nothing(
    tmp_path: Path, status: Status, stale: bool
) -> None:
    (issue,) = issues_of(tmp_path, entry("zero2 / gradient", case="{ mesh = [3] }"))
    options = RunOptions(
        implementations=("zero2",),
        world_sizes=(3,),
        known_issues=("none", str(tmp_path / "known.toml")),
    )
    matcher = KnownIssueMatcher(options, Releases({"torch": "2.13.0"}))
    matcher.arrange([])
    matcher.marked(case(0, status=status, gradient="holds", mesh=(3,)))
    assert matcher.unseen() == ([(issue, 0)] if stale else [])


def test_the_script_runs_the_measured_releases() -> None:
    listed = Path(__file__).parents[3] / "reports" / "releases" / "measured.txt"
    measured = ours()[0].versions.measured
    names = [f"{library}=={one}" for library in LIBRARIES for one in measured[library]]
    assert listed.read_text().split() == names


def test_ours_are_of_measured_releases() -> None:
    for issue in ours():
        measured = issue.versions.measured
        assert measured.keys() == set(LIBRARIES)
        library = library_of(issue.implementation)
        assert set(issue.versions.having) <= {library}
        shows = [
            version
            for version in measured[library]
            if issue.known_in(Releases({"torch": "2.13.0", library: version}))
        ]
        assert shows, f"{issue.source}: it is in no release that was measured"
        # Where it ends, the entry says so: only the newest release leaves the end open.
        newest = measured[library][-1]
        later = Releases({"torch": "2.13.0", library: "99.0"})
        assert issue.known_in(later) is (newest in shows)


@pytest.mark.parametrize(
    ("device", "asked", "shows"),
    [("", "cpu", True), ("cuda", "cpu", False), ("cuda", "cuda:1", True), ("cpu", "cuda", False)],
)
def test_devices(tmp_path: Path, device: str, asked: str, shows: bool) -> None:
    (issue,) = issues_of(tmp_path, entry("fsdp2 / loss", device=device))
    assert issue.shows_on(asked) is shows
    options = RunOptions(
        implementations=("fsdp2",), known_issues=("none", str(tmp_path / "known.toml")),
        device=asked,
    )  # fmt: skip
    assert (issue in KnownIssueMatcher(options, Releases({"torch": "2.13.0"})).issues) is shows


def test_a_device_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'gpu'.*cpu, cuda"):
        issues_of(tmp_path, entry("fsdp2 / loss", device="gpu"))


def violated(*causes: str, mesh: tuple[int, ...] = (2,)) -> tuple[CaseFinished, Violation]:
    violation = msgspec.structs.replace(VIOLATION, causes=causes)
    return case(status="violated", mesh=mesh, gradient="violated"), violation


@pytest.mark.parametrize(
    ("fingerprint", "causes", "same"),
    [
        ("zero2 / gradient / gradient x W", ("gradient x W",), True),
        ("zero2 / gradient / gradient x W", ("gradient doubled", "gradient x W"), True),
        ("zero2 / gradient / gradient x W", ("gradient doubled",), False),
        ("zero2 / gradient / gradient x W", (), False),
        (
            "zero2 / gradient / gradient doubled+gradient x W",
            ("gradient doubled", "gradient x W", "gradient x GA"),
            True,
        ),
        ("zero2 / gradient / gradient doubled+gradient x W", ("gradient x W",), False),
        ("zero2 / gradient / gradient / W", ("gradient / W",), True),
        ("zero2 / gradient", (), True),
        ("zero2 / gradient", ("gradient x W",), False),
        ("zero3 / gradient / gradient x W", ("gradient x W",), False),
        ("zero2 / update / gradient / gradient x W", ("gradient x W",), False),
        ("zero2 / gradient / exp_avg / gradient x W", ("gradient x W",), False),
    ],
)
def test_a_violation_matches_by_its_fingerprint(
    tmp_path: Path, fingerprint: str, causes: tuple[str, ...], same: bool
) -> None:
    (issue,) = issues_of(tmp_path, entry(fingerprint))
    assert issue.matches(*violated(*causes)) is same


@pytest.mark.parametrize(
    ("fingerprint", "role", "causes", "same"),
    [
        ("zero2 / damage / exp_avg / flip", "exp_avg", ("flip",), True),
        ("zero2 / damage / exp_avg / flip", "checkpoint", ("flip",), False),
        ("zero2 / damage / exp_avg / flip", "exp_avg", ("mix",), False),
        ("zero2 / damage / exp_avg / flip", "exp_avg", (), False),
        ("zero2 / roundtrip / exp_avg / flip", "exp_avg", ("flip",), False),
        ("zero2 / damage / exp_avg", "exp_avg", (), True),
        ("zero2 / damage / exp_avg", "step", (), False),
        ("zero2 / damage / exp_avg", "exp_avg", ("flip",), False),
        ("zero2 / damage / exp_avg", "step", ("exp_avg",), False),
    ],
)
def test_what_a_checkpoint_loses_matches_by_role_and_cause(
    tmp_path: Path, fingerprint: str, role: str, causes: tuple[str, ...], same: bool
) -> None:
    (issue,) = issues_of(tmp_path, entry(fingerprint))
    finished, violation = violated(*causes)
    damage = msgspec.structs.replace(violation, obligation="damage", role=role)
    assert issue.matches(finished, damage) is same


@pytest.mark.parametrize(
    ("fingerprint", "features", "same"),
    [
        ("zero2 / clip / norm / norm of another step", ["clip-inf"], True),
        ("zero2 / continuation / norm / norm of another step", [], True),
        ("zero2 / clip / norm / norm of another step", ["clip-inf", "world-3"], True),
        ("zero2 / clip / norm / norm of another step", ["clip-inf", "world-2"], True),
        ("zero2 / clip / norm / norm of another step", ["clip-inf", "world-4"], False),
        ("zero2 / update / norm / norm of another step", [], False),
        ("zero2 / clip / norm", [], False),
    ],
)
def test_what_is_wrong_in_a_step_is_known_after_a_load_too(
    tmp_path: Path, fingerprint: str, features: list[str], same: bool
) -> None:
    """On the ranks that loaded, if they are such that it shows there."""
    (issue,) = issues_of(tmp_path, entry(fingerprint, features=features))
    finished, violation = violated("norm of another step")
    of = msgspec.structs.replace(violation, obligation="continuation", role="norm", in_step="clip")
    resumed = Case(
        mesh=(2,), training=Training(clip=1.0, norm="inf"), resume=(TrainingSegment(mesh=(3,)),)
    )
    assert issue.matches(msgspec.structs.replace(finished, case=resumed), of) is same


@pytest.mark.parametrize(
    ("obligations", "known"),
    [(RESUME, True), (EQUIVALENCE, True), (("roundtrip",), False), (("loss",), False)],
)
def test_an_issue_of_a_step_is_known_where_only_steps_after_loads_are_asked_for(
    tmp_path: Path, obligations: tuple[Obligation, ...], known: bool
) -> None:
    (tmp_path / "known.toml").write_text(
        entry("zero2 / gradient / gradient x W", case="{ mesh = [2] }")
    )
    files = ("none", str(tmp_path / "known.toml"))
    options = RunOptions(implementations=("zero2",), obligations=obligations, known_issues=files)
    matcher = KnownIssueMatcher(options, Releases({"torch": "2.13.0"}))
    planned, _ = matcher.arrange([])
    assert len(planned) == ("gradient" in obligations)
    finished, violation = violated("gradient x W")
    after = msgspec.structs.replace(violation, obligation="continuation", in_step="gradient")
    assert matcher.listed(finished, after) is known
    assert not matcher.unseen()


RESUMED = "{ mesh = [3], resume = [{ mesh = [2] }] }"


@pytest.mark.parametrize(
    ("obligations", "sizes", "tried"),
    [
        (EQUIVALENCE, (2, 3), 0),
        (("gradient", "roundtrip"), (2, 3), 2),
        (RESUME, (2, 3), 2),
        (RESUME, (3,), 0),
    ],
)
def test_a_case_with_a_checkpoint_is_tried_where_checkpoints_are_asked_for(
    tmp_path: Path, obligations: tuple[Obligation, ...], sizes: tuple[int, ...], tried: int
) -> None:
    text = entry("zero2 / crashed / RuntimeError", case=RESUMED)
    (tmp_path / "known.toml").write_text(text + entry("zero2 / roundtrip / step", case=RESUMED))
    options = RunOptions(
        implementations=("zero2",),
        obligations=obligations,
        world_sizes=sizes,
        known_issues=("none", str(tmp_path / "known.toml")),
    )
    planned, _ = KnownIssueMatcher(options, Releases({"torch": "2.13.0"})).arrange([])
    assert len(planned) == tried


@pytest.mark.parametrize(("profile", "numbers"), [("smoke", [0, 2]), ("quick", [0, 1, 2])])
def test_a_first_look_takes_one_case_of_each_page(
    tmp_path: Path, profile: str, numbers: list[int]
) -> None:
    """Where several implementations have one fault, one of them shows it."""
    entries = [("zero2", "one.md"), ("zero3", "one.md"), ("zero3", "other.md")]
    text = "".join(
        entry(f"{name} / gradient", page=f"docs/{page}", case="{ mesh = [3] }")
        for name, page in entries
    )
    (tmp_path / "known.toml").write_text(text)
    options = RunOptions(
        implementations=("zero2", "zero3"),
        profile=profile,
        known_issues=("none", str(tmp_path / "known.toml")),
    )
    planned, _ = KnownIssueMatcher(options, Releases({"torch": "2.13.0"})).arrange([])
    assert [one.implementation for one in planned] == [entries[n][0] for n in numbers]


def test_features_and_words_narrow_an_entry(tmp_path: Path) -> None:
    (issue,) = issues_of(tmp_path, entry("zero2 / gradient / gradient x W", features=["world-3"]))
    assert issue.matches(*violated("gradient x W", mesh=(3,)))
    assert not issue.matches(*violated("gradient x W", mesh=(2,)))
    crash = case(status="crashed", reason="rank 1 raised RuntimeError: an empty tensor")
    crash = msgspec.structs.replace(crash, error="RuntimeError")
    text = "".join(
        entry(fingerprint, says=says)
        for fingerprint, says in (
            ("zero2 / crashed / RuntimeError", "empty tensor"),
            ("zero2 / crashed / RuntimeError", "no mesh"),
            ("zero2 / crashed / LookupError", ""),
            ("zero2 / gradient", ""),
        )
    )
    assert [issue.matches(crash, None) for issue in issues_of(tmp_path, text)] == [
        True, False, False, False,
    ]  # fmt: skip


def test_what_is_known_of_other_code_is_named() -> None:
    """Of a crash by its words, whatever the case has; of a violation by its cause and features."""
    options = RunOptions(implementations=("mine.py:f",))
    matcher = KnownIssueMatcher(options, Releases({"torch": "2.13.0", "deepspeed": "0.17.6"}))
    crash = msgspec.structs.replace(
        case(0, "mine.py:f", "crashed", reason="'FSDPParam' has no attribute '_unsharded_param'"),
        error="AttributeError",
    )
    found = matcher.similar(crash, None)
    assert found is not None and found.fingerprint == "fsdp2 / crashed / AttributeError"
    assert matcher.similar(msgspec.structs.replace(crash, reason="no attribute 'x'"), None) is None
    violation = msgspec.structs.replace(VIOLATION, causes=("last microbatch only",))
    several = Case(mesh=(2,), training=Training(microbatches=2))
    for given, fingerprint in (
        (several, "deepspeed2 / gradient / last microbatch only"),
        (Case(mesh=(2,)), None),
    ):
        wrong = msgspec.structs.replace(case(0, "mine.py:f", "violated"), case=given)
        similar = matcher.similar(wrong, violation)
        assert (similar and similar.fingerprint) == fingerprint
    newer = KnownIssueMatcher(options, Releases({"torch": "2.13.0", "deepspeed": "0.19.8"}))
    wrong = msgspec.structs.replace(case(0, "mine.py:f", "violated"), case=several)
    assert newer.similar(wrong, violation) is None


def test_an_issue_in_the_wake_of_another_violation_is_seen(tmp_path: Path) -> None:
    (tmp_path / "known.toml").write_text(entry("zero2 / gradient / parameter"))
    files = ("none", str(tmp_path / "known.toml"))
    options = RunOptions(implementations=("zero2",), known_issues=files)
    matcher = KnownIssueMatcher(options, Releases({"torch": "2.13.0"}))
    violations = [
        msgspec.structs.replace(VIOLATION, obligation=obligation, role="parameter", causes=())
        for obligation in ("loss", "gradient")
    ]
    finished = case(status="violated", loss="violated", gradient="violated")
    assert finished.judgement is not None

    def marked(*violations: Violation) -> CaseFinished:
        judgement = msgspec.structs.replace(finished.judgement, violations=violations)
        return matcher.marked(msgspec.structs.replace(finished, judgement=judgement))

    assert marked(violations[0]).known == ()
    assert [issue for issue, _ in matcher.unseen()] == matcher.issues
    # The gradient follows from the loss, which is not listed: the case fails.
    assert marked(*violations).known == ()
    assert matcher.unseen() == []
