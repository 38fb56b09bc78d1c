"""The heartbeat: a small process beside each worker and trainer that says how its parent is doing.

It runs apart from its parent, so a parent that is busy in native code for a minute is still heard; and it reports when
the parent last made progress, read from the parent's own memory, so a parent that hangs cannot look alive. It ends
with its parent however that ends: the kernel kills it (`PR_SET_PDEATHSIG`), its standard input closes, and before each
beat it looks whether it has been orphaned. Whichever is noticed first.

    parent                              sidecar                              controller
    cell.moved("generate")    ---->     cell.read()   every `every_s`  ----> Heartbeat(progressed_ago_s, doing)
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from penstock.records.ids import MemberId, PipelineName
from penstock.runtime.process import die_with_parent
from penstock.runtime.progress import ProgressCell
from penstock.wire.messages import Heartbeat

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 64 * 1024


class Settings(msgspec.Struct, frozen=True):
    """What the parent tells its sidecar, on standard input: a token has no place on a command line."""

    endpoint: str
    token: str
    pipeline: PipelineName
    member: MemberId
    parent_pid: int
    cell_fd: int
    every_s: float


class Sidecar:
    """The parent's side. Start it from a thread that lives as long as the process, best the main one."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @classmethod
    def start(
        cls,
        endpoint: Path | str,
        token: str,
        pipeline: PipelineName,
        member: MemberId,
        cell: ProgressCell,
        *,
        every_s: float = 2.0,
    ) -> Sidecar:
        """Starts beating for `member` at the controller that the endpoint file names."""
        settings = Settings(str(endpoint), token, pipeline, member, os.getpid(), cell.fileno(), every_s)
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock.control.io.heartbeat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(cell.fileno(),),
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(settings) + b"\n")
        process.stdin.flush()  # and left open: its end is how the sidecar hears of ours
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def stop(self, timeout_s: float) -> None:
        """Ends the sidecar; returns when it is gone, after `timeout_s` at most."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            logger.warning("the heartbeat did not end within %g s and was killed", timeout_s)
            self._process.kill()
            self._process.wait()

    def __repr__(self) -> str:
        return f"Sidecar(pid={self.pid}, alive={self.alive})"


def beat(settings: Settings, cell: ProgressCell) -> bool:
    """Sends one heartbeat; False when nobody answered it."""
    progress = cell.read()
    heartbeat = Heartbeat(
        settings.pipeline,
        settings.member,
        progressed_ago_s=progress.ago_s if progress is not None else 0.0,
        doing=progress.doing if progress is not None else "starting",
    )
    try:
        where: dict[str, Any] = json.loads(Path(settings.endpoint).read_text(encoding="utf-8"))
        status = post((str(where["host"]), int(where["port"])), settings.token, msgspec.msgpack.encode(heartbeat))
    except (OSError, ValueError, KeyError, TypeError):
        return False  # the controller is away or being restarted: the next beat tries again
    return status == 200


def post(address: tuple[str, int], token: str, body: bytes) -> int:
    """One call on a connection of its own, bounded in time and size; returns the status (0: no HTTP answer)."""
    head = (
        f"POST /v1/call HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Type: application/msgpack\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    with socket.create_connection(address, timeout=ANSWER_TIMEOUT_S) as connection:
        connection.sendall(head.encode() + body)
        answer = b""
        while len(answer) < MAX_ANSWER_BYTES and time.monotonic() < deadline and (part := connection.recv(65536)):
            answer += part
    words = answer.split(b" ", 2)
    return int(words[1]) if len(words) == 3 and words[1].isdigit() else 0


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; ours ends with the parent's
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=Settings)
    die_with_parent(settings.parent_pid)
    cell = ProgressCell(settings.cell_fd)
    while os.getppid() == settings.parent_pid:
        beat(settings, cell)
        closed, _, _ = select.select([sys.stdin.buffer], [], [], settings.every_s)
        if closed:
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
