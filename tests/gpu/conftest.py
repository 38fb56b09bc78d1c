"""These tests need a GPU: they run when they are asked for by name, as `pytest tests/gpu`, or by `-m gpu`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from running import no_leftovers

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    named = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    if all(path.is_relative_to(HERE) for path in named):
        config.option.markexpr = "gpu"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A place for a run, checked afterwards for processes and shared memory left behind."""
    for _ in no_leftovers(tmp_path):
        yield tmp_path
