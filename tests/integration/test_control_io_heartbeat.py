"""The sidecar: tells dead, wedged and busy apart, and never outlives its parent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import psutil
import pytest

from penstock.control.io.sidecar import Sidecar
from penstock.records.ids import MemberId, PipelineName
from penstock.runtime.process import is_alive, start_time
from penstock.runtime.progress import ProgressCell
from penstock.wire.messages import Heartbeat

A = PipelineName("a")
W = MemberId("worker")
TOKEN = "a-secret"


def eventually(condition: Callable[[], Any], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


class Listener:
    """Stands in for the controller and writes down the heartbeats it hears."""

    def __init__(self, endpoint: Path) -> None:
        self.endpoint = endpoint
        self.heard: list[Heartbeat] = []
        self.tokens: set[str | None] = set()
        listener = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                listener.tokens.add(self.headers["authorization"])
                listener.heard.append(msgspec.msgpack.decode(body, type=Heartbeat))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.announce()

    def announce(self) -> None:
        self.endpoint.write_text(json.dumps({"host": "127.0.0.1", "port": self._server.server_port, "pid": 0}))

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    listener = Listener(tmp_path / "controller.json")
    yield listener
    listener.close()


@pytest.fixture
def cell() -> Iterator[ProgressCell]:
    cell = ProgressCell()
    yield cell
    cell.close()


@pytest.fixture
def sidecar(listener: Listener, cell: ProgressCell) -> Iterator[Sidecar]:
    sidecar = Sidecar.start(listener.endpoint, TOKEN, A, W, cell, every_s=0.05)
    yield sidecar
    sidecar.stop(20)
    assert not sidecar.alive


def test_before_the_first_move_the_parent_is_starting(listener: Listener, sidecar: Sidecar) -> None:
    eventually(lambda: listener.heard)
    assert listener.heard[0] == Heartbeat(A, W, 0.0, "starting")
    assert listener.tokens == {f"Bearer {TOKEN}"}


def test_busy_and_wedged_are_told_apart(listener: Listener, cell: ProgressCell, sidecar: Sidecar) -> None:
    cell.moved("generate")
    eventually(lambda: listener.heard and listener.heard[-1].doing == "generate")
    for _ in range(3):  # busy: every move is reported as recent
        cell.moved("generate")
        count = len(listener.heard)
        eventually(lambda count=count: len(listener.heard) > count + 1)
        assert listener.heard[-1].progressed_ago_s < 30
    stuck = len(listener.heard)  # wedged: nothing moves, and every beat says for how much longer
    eventually(lambda: len(listener.heard) >= stuck + 4)
    ages = [beat.progressed_ago_s for beat in listener.heard[stuck:]]
    assert ages == sorted(ages)
    assert ages[-1] > ages[0]


def test_it_follows_the_controller_to_another_port(listener: Listener, tmp_path: Path, cell: ProgressCell) -> None:
    moved = tmp_path / "moved"
    moved.mkdir()
    listener.endpoint.unlink()  # the first controller is gone, its address too
    sidecar = Sidecar.start(listener.endpoint, TOKEN, A, W, cell, every_s=0.05)
    listener.endpoint.write_text('{"host": "127.0.0.1", "port": 9, "pid": 0}')
    second = Listener(moved / "controller.json")
    listener.endpoint.write_text(second.endpoint.read_text())
    eventually(lambda: second.heard)
    sidecar.stop(20)
    second.close()


def test_one_that_was_killed_alone_is_started_again(listener: Listener, sidecar: Sidecar) -> None:
    eventually(lambda: listener.heard)
    first = sidecar.pid
    os.kill(first, signal.SIGKILL)
    eventually(lambda: sidecar.alive and sidecar.pid != first)
    count = len(listener.heard)
    eventually(lambda: len(listener.heard) > count)


def test_ctrl_c_does_not_end_it_before_its_parent(listener: Listener, sidecar: Sidecar) -> None:
    eventually(lambda: listener.heard)
    os.kill(sidecar.pid, signal.SIGINT)
    count = len(listener.heard)
    eventually(lambda: len(listener.heard) > count + 2)
    assert sidecar.alive


def test_it_is_small(listener: Listener, sidecar: Sidecar) -> None:
    eventually(lambda: listener.heard)
    maps = Path(f"/proc/{sidecar.pid}/maps").read_text() if sys.platform == "linux" else ""
    assert "torch" not in maps
    assert psutil.Process(sidecar.pid).memory_info().rss < 60e6


PARENT = """
    import os, sys, time
    from penstock.control.io.sidecar import Sidecar
    from penstock.runtime.progress import ProgressCell

    cell = ProgressCell()
    cell.moved("waiting to be killed")
    sidecar = Sidecar.start(sys.argv[1], "a-secret", "a", "worker", cell, every_s=0.05)
    print(sidecar.pid, flush=True)
    if sys.argv[2] == "raise":
        raise RuntimeError("an ordinary death")
    if sys.argv[2] == "exit":
        os._exit(3)
    time.sleep(60)
"""


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT, "raise", "exit"])
def test_it_dies_with_its_parent_however_that_dies(listener: Listener, death: signal.Signals | str) -> None:
    command = [sys.executable, "-c", textwrap.dedent(PARENT), str(listener.endpoint), str(death)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        born = start_time(pid)
        if isinstance(death, signal.Signals):
            eventually(lambda: listener.heard)  # the witness: it was beating when its parent died
            os.kill(parent.pid, death)
        parent.wait(20)
    eventually(lambda: not is_alive(pid, born))
    assert parent.returncode != 0


def test_a_parent_that_is_stopped_is_reported_as_not_moving(listener: Listener) -> None:
    """SIGSTOP: alive for the kernel, and the sidecar still runs; only the progress tells."""
    command = [sys.executable, "-c", textwrap.dedent(PARENT), str(listener.endpoint), "sleep"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        eventually(lambda: listener.heard)
        os.kill(parent.pid, signal.SIGSTOP)
        count = len(listener.heard)
        eventually(lambda: len(listener.heard) >= count + 5)
        ages = [beat.progressed_ago_s for beat in listener.heard[count:]]
        assert ages == sorted(ages)
        parent.kill()
    eventually(lambda: not is_alive(pid))
