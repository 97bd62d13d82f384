"""Results of the judge: a verdict per obligation, and the evidence of violations."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import msgspec

Equivalence = Literal["ownership", "loss", "gradient", "clip", "update", "publish", "buffers"]
Resume = Literal["export", "roundtrip", "continuation", "durability", "damage"]
Memory = Literal["persistent", "peak", "release", "communication"]
Obligation = Literal[Equivalence, Resume, Memory]
EQUIVALENCE: tuple[Equivalence, ...] = get_args(Equivalence)
"""What every step must do."""
RESUME: tuple[Resume, ...] = get_args(Resume)
"""What a checkpoint must do, in cases that have one."""
MEMORY: tuple[Memory, ...] = get_args(Memory)
"""Bytes that a rank may hold and send; measured in a run of its own, after that of the steps."""
OBLIGATIONS: tuple[Obligation, ...] = (*EQUIVALENCE, *RESUME, *MEMORY)

OBLIGATION_SETS: Mapping[str, tuple[Obligation, ...]] = {
    "equivalence": EQUIVALENCE,
    "resume": RESUME,
    "memory": MEMORY,
}
"""Names that stand for several obligations."""

TITLES: dict[Obligation, str] = {
    "ownership": "the shards of every tensor tile it exactly once",
    "loss": "each rank's loss is that of one device, bit for bit",
    "gradient": "the reduced gradient lies in the enclosure of the declared semantics",
    "clip": "the norm and the clipped gradient lie in their enclosures",
    "update": "the optimizer's next state lies in its enclosure",
    "publish": "every rank computes next with the parameters that were updated",
    "buffers": "running statistics and other buffers follow the declared semantics",
    "export": "what the library exports is what the shards hold, bit for bit",
    "roundtrip": "what is loaded is what was saved, bit for bit, and saving changes nothing",
    "continuation": "the steps after a load are those of one device",
    "durability": "where a writer is killed, the checkpoint before it or the new one loads whole",
    "damage": "a damaged checkpoint is refused",
    "persistent": "each rank holds what its layout, or else its stage, says, and it has a holder",
    "peak": "at no instant a rank holds more than its layout says",
    "release": "nothing grows from step to step, and nothing survives close()",
    "communication": "each rank calls the collectives that its layout says",
}

VACUOUS: dict[Obligation, str] = {
    "ownership": "every rank holds every tensor whole",
    "loss": "every loss is 0, or not finite",
    "gradient": "the gradient is 0 everywhere, or not finite",
    "clip": "the norm does not reach the maximum",
    "update": "no parameter moves",
    "publish": "there is one rank, or no parameter moves",
    "buffers": "no buffer changes",
    "export": "the state that is exported is the one that training began with",
    "roundtrip": "the state that is saved is the one that training began with",
    "continuation": "no parameter moves after the load",
    "durability": "the writer had finished before it was killed",
    "damage": "what is loaded from the damaged checkpoint is right",
    "persistent": "there is one rank, or neither a layout nor a stage says how much it may hold",
    "peak": "there is one rank, or no layout says how much is held within a step",
    "release": "nothing is allocated",
    "communication": "there is one rank, so nothing is sent",
}
"""When an obligation holds since nothing could fail: the plain failure to do it holds too."""

DECLARES: dict[Obligation, str] = {
    "persistent": "declare the stage of your code, or its layout; offloaded state is not judged"
}
"""Advice for an obligation that is exercised only where code declares something."""

ESTIMATED = (
    "estimated, since kernels or the order of operations differ from those of one device: the "
    "reference ran again with what it computes moved by a round-off, and a multiple of what that "
    "moved is let pass (16 times, or 3 times element by element)"
)
"""What the bound of an obligation in `Judgement.estimated` is."""

Status = Literal["holds", "violated", "not exercised", "unsupported", "crashed", "hung", "known"]
"""`known` is set by a run, never by the judge: it failed, and is a listed known issue."""

STATUSES: tuple[Status, ...] = get_args(Status)

Tier = Literal["full", "state only", "parameters only"]

Gave = Literal["new", "older", "none", "lost", "wrong", "unharmed"]
"""What a load gave of a checkpoint whose writer was killed, or that was damaged: the new one whole,
the older one whole, a refusal, a refusal though there was an older one, something else; `unharmed`:
the writer had finished before, or there was nothing to damage."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one load of a resumed case.

    segment: index in `case.segments.segments_of`, from 1; violated: obligations that the load, or a
    step after it, violates; gave: of one that only tries a killed or damaged checkpoint, else None.
    """

    segment: int
    violated: tuple[Obligation, ...] = ()
    gave: Gave | None = None


TELLING_BITS = 10
"""Some fifty candidates are tried: with so many bits one of them fits by chance in 5 % of cases."""


class Explanation(NamedTuple):
    """One plain sentence on what is wrong, with the causes that may be behind it."""

    text: str
    causes: tuple[str, ...] = ()
    sentences: Mapping[str, str] = {}
    """Text if a cause is the only one, by cause."""

    @classmethod
    def of(
        cls,
        causes: Iterable[str],
        sentences: Mapping[str, str],
        text: str = "",
        between: str = "; ",
    ) -> Explanation:
        """Make it of what each cause says: `"the loss is wrong; it is 0; or it is infinite"`.

        sentences: by cause, where it says something; text: what is wrong whatever the cause.
        """

        def joined(sentence: str) -> str:
            return between.join(filter(None, (text, sentence)))

        causes = tuple(causes)
        said = {cause: sentences[cause] for cause in causes if sentences.get(cause)}
        alone = {cause: joined(sentence) for cause, sentence in said.items()}
        return cls(joined("; or ".join(dict.fromkeys(said.values()))), causes, alone)


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    """Violation of an obligation: the first place where it does not hold.

    step: 0-based within the case, -1 for the state before the first step; role and tensors: what
    is outside its enclosure (worst first); ranks: which ranks hold it; element: index in the worst
    tensor; observed, expected, bound: of that element, in its own unit; ratio: largest
    abs(observed - expected) / bound; causes: what explains it, by name (may be several where the
    world size makes them coincide); explanation: one plain sentence; wrong: elements outside,
    of total.
    """

    obligation: Obligation
    step: int
    role: str
    tensors: tuple[str, ...]
    ranks: tuple[int, ...]
    explanation: str
    element: tuple[int, ...] = ()
    observed: float | None = None
    expected: float | None = None
    bound: float | None = None
    ratio: float | None = None
    wrong: int = 0
    total: int = 0
    causes: tuple[str, ...] = ()
    mild: bool = False
    """Only what is reported is wrong (a logged norm); parameters are right."""
    in_step: Equivalence | None = None
    """Of a violation of `continuation`: the obligation of a step that it violates."""
    error: str = ""
    """Type and first line of the exception, where a load refused a checkpoint."""
    attribution: str = ""
    """Sentence that says of what the wrong values are made, found by solving for it or by looking
    values up, without a list of known bugs. Empty: nothing fits."""
    parts: tuple[Violation, ...] = ()
    """Where no one cause explains every wrong tensor: the tensors that each cause explains, and
    those that none does. Together they are the violation."""
    sentences: Mapping[str, str] = {}
    """Explanation if a cause is the only one, by cause. A cause without one has `explanation`."""

    @property
    def faint(self) -> bool:
        """True if so little is wrong, by so little, that many causes would give it by chance.

        A value at a distance of r bounds is within the bound of an unrelated candidate with a
        probability of about 1/r, so n of them say about n log2(r) bits.
        """
        if not self.wrong or self.ratio is None or not math.isfinite(self.ratio):
            return False
        return self.wrong * math.log2(max(1.0, self.ratio)) < TELLING_BITS

    def reworded(self, change: Callable[[str], str]) -> Violation:
        """Return the violation with another explanation, whichever of its causes is left."""
        return msgspec.structs.replace(
            self,
            explanation=change(self.explanation),
            sentences={cause: change(text) for cause, text in self.sentences.items()},
        )

    def explained_by(self, causes: Collection[str]) -> bool:
        """Return True if one of these causes explains it."""
        return any(cause in causes for cause in self.causes)

    def narrowed(self, causes: Collection[str]) -> Violation:
        """Return the violation with those of its causes that are among these, in its own numbers.

        As it is, if none of them is.
        """
        left = tuple(cause for cause in self.causes if cause in causes)
        if not left or left == self.causes:
            return self
        texts = {cause: self.sentences[cause] for cause in left if cause in self.sentences}
        text = "; or ".join(dict.fromkeys(texts.values())) or self.explanation
        return msgspec.structs.replace(self, causes=left, explanation=text, sentences=texts)


def with_parts(
    violation: Violation, parts: Sequence[tuple[tuple[str, ...], Explanation]]
) -> Violation:
    """Return the violation with its parts: (tensors, what is wrong with them) of each."""
    replace = msgspec.structs.replace
    of_tensors = tuple(
        replace(
            violation,
            tensors=tensors,
            causes=explanation.causes,
            explanation=explanation.text,
            sentences=explanation.sentences,
        )
        for tensors, explanation in parts
    )
    return replace(violation, parts=of_tensors)


def with_attribution(violation: Violation, attribution: str) -> Violation:
    """Return the violation, and its parts, with an attribution of all that is wrong."""
    replace = msgspec.structs.replace
    parts = tuple(replace(one, attribution=attribution) for one in violation.parts)
    return replace(violation, attribution=attribution, parts=parts)


def merge_violations(violations: Sequence[Violation]) -> Violation | None:
    """Merge several violations of one obligation: the first one, with all of them as parts."""
    if len(violations) < 2:
        return violations[0] if violations else None
    parts = tuple(part for one in violations for part in (one.parts or (one,)))
    return msgspec.structs.replace(violations[0], parts=parts)


class MeasuredBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that ranks hold after the last measured step, and send in it, for reports only.

    In bytes. copy: one unsharded copy of all (parameters, gradients, optimizer states); held:
    parameters, gradients, optimizer states and memory for communication, of the rank that holds
    most of them; total: of all ranks; sent: by the rank that sends most, by rings, and by_kind:
    those of each kind of collective; trained: of the parameters that are trained; elements: Psi, of
    all parameters; stage: declared, or None; predicted: True if a layout predicts the bytes held.
    """

    copy: tuple[int, int, int]
    held: int
    total: int
    sent: float
    trained: int
    elements: int
    stage: int | None = None
    predicted: bool = False
    by_kind: dict[str, float] = {}


