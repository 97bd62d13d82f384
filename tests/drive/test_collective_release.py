"""Memory that a thread of a backend has last is given back where the measured thread sees it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from zerocheck.drive import collective_release
from zerocheck.drive.collective_release import CollectiveRelease


class Backend:
    """A thread that has a tensor until it is told to let go."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensors = [tensor]
        self._told = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self._told.wait()
        self._tensors.clear()

    def let_go(self) -> None:
        self._told.set()
        self._thread.join()


@pytest.fixture
def collective(monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.Tensor], torch.Tensor]:
    """An operator that is taken for a collective."""
    relu = torch.ops.aten.relu_.default
    monkeypatch.setattr(collective_release, "is_collective", lambda func: func is relu)
    return torch.relu_


@pytest.mark.parametrize("replaced", [False, True])
def test_what_a_thread_has_last(
    collective: Callable[[torch.Tensor], torch.Tensor], replaced: bool
) -> None:
    """Also where the tensor got another storage after the collective."""
    gone: list[int] = []
    with CollectiveRelease(gone.append):
        tensor = torch.ones(8, dtype=torch.bfloat16)
        collective(tensor)
        backend = Backend(tensor)
        if replaced:
            tensor.data = tensor.data.float()
        address = tensor.data_ptr()
        torch.zeros(1)
        del tensor
        torch.zeros(1)
        assert address not in gone
        backend.let_go()
        torch.zeros(1)
        assert address in gone


def test_what_is_in_use_is_not_gone(collective: Callable[[torch.Tensor], torch.Tensor]) -> None:
    gone: list[int] = []
    with CollectiveRelease(gone.append) as flight:
        tensor = torch.ones(8)
        for _ in range(3):
            collective(tensor)
        torch.zeros(1)
        flight.settle(lambda storage: storage.data_ptr() == tensor.data_ptr())
        assert not gone
