"""Devices by name, and random states. No GPU is needed: torch's module of one is stood in for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from zerocheck.errors import UsageError
from zerocheck.machine import devices

GPU = torch.device("cuda", 1)


class Module:
    """torch.cuda, with a generator of two bytes for each of two devices."""

    def __init__(self) -> None:
        self.states = [b"\0\0", b"\0\0"]
        self.current = 0

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index
        yield
        self.current = before

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return torch.frombuffer(bytearray(self.states[device.index]), dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self.states[device.index] = bytes(state.tolist())

    def manual_seed(self, seed: int) -> None:
        self.states[self.current] = seed.to_bytes(2, "big")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    made = Module()
    monkeypatch.setattr(torch, "get_device_module", lambda _: made)
    return made


@pytest.mark.parametrize("name", ["cpu", "cuda", "cuda:0", "cuda:17"])
def test_spelled_right(name: str) -> None:
    devices.check_device(name)
    assert devices.kind_of(name) in ("cpu", "cuda")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("cdua", "'cuda'"), ("CUDA", "'cuda'"), ("cuda1", "'cuda'"), ("cuda:-1", "'cuda'"),
     ("cuda:01", "'cuda:0'"), ("cpu:0", "'cpu'"), ("cup", "'cpu'")],
)  # fmt: skip
def test_spelled_wrong(name: str, nearest: str) -> None:
    with pytest.raises(UsageError, match=f"unknown device '{name}'; did you mean {nearest}"):
        devices.check_device(name)


def test_names_need_no_torch() -> None:
    code = "import sys, zerocheck.run.plan.options; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


def test_the_state_of_a_gpu_stands_before_that_of_the_cpu(module: Module) -> None:
    devices.seed_device(258, GPU)
    assert module.states == [b"\0\0", b"\1\2"] and module.current == 0  # that one alone
    state = devices.random_state(GPU)
    assert devices.drawn_from(state, GPU) == b"\1\2"
    assert state[2:] == devices.random_state(torch.device("cpu"))
    with devices.forked(GPU):
        devices.seed_device(7, GPU)
        torch.rand(1)
        assert devices.random_state(GPU)[:2] == b"\0\7" and devices.random_state(GPU) != state
    assert devices.random_state(GPU) == state


def test_on_the_cpu_it_is_the_generator_alone(module: Module) -> None:
    cpu = torch.device("cpu")
    devices.seed_device(3, cpu)
    state = devices.random_state(cpu)
    assert state == torch.get_rng_state().numpy().tobytes() == devices.drawn_from(state, cpu)
    first = torch.rand(3)
    devices.set_random_state(state, cpu)
    assert torch.equal(first, torch.rand(3))
    assert module.states == [b"\0\0", b"\0\0"]
    assert devices.processor(cpu) == "" and devices.placed("cpu") == cpu
