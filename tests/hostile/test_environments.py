"""On a machine that lacks something, a command works or says what is missing: exit code 2."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import hand_made
import pytest
import torch
from checkpoint.hand_made_checkpoints import state
from hostile.confined import ANOTHER_USER, control_group, why_not
from hostile.leftovers import Leftovers
from hostile.trials import assert_printable
from slices import sliced

from zerocheck.case.schema import Block, Case, Model
from zerocheck.run.execute.environment import environment
from zerocheck.run.findings.case_file import write
from zerocheck.run.records.journal import encode
from zerocheck.run.records.records import CaseFile

PROGRAM = f"{sys.executable} -m zerocheck"
RUN = f"{PROGRAM} run zero2 --world-sizes 2 --max-cases 1 --no-shrink --obligations update"
MEMORY = f"{PROGRAM} memory gpt2 --implementation zero2 --world-size 2"
REPLAY = f"{PROGRAM} replay $GIVEN/case.json"
FAULTS = f"{PROGRAM} faults average-becomes-sum --world-sizes 2 --max-cases 1"
REPORT = f"{PROGRAM} report $GIVEN/run --report-dir r"
CHECKPOINT = f"{PROGRAM} checkpoint $GIVEN/saved.pt"
REMOVED = "mkdir d; cd d; rmdir ../d"
TWO_CORES = "taskset -c 0,1"
"""Libraries start as many threads as there are cores, and each takes address space."""
STAYING = ("zerocheck-cores-", "torchinductor_")

WORKS, FOUND, REFUSED, EITHER = (0,), (1,), (2,), (0, 2)

SHELLS: dict[str, tuple[str, tuple[int, ...], str]] = {
    # name: (shell command, exit codes, what is said)
    "no loopback": (f"unshare -rn {RUN}", REFUSED, "ip link set lo up"),
    "no room for the report": (
        f"mkdir r; unshare -rm sh -c 'mount -t tmpfs -o size=4k none r; {RUN} --report-dir r'",
        REFUSED, "no room is left",
    ),
    "file size of 0": (f"ulimit -f 0; trap '' XFSZ; {RUN}", REFUSED, "ulimit -f"),
    "report into /dev/full": (
        f"mkdir r; ln -s /dev/full r/journal.ndjson; {RUN} --report-dir r",
        REFUSED, "symbolic link",
    ),
    "report directory is a file": (f"touch r; {RUN} --report-dir r", REFUSED, "is a file"),
    "findings are a file": (
        f"mkdir r; touch r/findings; {RUN} --report-dir r", REFUSED, "r/findings is a file",
    ),
    "report directory read-only": (
        f"mkdir r; unshare -rm sh -c 'mount -t tmpfs -o ro none r; {RUN} --report-dir r'",
        REFUSED, "Read-only",
    ),
    "settings that torch does not know": (
        f"export TORCH_LOGS=bogus; {RUN}", REFUSED, "torch cannot be imported here: ValueError",
    ),
    "a config without keys": (
        f"echo {{}} > c.json; {PROGRAM} run c.json", REFUSED, "c.json has no keys (allowed:",
    ),
    "temporary files that the checked code removes": (
        f"mkdir tmp; export TMPDIR=$PWD/tmp; {PROGRAM} run $GIVEN/removing.py:build "
        "--world-sizes 2 --max-cases 1", REFUSED, "was removed while zerocheck used it",
    ),
    "stdout /dev/full": (f"{RUN} >/dev/full", REFUSED, "no room is left"),
    "stdout closed": (f"{RUN} >&-", WORKS, ""),
    "stdin closed": (f"{RUN} <&-", WORKS, ""),
    "stderr closed": (f"{RUN} 2>&-", WORKS, ""),
    "all closed": (f"{RUN} <&- >&- 2>&-", WORKS, ""),
    "20 descriptors": (f"ulimit -n 20; {RUN}", REFUSED, "ulimit -n"),
    "39 descriptors": (f"ulimit -n 39; {RUN}", REFUSED, "ulimit -n"),
    "64 descriptors": (f"ulimit -n 64; {RUN}", WORKS, ""),
    "few descriptors that may be more": (f"ulimit -Sn 50; {RUN}", WORKS, ""),
    "address space of 200 MiB": (f"ulimit -v 204800; {RUN}", REFUSED, "ulimit -v"),
    "address space of 600 MiB": (f"ulimit -v 614400; {RUN}", REFUSED, "ulimit -v"),
    "address space of 680 MiB": (f"ulimit -v 696320; {RUN}", EITHER, ""),
    "address space of 1 GiB": (f"ulimit -v 1048576; {TWO_CORES} {RUN}", WORKS, ""),
    "address space of 2 GiB": (f"ulimit -v 2097152; {TWO_CORES} {RUN}", WORKS, ""),
    "data of 100 MiB": (f"ulimit -d 102400; {RUN}", REFUSED, "ulimit -d"),
    "data of 200 MiB": (f"ulimit -d 204800; {RUN}", REFUSED, "ulimit -d"),
    "data of 270 MiB": (f"ulimit -d 276480; {RUN}", EITHER, ""),
    "data of 400 MiB": (f"ulimit -d 409600; {TWO_CORES} {RUN}", WORKS, ""),
    "stack of 256 KiB": (f"ulimit -s 256; {RUN}", WORKS, ""),
    "1 process": (f"{ANOTHER_USER} prlimit --nproc=1 {RUN}", REFUSED, "ulimit -u"),
    "4 processes": (f"{ANOTHER_USER} prlimit --nproc=4 {RUN}", REFUSED, "ulimit -u"),
    "9 processes": (f"{ANOTHER_USER} prlimit --nproc=9 {RUN}", REFUSED, "ulimit -u"),
    "20 processes": (f"{TWO_CORES} {ANOTHER_USER} prlimit --nproc=20 {RUN}", WORKS, ""),
    "no locked memory": (f"ulimit -l 0; {RUN}", WORKS, ""),
    "one processor": (f"taskset -c 0 {RUN}", WORKS, ""),
    "directory removed": (
        f"mkdir d; cd d; rmdir ../d; {RUN}", REFUSED, "change to one that exists",
    ),
    "directory removed, memory": (
        f"mkdir d; cd d; rmdir ../d; {MEMORY}", REFUSED, "change to one that exists",
    ),
    "directory of bytes": (f"mkdir $(printf 'd\\377'); cd d*; {RUN}", REFUSED, "not UTF-8"),
    "directory of escapes": (f"mkdir $(printf 'd\\033[2J'); cd d*; {RUN}", WORKS, ""),
    "TMPDIR missing": (f"TMPDIR=/nowhere/at/all {RUN}", WORKS, ""),
    "TMPDIR read-only": (
        f"mkdir t; unshare -rm sh -c 'mount -t tmpfs -o ro none t; TMPDIR=$PWD/t {RUN}'", WORKS, "",
    ),
    "TMPDIR full": (
        f"mkdir t; unshare -rm sh -c 'mount -t tmpfs -o size=4k none t; TMPDIR=$PWD/t {RUN}'",
        REFUSED, "no room is left",
    ),
    "shared memory full": (
        f"unshare -rm sh -c 'mount -t tmpfs -o size=64k none /dev/shm; {RUN}'", WORKS, "",
    ),
    "no shared memory": (
        f"mkdir t; unshare -rm sh -c 'mount -t tmpfs -o ro none /dev/shm; {RUN}'", WORKS, "",
    ),
    "no home": (f"unset HOME; {RUN}", WORKS, ""),
    "home missing": (f"HOME=/nowhere {RUN}", WORKS, ""),
    "umask 0777": (f"umask 0777; {RUN}", WORKS, ""),
    "locale C, ascii": (f"LC_ALL=C PYTHONUTF8=0 PYTHONIOENCODING=ascii {RUN}", WORKS, ""),
    "no environment": (f"env -i PYTHONPATH=$PYTHONPATH {RUN}", WORKS, ""),
    "terminal unknown": (f"TERM=nothing COLUMNS=0 LINES=-1 {RUN}", WORKS, ""),
    "OMP_NUM_THREADS": (f"OMP_NUM_THREADS=garbage {RUN}", WORKS, ""),
    "optimized": (f"PYTHONOPTIMIZE=2 {RUN}", WORKS, ""),
    "warnings are errors": (f"PYTHONWARNINGS=error {RUN}", WORKS, ""),
    "warnings are errors, by option": (RUN.replace(" -m", " -W error -m"), WORKS, ""),
    "safe path": (f"PYTHONSAFEPATH=1 {RUN}", WORKS, ""),
    "no bytecode": (f"PYTHONDONTWRITEBYTECODE=1 {RUN}", WORKS, ""),
    "developing": (f"PYTHONDEVMODE=1 {RUN}", WORKS, ""),
    "hash seed": (f"PYTHONHASHSEED=7 {RUN}", WORKS, ""),
    "debugging of torch": (
        f"TORCH_DISTRIBUTED_DEBUG=DETAIL TORCH_SHOW_CPP_STACKTRACES=1 TORCH_LOGS=+all {RUN}",
        WORKS, "",
    ),
    "ranks left over": (f"RANK=3 WORLD_SIZE=8 LOCAL_RANK=3 {RUN}", WORKS, ""),
    "rendezvous left over": (f"MASTER_ADDR=10.255.255.1 MASTER_PORT=99999 {RUN}", WORKS, ""),
    "interface left over": (f"GLOO_SOCKET_IFNAME=nothing0 {RUN}", WORKS, ""),
    "devices": (f"CUDA_VISIBLE_DEVICES=garbage {RUN}", WORKS, ""),
    "memory into /dev/full": (f"{MEMORY} --json /dev/full", REFUSED, "No space left"),
    "memory, stdout /dev/full": (f"{MEMORY} >/dev/full", REFUSED, "no room is left"),
    "memory, stdout closed": (f"{MEMORY} >&-", WORKS, ""),
    "list, stdout /dev/full": (f"{PROGRAM} list >/dev/full", REFUSED, "no room is left"),
    "version, stdout closed": (f"{PROGRAM} --version >&-", WORKS, ""),
    "memory, address space of 500 MiB": (f"ulimit -v 512000; {MEMORY}", REFUSED, "ulimit -v"),
    "memory, warnings are errors": (f"PYTHONWARNINGS=error {MEMORY}", WORKS, ""),
    "replay, no loopback": (f"unshare -rn {REPLAY}", REFUSED, "ip link set lo up"),
    "replay, 20 descriptors": (f"ulimit -n 20; {REPLAY}", REFUSED, "ulimit -n"),
    "replay, address space of 500 MiB": (f"ulimit -v 512000; {REPLAY}", REFUSED, "ulimit -v"),
    "replay, 4 processes": (
        f"cat $GIVEN/case.json >case.json; {ANOTHER_USER} prlimit --nproc=4 {PROGRAM} "
        "replay case.json", REFUSED, "ulimit -u",
    ),
    "replay of what cannot be read": (f"{PROGRAM} replay /proc/self/mem", REFUSED, "Input/output"),
    "faults, no loopback": (f"unshare -rn {FAULTS}", REFUSED, "ip link set lo up"),
    "faults, 20 descriptors": (f"ulimit -n 20; {FAULTS}", REFUSED, "ulimit -n"),
    "faults, data of 100 MiB": (f"ulimit -d 102400; {FAULTS}", REFUSED, "ulimit -d"),
    "faults, 4 processes": (f"{ANOTHER_USER} prlimit --nproc=4 {FAULTS}", REFUSED, "ulimit -u"),
    "report, no room": (
        f"mkdir r; unshare -rm sh -c 'mount -t tmpfs -o size=4k none r; {REPORT}'",
        REFUSED, "No space left",
    ),
    "report, directory read-only": (
        f"mkdir r; unshare -rm sh -c 'mount -t tmpfs -o ro none r; {REPORT}'", REFUSED, "Read-only",
    ),
    "report, stdout /dev/full": (f"{REPORT} >/dev/full", REFUSED, "no room is left"),
    "report, stdout closed": (f"{REPORT} >&-", WORKS, ""),
    "report, directory removed": (f"{REMOVED}; {REPORT}", REFUSED, "change to one that exists"),
    "report of what cannot be read": (f"{PROGRAM} report /proc/self/mem", REFUSED, "Input/output"),
    "report, 7 descriptors": (f"ulimit -n 7; {REPORT}", WORKS, ""),
    "checkpoint into /dev/full": (f"{CHECKPOINT} --json /dev/full", REFUSED, "No space left"),
    "checkpoint, stdout /dev/full": (f"{CHECKPOINT} >/dev/full", REFUSED, "no room is left"),
    "checkpoint, stdout closed": (f"{CHECKPOINT} >&-", WORKS, ""),
    "checkpoint, directory removed": (
        f"{REMOVED}; {CHECKPOINT}", REFUSED, "change to one that exists",
    ),
    "checkpoint that cannot be read": (
        f"ln -s /proc/self/mem saved.pt; {PROGRAM} checkpoint saved.pt", FOUND, "Input/output",
    ),
    "checkpoint, 7 descriptors": (f"ulimit -n 7; {CHECKPOINT}", WORKS, ""),
    "checkpoint, address space of 500 MiB": (
        f"ulimit -v 512000; {CHECKPOINT}", REFUSED, "ulimit -v",
    ),
    "checkpoint, warnings are errors": (f"PYTHONWARNINGS=error {CHECKPOINT}", WORKS, ""),
}  # fmt: skip

OFTEN = (
    "no loopback", "file size of 0", "stdout /dev/full", "20 descriptors", "directory removed",
    "findings are a file",
    "memory into /dev/full", "list, stdout /dev/full", "address space of 600 MiB", "4 processes",
    "replay, 20 descriptors", "report, stdout /dev/full", "checkpoint, stdout /dev/full",
)  # fmt: skip

GROUPS: dict[str, tuple[str, int, tuple[int, ...], str]] = {
    # name: (controller, limit, exit codes, what is said)
    "memory of 200 MiB": ("memory", 200 << 20, REFUSED, "control group"),
    "memory of 400 MiB": ("memory", 400 << 20, REFUSED, "control group"),
    "memory of 1 GiB": ("memory", 1 << 30, WORKS, ""),
    "1 process": ("pids", 1, REFUSED, "pids limit of the control group"),
    "6 processes": ("pids", 6, REFUSED, "pids limit of the control group"),
    "20 processes": ("pids", 20, WORKS, ""),
}


REMOVING = """
import shutil, tempfile, torch, zerocheck
def build(model, case, mesh):
    shutil.rmtree(tempfile.gettempdir(), ignore_errors=True)
    return zerocheck.Built(model, torch.optim.AdamW(zerocheck.groups(model, case)))
