"""Sharders whose ranks misbehave, one for each kind: `misbehaving.py:rank_NAME`."""

from __future__ import annotations

import atexit
import ctypes
import gc
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

from zerocheck.adapters.textbook.zero2 import Zero2
from zerocheck.errors import Unsupported

KEPT: list[Any] = []
LONG_S = 3600
SLEEP = [sys.executable, "-c", f"import time; time.sleep({LONG_S})"]


@dataclass(frozen=True)
class Fault:
    """What is done, where, and what is said of it.

    where: build, supports, forward, backward, step, report (what train_step returns), shards, save,
    load or close. status: the right ones; several where it depends on which rank is faster. says:
    what the verdict must say. everywhere: on all ranks, else on rank 1.
    """

    where: str
    do: Callable[[], Any]
    status: str | tuple[str, ...]
    says: str = ""
    everywhere: bool = False


class Own(Exception):
    """An exception of the user's."""


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__


class Unpicklable(Exception):
    def __init__(self):
        super().__init__("with a lock")
        self.lock = threading.Lock()

    def __reduce__(self):
        raise TypeError("cannot be pickled")


class Slow:
    """Hangs where it is collected."""

    def __del__(self):
        time.sleep(LONG_S)


class Raising(logging.Handler):
    def emit(self, record):
        raise Own("in a handler")


def raises(error):
    def do():
        raise error if isinstance(error, BaseException) else error()

    return do


def peers():
    """Pids of the other ranks: the other children of the zygote."""
    zygote = os.getppid()
    children = Path(f"/proc/{zygote}/task/{zygote}/children").read_text().split()
    return [int(pid) for pid in children if int(pid) != os.getpid()]


def segfault():
    ctypes.string_at(0)


def exhaust_address_space():
    KEPT.append(bytearray(1 << 60))


def endless_memory():
    """Asks for memory without end, and uses none of it: the machine needs its own."""
    for _ in range(1000):
        KEPT.append(numpy.empty(1 << 28, numpy.uint8))
    raise Own("250 GiB of memory, and no bound")


def recurse():
    return recurse()


def caused_by_itself():
    error = Own("a circle")
    error.__cause__ = error.__context__ = error
    raise error


def group_of_errors():
    raise ExceptionGroup("several", [Own("one"), ExceptionGroup("more", [Own("two")] * 50)])


def forever():
    while True:
        pass


def hold_lock_twice():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def hold_the_gil():
    ctypes.PyDLL(None).sleep(LONG_S)


def in_thread(target, *, daemon):
    threading.Thread(target=target, daemon=daemon).start()


def fork_that_returns():
    KEPT.append(os.fork())


def fork_that_sleeps():
    if os.fork() == 0:
        time.sleep(LONG_S)


def session_of_its_own():
    KEPT.append(subprocess.Popen(SLEEP, start_new_session=True))


def daemonize():
    """Fork twice, as servers do: the child belongs to nobody."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(SLEEP[0], SLEEP)
        os._exit(0)
    os.wait()


def daemonize_and_die():
    daemonize()
    os.kill(os.getpid(), signal.SIGKILL)


def fork_and_die():
    """Who is forked holds the sockets of the dead."""
    fork_that_sleeps()
    os.kill(os.getpid(), signal.SIGKILL)


def fill_stdout():
    line = b"x" * 1023 + b"\n"
    for _ in range(50 << 10):
        os.write(1, line)


def opened():
    """Files that this process holds open, by descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
    return found


def used():
    """Files of the harness that this process has open or maps."""
    mapped = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    return {path for path in (*opened().values(), *mapped) if "zerocheck-ranks-" in path}


def delete_own_files():
    for path in used():
        if os.path.exists(path):
            os.unlink(path)


def delete_own_directories():
    for path in used():
        shutil.rmtree(path[: path.index("/", path.index("zerocheck-ranks-"))], ignore_errors=True)


