"""Ranks of the pool are told on which hosts they are, before user code is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from ranks_asking import Ask, answers

from zerocheck.ranks import Pool


def test_each_rank_is_told_its_place(ask: Ask) -> None:
    places = answers(ask(3, "places", hosts=(2,)))
    assert places == [
        ["0", "3", "0", "2", "0", "2"],
        ["1", "3", "1", "2", "0", "2"],
        ["2", "3", "0", "1", "1", "2"],
    ]
    assert [t[2:] for t in answers(ask(2, "places"))] == [
        ["0", "2", "0", "1"],
        ["1", "2", "0", "1"],
    ]
    assert [t[2:] for t in answers(ask(2, "places", hosts=(1,), fresh=True))] == [
        ["0", "1", "0", "2"],
        ["0", "1", "1", "2"],
    ]


def test_other_hosts_are_other_processes(shared_pool: Pool, ask: Ask) -> None:
    """What a module reads when it is imported stays what it was in that process."""
    one = answers(ask(2, "imported"))
    other = answers(ask(2, "imported", hosts=(1,)))
    assert (one, other) == (["0", "1"], ["0", "0"])
    assert answers(ask(2, "imported")) == one
    assert set(shared_pool.rank_pids) >= {2}


def test_ranks_that_never_read_their_hosts_are_told_others(shared_pool: Pool, ask: Ask) -> None:
    """They are as good as new ones, which take a tenth of a second each."""
    ask(5, "reduce")
    pids = shared_pool.rank_pids[5]
    assert [t[2:] for t in answers(ask(5, "places", hosts=(2,)))] == [
        ["0", "2", "0", "3"],
        ["1", "2", "0", "3"],
        ["0", "2", "1", "3"],
        ["1", "2", "1", "3"],
        ["0", "1", "2", "3"],
    ]
    assert shared_pool.rank_pids[5] == pids
    # Now they have read it: others do what is asked for on other hosts.
    ask(5, "reduce")
    assert set(shared_pool.rank_pids[5]).isdisjoint(pids)


@pytest.mark.parametrize(
    "how", ["environ[]", "getenv", "in", "copy", "items", "environb", "unpack", "setdefault"]
)
def test_every_way_to_read_a_place_counts(how: str) -> None:
    script = f"""
import os
from zerocheck.machine import place_variables
from zerocheck.machine.hosts import places
os.environ.update(place_variables.values(places((1,), 2), 1))
place_variables.watch()
assert place_variables.copied(os.environ)["GROUP_RANK"] == "1"
list(os.environ), os.environ["PATH"], os.environ.get("HOME"), len(os.environ)
assert not place_variables.were_read()
{READS[how]}
assert place_variables.were_read()
"""
    subprocess.run([sys.executable, "-c", script], check=True)


READS = {
    "environ[]": "os.environ['LOCAL_RANK']",
    "getenv": "os.getenv('LOCAL_WORLD_SIZE')",
    "in": "'GROUP_RANK' in os.environ",
    "copy": "os.environ.copy()",
    "items": "dict(os.environ.items())",
    "environb": "os.environb[b'LOCAL_RANK']",
    "unpack": "{**os.environ}",
    "setdefault": "os.environ.setdefault('GROUP_WORLD_SIZE', '1')",
}


def test_jobs_of_several_hosts_run_beside_each_other(shared_pool: Pool) -> None:
    pending = [
        shared_pool.submit(2, f"echo {number}".encode(), hosts=hosts)
        for number, hosts in enumerate(((), (1,), (), (1,)))
    ]
    results = [shared_pool.wait(one) for one in pending]
    for number, result in enumerate(results):
        assert [answer[3] for answer in answers(result)] == [str(number)] * 2
        result.release()


@pytest.mark.parametrize("name", ["LOCAL_RANK", "RANK"])
def test_the_launchers_own_are_not_handed_down(
    name: str, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "7")
    assert "7" not in answers(ask(2, "places", fresh=True))[1]
    assert os.environ[name] == "7"
