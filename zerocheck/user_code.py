"""Import of the user's code by `package.module:Name` or `path/to/file.py:Name`, and these names."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from .catalogue import check_config, is_config
from .errors import UsageError, did_you_mean, file_of

_stamps: dict[Path, tuple[int, int]] = {}
"""When each file was changed last, as it was imported."""


def import_user_code(name: str) -> Any:
    """Import the object named by `package.module:Name` or `path/to/file.py:Name`.

    Runs the user's code. Raises UsageError, with what is missing and where.
    """
    where, _, attribute = name.rpartition(":")
    return _attribute(_module(where, attribute), where, attribute)


def check_file(name: str) -> None:
    """Raise UsageError for a missing file in `path/to/file.py:Name`, or a bad DeepSpeed config.

    It does so at once, where importing it waits for rank processes. Other names pass; nothing is
    imported.
    """
    if is_config(name):
        check_config(name)
    where = name.rpartition(":")[0]
    if where.endswith(".py"):
        file_of(where)


def _module(where: str, attribute: str) -> ModuleType:
    if where.endswith(".py"):
        path = file_of(where)
        module_name = f"zerocheck_user_{path.stem}"
        there = _there(path, (module_name, path.stem))
        if there is not None:
            return there
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # By its own name too: a sharder that imports the file of the model must get the same
        # classes, or a wrapping by class would find none of them.
        names = [module_name] if path.stem in sys.modules else [module_name, path.stem]
        sys.modules.update(dict.fromkeys(names, module))
        _stamps[path] = _stamp(path)
        folder = str(path.parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            for name in names:
                del sys.modules[name]
            raise UsageError(f"{where} does not import: {_reason(error, path)}") from error
        return module
    try:
        return importlib.import_module(where)
    except BaseException as error:
        hint = ""
        if isinstance(error, ModuleNotFoundError) and Path(f"{where}.py").is_file():
            hint = f"; did you mean '{where}.py:{attribute}'?"
        raise UsageError(f"module {where!r} does not import: {_reason(error)}{hint}") from error


def _there(path: Path, names: tuple[str, ...]) -> ModuleType | None:
    """Return the module of the file, if it was imported and not changed since."""
    for name in names:
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if file is not None and Path(file).resolve() == path:
            if _stamps.get(path, _stamp(path)) == _stamp(path):
                return module
            for one in names:
                if sys.modules.get(one) is module:
                    del sys.modules[one]
    return None


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size


def _attribute(module: ModuleType, where: str, attribute: str) -> Any:
    try:
        return getattr(module, attribute)
    except AttributeError:
        pass
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise UsageError(f"{where} does not give {attribute!r}: {_reason(error)}") from error
    names = [name for name in vars(module) if not name.startswith("_")]
    raise UsageError(f"{where} has no {attribute!r}{did_you_mean(attribute, names)}")


def _reason(error: BaseException, path: Path | None = None) -> str:
    """Describe an error: type, message and, for a file of the user, the line in it."""
    line = ""
    trace = error.__traceback__
    while trace is not None:
        if path is not None and trace.tb_frame.f_code.co_filename == str(path):
            line = f" (line {trace.tb_lineno})"
        trace = trace.tb_next
    if isinstance(error, SyntaxError) and error.lineno:
        return f"SyntaxError: {error.msg} (line {error.lineno})"
    return f"{type(error).__name__}: {error}{line}"


Nameable = str | type | Callable[..., Any]
"""Name as on the command line, or a class or function at the top of a module."""


def importable_name(given: Nameable) -> str:
    """Return the name by which rank processes import `given`.

    `package.module:Name` or `path/to/file.py:Name`; a name stays as it is. Raises UsageError for an
    object that they could not find there.
    """
    if isinstance(given, str):
        return given
    if not (inspect.isclass(given) or inspect.isfunction(given)):
        raise UsageError(
            f"{given!r} is a {type(given).__name__}; needed is a class, a function "
            "build(model, case, mesh), or a name such as 'fsdp2'"
        )
    qualified, module = given.__qualname__, sys.modules.get(given.__module__)
    if not qualified.isidentifier() or getattr(module, qualified, None) is not given:
        raise UsageError(
            f"{qualified} is not at the top of its module {given.__module__}, so rank processes "
            "cannot import it; define it there under that name"
        )
    file = getattr(module, "__file__", None)
    if file is None:
        raise UsageError(f"{qualified} is in no file, so rank processes cannot import it")
    if _in_package(given.__module__, Path(file)):
        return f"{given.__module__}:{qualified}"
    path = Path(file).resolve()
    here = Path.cwd().resolve()
    return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{qualified}"


def _in_package(module: str, file: Path) -> bool:
    """Return True if `module` is in a package that Python finds by name, and its file within it."""
    top, dot, _ = module.partition(".")
    if not dot:
        return False
    spec = PathFinder.find_spec(top)
    if spec is None or spec.submodule_search_locations is None:
        return False
    return any(
        file.resolve().is_relative_to(Path(folder).resolve())
        for folder in spec.submodule_search_locations
    )
