"""What libraries say where a machine lacks something, and how that is told to a user."""

from __future__ import annotations

import pytest

from zerocheck.machine.shortage import FILES, MEMORY, PROCESSES, THREADS, shortage_in


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("RuntimeError: can't start new thread", PROCESSES),
        ("terminate called without an active exception", THREADS),
        ("OSError: [Errno 24] Too many open files", FILES),
        ("OSError: [Errno 12] Cannot allocate memory", MEMORY),
        # The C library, which ends the process with exit code 127.
        ("cannot allocate memory for thread-local data: ABORT", MEMORY),
        ("what():  std::bad_alloc", MEMORY),
        ("RuntimeError: could not create a primitive", MEMORY),
        ("RuntimeError: mat1 and mat2 shapes cannot be multiplied", None),
    ],
)
def test_a_shortage_is_known_by_its_words(text: str, words: str | None) -> None:
    assert shortage_in(text) == words