def noise_on_sockets(noise):
    """Noise to the others and to the parent."""
    for descriptor, path in opened().items():
        if path.startswith("socket:"):
            try:
                os.set_blocking(descriptor, False)
                os.write(descriptor, noise)
            except OSError:
                continue
    time.sleep(LONG_S)


def few_descriptors():
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def exhaust_descriptors():
    few_descriptors()
    while True:
        KEPT.append(os.open(os.devnull, os.O_RDONLY))


def exhaust_descriptors_and_go_on():
    with suppress(OSError):
        exhaust_descriptors()


def no_processor_time():
    resource.setrlimit(resource.RLIMIT_CPU, (0, 1))
    forever()


def no_files():
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    with open(os.path.join(os.environ.get("TMPDIR", "/tmp"), "of-a-rank"), "wb") as file:
        file.write(b"x" * 100)


def alarm():
    signal.alarm(1)
    time.sleep(LONG_S)


def deaf():
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(LONG_S)


def hanging_at_exit():
    atexit.register(time.sleep, LONG_S)


def cycles():
    gc.disable()
    for _ in range(1000):
        one = [bytearray(1000)]
        one.append(one)


def wrong_handler():
    logging.getLogger().addHandler(Raising())
    logging.getLogger("of a user").error("an error")


def extra_collective():
    dist.all_reduce(torch.ones(7))


def other_shape():
    dist.all_reduce(torch.ones(3 + 1000 * dist.get_rank()))


def other_kind():
    if dist.get_rank() == 1:
        dist.broadcast(torch.ones(5), 0)
    else:
        dist.all_reduce(torch.ones(5))


def to_itself():
    work = dist.irecv(torch.ones(1), 1 - dist.get_rank())
    work.wait()


def endless_shards():
    from zerocheck.contract import Shard

    while True:
        yield Shard("none", "parameter", torch.zeros(1), (1,))


def execute(*command):
    os.execv(command[0], command)


def clear_modules():
    sys.modules.clear()


