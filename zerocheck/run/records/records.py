"""Records of a run: one per line of the journal, as data that round-trips.

The journal (NDJSON) is the only source of every report. A record is appended the moment it is
known, so that a killed run leaves a journal that is whole up to its last verdict.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ...case.schema import Case
from ...protocol.verdicts import Judgement, Obligation, Status, Violation

JOURNAL_FORMAT = 3


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """Environment in which a run took place."""

    zerocheck: str
    torch: str
    python: str
    platform: str
    cpu: str
    cores: int
    cpu_capability: str
    device: str = "cpu"
    """cpu or cuda: where cases ran. It is of the run, as the processor is, and not of the case."""
    gpu: str = ""
    """What decides the bits of a GPU's kernels: its name, capability, multiprocessors."""
    cuda: str = ""
    """Of torch: versions of CUDA and cuDNN."""
    libraries: str = ""
    """Names and versions of installed libraries that implementations need in addition to torch."""


class KnownReference(msgspec.Struct, frozen=True, kw_only=True):
    """A listed known issue, as reports show it.

    source: the file and entry; link: upstream; page: of the repository; avoid: what to do;
    features: what a case must have to show it. Any of them may be empty.
    """

    fingerprint: str
    reason: str
    source: str = ""
    link: str = ""
    page: str = ""
    avoid: str = ""
    features: tuple[str, ...] = ()

    @property
    def fault(self) -> str:
        """Name of the fault, which several entries may be of: its page, else its reason."""
        return self.page or self.reason


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """Cases that are not run because a known hang covers them."""

    implementation: str
    count: int
    known: KnownReference


class Unverified(msgspec.Struct, frozen=True, kw_only=True):
    """Known issues that were not measured in a release of this run, such as "torch 2.16.0".

    They cover what shows of them, and no run fails because one does not show.
    """

    release: str
    known: tuple[KnownReference, ...]


class RunStarted(msgspec.Struct, frozen=True, kw_only=True, tag="run started"):
    """First line of a journal. started: seconds since the epoch; planned: cases to run."""

    environment: Environment
    implementations: tuple[str, ...]
    obligations: tuple[Obligation, ...]
    profile: str
    seed: int
    world_sizes: tuple[int, ...]
    planned: int
    started: float
    left_out: tuple[LeftOut, ...] = ()
    unverified: tuple[Unverified, ...] = ()
    model: str = ""
    """The user's own, if every case has it."""
    without: dict[Obligation, str] = {}
    """Obligations that were asked for and that no case can exercise, and why."""
    without_of: dict[str, dict[str, str]] = {}
    """The same of each implementation that says so, which others may exercise."""
    shard: str = ""
    """The part of the planned cases that it takes, such as "3/8"; empty for all."""
    reused: int = 0
    """Number of the planned cases whose outcome is that of another run."""
    missing_shards: tuple[str, ...] = ()
    """Shards of this run whose outcomes were not given, where others were."""
    sources: dict[str, str] = {}
    """Digest of each file of the user's that the run names."""
    format: int = JOURNAL_FORMAT


class RefusedPairs(msgspec.Struct, frozen=True, kw_only=True):
    """Pairs of features that an implementation refuses, and the commonest reason that it gives."""

    reason: str
    pairs: str


class Coverage(msgspec.Struct, frozen=True, kw_only=True, tag="coverage"):
    """Coverage that a run wants of an implementation, recorded before its first case.

    features: all that count; ignored: those of options that it does not obey; supported, refused:
    pairs of features, in hex as the bits of case/covering.py's Pairs over `features`, empty where
    cases are only drawn at random; max_cases: what the user allowed, None for no limit; model: the
    user's own, which all cases have: features of models and batches are not drawn.
    """

    implementation: str
    features: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    supported: str = ""
    refused: tuple[RefusedPairs, ...] = ()
    max_cases: int | None = None
    model: str = ""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of running a case: the verdict, or why there is none.

    status: of the whole case ('holds' if no obligation is violated, else 'violated', or
    'unsupported', 'crashed', 'hung'); reason: why it is unsupported, or where each rank stopped;
    seconds: wall time of running and judging, judge_seconds: of judging alone.
    """

    status: Status
    judgement: Judgement | None = None
    reason: str = ""
    error: str = ""
    """Exception type of a crash, for the fingerprint."""
    title: str = ""
    """One sentence on a crash or hang."""
    place: str = ""
    """Innermost call of the user's code in a crash: `"build (my_ddp.py:5)"`."""
    detail: str = ""
    """Tracebacks, stacks and output of the ranks of a crash or hang."""
    causes: tuple[str, ...] = ()
    """Causes of a crash or hang, where collectives were traced."""
    begun: int = 0
    """Loads that had begun when a resumed case crashed or hung: see Judgement.loads."""
    seconds: float = 0.0
    judge_seconds: float = 0.0
    leaks: tuple[str, ...] = ()
    """Global state that the case left changed in its rank processes, in words."""

    @property
    def headline(self) -> str:
        """Title, or, of a crash with a known cause, that cause."""
        if self.causes:
            return f"the ranks {self.status}: they called {self.causes[0]}"
        return self.title

    def record(self, number: int, implementation: str, case: Case) -> CaseFinished:
        """Convert to a journal record."""
        return CaseFinished(
            number=number, implementation=implementation, case=case, **msgspec.structs.asdict(self)
        )


