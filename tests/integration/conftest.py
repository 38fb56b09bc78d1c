"""Every integration test is checked for what it leaves behind."""

from __future__ import annotations

import os
import shutil
import subprocess
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


@pytest.fixture
def disk(folder: Path) -> Iterator[Path]:
    """A file system of 16 MiB where runs are made."""
    place = folder / "runs"
    place.mkdir()
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    made = subprocess.run([mount, "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place)], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no small file system can be mounted here: {made.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of whole runs are slow, unless they are marked `smoke` or mark some of their own cases as slow."""
    for item in items:
        if "folder" not in getattr(item, "fixturenames", ()) or item.get_closest_marker("smoke") is not None:
            continue
        cases = [case for mark in item.iter_markers("parametrize") for case in mark.args[1]]
        if not any(mark.name == "slow" for case in cases for mark in getattr(case, "marks", ())):
            item.add_marker(pytest.mark.slow)
