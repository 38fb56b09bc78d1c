"""Agents that are programs: nothing of them is left behind, whatever ends them."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.envs.io import programs
from penstock.envs.io.agents import Agent
from penstock.runtime.process import is_alive, start_time

CHILD = """
import os, signal, subprocess, sys, time
{ignore}
body = "import signal, time; {child}; print(flush=True); time.sleep(300)"
child = subprocess.Popen([sys.executable, "-c", body], **{options})
open("pids.tmp", "w").write(f"{{os.getpid()}} {{child.pid}}")
os.rename("pids.tmp", "pids")
{then}
"""


def program(
    folder: Path, then: str, *, child: str = "pass", ignore: str = "", options: str = "{}", **more: Any
) -> Agent:
    """An agent that starts a child which holds its outputs, writes both pids, and continues with `then`."""
    script = folder / "agent.py"
    script.write_text(f"import os\nos.chdir({str(folder)!r})\n" + CHILD.format(**locals()))
    return Agent(command=[sys.executable, str(script)], **more)


def play(agent: Agent) -> tuple[threading.Thread, list[Any]]:
    """Plays in a thread; the list receives the result or the error."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(agent.play("http://x/v1", "key", 0).reward)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def until(condition: Callable[[], Any], deadline_s: float = 30.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.01)


def identities(folder: Path) -> list[tuple[int, float | None]]:
    """The processes of the agent, identified while they run."""
    until((folder / "pids").exists)
    found = [(pid, start_time(pid)) for pid in map(int, (folder / "pids").read_text().split())]
    assert all(is_alive(*one) for one in found[1:]), "the child runs"
    return found


@pytest.fixture
def left(tmp_path: Path) -> Any:
    """Kills what a failing test leaves."""
    yield
    for pid in map(int, (tmp_path / "pids").read_text().split()) if (tmp_path / "pids").exists() else ():
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


IGNORE = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


@pytest.mark.usefixtures("left")
@pytest.mark.parametrize("stubborn", [False, True])
def test_a_late_program_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stubborn: bool
) -> None:
    monkeypatch.setattr(programs, "TERMINATE_S", 0.2 if stubborn else 20.0)
    deaf = {"child": IGNORE, "ignore": IGNORE} if stubborn else {}
    agent = program(tmp_path, "time.sleep(300)", timeout_s=2.0, **deaf)
    thread, found = play(agent)
    processes = identities(tmp_path)
    thread.join(15.0)
    assert "did not end within 2 s" in str(found[0])
    until(lambda: not any(is_alive(*one) for one in processes))


@pytest.mark.usefixtures("left")
def test_a_program_that_ends_leaves_no_children_and_is_not_held_by_them(tmp_path: Path) -> None:
    agent = program(tmp_path, "print(0.25)", timeout_s=60.0)
    thread, found = play(agent)
    thread.join(30.0)
    assert found == [0.25]
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    until(lambda: not any(is_alive(pid) for pid in pids))


@pytest.mark.usefixtures("left")
def test_a_child_in_another_session_does_not_hold_its_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "TERMINATE_S", 0.2)
    agent = program(tmp_path, "print(0.25)", options="dict(start_new_session=True)", timeout_s=60.0)
    thread, found = play(agent)
    thread.join(30.0)
    assert found == [0.25]


@pytest.mark.usefixtures("left")
@pytest.mark.parametrize("how", ["cancel", "close"])
def test_a_program_whose_result_is_no_longer_used_is_killed_with_its_children(tmp_path: Path, how: str) -> None:
    agent = program(tmp_path, "time.sleep(300)", timeout_s=300.0)
    thread, found = play(agent)
    processes = identities(tmp_path)
    if how == "cancel":
        agent.cancel("key")
    else:
        agent.close()
    thread.join(15.0)
    assert isinstance(found[0], Exception)
    until(lambda: not any(is_alive(*one) for one in processes))


def test_of_an_output_only_the_end_is_kept() -> None:
    script = "import sys; sys.stdout.write('x ' * 5_000_000); sys.stderr.write('e' * 5_000_000); print(0.5)"
    agent = Agent(command=[sys.executable, "-c", script])
    assert agent.play("http://x/v1", "key", 0).reward == 0.5
    failing = Agent(command=[sys.executable, "-c", script + "; sys.exit('no luck')"])
    with pytest.raises(RuntimeError, match=r"ended with exit code 1: e{1000}.*no luck"):
        failing.play("http://x/v1", "key", 0)
