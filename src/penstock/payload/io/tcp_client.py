"""The exchange over TCP, client side."""

from __future__ import annotations

import socket
import time
from typing import Literal

import xxhash

from penstock.payload.exchange import STATUS
from penstock.payload.io.timed_socket import TimedSocket
from penstock.payload.io.wire_client import Broken
from penstock.payload.ports import Fault

CHUNK_BYTES = 1 << 20
"""Received and hashed in pieces of at most this size: each is hashed while it is in the CPU cache."""


class TcpWire:
    name: Literal["tcp", "ucxx"] = "tcp"
    lane = 0

    def __init__(self, connect_s: float = 3.0) -> None:
        self._connect_s = connect_s

    def connect(self, host: str, port: int, hello: bytes, deadline: float) -> TcpConnection:
        try:
            timeout_s = min(self._connect_s, max(1e-3, deadline - time.monotonic()))
            peer = TimedSocket(socket.create_connection((host, port), timeout_s))
        except TimeoutError as error:
            raise Broken("timed_out", "no connection in time") from error
        except (OSError, ValueError, OverflowError) as error:  # the latter two: an invalid host or port
            raise Broken("refused", f"cannot connect: {error}") from error
        return TcpConnection(peer, hello)

    def close(self) -> None:
        """Nothing to close."""


class TcpConnection:
    """One connection to a server."""

    reusable = True

    def __init__(self, peer: TimedSocket, hello: bytes) -> None:
        self.born = time.monotonic()
        self._peer = peer
        self._preamble = hello
        """Sent together with the first request."""
        self._status = bytearray(STATUS.size)
        self._body = memoryview(b"")
        self._arrived = 0
        """Bytes of the current reply, status included."""

    def ask(self, request: bytes, body: memoryview, deadline: float) -> bytearray:
        self._body, self._arrived = body, 0
        try:
            self._peer.send(deadline, self._preamble + request)
            self._preamble = b""
            # One system call for the status and what has arrived of the body: all of a small payload.
            self._count(self._peer.receive_into(deadline, self._status, body[:CHUNK_BYTES]))
            while self._arrived < STATUS.size:
                rest = memoryview(self._status)[self._arrived :]
                self._count(self._peer.receive_into(deadline, rest))
        except OSError as error:
            raise self._broken(error) from error
        return self._status

    def receive_body(self, deadline: float, hasher: xxhash.xxh3_64 | None) -> None:
        body = self._body
        at, end = 0, self._arrived - STATUS.size
        try:
            while True:
                if hasher is not None:
                    hasher.update(body[at:end])
                if end == len(body):
                    return
                at = end
                end += self._count(self._peer.receive_into(deadline, body[at : at + CHUNK_BYTES]))
        except OSError as error:
            raise self._broken(error) from error

    def receive_text(self, size_bytes: int, deadline: float) -> bytes:
        text = bytes(self._body[: self._arrived - STATUS.size])
        try:
            while len(text) < size_bytes:
                piece = self._peer.receive(deadline, size_bytes - len(text))
                self._count(len(piece))
                text += piece
        except OSError as error:
            raise self._broken(error) from error
        return text

    def break_off(self) -> None:
        self._peer.break_off()

    def close(self) -> bool:
        self._peer.close()
        return True

    def _count(self, received: int) -> int:
        if not received:
            raise Broken("truncated" if self._arrived else "reset", f"closed {self._progress}", self._arrived > 0)
        self._arrived += received
        return received

    def _broken(self, error: OSError) -> Broken:
        fault: Fault = "timed_out" if isinstance(error, TimeoutError) else "reset"
        return Broken(fault, f"{error} {self._progress}", self._arrived > 0)

    @property
    def _progress(self) -> str:
        return f"after {self._arrived} of {STATUS.size + len(self._body)} bytes"
