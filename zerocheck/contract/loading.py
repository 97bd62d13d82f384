"""Loading of an implementation by name.

Built in, `package.module:Name`, `path/to/file.py:Name`, or the path of a library's config.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from ..catalogue import (
    check_installed,
    check_spelling,
    extra_of,
    is_config,
    maker_of,
    missing,
    package_of,
    place_of,
)
from ..errors import UsageError
from ..user_code import import_user_code
from .build import BuiltImplementation, from_function
from .implementation import Implementation

_loaded: dict[str, type[Implementation]] = {}


def load(name: str) -> type[Implementation]:
    """Load the class of an implementation. Ranks call it, since it imports the user's code.

    Raises UsageError, with what is missing and where, if it cannot be used.
    """
    if name not in _loaded:
        check_spelling(name)
        check_installed(name)
        if extra := extra_of(name):
            reason = missing(extra)
            if reason is not None:
                raise UsageError(f"{name} {reason}")
        given = _imported(name)
        if is_config(name):
            return given(name)  # type: ignore[no-any-return]
        _loaded[name] = _as_class(name, given)
    return _loaded[name]


def _imported(name: str) -> Any:
    try:
        return import_user_code(place_of(name))
    except UsageError as error:
        package = package_of(name)
        if not package:
            raise
        raise UsageError(f"{name}, of the installed package {package}: {error}") from error


def _as_class(name: str, given: Any) -> type[Implementation]:
    if hasattr(given, "handles"):
        raise UsageError(f"{name}: `handles` is called `capabilities`")
    made = _made_of_object(name, given)
    if made is not None:
        return made
    if inspect.isfunction(given) or isinstance(given, partial):
        _check_takes(name, given, "a build function", "model", "case", "mesh")
        return from_function(given, name.rpartition(":")[2])
    if not inspect.isclass(given):
        raise UsageError(
            f"{name} is of type {type(given).__name__}; needed is a subclass of "
            "zerocheck.Implementation or a function build(model, case, mesh)"
        )
    if not issubclass(given, Implementation):
        given = _adopted(name, given)
    base: type[Implementation] = Implementation
    required = ["__init__", "train_step", "shards"]
    if issubclass(given, BuiltImplementation):
        base, required = BuiltImplementation, ["build"]
    lacking = [method for method in required if getattr(given, method) is getattr(base, method)]
    if lacking:
        raise UsageError(f"{name} lacks {_listed(lacking)}, which every implementation must have")
    if base is BuiltImplementation and inspect.isfunction(vars(given).get("build")):
        _check_takes(name, given.build, "build()", "self", "model", "case", "mesh")
    return given  # type: ignore[no-any-return]


def _check_takes(name: str, function: Any, noun: str, *arguments: str) -> None:
    """Raise UsageError for a function that cannot be called with these positional arguments."""
    signature = inspect.signature(function)
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise UsageError(
            f"{name}: {noun} takes ({', '.join(arguments)}) and returns zerocheck.Built; this one "
            f"takes {signature}"
        ) from error


def _made_of_object(name: str, given: Any) -> type[Implementation] | None:
    """Make the class of an object or class of a library, or of a function that returns an object.

    None for anything else. Raises UsageError where the function raises.
    """
    if hasattr(given, "train_step"):
        return None
    one = given
    if inspect.isfunction(given) and not inspect.signature(given).parameters:
        try:
            one = given()
        except Exception as error:
            raise UsageError(
                f"{name}() raises {type(error).__name__}: {error}; a function without arguments "
                "returns an object of a library, and a build function takes (model, case, mesh)"
            ) from error
    maker = maker_of(one)
    return None if maker is None else import_user_code(maker)(name, given)


def _adopted(name: str, given: type) -> type[Implementation]:
    """Adopt a class that follows the contract without subclassing it."""
    lacking = [method for method in ("train_step", "shards") if not hasattr(given, method)]
    if lacking:
        raise UsageError(
            f"{name} is a class without {_listed(lacking)}; needed is a subclass of "
            "zerocheck.Implementation or a function build(model, case, mesh)"
        )
    return type(given.__name__, (given, Implementation), {})


def _listed(methods: list[str]) -> str:
    *rest, last = (f"{method}()" for method in methods)
    return f"{', '.join(rest)} and {last}" if rest else last
