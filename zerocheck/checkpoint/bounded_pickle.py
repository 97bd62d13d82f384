"""Unpickling whose work is bounded by the size of the file.

Two forms of a few hundred bytes take a process for hours, deaf to Ctrl-C: a key that is a tuple of
two references to a tuple of two references and so on, which Python hashes as a tree, and millions
of nested marks. No checkpoint has either.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any, BinaryIO, ClassVar

_DISPATCH: dict[int, Any] = dict(pickle._Unpickler.dispatch)
MOST_MARKS = 1000
"""Marks that may be open at once."""
MOST_IN_A_KEY = 1000
"""Elements of a key, those of tuples in it included and counted each time they occur."""


class Broken(Exception):
    """Error for a pickle that is no whole one of the expected form."""


class BoundedUnpickler(pickle._Unpickler):
    """Python's own unpickler written in Python, not that in C.

    A flipped bit can make an index of the memo, which C keeps in an array as long as its largest
    index: tens of gigabytes for one wrong byte. Here it is a dict.
    """

    stack: list[Any]
    metastack: list[Any]

    def _mark(self) -> None:
        if len(self.metastack) >= MOST_MARKS:
            raise Broken(f"it has more than {MOST_MARKS} nested marks")
        _DISPATCH[pickle.MARK[0]](self)

    def _set_item(self) -> None:
        check_key(self.stack[-2])
        _DISPATCH[pickle.SETITEM[0]](self)

    def _set_items(self) -> None:
        for key in self.stack[::2]:
            check_key(key)
        _DISPATCH[pickle.SETITEMS[0]](self)

    def _dict(self) -> None:
        for key in self.stack[::2]:
            check_key(key)
        _DISPATCH[pickle.DICT[0]](self)

    def _add_items(self) -> None:
        for item in self.stack:
            check_key(item)
        _DISPATCH[pickle.ADDITEMS[0]](self)

    def _frozen_set(self) -> None:
        for item in self.stack:
            check_key(item)
        _DISPATCH[pickle.FROZENSET[0]](self)

    dispatch: ClassVar[dict[int, Any]] = {
        **_DISPATCH,
        pickle.MARK[0]: _mark,
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: _set_items,
        pickle.DICT[0]: _dict,
        pickle.ADDITEMS[0]: _add_items,
        pickle.FROZENSET[0]: _frozen_set,
    }


def check_key(key: Any) -> None:
    """Raise Broken for a key that is not small: hashing it takes time for each element."""
    left, open_ = MOST_IN_A_KEY, [key]
    while open_:
        value = open_.pop()
        left -= 1
        if isinstance(value, tuple):
            open_ += value[: left + 1]
        if left < len(open_):
            raise Broken(f"it has a key of more than {MOST_IN_A_KEY} elements")


def check_arguments(arguments: Iterable[Any]) -> None:
    """Raise Broken for arguments of a call that makes keys of what is not small: a set, a dict."""
    for argument in arguments:
        check_key(argument)
        for item in argument if isinstance(argument, list | tuple) else ():
            check_key(item[0] if isinstance(item, list) and item else item)


class _Anything:
    """Stands for a class and its instances: called, filled and used as a key without effect."""

    def __call__(self, *args: object) -> _Anything:
        check_arguments(args)
        return self

    def __setitem__(self, key: object, value: object) -> None:
        pass

    def extend(self, items: object) -> None:
        pass

    append = add = update = extend


class _Trial(BoundedUnpickler):
    """Reads what another unpickler is to read, and builds only plain values of it."""

    def find_class(self, module: str, name: str) -> Any:
        return _Anything()

    def persistent_load(self, pid: Any) -> Any:
        return _Anything()

    def _made(self) -> None:
        self.stack.pop()

    def _made_with_keywords(self) -> None:
        del self.stack[-2:]

    dispatch: ClassVar[dict[int, Any]] = {
        **BoundedUnpickler.dispatch,
        pickle.NEWOBJ[0]: _made,
        pickle.NEWOBJ_EX[0]: _made_with_keywords,
        pickle.BUILD[0]: _made,
    }


def check_pickle(file: BinaryIO) -> None:
    """Read the pickle at this place of a file. Raises Broken for one that would take long."""
    try:
        _Trial(file).load()
    except Broken:
        raise
    except Exception as error:  # a damaged pickle raises whatever its bytes lead to
        raise Broken(f"{type(error).__name__}: {error}") from error