FAULTS = {
    # It ends, or is ended
    "exit_0": Fault("forward", lambda: os._exit(0), "crashed", "left with exit code 0"),
    "exit_7": Fault("build", lambda: os._exit(7), "crashed", "left with exit code 7"),
    "exit_of_all": Fault("step", lambda: os._exit(7), "crashed", "exit code 7", everywhere=True),
    "exit_in_supports": Fault("supports", lambda: os._exit(7), "crashed", "exit code 7"),
    "exit_in_save": Fault("save", lambda: os._exit(7), "crashed", "exit code 7"),
    "exit_in_load": Fault("load", lambda: os._exit(7), "crashed", "exit code 7"),
    "exit_in_close": Fault("close", lambda: os._exit(0), "crashed", "exit code 0"),
    "sys_exit": Fault("backward", lambda: sys.exit(3), "crashed", "SystemExit: 3"),
    "system_exit": Fault("step", raises(SystemExit), "crashed", "SystemExit", everywhere=True),
    "keyboard_interrupt": Fault("forward", raises(KeyboardInterrupt), "crashed", "Interrupt"),
    "generator_exit": Fault("shards", raises(GeneratorExit), "crashed", "GeneratorExit"),
    "abort": Fault("build", os.abort, "crashed", "SIGABRT"),
    "segfault": Fault("forward", segfault, "crashed", "SIGSEGV"),
    "segfault_in_load": Fault("load", segfault, "crashed", "SIGSEGV"),
    "kill_itself": Fault(
        "backward", lambda: os.kill(os.getpid(), signal.SIGKILL), "crashed", "died of SIGKILL"
    ),
    "kill_another": Fault(
        "step", lambda: os.kill(peers()[0], signal.SIGKILL), "crashed", "rank 0 died of SIGKILL"
    ),
    "kill_its_group": Fault(
        "step", lambda: os.killpg(0, signal.SIGTERM), "crashed", "died of SIGTERM"
    ),
    "kill_the_zygote": Fault(
        "step", lambda: (os.kill(os.getppid(), signal.SIGKILL), time.sleep(LONG_S)),
        "crashed", "the process that starts ranks was killed",
    ),
    "alarm": Fault("forward", alarm, "crashed", "died of SIGALRM"),
    "no_processor_time": Fault("forward", no_processor_time, "crashed", "died of SIG"),
    "execute_true": Fault("step", lambda: execute("/bin/true"), "crashed", "exit code 0"),
    # It stops
    "stop_itself": Fault(
        "step", lambda: os.kill(os.getpid(), signal.SIGSTOP), "hung", "rank 1 is stopped"
    ),
    "stop_another": Fault(
        "step", lambda: os.kill(peers()[0], signal.SIGSTOP), "hung", "rank 0 is stopped"
    ),
    "execute_sleep": Fault(
        "step", lambda: execute("/bin/sleep", str(LONG_S)), "crashed", "closed its connection"
    ),
    "sleep": Fault("forward", lambda: time.sleep(LONG_S), "hung", "in <lambda>"),
    "sleep_of_all": Fault("shards", lambda: time.sleep(LONG_S), "hung", everywhere=True),
    "sleep_in_save": Fault("save", lambda: time.sleep(LONG_S), "hung"),
    "hold_the_gil": Fault("backward", hold_the_gil, "hung"),
    "hold_lock_twice": Fault("build", hold_lock_twice, "hung", "hold_lock_twice"),
    "busy": Fault("step", forever, "hung", "forever"),
    "endless_shards": Fault("shards", endless_shards, "hung"),
    "deaf": Fault("forward", deaf, "hung"),
    "finalizer": Fault("forward", lambda: (Slow(), None)[1], "hung", "__del__"),
    # It leaves threads and processes
    "thread": Fault("step", lambda: in_thread(lambda: time.sleep(LONG_S), daemon=False), "holds"),
    "busy_thread": Fault("close", lambda: in_thread(forever, daemon=True), "holds"),
    "fork_that_returns": Fault("close", fork_that_returns, "holds"),
    "fork_that_sleeps": Fault("step", fork_that_sleeps, "holds"),
    "session_of_its_own": Fault("step", session_of_its_own, "holds"),
    "daemon": Fault("step", daemonize, "holds"),
    "daemon_of_a_dead_rank": Fault("step", daemonize_and_die, "crashed", "SIGKILL"),
    "fork_and_die": Fault("step", fork_and_die, "crashed", "rank 1 died of SIGKILL"),
    "hanging_at_exit": Fault("build", hanging_at_exit, "holds"),
    # It takes away what it has
    "close_all_descriptors": Fault("step", lambda: os.closerange(0, 4096), ("crashed", "hung")),
    "close_descriptors_in_close": Fault(
        "close", lambda: os.closerange(0, 4096), ("crashed", "hung")
    ),
    "close_stdout": Fault("step", sys.stdout.close, "holds"),
    "close_descriptor_1": Fault("close", lambda: os.close(1), "holds"),
    "fill_stdout": Fault("step", fill_stdout, "holds"),
    "delete_own_files": Fault("step", delete_own_files, "crashed", "file was removed"),
    "delete_observed_files": Fault("close", delete_own_files, "crashed", "file was removed"),
    "delete_own_directories": Fault(
        "close", delete_own_directories, "crashed", "file was removed"
    ),
    "noise_on_sockets": Fault("step", lambda: noise_on_sockets(b"\xff" * 64), "crashed", "socket"),
    "framed_noise_on_sockets": Fault(
        "step", lambda: noise_on_sockets(b"\x02" + bytes(7) + b"hi" * 9), "crashed", "socket"
    ),
    "exhaust_descriptors": Fault("forward", exhaust_descriptors, "crashed", "Too many open"),
    "exhaust_descriptors_and_go_on": Fault("close", exhaust_descriptors_and_go_on, "holds"),
    "no_files": Fault("step", no_files, "crashed", "File too large"),
    "clear_modules": Fault("close", clear_modules, ("holds", "crashed")),
    # It raises
    "recursion": Fault("backward", recurse, "crashed", "RecursionError"),
    "memory_error": Fault("build", exhaust_address_space, "crashed", "MemoryError"),
    "endless_memory": Fault("step", endless_memory, "crashed", "out of memory"),
    "huge_tensor": Fault("step", lambda: torch.empty(1 << 50), "crashed", "allocate"),
    "mute": Fault("step", raises(Mute), "crashed", "Mute", everywhere=True),
    "unpicklable": Fault("build", raises(Unpicklable), "crashed", "with a lock"),
    "long_message": Fault(
        "forward", lambda: raises(Own("long " * (2 << 20)))(), "crashed", "Own: long long"
    ),
    "caused_by_itself": Fault("step", caused_by_itself, "crashed", "a circle"),
    "group_of_errors": Fault("step", group_of_errors, "crashed", "several", everywhere=True),
    "raise_alone": Fault("backward", raises(Own("only here")), "crashed", "only here"),
    "raise_in_close": Fault("close", raises(Own("at the end")), "crashed", "at the end"),
    "raise_in_save": Fault("save", raises(Own("on the disk")), "crashed", "on the disk"),
    "unsupported": Fault(
        "build", raises(Unsupported("not this")), "unsupported", "not this", everywhere=True
    ),
    # It breaks what ranks do together
    "extra_collective": Fault("step", extra_collective, ("crashed", "hung", "violated")),
    "other_shape": Fault("step", other_shape, ("crashed", "hung"), everywhere=True),
    "other_kind": Fault("step", other_kind, ("crashed", "hung"), everywhere=True),
    "receive_from_nobody": Fault("step", to_itself, "hung"),
    "no_process_group": Fault("step", dist.destroy_process_group, ("crashed", "hung")),
    # It changes what is around it, and goes on
    "directory": Fault("build", lambda: os.chdir("/"), "holds"),
    "signal_handlers": Fault(
        "build", lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN), "holds"
    ),
    "cycles": Fault("step", cycles, "holds"),
    "threads_of_torch": Fault("build", lambda: torch.set_num_threads(64), "holds"),
    "wrong_handler": Fault("step", wrong_handler, "crashed", "in a handler"),
    # It gives back something else
    "report_5": Fault("report", lambda: 5, "crashed", everywhere=True),
    "no_report": Fault("report", lambda: None, "crashed", everywhere=True),
    "no_shards": Fault("shards", lambda: (), "violated", everywhere=True),
    "shards_5": Fault("shards", lambda: (5,), "crashed", everywhere=True),
    "shards_of_strings": Fault("shards", lambda: ("weight",), "crashed", everywhere=True),
}  # fmt: skip


