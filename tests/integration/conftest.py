"""Every integration test is checked for what it leaves behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from running import no_leftovers


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A place for a run, checked afterwards for processes and shared memory left behind."""
    for _ in no_leftovers(tmp_path):
        yield tmp_path


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of whole runs are slow; a few marked `smoke` are part of the default tests all the same."""
    for item in items:
        if "folder" in getattr(item, "fixturenames", ()) and item.get_closest_marker("smoke") is None:
            item.add_marker(pytest.mark.slow)
