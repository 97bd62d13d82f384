"""Import of the user's code by `package.module:Name` or `path/to/file.py:Name`, and these names.

A file of a package, or with relative imports, is imported as its module. Modules come from the
first of these that has them:

1. the standard library, and what stands before it on `sys.path` (PYTHONPATH);
2. the folder of each file that was named, as for `python file.py`; for a file of a package, the
   folder above the package;
3. installed packages;
4. the current directory, which `python -m` has too.

So neither a file named `types.py` nor a folder named like an installed package changes what other
code imports. All processes import through this module, and so agree.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from .catalogue import check_config, in_session, is_config
from .errors import UsageError, did_you_mean, file_of, nearest
from .session_objects import check_session, session_object

_stamps: dict[Path, tuple[int, int]] = {}
"""When each file was changed last, as it was imported."""

UNDER_MAIN = 'put what it runs under `if __name__ == "__main__":`'
"""Advice for a file that does more than define when it is imported."""


def import_user_code(name: str) -> Any:
    """Import the object named by `package.module:Name` or `path/to/file.py:Name`.

    Runs the user's code. Raises UsageError, with what is missing and where.
    """
    if in_session(name):
        return session_object(name)
    where, _, attribute = name.rpartition(":")
    found = _attribute(_module(where, attribute), where, attribute)
    _put_default_dtype_back()
    return found


def _put_default_dtype_back() -> None:
    """Have torch make float32 tensors again, as cases need, if a file has changed that."""
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.set_default_dtype(torch.float32)


def check_file(name: str) -> None:
    """Raise UsageError at once for a name whose file or module does not exist, or a bad config.

    Importing it would wait for rank processes. Nothing is imported here.
    """
    if is_config(name):
        check_config(name)
    where, _, attribute = name.rpartition(":")
    if in_session(name):
        check_session(name)
    elif where.endswith(".py"):
        file_of(where)
    elif where:
        _look_here(where)
        _check_module(where, attribute)


def _module(where: str, attribute: str) -> ModuleType:
    if not where.endswith(".py"):
        _look_here(where)
        _check_module(where, attribute)
        return _import(where, f"module {where!r}", attribute)
    path = file_of(where)
    name, root = _place_in_package(path)
    _look_in(root)
    _look_here(where)
    if root == path.parent:
        return _import_alone(path, where)
    if str(path.parent) not in sys.path:  # files beside it may be imported by their own names
        sys.path.append(str(path.parent))
    top = name.partition(".")[0]
    try:
        module = _import(name, where, attribute, path)
    except UsageError as error:
        if not _is_missing(name, error.__cause__):
            raise
        module = sys.modules[top]
    if _file_of(module) != path:
        raise UsageError(
            f"{where} is the module {name}, but Python finds another {top!r}, in "
            f"{_folder_of(sys.modules[top])}: rename one of the two, or uninstall that one"
        )
    return module


def _import_alone(path: Path, where: str) -> ModuleType:
    """Import a file that is in no package.

    It gets its own name too: a sharder that imports the file of the model must get the same
    classes, or a wrapping by class would find none of them.
    """
    module_name = f"zerocheck_user_{path.stem}"
    # It may be a module of a package without `__init__.py`, which another file showed to be one.
    files = {name: getattr(module, "__dict__", {}) for name, module in [*sys.modules.items()]}
    aliases = [name for name, values in files.items() if values.get("__file__") == str(path)]
    loaded = _loaded(path, (module_name, path.stem, *aliases))
    if loaded is not None:
        return loaded
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    names = [module_name] if path.stem in sys.modules else [module_name, path.stem]
    sys.modules.update(dict.fromkeys(names, module))
    _stamps[path] = _stamp(path)
    try:
        with _without_training():
            spec.loader.exec_module(module)
    except BaseException as error:
        for name in names:
            del sys.modules[name]
        raise _not_imported(error, where, path) from error
    return module


def _import(name: str, where: str, attribute: str, path: Path | None = None) -> ModuleType:
    """Import a module by name, anew if its file changed. where: what messages call it."""
    path = path or _file_of(sys.modules.get(name))
    loaded = None if path is None else _loaded(path, (name,))
    if loaded is not None:
        return loaded
    importlib.invalidate_caches()
    try:
        with _without_training():
            module = importlib.import_module(name)
    except BaseException as error:
        hint = _near_module(name, attribute) if _is_missing(name, error) else ""
        raise _not_imported(error, where, path, hint) from error
    if (file := _file_of(module)) is not None:
        _stamps[file] = _stamp(file)
    return module


class _Trains(Exception):
    """Raised in user code that takes an optimizer step while it is imported."""


@contextmanager
def _without_training() -> Iterator[None]:
    """Let no optimizer step be taken: a script would train in every rank, for as long as it does.

    Without torch none can be.
    """
    optimizers: Any = sys.modules.get("torch.optim.optimizer")
    if optimizers is None:
        yield
        return

    def refuse(*_: object) -> None:
        raise _Trains

    hook = optimizers.register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        hook.remove()


def _is_missing(name: str, error: BaseException | None) -> bool:
    """Return True if an import failed since there is no module `name`, or no package of it."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    return missing is not None and f"{name}.".startswith(f"{missing}.")


