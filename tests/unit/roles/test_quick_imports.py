"""A quicker answer to which packages are installed is the same answer."""

from __future__ import annotations

import importlib.metadata
import sys

import pytest

from penstock.roles import quick_imports


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="goes by other rules, and is not replaced")
def test_packages_are_those_of_the_standard_library():
    def ordered(found: dict[str, list[str]]) -> dict[str, list[str]]:
        return {package: sorted(names) for package, names in found.items()}

    assert ordered(quick_imports.packages_distributions()) == ordered(
        {package: list(names) for package, names in importlib.metadata.packages_distributions().items()}
    )
