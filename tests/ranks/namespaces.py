"""Hosts made of network namespaces, each with an address of its own, joined by one link.

They see the same files, and neither each other's shared memory nor loopback. Making them needs root
and iproute2.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_numbers = itertools.count(1)


class Unavailable(Exception):
    """Namespaces cannot be made here, and why."""


class Host:
    """One of them. `processes` were started on it."""

    def __init__(self, name: str, address: str, names: str) -> None:
        """names: path of what it has for /etc/hosts."""
        self.name = name
        self.address = address
        self._names = names
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, command: Sequence[str], *, cwd: Path) -> subprocess.Popen[str]:
        """Start a command there, in a session of its own, with the name as the host's name."""
        # The mounts are its own too: nothing of this is seen outside.
        named = f'hostname {self.name}; mount --bind {self._names} /etc/hosts; exec "$@"'
        inside = ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-e", "-c", named]
        process = subprocess.Popen(
            [*inside, "-", *command],
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def torchrun(
        self, ranks: int, arguments: Sequence[str], *, master: Host, cwd: Path
    ) -> subprocess.Popen[str]:
        """Start torchrun on two hosts, of which this is one, with so many ranks here."""
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
        command += ["--nproc-per-node", str(ranks), "--rdzv-backend", "c10d", "--rdzv-id", "test"]
        command += ["--rdzv-endpoint", f"{master.name}:29477"]
        return self.start([*command, "-m", "zerocheck", *arguments], cwd=cwd)

    def die(self) -> None:
        """Kill all its processes at once, as a host that loses its power does."""
        run = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True)
        for pid in map(int, run.stdout.split()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


class TwoHosts:
    """Raises Unavailable where they cannot be made."""

    def __init__(self) -> None:
        number = f"{os.getpid()}{next(_numbers)}"
        self._names = Path(tempfile.mkdtemp(prefix="hosts-")) / "hosts"
        self.hosts = [
            Host(f"zc{letter}{number}", f"10.77.0.{place}", str(self._names))
            for place, letter in ((1, "a"), (2, "b"))
        ]
        lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in self.hosts)]
        self._names.write_text("\n".join(lines) + "\n")

        one, other = (host.name for host in self.hosts)
        try:
            for host in self.hosts:
                _ip("netns", "add", host.name)
            _ip("-n", one, "link", "add", "to-b", "type", "veth", "peer", "name", "to-a")
            _ip("-n", one, "link", "set", "to-a", "netns", other)
            for host, link in zip(self.hosts, ("to-b", "to-a"), strict=True):
                _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", link)
                _ip("-n", host.name, "link", "set", link, "up")
                _ip("-n", host.name, "link", "set", "lo", "up")
        except Unavailable:
            self.close()
            raise

    def slow_down(self, rate: str) -> None:
        """Let the link carry no more than that, such as "20mbit", in each direction."""
        for host, link in zip(self.hosts, ("to-b", "to-a"), strict=True):
            limit = ["rate", rate, "burst", "32kbit", "latency", "200ms"]
            command = ["qdisc", "replace", "dev", link, "root", "tbf", *limit]
            _run(["ip", "netns", "exec", host.name, "tc", *command])

    def close(self) -> None:
        """End what runs on them, and remove them."""
        for host in self.hosts:
            host.die()
            for process in host.processes:
                process.communicate()
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True)
        shutil.rmtree(self._names.parent)


def _ip(*arguments: str) -> None:
    _run(["ip", *arguments])


def _run(command: Sequence[str]) -> None:
    try:
        run = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise Unavailable(f"{command[0]} is not there (Debian's iproute2 brings it)") from error
    if run.returncode:
        raise Unavailable(f"{' '.join(command)}: {run.stderr.strip()}")
