"""Objects that no file has: of a notebook, of the script that runs, or made within a function.

Other processes get them by their code (cloudpickle), from the process that started them and from
no file. Their names are `__main__:NAME`.
"""

from __future__ import annotations

import io
import pickle
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType
from typing import Any, ClassVar

from .errors import UsageError

_objects: dict[str, Any] = {}
"""Objects that names stand for now, in this process."""
_code = b""
"""The same for other processes, pickled together with the code that they define and use."""


@contextmanager
def available(objects: Mapping[str, Any]) -> Iterator[None]:
    """Let names stand for objects: here, and in processes that start meanwhile.

    Raises UsageError for an object that cannot be sent to another process.
    """
    code = _packed(objects)
    before = dict(_objects), _code
    _set(objects, code)
    try:
        yield
    finally:
        _set(*before)


def _set(objects: Mapping[str, Any], code: bytes) -> None:
    global _code
    _objects.clear()
    _objects.update(objects)
    _code = code


def session_code() -> bytes:
    """Return the objects that are available for another process; empty if there are none."""
    return _code


def unpacked(code: bytes) -> dict[str, Any]:
    """Return the objects of a session as they were when they were pickled."""
    objects: dict[str, Any] = pickle.loads(code) if code else {}
    return objects


def receive_session_code(code: bytes) -> None:
    """Take the objects of another process. They are unpickled if one is asked for."""
    if code != _code:
        _set({}, code)


def session_object(name: str) -> Any:
    """Return the object of that name. Runs the user's code, in another process.

    Raises UsageError if it is not here, or cannot be unpickled.
    """
    if name not in _objects:
        try:
            _objects.update({**unpacked(_code), **_objects})
        except Exception as error:
            raise UsageError(
                f"{_label(name)} cannot be loaded in another process: {type(error).__name__}: "
                f"{error}; put the code into a file, and name it path/to/file.py:NAME"
            ) from error
    check_session(name)
    return _objects[name]


def check_session(name: str) -> None:
    """Raise UsageError for an object that only another process has, or had."""
    if name not in _objects:
        raise UsageError(
            f"{name!r} is of a notebook or a script that ran, and is not here; put it into a file, "
            f"and name it path/to/file.py:{_label(name)}"
        )


def _packed(objects: Mapping[str, Any]) -> bytes:
    """Pickle objects in one piece, so that what they share stays one object."""
    if not objects:
        return b""
    import cloudpickle

    reduce = cloudpickle.Pickler.dispatch_table[CodeType]

    class FilePickler(cloudpickle.Pickler):  # type: ignore[misc]
        """cloudpickle, which keeps the names of files: tracebacks of ranks have them."""

        dispatch_table: ClassVar[Any] = ChainMap(
            {CodeType: lambda code: (_with_file, (code.co_filename, *reduce(code)))},
            cloudpickle.Pickler.dispatch_table,
        )

    pickled = io.BytesIO()
    try:
        FilePickler(pickled).dump(dict(objects))
        return pickled.getvalue()
    except Exception as error:
        raise UsageError(
            f"{' and '.join(map(_label, objects))} cannot be sent to rank processes: "
            f"{type(error).__name__}: {error}; create that inside the function, or put the code "
            "into a file"
        ) from error


def _with_file(file: str, make: Callable[..., CodeType], arguments: tuple[Any, ...]) -> CodeType:
    """Make a code object in the process that unpickles it, with the file that it is of."""
    return make(*arguments).replace(co_filename=file)


def _label(name: str) -> str:
    return name.partition(":")[2]
