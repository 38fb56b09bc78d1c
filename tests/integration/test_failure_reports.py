"""A process that ends before its work is done leaves a failure report, and an exit code that fits."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.config.load import load
from penstock.errors import ConfigError
from penstock.records.ids import StepIndex, Version
from penstock.roles.__main__ import parse
from penstock.roles.environments import environment_of
from penstock.roles.process import UNEXPECTED, RoleMain, RoleProcess, run_role
from penstock.roles.reporting import connected
from penstock.runtime.rundir import RunDir
from penstock.wire.messages import Registered

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


def lived(folder: Path, main: RoleMain) -> tuple[int, dict[str, object] | None]:
    run = RunDir.create(folder, "run", CONFIG.format(environment="copy"), "0")
    named = ("--name", "one", "--member", "one-1", "--session", "s", "--pipeline", "p")
    with run.with_new_token():
        code = run_role(main, parse(["trainer", str(run.root), *named]))
    path = run.failure_path("one")
    return code, json.loads(path.read_text()) if path.exists() else None


def test_work_that_is_done_is_a_good_end(tmp_path: Path):
    async def main(process: RoleProcess) -> None:
        pass

    assert lived(tmp_path, main) == (0, None)


@pytest.mark.parametrize("error", [SystemExit(0), SystemExit("install it"), KeyboardInterrupt(), ValueError("no")])
def test_an_exit_that_the_users_code_asks_for_is_not(tmp_path: Path, error: BaseException):
    async def main(process: RoleProcess) -> None:
        raise error

    code, words = lived(tmp_path, main)
    assert code == UNEXPECTED
    assert words is not None
    assert words["kind"] == type(error).__name__
    assert str(error) in str(words["message"])


@pytest.mark.timeout(50)
def test_no_process_waits_for_a_controller_that_will_not_come(tmp_path: Path):
    """A controller that refuses to start ends the run, and the others wait for it for a minute."""

    async def main(process: RoleProcess) -> None:
        asyncio.get_running_loop().call_later(0.5, process.stop.request, "the controller failed")
        async with connected(process, "trainer", lambda: asyncio.sleep(0)):
            raise AssertionError("there is no controller to connect with")

    assert lived(tmp_path, main) == (0, None)


class Controller:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    async def call(self, request: Any, timeout_s: float | None = None) -> Any:
        await asyncio.sleep(0)
        self.told.append(request)
        return Registered("running", Version(0), StepIndex(0))

    def begin_shutdown(self, timeout_s: float) -> None:
        pass

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("error", [OSError("the disk is gone\nfor good"), None])
def test_a_process_that_fails_does_not_say_that_it_has_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None
):
    """A trainer that is believed to have finished is believed to have saved its last step."""
    controller, sidecar = Controller(), SimpleNamespace(stop=lambda timeout_s: None)
    monkeypatch.setattr("penstock.roles.process.ControlClient", lambda *_, **__: controller)
    monkeypatch.setattr("penstock.roles.process.Sidecar.start", lambda *_, **__: sidecar)

    async def main(process: RoleProcess) -> None:
        async with connected(process, "trainer", lambda: asyncio.sleep(0)):
            if error is not None:
                raise error

    lived(tmp_path, main)
    unregister = controller.told[-1]
    said = ("OSError: the disk is gone", True) if error is not None else ("finished", False)
    assert (unregister.reason, unregister.failed) == said


@pytest.mark.timeout(50)
def test_a_process_that_is_asked_to_stop_while_it_starts_does_not_finish_starting(tmp_path: Path):
    built, never = Future[str](), Future[str]()
    built.set_result("built")

    async def main(process: RoleProcess) -> None:
        assert await process.started(built) == "built"
        process.stop.request("Ctrl-C")
        await process.started(never)

    assert lived(tmp_path, main) == (0, None)


def test_an_environment_that_exits_is_the_users_to_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "exits_at_once.py").write_text("import sys\n\ndef make(seed):\n    sys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "run.toml").write_text(CONFIG.format(environment="exits_at_once:make"))
    config = load(tmp_path / "run.toml")
    with pytest.raises(ConfigError, match="'exits_at_once:make' could not be made: SystemExit: 0"):
        environment_of(config, config.pipeline[0])
