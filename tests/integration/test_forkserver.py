"""Processes forked from one that has imported torch: children of the supervisor like all others."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from running import Running, left_behind, letters, no_leftovers, start, wait_for

from penstock.payload.io.leftovers import sweep
from penstock.runtime.rundir import RunDir

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path) -> Iterator[None]:
    yield from no_leftovers(tmp_path)


def forkserver(running: Running) -> psutil.Process:
    def found() -> psutil.Process | None:
        children = psutil.Process(running.process.pid).children()
        return next((one for one in children if "penstock.roles.forkserver" in one.cmdline()), None)

    return wait_for(found, 30, "the fork server")


def test_forked_processes_are_children_of_the_supervisor_and_restart_after_a_kill(tmp_path: Path):
    running = start(tmp_path, letters(tmp_path, steps=80))
    trainer = running.child("letters.trainer", 60)
    assert trainer.ppid() == running.process.pid
    running.wait_for_step(3)
    trainer.kill()
    code, output = running.end()
    assert code == 0, output
    assert "letters.trainer ended (killed by SIGKILL)" in output


def test_a_killed_supervisor_leaves_nothing(tmp_path: Path):
    running = start(tmp_path, letters(tmp_path, steps=5000))
    running.wait_for_step(1)
    server = forkserver(running)
    running.process.kill()
    wait_for(lambda: not server.is_running(), 10, "the fork server to end")
    wait_for(lambda: not left_behind(tmp_path), 10, "all processes to end")
    sweep(RunDir.open(running.directory).run_id)  # the next run of the machine would do it


def test_a_killed_supervisor_leaves_nothing_while_torch_is_imported(tmp_path: Path):
    running = start(tmp_path, letters(tmp_path, steps=5000))
    server = forkserver(running)
    running.process.kill()
    wait_for(lambda: not server.is_running(), 10, "the fork server to end")


def test_the_run_goes_on_without_its_fork_server(tmp_path: Path):
    running = start(tmp_path, letters(tmp_path, steps=30))
    running.wait_for_step(2)
    forkserver(running).kill()
    running.child("letters.rollout.0").kill()  # started again from nothing
    code, output = running.end()
    assert code == 0, output
    assert "without preloaded imports" in (running.directory / "logs" / "supervisor.log").read_text()


def test_interrupted_while_torch_is_imported(tmp_path: Path):
    running = start(tmp_path, letters(tmp_path, steps=30))
    forkserver(running)
    running.process.send_signal(signal.SIGINT)
    assert running.end(30)[0] == 130


def test_a_mistaken_configuration_leaves_no_fork_server(tmp_path: Path):
    running = start(tmp_path, letters(tmp_path, steps=0))
    code, output = running.end(30)
    assert code == 2, output
    parent = str(running.process.pid)
    servers = [one.info["cmdline"] or [] for one in psutil.process_iter(["cmdline"])]
    assert not [one for one in servers if "penstock.roles.forkserver" in one and parent in one]


def test_processes_can_be_started_from_nothing(tmp_path: Path):
    running = start(tmp_path, letters(tmp_path, steps=3, extra="[launch]\npreload = false\n"))
    code, output = running.end()
    assert code == 0, output
    assert not (running.directory / "logs" / "forkserver.log").exists()