def statuses_of(
    violated: Collection[Obligation], exercised: Collection[Obligation]
) -> dict[Obligation, Status]:
    """Return the verdict on each obligation of a step."""
    return {
        one: "violated" if one in violated else "holds" if one in exercised else "not exercised"
        for one in EQUIVALENCE
    }


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """Verdicts of the judge on one case.

    statuses: per obligation; share: per obligation, the largest abs(error) / bound that was seen
    (1.0 is the edge); violations: at most one per obligation, the first; tier: how much the
    implementation showed; digest: hash of all that was observed, for replay bit for bit.
    """

    statuses: dict[Obligation, Status]
    share: dict[Obligation, float] = {}
    violations: tuple[Violation, ...] = ()
    further: tuple[Violation, ...] = ()
    """Other violations of those obligations: of a later step, role or rank. They count where the
    first one is a known issue, which must not hide them."""
    tier: Tier = "full"
    digest: str = ""
    semantics: dict[str, str] = {}
    vacuous: tuple[Obligation, ...] = ()
    """Obligations that hold since nothing could fail in this case: see VACUOUS."""
    estimated: tuple[Obligation, ...] = ()
    """Obligations whose bound is estimated, and not derived."""
    shares: dict[str, float] = {}
    """Largest part of parameters, gradients and optimizer states that one rank holds; empty on
    one rank. See judge/shares.py."""
    stage: int | None = None
    """Declared stage of sharding; None: it does not say."""
    unjudged: dict[Obligation, str] = {}
    """Obligations that were asked for and could not be judged, with the reason."""
    loads: tuple[Load, ...] = ()
    """The loads that were judged, in their order; empty if nothing is resumed. A segment that only
    tries a checkpoint has two, the first of the checkpoint as it was written."""
    measured_bytes: MeasuredBytes | None = None
    """Of a case that was measured."""
    words: tuple[str, ...] = ()
    """For a violated case, other declarations under which everything in it holds, such as
    "buffers='rank0'"; see judge/words.py."""