"""


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that commands read: a case, a journal and a checkpoint."""
    place = tmp_path_factory.mktemp("given")
    case = Case(mesh=(2,), model=Model(blocks=(Block(kind="mlp"),)))
    file = CaseFile(
        implementation="zero2", case=case, status="violated", judgement=None,
        environment=environment(), title="wrong",
    )  # fmt: skip
    write(place, "case", file)
    (place / "run").mkdir()
    journal = b"".join(encode(one) + b"\n" for one in hand_made.held())
    (place / "run" / "journal.ndjson").write_bytes(journal)
    torch.save(state(), place / "saved.pt")
    (place / "removing.py").write_text(REMOVING)
    return place


@pytest.mark.every(4)
@pytest.mark.parametrize("name", sliced(tuple(SHELLS), OFTEN))
def test_it_works_or_says_what_is_missing(tmp_path: Path, given: Path, name: str) -> None:
    command, codes, says = SHELLS[name]
    if "unshare" in command and (why := why_not("unshare -rmn true")):
        pytest.skip(f"no namespaces can be made here: {why}")
    if ANOTHER_USER in command:
        if why := why_not(f"{ANOTHER_USER} true"):
            pytest.skip(f"no command can be run as another user here: {why}")
        tmp_path.chmod(0o777)
    assert_survived(tmp_path, command, codes, says, given)


