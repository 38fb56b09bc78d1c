"""The command and the path of Python child processes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from penstock.runtime.interpreter import python_command, search_path


def test_an_empty_entry_of_the_path_is_dropped(monkeypatch: pytest.MonkeyPatch):
    """`PYTHONPATH=$PYTHONPATH:/code` has one if the variable was not set. Python reads it as the working directory."""
    monkeypatch.setenv("PYTHONPATH", ":/code::")
    assert search_path("/mine", Path("/theirs")) == "/mine:/theirs:/code"
    monkeypatch.delenv("PYTHONPATH")
    assert search_path() == ""


def test_a_child_does_not_import_from_the_working_directory(tmp_path: Path):
    (tmp_path / "json.py").write_text("raise SystemExit('executed')")
    subprocess.run(python_command("-c", "import json; json.dumps"), cwd=tmp_path, check=True)
