"""Imports of transformers without what it prepares for models that are not used.

`transformers.models` reads the files of all models to list what is in them, and `transformers` has done so before. To
know which packages are installed, an object is made for every file of each. Without both the same modules are imported
in three quarters of the time; `transformers.models` makes its list when it is asked for something.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

MODELS = "transformers.models"


def import_all(names: Iterable[str]) -> None:
    """Those that are not there are left out: a process that needs one says what is missing."""
    with _packages_listed_quickly():
        for name in names:
            with contextlib.suppress(ImportError):
                if name.startswith(f"{MODELS}."):
                    _leave_unlisted(MODELS)
                importlib.import_module(name)


class _Unlisted(ModuleType):
    """A package whose modules can be imported before it has run itself; it runs when it is asked for anything else."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def _leave_unlisted(package: str) -> None:
    if package not in sys.modules and (spec := importlib.util.find_spec(package)) is not None:
        module = _Unlisted(package)
        module.__spec__, module.__file__ = spec, spec.origin
        module.__path__ = list(spec.submodule_search_locations or ())
        sys.modules[package] = module


@contextlib.contextmanager
def _packages_listed_quickly() -> Iterator[None]:
    if sys.version_info >= (3, 12):  # where it goes by other rules
        yield
        return
    usual = importlib.metadata.packages_distributions
    importlib.metadata.packages_distributions = packages_distributions
    try:
        yield
    finally:
        importlib.metadata.packages_distributions = usual


def packages_distributions() -> dict[str, list[str]]:
    """The distributions of each top-level package, as the function of this name in Python 3.11 finds them."""
    found: dict[str, list[str]] = {}
    for distribution in importlib.metadata.distributions():
        packages = (distribution.read_text("top_level.txt") or "").split()
        if not packages:
            files = (line.partition(",")[0] for line in (distribution.read_text("RECORD") or "").splitlines())
            split = (file.partition("/") for file in files if file.endswith(".py"))
            packages = sorted({first if slash else first.removesuffix(".py") for first, slash, _ in split})
        for package in packages:
            found.setdefault(package, []).append(distribution.metadata["Name"])
    return found
