"""Faster imports of transformers, which lists all installed packages when it is imported.

Python 3.11 lists them by making an object for every file of each package, which takes a fifth of a second. During the
import a faster function with the same result replaces it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import sys
from collections.abc import Iterable, Iterator


def import_all(names: Iterable[str]) -> None:
    """Skips modules that are not installed: a process that needs one reports it."""
    with _packages_listed_quickly():
        for name in names:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


@contextlib.contextmanager
def _packages_listed_quickly() -> Iterator[None]:
    if sys.version_info >= (3, 12):  # which lists them by other rules
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
