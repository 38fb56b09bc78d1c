"""The heartbeat sidecar: a small process beside each worker and trainer that reports its liveness. It imports little.

It is a separate process, so heartbeats continue while the parent is busy in native code. It reports when the parent
last made progress, read from shared memory, so a parent that hangs is detected. It always ends with its parent: the
kernel kills it (`PR_SET_PDEATHSIG`), its standard input closes, or it detects before a heartbeat that it was orphaned.

    parent                              sidecar                              controller
    cell.moved("generate")    ---->     cell.read()   every `every_s`  ----> Heartbeat(progressed_ago_s, doing)
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any

import msgspec

from penstock.runtime.parent import die_with_parent
from penstock.runtime.progress import ProgressCell

ANSWER_TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 64 * 1024


class Settings(msgspec.Struct, frozen=True):
    """Settings of the sidecar, sent on standard input: a token must not appear on a command line."""

    endpoint: str
    token: str
    heartbeat: dict[str, Any]
    """The `Heartbeat` call without the fields that are read from the cell."""
    parent_pid: int
    cell_fd: int
    every_s: float


def beat(settings: Settings, cell: ProgressCell, line: HeartbeatConnection) -> bool:
    """Sends one heartbeat; False if it was not accepted."""
    progress = cell.read()
    heartbeat = settings.heartbeat | {
        "progressed_ago_s": progress.ago_s if progress is not None else 0.0,
        "doing": progress.doing if progress is not None else "starting",
    }
    try:
        with open(settings.endpoint, encoding="utf-8") as file:
            where: dict[str, Any] = json.load(file)
        status = line.post((str(where["host"]), int(where["port"])), msgspec.msgpack.encode(heartbeat))
    except (OSError, ValueError, KeyError, TypeError):
        line.close()
        return False  # the controller is down or restarting: the next heartbeat retries
    return status == 200


class HeartbeatConnection:
    """One persistent connection to the controller: heartbeats continue when a port is full of unauthenticated ones."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._address: tuple[str, int] | None = None
        self._connection: socket.socket | None = None

    def post(self, address: tuple[str, int], body: bytes) -> int:
        """One call, bounded in time and size; returns the status (0: no HTTP answer)."""
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        if address != self._address:
            self.close()
        kept = self._connection is not None
        try:
            return self._exchange(address, body, deadline)
        except OSError:
            self.close()
            if not kept or time.monotonic() > deadline:
                raise
            return self._exchange(address, body, deadline)  # the connection was closed since the last heartbeat

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _exchange(self, address: tuple[str, int], body: bytes, deadline: float) -> int:
        if self._connection is None:
            self._connection = socket.create_connection(address, timeout=ANSWER_TIMEOUT_S)
            self._address = address
        connection = self._connection
        head = (
            f"POST /v1/call HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\nAuthorization: Bearer {self._token}\r\n"
            f"Content-Type: application/msgpack\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection.settimeout(ANSWER_TIMEOUT_S)
        connection.sendall(head.encode() + body)
        answer = b""
        while (missing := _missing(answer)) != 0 and len(answer) < MAX_ANSWER_BYTES:
            connection.settimeout(max(1e-3, deadline - time.monotonic()))
            part = connection.recv(65536)
            if not part and not answer:
                raise ConnectionResetError("closed without a response")
            if not part:
                break
            answer += part
        if missing != 0 or b"connection: close" in answer.lower():
            self.close()
        words = answer.split(b" ", 2)
        return int(words[1]) if len(words) == 3 and words[1].isdigit() else 0


def _missing(answer: bytes) -> int:
    """Bytes of an HTTP response that have not arrived yet; -1 if that is unknown."""
    head, end, body = answer.partition(b"\r\n\r\n")
    if not end:
        return -1
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length" and value.strip().isdigit():
            return max(0, int(value) - len(body))
    return -1


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent decides
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=Settings)
    die_with_parent(settings.parent_pid)
    cell = ProgressCell(settings.cell_fd)
    line = HeartbeatConnection(settings.token)
    while os.getppid() == settings.parent_pid:
        beat(settings, cell, line)
        closed, _, _ = select.select([sys.stdin.buffer], [], [], settings.every_s)
        if closed:
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
