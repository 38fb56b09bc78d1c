"""Objects that a configuration names: a built-in name, or `package.module:Name`."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError

SEARCHED_SHOWN = 4
OURS = (str(Path(__file__).parents[1]), str(importlib.__file__))
"""Paths of traceback frames that are not in the user's code."""


def load_callable(kind: str, path: str, known: Collection[str] = ()) -> Callable[..., Any]:
    """The object at `package.module:Name`. Raises ConfigError, with the nearest of `known` if it is no such path."""
    if not all(path.partition(":")):
        raise ConfigError(f"unknown {kind} {path!r}{nearest(path, known)}; or give 'package.module:Name'")
    found = _load(path)
    if not callable(found):
        raise ConfigError(f"{kind} {path!r} is a {type(found).__name__}, expected a callable")
    return found


def check_call(owner: str, function: Callable[..., Any], *parameters: str, **columns: Any) -> None:
    """Raises ConfigError unless `function(*parameters, **columns)` matches its signature."""
    _check_call(owner, function, [*parameters, *(f"{column}=" for column in columns)], parameters, columns)


def check_methods(owner: str, found: type, protocol: type, without: Collection[str] = ()) -> None:
    """Raises ConfigError unless the class has the methods of a protocol with matching signatures. If the protocol has
    `**keywords`, the method may require any keywords. Methods in `without` are optional."""
    for name, promised in vars(protocol).items():
        if name.startswith("_") or name in without or not inspect.isfunction(promised):
            continue
        parameters = inspect.signature(promised).parameters.values()
        more = [f"**{one.name}" for one in parameters if one.kind is inspect.Parameter.VAR_KEYWORD]
        given = tuple(one.name for one in parameters if one.kind is not inspect.Parameter.VAR_KEYWORD)
        method = getattr(found, name, None)
        if not callable(method):
            raise ConfigError(f"{owner} has no method {name}({', '.join(given[1:])})")
        if isinstance(inspect.getattr_static(found, name), staticmethod | classmethod):
            given = given[1:]
        _check_call(f"{owner}: {name}", method, [*given, *more], given, None if more else {})


def takes(function: Callable[..., Any], keyword: str) -> bool:
    """Whether the function accepts this keyword."""
    parameters = inspect.signature(function).parameters
    return keyword in parameters or any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())


def _check_call(
    owner: str,
    function: Callable[..., Any],
    written: Collection[str],
    parameters: tuple[str, ...],
    columns: Mapping[str, Any] | None,
) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # not written in Python: the call itself will raise
    try:
        if columns is None:
            signature.bind_partial(*parameters)
        else:
            signature.bind(*parameters, **columns)
    except TypeError as error:
        raise ConfigError(f"{owner} is called with ({', '.join(written)}), but takes {signature}: {error}") from error


def nearest(name: str, known: Collection[str]) -> str:
    """The end of an error message about an unknown name: close matches, or a short list of valid names."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return f"; did you mean {' or '.join(repr(match) for match in close)}?"
    return f"; known: {', '.join(sorted(known))}" if 0 < len(known) <= 20 else ""


def described(error: BaseException) -> str:
    """An error of the user's code, with its line."""
    return f"{type(error).__name__}: {error}{_line_of(error)}"


def _line_of(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f" ({error.filename}:{error.lineno})" if error.filename and error.filename not in str(error) else ""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(("<", *OURS))]
    return f" ({theirs[-1].filename}:{theirs[-1].lineno})" if theirs else ""


def _load(path: str) -> Any:
    module_name, _, attribute = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{path!r}: the module {module_name!r} imports {error.name!r}, which is not installed{_line_of(error)}"
            ) from error
        searched = ", ".join(repr(folder) for folder in sys.path[:SEARCHED_SHOWN])
        raise ConfigError(
            f"{path!r}: there is no module {error.name!r} on the Python path, which begins with {searched}; "
            f"run.extra_path adds directories to it"
        ) from error
    except (Exception, SystemExit) as error:  # the user's code may raise anything when it is imported
        raise ConfigError(f"{path!r}: the module {module_name!r} cannot be imported: {described(error)}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [name for name in dir(found) if not name.startswith("_")]
            raise ConfigError(f"{path!r}: {module_name!r} has no {part!r}{nearest(part, public)}")
        found = getattr(found, part)
    return found
