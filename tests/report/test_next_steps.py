"""What to do after a run: commands that fit what it showed."""

from __future__ import annotations

from hand_made import case, failed, finding, finished, held, known, stale, started

from zerocheck.report.next_steps import next_lines
from zerocheck.run.records.records import Record
from zerocheck.run.records.tally import tally


def commands(records: list[Record]) -> list[str]:
    lines = next_lines(tally(records))
    assert len(lines) <= 3 and all(not line or line[0] in " n" for line in lines)
    return [line.partition("zerocheck ")[2] for line in lines]


def test_a_run_of_ours_that_holds_leads_to_the_users_code() -> None:
    assert commands(held()) == [
        "run my_sharding.py:my_fsdp",
        "run zero2 --obligations equivalence,resume,memory",
        "run zero2 --profile ci",
    ]
    assert len(commands(known())) == 3


def test_a_run_of_the_users_code_leads_to_more_of_it() -> None:
    name = "my dir/sharding.py:f"
    records = [started(name), case(0, name), finished()]
    assert commands(records)[0].startswith("run 'my dir/sharding.py:f' --obligations")


def test_the_users_model_stays_in_the_command() -> None:
    name = "sharding.py:f"
    records = [started(name, model="net.py:make"), case(0, name), finished()]
    assert commands(records) == [
        "run sharding.py:f --model net.py:make --obligations equivalence,resume,memory",
        "run sharding.py:f --model net.py:make --profile ci",
    ]


def test_a_finding_leads_to_its_replay() -> None:
    assert commands(failed())[0] == ("replay zerocheck-report/findings/zero2-gradient.json")
    crash = finding(obligation=None, status="crashed", case_file="", violation=None)
    records = [started(), case(0), crash, finished(1)]
    assert commands(records) == ["run zero2 --known-issues known.toml"]


def test_nothing_where_nothing_is_known() -> None:
    assert commands([started(), case(0)]) == []
    assert commands([*held()[:-1], stale(), finished(1)]) == []
