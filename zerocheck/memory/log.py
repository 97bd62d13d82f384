"""Log of the allocation tracker: storages, when their sizes changed, and collectives."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal, NamedTuple

from ..protocol.layout import Category, Phase
from .collectives import CollectiveKind

Place = Literal["device", "pageable", "pinned"]
"""Memory of a storage: that of the device, or of the host."""


class Moment(NamedTuple):
    """Place and time of an operator's call.

    module: the innermost one, "" for none; again: in a forward that runs once more for activation
    checkpointing.
    """

    step: int
    phase: Phase
    module: str
    operator: str
    again: bool


@dataclass(slots=True)
class Storage:
    """Storage with its classification (`kind`) and its holder.

    held: claimed by the implementation's shards, which no operator's evidence overrules; counts: a
    step count; stream: of a GPU, on which it would be allocated; place: see Place.
    """

    size: int
    kind: Category = "other"
    holder: str = ""
    held: bool = False
    counts: bool = False
    alive: bool = True
    stream: int = 0
    place: Place = "device"
    evidence: int = 0


class SentBytes(NamedTuple):
    """Bytes that one rank sends in one collective.

    size: of the whole tensor, padding included; sent: over the link of the rank; microbatch: of
    the step, from 0.
    """

    step: int
    phase: Phase
    module: str
    kind: CollectiveKind
    size: int
    sent: Fraction
    microbatch: int


class HostCopy(NamedTuple):
    """Copy of a tensor between the memory of the device and that of the host."""

    step: int
    to_host: bool
    size: int
    microbatch: int


@dataclass(slots=True)
class Log:
    """Log of events: changes are (index of the moment, number of the storage, bytes added).

    workspaces: (number of changes before, bytes) of what a kernel of a GPU takes while it runs;
    whole: number of the first storages, which are those of the model before it is sharded.
    """

    moments: list[Moment] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    changes: list[tuple[int, int, int]] = field(default_factory=list)
    collectives: list[SentBytes] = field(default_factory=list)
    copies: list[HostCopy] = field(default_factory=list)
    workspaces: list[tuple[int, int]] = field(default_factory=list)
    whole: int = 0