def misbehaving(name):
    """A sharder that is right but for this."""
    fault = FAULTS[name]

    def here(where):
        return fault.where == where and (fault.everywhere or dist.get_rank() == 1)

    def act(where):
        if here(where):
            fault.do()

    class Misbehaving(Zero2):
        @classmethod
        def supports(cls, case):
            act("supports")
            return super().supports(case)

        def __init__(self, model, case, mesh):
            act("build")
            super().__init__(model, case, mesh)
            model.register_forward_pre_hook(lambda *_: act("forward"))
            next(model.parameters()).register_hook(lambda *_: act("backward"))

        def train_step(self, step):
            act("step")
            report = super().train_step(step)
            return fault.do() if here("report") else report

        def shards(self):
            given = fault.do() if here("shards") else None
            return super().shards() if given is None else given

        def save(self, directory, loader):
            act("save")
            return super().save(directory, loader)

        def load(self, directory, loader):
            act("load")
            super().load(directory, loader)

        def close(self):
            super().close()
            act("close")

    Misbehaving.__name__ = Misbehaving.__qualname__ = name
    return Misbehaving


def __getattr__(name):
    """The sharder of a fault, `rank_` before its name: functions of this module have some names."""
    if name.startswith("rank_") and name[5:] in FAULTS:
        return misbehaving(name[5:])
    raise AttributeError(name)
