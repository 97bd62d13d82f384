"""Next steps after a run: at most three lines at its end, each with a command."""

from __future__ import annotations

from collections.abc import Sequence

from ..catalogue import BUILT_IN, OF_EXTRAS, in_session
from ..foreign_text import copyable, one_line
from ..protocol.verdicts import OBLIGATION_SETS
from ..run.records.finding_text import replay_call, replay_line
from ..run.records.tally import Tally, why


def next_lines(counted: Tally) -> list[str]:
    """Return what to do next; nothing for a run that was interrupted or checked nothing."""
    if counted.started is None or not counted.complete:
        return []
    if counted.findings:
        steps = _after_findings(counted)
    elif counted.started.shard:
        steps = [("all shards together", "the same command, with a --reuse for each journal")]
    else:
        steps = _after_holding(counted)
    width = max((len(what) for what, _ in steps), default=0)
    return [
        f"{'next:' if not number else '     '} {what:<{width}}  {one_line(command)}"
        for number, (what, command) in enumerate(steps)
    ]


def _after_findings(counted: Tally) -> list[tuple[str, str]]:
    first = next((one for one in counted.findings if one.case_file), counted.findings[0])
    names, model = [first.implementation], _model(counted)
    replay = replay_call(first) if in_session(first.implementation) else replay_line(first)
    steps = [("the same case again", replay)] if first.case_file else []
    if first.obligation is not None:
        alone = _run_with(names, "obligations", first.obligation, model)
        steps.append(("nothing but what is wrong", alone))
    return [*steps, ("if it must wait", _run_with(names, "known-issues", "known.toml", model))]


def _model(counted: Tally) -> str:
    """Return the user's own model of the run, or an empty text."""
    return "" if counted.started is None else counted.started.model


def _run_with(names: Sequence[str], option: str, value: str, model: str = "") -> str:
    """Return the command with an option, or the call in Python for objects that have no file."""
    if not any(map(in_session, (*names, model))):
        own = f" --model {copyable([model])}" if model else ""
        return f"zerocheck run {copyable(list(names))}{own} --{option} {value}"
    arguments = [*map(_argument, names), *([f"model={_argument(model)}"] if model else [])]
    return f"zerocheck.run({', '.join(arguments)}, {option.replace('-', '_')}={value!r})"


def _argument(name: str) -> str:
    """Return a name as an argument in Python."""
    return name.partition(":")[2] if in_session(name) else repr(name)


def _after_holding(counted: Tally) -> list[tuple[str, str]]:
    started = counted.started
    if why(counted) or started is None:
        return []
    own = [one for one in started.implementations if one not in (*BUILT_IN, *OF_EXTRAS)]
    steps = []
    if not own:
        steps.append(("your own code", "zerocheck run my_sharding.py:my_fsdp"))
    names = own or started.implementations[:1]
    unasked = [name for name, of in OBLIGATION_SETS.items() if not {*of} & {*counted.obligations}]
    if unasked:
        asked = ",".join(OBLIGATION_SETS)
        words = {"resume": "checkpoints", "memory": "memory", "equivalence": "every step"}
        what = " and ".join(words.get(name, name) for name in unasked)
        steps.append((f"{what} too", _run_with(names, "obligations", asked, started.model)))
    if not any(one.covered.counted for one in counted.implementations.values()):
        steps.append(("all pairs of features", _run_with(names, "profile", "ci", started.model)))
    return steps
