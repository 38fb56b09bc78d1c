"""A process that ends for another reason than that its work is done leaves last words, and an exit code that fits."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.config.load import load
from penstock.errors import ConfigError
from penstock.roles.__main__ import parse
from penstock.roles.environments import environment_of
from penstock.roles.process import UNEXPECTED, RoleProcess, run_role
from penstock.runtime.rundir import RunDir

CONFIG = """
[[pipeline]]
name = "p"
steps = 1
env.name = "{environment}"
model.kind = "tiny"
"""


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before


def lived(folder: Path, error: BaseException | None) -> tuple[int, dict[str, object] | None]:
    run = RunDir.create(folder, "run", CONFIG.format(environment="copy"), "0")

    async def main(process: RoleProcess) -> None:
        if error is not None:
            raise error

    code = run_role(main, parse(["trainer", str(run.root), "--name", "one", "--member", "one-1", "--session", "s"]))
    path = run.failure_path("one")
    return code, json.loads(path.read_text()) if path.exists() else None


def test_work_that_is_done_is_a_good_end(tmp_path: Path):
    assert lived(tmp_path, None) == (0, None)


@pytest.mark.parametrize("error", [SystemExit(0), SystemExit("install it"), KeyboardInterrupt(), ValueError("no")])
def test_an_exit_that_the_users_code_asks_for_is_not(tmp_path: Path, error: BaseException):
    code, words = lived(tmp_path, error)
    assert code == UNEXPECTED
    assert words is not None
    assert words["kind"] == type(error).__name__
    assert str(error) in str(words["message"])


def test_an_environment_that_exits_is_the_users_to_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "exits_at_once.py").write_text("import sys\n\ndef make(seed):\n    sys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "run.toml").write_text(CONFIG.format(environment="exits_at_once:make"))
    config = load(tmp_path / "run.toml")
    with pytest.raises(ConfigError, match="'exits_at_once:make' could not be made: SystemExit: 0"):
        environment_of(config, config.pipeline[0])
