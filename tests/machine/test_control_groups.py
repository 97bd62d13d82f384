"""Limits of control groups, read from made-up trees of files and from this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerocheck.machine import host
from zerocheck.machine.host import GroupLimit, denials, memory_limits, process_limits


def proc(folder: Path, cgroup: str, *mounts: str) -> Path:
    """A /proc/self with these groups and mounts."""
    (folder / "cgroup").write_text(cgroup)
    (folder / "mountinfo").write_text("".join(f"{mount}\n" for mount in mounts))
    return folder


def group(folder: Path, **files: object) -> Path:
    """A folder of a group; `memory_max` is the file memory.max."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{value}\n")
    return folder


def test_version_2_with_limits_above(tmp_path: Path) -> None:
    top = tmp_path / "a mount"
    here = proc(
        tmp_path,
        "0::/user.slice/job\n",
        "25 30 0:23 / /sys rw shared:7 - sysfs sysfs rw",
        f"29 23 0:26 / {tmp_path}/a\\040mount rw,nosuid shared:9 - cgroup2 cgroup2 rw",
    )
    stat = "anon 5\nfile 99\nactive_file 20000\ninactive_file 30000"
    group(top / "user.slice/job", memory_max="max", memory_current=7, memory_stat=stat)
    group(top / "user.slice", memory_max=500_000, memory_current=300_000, memory_stat=stat)
    group(top / "user.slice", pids_max=9, pids_current=12)
    group(top / "user.slice/job", pids_max=20, pids_current=4)
    group(tmp_path, memory_max=1, memory_current=1)  # above the mount: no group
    assert memory_limits(here) == [GroupLimit(500_000, 250_000)]
    assert process_limits(here) == [GroupLimit(20, 4), GroupLimit(9, 12)]
    assert [one.left for one in process_limits(here)] == [16, 0]


def test_version_1_in_a_container(tmp_path: Path) -> None:
    """The mount shows the container's own group at its top, under the host's name for it."""
    here = proc(
        tmp_path,
        "9:name=systemd:/docker/4f\n8:pids:/docker/4f\n4:cpu,memory:/docker/4f\n",
        f"35 31 0:32 /docker/4f {tmp_path}/memory ro - cgroup cgroup rw,memory",
        f"39 31 0:36 /docker/4f {tmp_path}/pids ro - cgroup cgroup rw,pids",
    )
    group(
        tmp_path / "memory",
        memory_limit_in_bytes=1000,
        memory_usage_in_bytes=400,
        memory_stat="active_file 1\ntotal_active_file 50\ntotal_inactive_file 50",
    )
    group(tmp_path / "pids", pids_max="max", pids_current=3)
    assert memory_limits(here) == [GroupLimit(1000, 300)]
    assert process_limits(here) == []


def test_version_1_without_a_limit(tmp_path: Path) -> None:
    here = proc(
        tmp_path, "4:memory:/a\n", f"35 31 0:32 / {tmp_path}/memory rw - cgroup cgroup rw,memory"
    )
    group(tmp_path / "memory/a", memory_limit_in_bytes=9223372036854771712, memory_usage_in_bytes=1)
    assert memory_limits(here) == []


def test_both_versions_at_once(tmp_path: Path) -> None:
    here = proc(
        tmp_path,
        "8:pids:/\n0::/\n",
        f"39 31 0:36 / {tmp_path}/pids rw - cgroup cgroup rw,pids",
        f"41 31 0:38 / {tmp_path}/unified rw - cgroup2 cgroup2 rw",
    )
    group(tmp_path / "pids", pids_max=30, pids_current=3)
    group(tmp_path / "unified")
    assert process_limits(here) == [GroupLimit(30, 3)]


@pytest.mark.parametrize("name", ["/../other", "/elsewhere"])
def test_a_group_out_of_the_mount(tmp_path: Path, name: str) -> None:
    here = proc(
        tmp_path, f"0::{name}\n", f"41 31 0:38 /own {tmp_path}/unified rw - cgroup2 cgroup2 rw"
    )
    group(tmp_path / "unified", pids_max=30, pids_current=3)
    assert process_limits(here) == [GroupLimit(30, 3)]


def test_nothing_that_can_be_read(tmp_path: Path) -> None:
    assert memory_limits(tmp_path / "nowhere") == []
    garbage = proc(tmp_path, "garbage\n", "garbage", f"1 2 3 / {tmp_path} rw - cgroup2")
    assert memory_limits(garbage) == []


def test_this_machine() -> None:
    for one in (*memory_limits(), *process_limits()):
        assert 0 <= one.left <= one.limit < host.UNLIMITED


def test_denials_are_those_of_all_groups(tmp_path: Path) -> None:
    here = proc(tmp_path, "0::/job/step\n", f"29 23 0:26 / {tmp_path}/top rw - cgroup2 cgroup2 rw")
    group(tmp_path / "top/job/step", pids_events="max 3", memory_events="low 1\noom_kill 1")
    group(tmp_path / "top/job", pids_events="max 4")
    assert denials("pids", here) == 7
    assert denials("memory", here) == 1
