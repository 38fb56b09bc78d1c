"""Things that a configuration names: one of the house's own, or `package.module:Name` for anything else."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Collection
from typing import Any

from penstock.errors import ConfigError


def load_callable(kind: str, path: str, known: Collection[str] = ()) -> Callable[..., Any]:
    """What lies at `package.module:Name`. ConfigError otherwise: with the nearest of `known` if it is no such path."""
    if not all(path.partition(":")):
        raise ConfigError(f"unknown {kind} {path!r}{nearest(path, known)}; or give 'package.module:Name'")
    found = _load(path)
    if not callable(found):
        raise ConfigError(f"{kind} {path!r} is a {type(found).__name__}, expected something to call")
    return found


def nearest(name: str, known: Collection[str]) -> str:
    """The end of a sentence about a name that is not one of these."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return f"; did you mean {' or '.join(repr(match) for match in close)}?"
    return f"; known: {', '.join(sorted(known))}" if 0 < len(known) <= 20 else ""


def _load(path: str) -> Any:
    module_name, _, attribute = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{path!r}: there is no module {error.name!r} on the Python path") from error
    except ImportError as error:
        raise ConfigError(f"{path!r}: the module {module_name!r} cannot be imported: {error}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [name for name in dir(found) if not name.startswith("_")]
            raise ConfigError(f"{path!r}: {module_name!r} has no {part!r}{nearest(part, public)}")
        found = getattr(found, part)
    return found
