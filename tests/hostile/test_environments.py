"""On a machine that lacks something, a command works or says what is missing: exit code 2."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hostile.leftovers import Leftovers
from hostile.trials import assert_printable
from slices import sliced

PROGRAM = f"{sys.executable} -m zerocheck"
RUN = f"{PROGRAM} run zero2 --world-sizes 2 --max-cases 1 --no-shrink"
MEMORY = f"{PROGRAM} memory gpt2 --implementation zero2 --world-size 2"
STAYING = ("zerocheck-cores-", "torchinductor_")

WORKS, REFUSED, EITHER = (0,), (2,), (0, 2)

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
    "report directory read-only": (
        f"mkdir r; unshare -rm sh -c 'mount -t tmpfs -o ro none r; {RUN} --report-dir r'",
        REFUSED, "Read-only",
    ),
    "stdout /dev/full": (f"{RUN} >/dev/full", REFUSED, "no room is left"),
    "stdout closed": (f"{RUN} >&-", EITHER, ""),
    "stdin closed": (f"{RUN} <&-", WORKS, ""),
    "stderr closed": (f"{RUN} 2>&-", WORKS, ""),
    "all closed": (f"{RUN} <&- >&- 2>&-", EITHER, ""),
    "20 descriptors": (f"ulimit -n 20; {RUN}", REFUSED, "ulimit -n"),
    "39 descriptors": (f"ulimit -n 39; {RUN}", REFUSED, "ulimit -n"),
    "64 descriptors": (f"ulimit -n 64; {RUN}", WORKS, ""),
    "few descriptors that may be more": (f"ulimit -Sn 50; {RUN}", WORKS, ""),
    "address space of 1 GiB": (f"ulimit -v 1048576; {RUN}", EITHER, ""),
    "address space of 2 GiB": (f"ulimit -v 2097152; {RUN}", EITHER, ""),
    "data of 200 MiB": (f"ulimit -d 204800; {RUN}", EITHER, ""),
    "stack of 256 KiB": (f"ulimit -s 256; {RUN}", EITHER, ""),
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
        EITHER, "",
    ),
    "shared memory full": (
        f"unshare -rm sh -c 'mount -t tmpfs -o size=64k none /dev/shm; {RUN}'", WORKS, "",
    ),
    "no shared memory": (
        f"mkdir t; unshare -rm sh -c 'mount -t tmpfs -o ro none /dev/shm; {RUN}'", WORKS, "",
    ),
    "no home": (f"unset HOME; {RUN}", WORKS, ""),
    "home missing": (f"HOME=/nowhere {RUN}", WORKS, ""),
    "umask 0777": (f"umask 0777; {RUN}", EITHER, ""),
    "locale C, ascii": (f"LC_ALL=C PYTHONUTF8=0 PYTHONIOENCODING=ascii {RUN}", WORKS, ""),
    "no environment": (f"env -i PYTHONPATH=$PYTHONPATH {RUN}", WORKS, ""),
    "terminal unknown": (f"TERM=nothing COLUMNS=0 LINES=-1 {RUN}", WORKS, ""),
    "OMP_NUM_THREADS": (f"OMP_NUM_THREADS=garbage {RUN}", WORKS, ""),
    "optimized": (f"PYTHONOPTIMIZE=2 {RUN}", EITHER, ""),
    "warnings are errors": (f"PYTHONWARNINGS=error {RUN}", EITHER, ""),
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
}  # fmt: skip

OFTEN = (
    "no loopback", "file size of 0", "stdout /dev/full", "20 descriptors", "directory removed",
    "memory into /dev/full", "list, stdout /dev/full",
)  # fmt: skip


def namespaces() -> str:
    """Why none can be made here; empty where they can."""
    made = subprocess.run(["unshare", "-rmn", "true"], capture_output=True, text=True)
    return made.stderr.strip()


@pytest.mark.parametrize("name", sliced(tuple(SHELLS), OFTEN))
def test_it_works_or_says_what_is_missing(tmp_path: Path, name: str) -> None:
    command, codes, says = SHELLS[name]
    if "unshare" in command and (why := namespaces() if shutil.which("unshare") else "no unshare"):
        pytest.skip(f"no namespaces can be made here: {why}")
    assert_survived(tmp_path, command, codes, says)


def assert_survived(
    folder: Path, command: str, codes: tuple[int, ...], says: str, **options: Callable[[], None]
) -> None:
    left = Leftovers()
    temporary = folder / "temporary"
    temporary.mkdir()
    environment = {**os.environ, **left.environment, "TMPDIR": str(temporary)}
    done = subprocess.Popen(
        ["bash", "-c", command], cwd=folder, env=environment, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
    )  # fmt: skip
    try:
        out, error = (text.decode() for text in done.communicate(timeout=300))
        said = f"{command}: {done.returncode}\n{out[-3000:]}{error[-3000:]}"
        assert done.returncode in codes, said
        assert says in out + error, said
        assert "Traceback" not in out + error and "please report" not in error, said
        assert_printable(out + error)
        if done.returncode == 2 and "2>&-" not in command:
            assert "error: " in error, said
        left.gone(10)
        names = [one for one in os.listdir(temporary) if not one.startswith(STAYING)]
        assert not names
    finally:
        left.kill()