def _loaded(path: Path, names: tuple[str, ...]) -> ModuleType | None:
    """Return the module of the file if it was imported and has not changed since."""
    for name in names:
        module = sys.modules.get(name)
        if module is not None and _file_of(module) == path:
            if _stamps.get(path, _stamp(path)) == _stamp(path):
                return module
            for alias in names:
                if sys.modules.get(alias) is module:
                    del sys.modules[alias]
    return None


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size


def _file_of(module: ModuleType | None) -> Path | None:
    """Return the file that a module was imported from; None for one without."""
    file = getattr(module, "__file__", None)
    return None if file is None or not os.path.isfile(file) else Path(file).resolve()


def _folder_of(package: ModuleType) -> str:
    file = getattr(package, "__file__", None)
    return str(Path(file).parent if file else next(iter(getattr(package, "__path__", ["?"]))))


def _attribute(module: ModuleType, where: str, attribute: str) -> Any:
    try:
        return getattr(module, attribute)
    except AttributeError:
        pass
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise UsageError(f"{where} does not give {attribute!r}: {_gist(error)}") from error
    names = [name for name in vars(module) if not name.startswith("_")]
    hint = did_you_mean(attribute, names)
    own = [name for name in names if _is_defined_in(module, vars(module)[name])]
    if _file_of(module) is None:
        hint = _near_module(where, attribute)
    elif own and not hint:
        hint = f"; it defines {', '.join(own[:_SHOWN])}"
    raise UsageError(f"{where} has no {attribute!r}{hint}")


_SHOWN = 5
"""Names of a file that a message lists."""


def _is_defined_in(module: ModuleType, value: object) -> bool:
    kinds = inspect.isclass(value) or inspect.isfunction(value)
    return kinds and getattr(value, "__module__", "") == module.__name__


# Where modules are looked for


def _look_in(folder: Path) -> None:
    """Add the folder of a file that was named to `sys.path`, behind the standard library."""
    paths = sysconfig.get_paths()
    installed = paths["purelib"]
    if str(folder) in sys.path[: sys.path.index(installed) if installed in sys.path else None]:
        return
    standard = {paths["stdlib"], paths["platstdlib"], f"{paths['platstdlib']}/lib-dynload"}
    indices = [index for index, entry in enumerate(sys.path) if entry in standard]
    sys.path.insert(indices[-1] + 1 if indices else 0, str(folder))


def _look_here(where: str) -> None:
    """Add the current directory to `sys.path`, behind all else.

    It is not needed for what is imported already, such as code of zerocheck.
    """
    if where.partition(".")[0] in sys.modules:
        return
    with suppress(OSError):
        here = os.getcwd()
        if here not in sys.path and "" not in sys.path:
            sys.path.append(here)


def _place_in_package(path: Path) -> tuple[str, Path]:
    """Return the name of a file's module, and the folder in which that name is looked for.

    The package goes up as far as there is an `__init__.py`, or as relative imports reach.
    """
    parts = [] if path.stem == "__init__" else [path.stem]
    folder, reach = path.parent, _reach(path)
    while (
        "." not in folder.name and folder.name and ((folder / "__init__.py").is_file() or reach > 0)
    ):
        parts.insert(0, folder.name)
        folder, reach = folder.parent, reach - 1
    return ".".join(parts), folder


