"""Imports of transformers, which asks at its import which packages are installed.

Python 3.11 answers by making an object for every file of each package, which takes a fifth of a second. Meanwhile a
quicker function takes its place, with the same answer.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import sys
from collections.abc import Iterable, Iterator


def import_all(names: Iterable[str]) -> None:
    """Those that are not there are left out: a process that needs one says what is missing."""
    with _packages_listed_quickly():
        for name in names:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


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