@pytest.mark.parametrize("name", sliced(tuple(GROUPS), ("memory of 200 MiB", "6 processes")))
def test_in_a_control_group(tmp_path: Path, given: Path, name: str) -> None:
    controller, limit, codes, says = GROUPS[name]
    with ExitStack() as stack:
        group = entered(stack, controller, limit)
        command = f"echo $$ >{group}/cgroup.procs; exec {TWO_CORES} {RUN}"
        assert_survived(tmp_path, command, codes, says, given)


LAUNCHED = "-m torch.distributed.run --nproc-per-node 2"
SPENT = "--profile ci --seed 7 --max-cases 24 --world-sizes 2,4 --no-shrink"
FEW = "--max-cases 6 --no-shrink"
ENDS = "obligations hold|no new finding|no further process or thread may be started"


@pytest.mark.long
@pytest.mark.parametrize(
    ("controller", "limit", "launcher", "command", "says"),
    [
        ("pids", 60, "", f"zero3 {SPENT}", ENDS),
        ("pids", 16, LAUNCHED, f"fsdp2 {FEW}", ENDS),
        ("pids", 40, LAUNCHED, f"zero3 {FEW}", "all obligations hold"),
        ("memory", 700 << 20, LAUNCHED, f"zero3 {FEW}", "all obligations hold"),
    ],
)
def test_ranks_that_use_up_a_limit(
    tmp_path: Path, controller: str, limit: int, launcher: str, command: str, says: str
) -> None:
    """What passed the check at the start and was used up later was a crash of right code."""
    with ExitStack() as stack:
        group = entered(stack, controller, limit)
        done = subprocess.run(
            f"echo $$ >{group}/cgroup.procs; "
            f"exec {sys.executable} {launcher} -m zerocheck run {command}",
            shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=500,
        )  # fmt: skip
    said = done.stdout + done.stderr
    assert re.search(says, said) and "please report" not in said, said[-3000:]
    assert not list((tmp_path / "zerocheck-report/findings").glob("*.json")), said[-3000:]


def entered(stack: ExitStack, controller: str, limit: int) -> Path:
    try:
        return stack.enter_context(control_group(controller, limit))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")


def assert_survived(
    folder: Path, command: str, codes: tuple[int, ...], says: str, given: Path
) -> None:
    left = Leftovers()
    temporary = folder / "temporary"
    temporary.mkdir()
    environment = {**os.environ, **left.environment, "TMPDIR": str(temporary), "GIVEN": str(given)}
    done = subprocess.Popen(
        ["bash", "-c", command], cwd=folder, env=environment, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        out, error = (text.decode() for text in done.communicate(timeout=300))
        message = f"{command}: {done.returncode}\n{out[-3000:]}{error[-3000:]}"
        assert done.returncode in codes, message
        assert says in out + error, message
        assert "Traceback" not in out + error and "please report" not in error, message
        assert_printable(out + error)
        if done.returncode == 2 and "2>&-" not in command:
            assert "error: " in error, message
        left.gone(10)
        names = [one for one in os.listdir(temporary) if not one.startswith(STAYING)]
        assert not names
    finally:
        left.kill()
