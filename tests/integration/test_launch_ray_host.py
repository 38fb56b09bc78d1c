"""The part of the Ray launcher that runs on a node, without Ray: a process far from its run directory."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from running import letters, wait_for

import penstock
from penstock.config.load import dump, load
from penstock.launch.processes import CONTROLLER, ProcessSpec
from penstock.launch.ray_host import ProcessExit, RoleHost, RunFiles, StartOrder, clear_node, survey_node
from penstock.runtime.rundir import RunDir

pytestmark = pytest.mark.timeout(120)

TOKEN = "t" * 43
TRAINER = ProcessSpec("letters.trainer", "trainer", ("--pipeline", "letters"), threads=1, pipeline="letters")

HOST = """
import sys
from penstock.launch.processes import CONTROLLER
from penstock.launch.ray_host import RoleHost, StartOrder
host = RoleHost()
assert host.open(sys.argv[1], sys.argv[2])
host.start(StartOrder(CONTROLLER, "controller-1", "one", host="", gpus=0, extra_path=(), token="t" * 43))
print("started", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def run(folder: Path) -> RunDir:
    config = load(letters(folder))
    return RunDir.create(config.run.dir, "far", dump(config), penstock.__version__)


@pytest.fixture
def host(run: RunDir, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[RoleHost]:
    """One that does not see the run directory."""
    (folder / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder / "tmp"))
    host = RoleHost()
    assert not host.open(str(folder / "nowhere"), run.run_id)
    files = {name: (run.root / name).read_text() for name in ("run.json", "config.toml")}
    assert Path(host.create_directory(RunFiles(run.run_id, files))).parent == folder / "tmp"
    yield host
    clear_node(run.run_id)
    assert list((folder / "tmp").iterdir()) == []


def order(spec: ProcessSpec, **changes: str) -> StartOrder:
    return StartOrder(
        spec, f"{spec.name}-1", "one", host=changes.get("host", ""), gpus=0, extra_path=(), token="t" * 43
    )


def test_a_process_lives_ends_and_logs_far_from_its_run_directory(host: RoleHost):
    host.start(order(CONTROLLER, host="127.0.0.2"))
    log = b""

    def listens() -> bool:
        nonlocal log
        log += host.exchange(CONTROLLER.name, None, len(log))
        return b"listening on 127.0.0.2:" in log

    wait_for(listens, 60, "the controller to listen on the address of its node")
    host.terminate()
    assert host.wait(CONTROLLER.name) == ProcessExit(0, None)
    assert b"ended gracefully" in host.exchange(CONTROLLER.name, None, len(log))


def test_the_failure_report_comes_back_with_the_exit_code(host: RoleHost):
    host.start(order(ProcessSpec("unknown", "trainer", ("--pipeline", "unknown"), threads=1)))
    seen = host.wait("unknown")
    assert seen.exit_code != 0
    assert seen.failure_report is not None
    assert "'unknown', which is not configured" in seen.failure_report["message"]


def test_the_address_of_the_controller_reaches_a_process_that_waits_for_it(host: RoleHost):
    host.start(order(TRAINER))
    endpoint = '{"host": "127.0.0.1", "port": 1, "pid": 1}'
    wait_for(lambda: b"controller at 127.0.0.1:1" in host.exchange(TRAINER.name, endpoint, 0), 60, "a call to port 1")
    host.kill_tree(5.0)
    asked, killed = 0, -signal.SIGKILL
    assert host.wait(TRAINER.name).exit_code in (asked, killed)


def test_a_killed_host_takes_its_process_along(run: RunDir):
    assert survey_node(str(run.root), run.run_id).sees_directory
    host = subprocess.Popen(
        [sys.executable, "-c", HOST, str(run.root), run.run_id],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert host.stdout is not None
    assert host.stdout.readline() == "started\n"
    (child,) = psutil.Process(host.pid).children()
    host.kill()
    host.communicate(timeout=10)
    wait_for(lambda: not child.is_running(), 10, "the process to end with its host")
