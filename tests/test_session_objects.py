"""Objects that no file has: their names here, and their code in other processes."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import zerocheck
from zerocheck.errors import UsageError
from zerocheck.session_objects import available, session_code, session_object, unpacked

CELLS = """
class Layer:
    pass

def model():
    return Layer

def sharder():
    return Layer, lambda: 1 / 0
"""


def cells() -> dict[str, Any]:
    """Objects of a notebook: defined in no module that can be imported."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(CELLS, "/cells/7.py", "exec"), names)
    return {f"__main__:{name}": names[name] for name in ("model", "sharder")}


def test_names_stand_for_objects_for_a_while() -> None:
    objects, later = cells(), cells()
    with available(objects):
        assert session_object("__main__:model") is objects["__main__:model"]
        with available(later):
            assert session_object("__main__:model") is later["__main__:model"]
        assert session_object("__main__:model") is objects["__main__:model"]
        assert session_code()
    assert not session_code()
    with pytest.raises(UsageError, match=r"put it into a file, and name it .*file.py:model$"):
        session_object("__main__:model")


def test_another_name_is_not_there() -> None:
    with available(cells()), pytest.raises(UsageError, match="'__main__:other' is of a notebook"):
        session_object("__main__:other")


OTHER = """
import sys, traceback
from zerocheck.session_objects import receive_session_code, session_object
receive_session_code(sys.stdin.buffer.read())
layer, fails = session_object("__main__:sharder")()
print(layer is session_object("__main__:model")())
try:
    fails()
except ZeroDivisionError:
    traceback.print_exc(file=sys.stdout)
"""


def elsewhere(code: bytes) -> str:
    path = str(Path(zerocheck.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", OTHER], input=code, capture_output=True, env={"PYTHONPATH": path}
    )
    return (done.stdout + done.stderr).decode()


def test_another_process_has_the_code() -> None:
    """One class for all objects that use it, and the files and lines of tracebacks."""
    with available(cells()):
        output = elsewhere(session_code())
    assert output.startswith("True\n"), output
    assert 'File "/cells/7.py", line 9, in <lambda>' in output


def test_what_another_process_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("a_module_of_here")
    exec("def helper(): pass", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    objects = cells()
    objects["__main__:model"].__globals__["helper"] = vars(module)["helper"]
    exec("def sharder(): helper()", objects["__main__:model"].__globals__)
    objects["__main__:sharder"] = objects["__main__:model"].__globals__["sharder"]
    with available(objects):
        output = elsewhere(session_code())
    assert "sharder cannot be loaded in another process: ModuleNotFoundError: No module" in output
    assert "put the code into a file" in output


def test_a_snapshot_is_of_its_time() -> None:
    objects = cells()
    names = objects["__main__:model"].__globals__
    with available(objects):
        code = session_code()
    layer, names["Layer"] = names["Layer"], int
    assert objects["__main__:model"]() is int
    assert unpacked(code)["__main__:model"]() is layer
    assert unpacked(b"") == {} and pickle.loads(code)