class CaseFinished(Outcome, frozen=True, kw_only=True, tag="case finished"):
    """One case and its outcome.

    known: obligations whose violation is a listed known issue, or for a crash or hang that is one,
    all that were asked for.
    """

    number: int
    implementation: str
    case: Case
    known: tuple[Obligation, ...] = ()
    unreproduced: str = ""
    """Failure that no fresh rank processes showed; the verdict is of these."""


class Finding(msgspec.Struct, frozen=True, kw_only=True, tag="finding"):
    """Finding: one bug, with all failing cases of its fingerprint.

    It is written when it is found, and again when more cases say more of it: of several records
    with one `number`, its place in the order of discovery, the last one counts.

    fingerprint: implementation, obligation, role and cause, no numbers; status: violated, crashed
    or hung; title: one plain sentence; violation: of the case to replay; case_number: which case
    of the run that is, or was shrunk from; reason: where each rank stood, detail: their stacks;
    confirmed: how often it reproduced in fresh rank processes, of how many tries; otherwise: what
    came of the other tries, and how often; causes: those that explain all failing cases seen;
    cases: how many those are; case_file: what `replay` takes; known: the listed issue that it is.
    """

    number: int
    fingerprint: str
    implementation: str
    status: Status
    title: str
    case_number: int
    obligation: Obligation | None = None
    violation: Violation | None = None
    causes: tuple[str, ...] = ()
    reason: str = ""
    detail: str = ""
    follows: tuple[Obligation, ...] = ()
    """Obligations that are violated in cases that show this finding, and can follow from it."""
    confirmed: int = 0
    tries: int = 0
    otherwise: dict[str, int] = {}
    cases: int = 1
    case_file: str = ""
    size: str = ""
    """Of the case to replay, if it was shrunk: "2 ranks, 1 block, 1 step"."""
    variant: str = ""
    """What a variant of the case with distinct numbers of ranks and microbatches shows, with these
    numbers: "on 3 ranks with 5 microbatches: ...". All other numbers are of the case to replay."""
    extent: str = ""
    """What the failure needs, and where it shows; or why that is not known."""
    groups: tuple[str, ...] = ()
    """Groups of features (case/features) that the failure needs; none if that is not known."""
    known: KnownReference | None = None
    similar: KnownReference | None = None
    """Listed issue of other code that fails in the same way; the run fails all the same."""
    model: str = ""
    """The user's own, if the case to replay has it."""
    optimizer: str = ""
    """Location of the user's own class, if the case to replay has it."""
    estimated: bool = False
    """The bound is estimated, and not derived."""
    words: tuple[str, ...] = ()
    """Other declared semantics under which all failing cases hold, such as "buffers='rank0'"."""
    merged: int | None = None
    """Number of the finding that this one turned out to be: it is no finding of its own."""
    place: str = ""
    """Innermost call of the user's code, if it is a crash."""
    left_out: int = 0
    """Cases that were not run, since every case crashed in this way."""
    suspicion: str = ""
    """Of what no fresh rank processes showed: what may be behind it. It does not fail the run."""

    @property
    def hint(self) -> str:
        """Declarations under which the code is right.

        "If intended, declare Semantics(buffers='rank0')."
        """
        if not self.words or self.known is not None or self.intermittent or self.suspicion:
            return ""
        return f"If intended, declare {' or '.join(f'Semantics({word})' for word in self.words)}"

    @property
    def intermittent(self) -> bool:
        """True if the failure showed in some fresh rank processes and not in others."""
        return 0 < self.confirmed < self.tries


class StaleIssue(msgspec.Struct, frozen=True, kw_only=True, tag="stale issue"):
    """A listed known issue that no case showed. obligation: None for a crash or hang.

    seen: what its own case gave instead; advice: what to do with the entry.
    """

    implementation: str
    known: KnownReference
    seen: str
    advice: str
    obligation: Obligation | None = None


class RunFinished(msgspec.Struct, frozen=True, kw_only=True, tag="run finished"):
    """Last line. outcome: 'done', 'interrupted', or 'lost' where ranks of a launcher were.

    exit_code: as of the command line.
    """

    outcome: Literal["done", "interrupted", "lost"]
    exit_code: int
    seconds: float
    why: tuple[str, ...] = ()


Record = RunStarted | Coverage | CaseFinished | Finding | StaleIssue | RunFinished


class CaseFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Input of `replay`: a case, the implementation it was run on, and its verdict.

    title, causes, confirmed, tries: as of the Finding; 0 tries where it was not run again;
    obligations: that were asked for, none for all but those of MEMORY.
    """

    implementation: str
    case: Case
    status: Status
    judgement: Judgement | None
    environment: Environment
    title: str = ""
    causes: tuple[str, ...] = ()
    confirmed: int = 0
    tries: int = 0
    obligations: tuple[Obligation, ...] = ()
    format: Literal[1] = 1
