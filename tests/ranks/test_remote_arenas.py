"""Arenas of other machines, through a store: what travels, and what does not."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from zerocheck.ranks.arena import Arena
from zerocheck.ranks.remote_arenas import Answers, BytesCache, LocalView, Post, RemoteView, received
from zerocheck.ranks.store_mail import StoreMail
from zerocheck.ranks.view import Mappings, Slot


class CountingMail(StoreMail):
    """Counts the bytes that are put."""

    def __init__(self, store: HashStore) -> None:
        super().__init__(store)
        self.put_bytes = 0

    def put(self, key: str, data: bytes | memoryview) -> None:
        self.put_bytes += len(data)
        super().put(key, data)


class Other:
    """A rank on another machine: an arena, and a thread that answers."""

    def __init__(self, directory: Path) -> None:
        store = HashStore()
        self.arena = Arena("other", [str(directory)])
        self.mail = CountingMail(store)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        mine = StoreMail(store)
        self.post = Post(mine, lambda rank, key: self._wait(mine, key))

    @staticmethod
    def _wait(mail: StoreMail, key: str) -> None:
        assert mail.wait(key)

    def _serve(self) -> None:
        answers = Answers(self.mail, 1)
        while not self._stop.is_set():
            if not answers.answer_one({0: self.arena}):
                self._stop.wait(0.001)

    def view(self, held: BytesCache) -> RemoteView:
        return RemoteView(self.post, 1, 0, self.arena.used, held)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.arena.close()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Other]:
    rank = Other(tmp_path)
    yield rank
    rank.close()


def test_a_slot_comes_when_it_is_asked_for(other: Other) -> None:
    values = torch.randn(3_000_001)  # more than one piece of mail
    narrow = torch.randn(7).bfloat16()
    slots = [other.arena.put([one]) for one in (values, narrow)]
    view = other.view(BytesCache())
    assert other.mail.put_bytes == 0
    for slot, wanted in zip(slots, (values, narrow), strict=True):
        fetched = view.tensor(slot)
        assert torch.equal(fetched, wanted) and fetched.dtype is wanted.dtype
        assert fetched.data_ptr() % 64 == 0  # kernels choose by the address
    assert view.tensor(Slot(0, 0, "float32")).numel() == 0
    with pytest.raises(ValueError, match="outside of the arena"):
        view.tensor(Slot(0, values.numel() + 99, "float32"))


def test_replicas_do_not_travel(other: Other, tmp_path: Path) -> None:
    values, second = torch.randn(50_000), torch.randn(50_000)
    here = Arena("here", [str(tmp_path)])
    mine = here.put([values])
    slots = [other.arena.put([one]) for one in (values, second, second)]
    held = BytesCache()
    local = LocalView(Mappings().view(0, 0, here.path, here.size), held)
    own = local.tensor(mine)
    view = other.view(held)
    assert view.tensor(slots[0]) is own
    assert other.mail.put_bytes < 100
    fetched = view.tensor(slots[1])
    assert torch.equal(fetched, second)
    assert view.tensor(slots[2]) is fetched
    assert 200_000 < other.mail.put_bytes < 201_000
    here.close()


def test_one_bit_makes_another_tensor(other: Other) -> None:
    values = torch.randn(50_000)
    changed = values.clone()
    changed[-1] = -changed[-1]
    slots = [other.arena.put([one]) for one in (values, changed)]
    view = other.view(BytesCache())
    first, second = (view.tensor(slot) for slot in slots)
    assert torch.equal(first, values) and torch.equal(second, changed)


def test_a_long_tensor_comes_in_parts(other: Other, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that a replica has do not travel; one bit in the last part makes another tensor."""
    monkeypatch.setattr("zerocheck.ranks.remote_arenas.PART_BYTES", 64_000)
    values = torch.randn(50_000)
    early, late = values.clone(), values.clone()
    early[7] = -early[7]
    late[-1] = -late[-1]
    both = late.clone()
    both[7] = early[7]
    slots = [other.arena.put([one]) for one in (values, values, late, early, both)]
    view = other.view(BytesCache())
    first = view.tensor(slots[0])
    assert torch.equal(first, values) and other.mail.put_bytes > 200_000
    sent = other.mail.put_bytes
    assert view.tensor(slots[1]) is first and other.mail.put_bytes < sent + 1000
    second = view.tensor(slots[2])
    assert torch.equal(second, late)
    assert other.mail.put_bytes < sent + 10_000  # the last part: 8,000 bytes
    third = view.tensor(slots[3])
    assert torch.equal(third, early)
    # Its first part is that of one replica, its last that of another.
    fourth = view.tensor(slots[4])
    assert torch.equal(fourth, both) and other.mail.put_bytes < sent + 64_000 + 10_000 + 2000
    assert torch.equal(first, values) and torch.equal(second, late)


def test_what_nobody_holds_is_let_go(other: Other) -> None:
    slot = other.arena.put([torch.randn(50_000)])
    held = BytesCache()
    view = other.view(held)
    fetched = view.tensor(slot)
    assert len(held.offers(fetched.nbytes, "float32")) == 1
    del fetched
    gc.collect()
    assert held.offers(200_000, "float32") == []


def test_what_comes_whole_lies_as_it_lay(tmp_path: Path) -> None:
    arena = Arena("it", [str(tmp_path)])
    slots = [arena.put([torch.randn(count)]) for count in (3, 50, 7)]
    view = received(arena.packed())
    for slot in slots:
        assert view.tensor(slot).data_ptr() % 64 == slot.offset % 64 == 0
    assert received(b"").tensor(Slot(0, 0, "float32")).numel() == 0
    arena.close()
