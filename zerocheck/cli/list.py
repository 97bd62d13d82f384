"""Lists of all names: implementations, obligations, features, profiles, known issues, faults."""

from __future__ import annotations

from typing import Any

import click

from .output import say


def list_faults() -> int:
    """List every fault with its source; return the exit code."""
    from ..catalogue import extra_of, missing
    from ..faults.registry import FAULTS, OF_EXTRAS

    _section(
        "faults", {fault.name: f"{fault.summary}; {fault.source}" for fault in FAULTS.values()}
    )
    for extra in dict.fromkeys(extra_of(fault.where) for fault in OF_EXTRAS.values()):
        title = f"faults in {extra}, which run where they are named"
        reason = missing(extra)
        if reason is not None:
            say(f"{title}: none here, since it {reason.partition('which ')[2]}")
            continue
        of_extra = [fault for fault in OF_EXTRAS.values() if extra_of(fault.where) == extra]
        _section(title, {fault.name: f"{fault.summary}; {fault.source}" for fault in of_extra})
    return 0


@click.command("list")
def list_() -> None:
    """Show all names that options take.

    Implementations, obligations, features, profiles and known issues.
    """
    from ..case.features import FEATURES
    from ..catalogue import BUILT_IN, CONFIG_KINDS, OF_EXTRAS, WITH_OPTIMIZERS, extra_of, installed
    from ..protocol.verdicts import TITLES
    from ..report.known_issues import listed_lines
    from ..run.known_issues.entries import ours
    from ..run.plan.profiles import PROFILES

    _section("implementations", BUILT_IN)
    _section("implementations with an optimizer of their own", WITH_OPTIMIZERS)
    added = {name: f"{where} (extra {extra_of(name)})" for name, where in OF_EXTRAS.items()}
    _section("implementations that need an extra, and run where they are named", added)
    if installed():
        _section(
            "implementations of installed packages, which run where they are named", _installed()
        )
    configs = {one.example: f"{one.content} (extra {one.extra})" for one in CONFIG_KINDS}
    _section("your own configuration files, by path", configs)
    _section("obligations", TITLES)
    _section("features", {f.name: f"{f.title} ({f.dimension})" for f in FEATURES.values()})
    _section(
        "profiles",
        {
            p.name: f"{p.cases} cases on {', '.join(map(str, p.world_sizes))} ranks, {p.summary}"
            + ("; all pairs of features first" if p.covering else "")
            for p in PROFILES.values()
        },
    )
    say("known issues")
    for line in listed_lines(ours()):
        say(f"  {line}")


def _installed() -> dict[str, str]:
    """Return each entry point with its place and package, or why it is refused."""
    from ..catalogue import NAMED, installed, refusal

    return {
        name: f"refused: {reason}"
        if (reason := refusal(name, name in NAMED))
        else f"{points[0].place} (package {points[0].package})"
        for name, points in installed().items()
    }


def _section(title: str, entries: Any) -> None:
    say(title)
    width = max(map(len, entries))
    for name, text in entries.items():
        say(f"  {name:<{width}}  {text}")
    say("")
