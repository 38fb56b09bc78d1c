"""Imports that leave out preparations: the same modules and the same answers."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from pathlib import Path

import pytest

from penstock.roles import quick_imports


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = tmp_path / "zoo_of_models"
    folder.mkdir()
    (folder / "__init__.py").write_text("from zoo_of_models import registry\nlisted = registry.all_of_them()\n")
    (folder / "registry.py").write_text("def all_of_them():\n    return ['cat']\n")
    (folder / "cat.py").write_text("legs = 4\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(quick_imports, "MODELS", folder.name)
    return folder.name


def test_a_model_is_imported_without_the_list_of_all(package: str, monkeypatch: pytest.MonkeyPatch):
    quick_imports.import_all([f"{package}.cat", f"{package}.no_such_model"])
    try:
        assert sys.modules[f"{package}.cat"].legs == 4
        assert f"{package}.registry" not in sys.modules
        unlisted = sys.modules[package]
        assert not hasattr(unlisted, "__wrapped__")  # what debuggers ask every module for
        assert f"{package}.registry" not in sys.modules
        assert unlisted.listed == ["cat"]  # asked for, the list is made
        assert importlib.import_module(package).listed == ["cat"]
        assert importlib.import_module(f"{package}.cat").legs == 4
        assert unlisted.listed == ["cat"]
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="goes by other rules, and is not replaced")
def test_packages_are_those_of_the_standard_library():
    def ordered(found: dict[str, list[str]]) -> dict[str, list[str]]:
        return {package: sorted(names) for package, names in found.items()}

    assert ordered(quick_imports.packages_distributions()) == ordered(
        {package: list(names) for package, names in importlib.metadata.packages_distributions().items()}
    )