def _reach(path: Path) -> int:
    """Return the most dots of a relative import in a file; 0 for none, or if it has an error."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return 0
    levels = (node.level for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return max(levels, default=0)


# What is said of a failure


def _check_module(where: str, attribute: str) -> None:
    """Raise UsageError for a module of which not even the package is found, or that is ambiguous.

    Imports nothing.
    """
    top, _, rest = where.partition(".")
    spec = None
    with suppress(ValueError):
        spec = importlib.util.find_spec(top) if top else None
    if spec is None and top not in sys.modules:
        raise UsageError(
            f"there is no module {where!r}, neither in the current directory nor installed"
            f"{_near_module(where, attribute)}"
        )
    if spec is None or top == __name__.partition(".")[0]:
        return
    here = _file_in(Path(), where)
    if rest:
        folders = map(Path, spec.submodule_search_locations or ())
        imported = next(filter(None, (_file_in(folder, rest) for folder in folders)), None)
    else:
        imported = Path(spec.origin) if spec.has_location and spec.origin else None
    if here and imported and not here.samefile(imported):
        raise UsageError(
            f"{where} is ambiguous: Python imports {imported}, and the current directory has "
            f"{here}; name the file that you mean, {here}:{attribute} or {imported}:{attribute}"
        )


def _file_in(folder: Path, module: str) -> Path | None:
    """Return the file of a module below a folder; None if it is not there."""
    path = folder.joinpath(*module.split("."))
    files = (path / "__init__.py", path.with_name(f"{path.name}.py"))
    return next(filter(Path.is_file, files), None)


def _near_module(where: str, attribute: str) -> str:
    """Return the name that was probably intended, as `"; did you mean 'pkg.shard:f'?"`, or ""."""
    path = Path(where)
    if path.is_dir():
        return f"; {where!r} is a folder: name a file in it, {path / 'FILE.py'}:{attribute}"
    if Path(f"{where}.py").is_file():
        return f"; did you mean '{where}.py:{attribute}'?"
    folder, parts = Path(), []
    for part in where.split("."):
        names = [p.stem for p in folder.glob("*.py")] + [p.name for p in folder.glob("*/")]
        near = part if part in names else nearest(part, names)
        if not near:
            return ""
        parts.append(near)
        folder /= near
    name = ".".join(parts)
    is_module = folder.with_suffix(".py").is_file() or (folder / "__init__.py").is_file()
    return f"; did you mean '{name}:{attribute}'?" if name != where and is_module else ""


def _not_imported(
    error: BaseException, where: str, path: Path | None, hint: str = ""
) -> UsageError:
    """Return the error for code that cannot be imported, with the line and what to do.

    Raises KeyboardInterrupt if that is what ended the import.
    """
    if isinstance(error, KeyboardInterrupt):
        raise error
    reason, advice = _reason(error, path)
    advice = hint or (f"; {advice}" if advice else "")
    return UsageError(f"{where} does not import: {reason}{advice}")


def _reason(error: BaseException, path: Path | None) -> tuple[str, str]:
    """Return what happened, with the line, and what to do."""
    frames = list(_frames(error.__traceback__))
    line = _line(frames, path)
    if isinstance(error, SystemExit):
        if any(file.endswith(f"{os.sep}argparse.py") for file, _ in frames):
            return f"it parses command-line arguments{line}, and gets none of its own", UNDER_MAIN
        code = "" if error.code is None else repr(error.code)
        return f"it ends the process, as by sys.exit({code}){line}", UNDER_MAIN
    if isinstance(error, _Trains):
        return f"it takes an optimizer step{line}, as a training script does", UNDER_MAIN
    if isinstance(error, SyntaxError):
        name = error.filename and Path(error.filename)
        place = "" if not name or name == path else f"{name.name}, "
        return f"{type(error).__name__}: {error.msg} ({place}line {error.lineno})", ""
    gist = f"{_gist(error)}{line}"
    if isinstance(error, ModuleNotFoundError) and error.name:
        return gist, _advice_on_missing(error.name.partition(".")[0], path)
    if isinstance(error, ImportError) and "relative import" in str(error):
        return gist, "name it from the folder above its package: package.module:Name"
    mistakes = (AttributeError, ImportError, NameError, TypeError, UsageError)
    return gist, "" if isinstance(error, mistakes) else f"if that is a script, {UNDER_MAIN}"


def _advice_on_missing(top: str, path: Path | None) -> str:
    """Return where a missing module is, else where it can be installed."""
    for folder in () if path is None else path.parents:
        if (folder / f"{top}.py").is_file() or (folder / top / "__init__.py").is_file():
            return f"{top} is in {folder}: run zerocheck there"
    return f"install it where zerocheck runs, in {sys.prefix}"


def _frames(trace: TracebackType | None) -> Iterator[tuple[str, int]]:
    """Iterate over file and line of each call, the outermost first."""
    while trace is not None:
        yield trace.tb_frame.f_code.co_filename, trace.tb_lineno
        trace = trace.tb_next


def _line(frames: list[tuple[str, int]], path: Path | None) -> str:
    """Return `" (line 3)"`, or `" (util.py, line 3)"` in another file: the innermost call outside
    of libraries."""
    library = (sysconfig.get_path("stdlib"), str(Path(__file__).parent), "<")
    own = [frame for frame in frames if not frame[0].startswith(library)]
    own = [frame for frame in own if "site-packages" not in frame[0]] or own
    if not own:
        return ""
    file, number = own[-1]
    return f" (line {number})" if file == str(path) else f" ({Path(file).name}, line {number})"


def _gist(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


# Names of objects

Nameable = str | type | Callable[..., Any]
"""Name as on the command line, or a class or function."""


def importable_name(given: Nameable) -> str:
    """Return the name by which rank processes import `given`.

    `package.module:Name` or `path/to/file.py:Name`; a name stays as it is. Raises UsageError for an
    object that they could not find there.
    """
    if isinstance(given, str):
        return given
    if not (inspect.isclass(given) or inspect.isfunction(given)):
        raise UsageError(
            f"got {described(given)}; needed is a class, a function build(model, case, mesh), or a "
            "name such as 'fsdp2'"
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


def described(value: object) -> str:
    """Return a value and its type, as messages show what was given: `"3 (int)"`."""
    text = repr(value)
    first = text.partition("\n")[0][:60]
    shown = first if first == text else f"{first}..."
    return f"{shown} ({type(value).__name__})"


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
