"""Facts on wrong values, merged over roles and ranks into one sentence."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from .places import Where, listed, ranks_words

MOST_FACTS = 6
"""Facts that a sentence lists, those of most elements."""


class Fact(NamedTuple):
    """Places of wrong values, and the predicate that is true of all of them."""

    role: str
    where: Where
    one: str
    """Predicate of one subject."""
    many: str
    """Predicate of several subjects."""
    elements: int
    """Wrong elements that it accounts for."""
    ranks: tuple[int, ...] = ()
    """Ranks that hold them; none where all hold one and the same."""
    partner: str = ""
    """Tensor whose values these are."""


class Facts(NamedTuple):
    """Facts on some wrong elements, and the number of those that no fact accounts for."""

    facts: tuple[Fact, ...]
    unexplained: int
    wrong: int

    @classmethod
    def joined(cls, several: Iterable[Facts]) -> Facts:
        """Join facts on different elements."""
        every = list(several)
        return cls(
            tuple(fact for one in every for fact in one.facts),
            sum(one.unexplained for one in every),
            sum(one.wrong for one in every),
        )

    def sentence(self, world_size: int = 0) -> str:
        """Return one sentence; empty if there is no fact. world_size: ranks that could hold it."""
        if not self.facts:
            return ""
        merged = _exchanged(_over_roles(_over_ranks(_relative(self.facts, world_size))))
        merged.sort(key=lambda one: -one[2])
        parts = [_clause(*one[:2], world_size) for one in merged[:MOST_FACTS]]
        further = sum(one[2] for one in merged[MOST_FACTS:])
        if further:
            parts.append(f"{further} elements are explained by {len(merged) - MOST_FACTS} more")
        if self.unexplained:
            parts.append(f"{self.unexplained} of {self.wrong} wrong elements remain unexplained")
        return "; ".join(parts)


Merged = tuple[tuple[str, ...], Fact, int]
"""Roles, the fact of the first of them, and the elements of all."""


def _relative(facts: Sequence[Fact], world_size: int) -> list[Fact]:
    """Name shards by their relation to the rank, where several ranks have the same: its own."""
    found: dict[Hashable, list[Fact]] = {}
    for fact in facts:
        found.setdefault((fact.role, fact.one), []).append(fact)
    result = []
    for same in found.values():
        own = all(fact.where.shards == fact.ranks for fact in same)
        rest = [tuple(r for r in range(world_size) if (r,) != fact.ranks) for fact in same]
        others = all(fact.where.shards == of for fact, of in zip(same, rest, strict=True))
        if len(same) > 1 and (own or others):
            words = "the shard of the rank itself" if own else "the shards of all other ranks"
            same = [fact._replace(where=Where(words, others)) for fact in same]
        result += same
    return result


def _over_ranks(facts: Sequence[Fact]) -> list[Fact]:
    found: dict[Hashable, Fact] = {}
    for fact in facts:
        key = (fact.role, fact.where, fact.one, bool(fact.ranks))
        before = found.get(key)
        if before is not None:
            ranks = tuple(sorted({*before.ranks, *fact.ranks}))
            fact = fact._replace(ranks=ranks, elements=before.elements + fact.elements)
        found[key] = fact
    return list(found.values())


def _over_roles(facts: Sequence[Fact]) -> list[Merged]:
    found: dict[Hashable, list[Fact]] = {}
    for fact in facts:
        found.setdefault((fact.where, fact.one, fact.ranks, fact.role == "step"), []).append(fact)
    return [
        (tuple(dict.fromkeys(one.role for one in same)), same[0], sum(one.elements for one in same))
        for same in found.values()
    ]


def _exchanged(merged: Sequence[Merged]) -> list[Merged]:
    """Join two tensors that have each other's values."""
    found: list[Merged] = []
    done: set[int] = set()
    for number, (roles, fact, count) in enumerate(merged):
        if number in done:
            continue
        for other in range(number + 1, len(merged)):
            others, partner, more = merged[other]
            if (
                fact.partner
                and (roles, fact.ranks) == (others, partner.ranks)
                and (fact.partner, partner.partner) == (partner.where.words, fact.where.words)
            ):
                done.add(other)
                where = Where(f"{fact.where.words} and {partner.where.words}", True)
                words = "have changed places"
                fact, count = fact._replace(where=where, one=words, many=words), count + more
                break
        found.append((roles, fact, count))
    return found


def _clause(roles: tuple[str, ...], fact: Fact, world_size: int) -> str:
    where = fact.where
    if roles in {("parameter",), ("buffer",)} and not where.words.startswith("the shard"):
        subject, several = where.words, where.several
    else:
        within = "in" if where.words.startswith("the shard") else "of"
        names = ["the parameters" if role == "parameter" else role for role in roles]
        subject = f"{listed(names)} {within} {where.words}"
        several = len(roles) > 1 or "parameter" in roles
    clause = f"{subject} {fact.many if several else fact.one}"
    if fact.ranks and len(fact.ranks) == world_size > 1:
        return f"on every rank, {clause}"
    return f"on {ranks_words(fact.ranks)}, {clause}" if fact.ranks else clause
