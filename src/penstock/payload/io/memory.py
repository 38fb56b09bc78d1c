"""The exchange without sockets: clients and servers in one process, for simulations.

The client, the server's exchange and the ring are the real ones. Only the wire between them is simulated: a `Carrier`
decides how long a request takes and whether it arrives.
"""

from __future__ import annotations

from typing import Literal, Protocol

import xxhash

from penstock.payload.exchange import STATUS, BodySent, ConnectionFailed, Event, Received
from penstock.payload.io.mapping import DIRECTORY
from penstock.payload.io.serving import Handler, Service
from penstock.payload.io.wire_client import Broken
from penstock.payload.ports import Fault
from penstock.runtime.clock import monotonic, sleep

Trouble = Fault | Literal["silent", "confirmation lost"]


class Carrier(Protocol):
    """Decides how long a request takes and how it fails."""

    @property
    def latency_s(self) -> float: ...

    def trouble(self, port: int, stage: Literal["connect", "ask"]) -> Trouble | None: ...


class MemoryExchange:
    """All simulated ports."""

    def __init__(self, carrier: Carrier) -> None:
        self.carrier = carrier
        self._ports = iter(range(1, 1 << 62))
        self.servers: dict[int, MemoryServer] = {}

    def serve(self, ring: str, token: str, *, ports: int, directory: str = DIRECTORY) -> MemoryServer:
        server = MemoryServer(self, ring, token, tuple(next(self._ports) for _ in range(ports)), directory)
        self.servers |= dict.fromkeys(server.ports, server)
        return server


class MemoryServer:
    """Serves one ring until it is closed, or its process dies."""

    def __init__(
        self, exchange: MemoryExchange, ring: str, token: str, ports: tuple[int, ...], directory: str = DIRECTORY
    ) -> None:
        self.service = Service(ring, token, directory=directory, limits=None, label="memory server")
        self.ports = ports
        self._exchange = exchange

    def close(self) -> None:
        for port in self.ports:
            self._exchange.servers.pop(port, None)
        self.service.reader.close()

    @property
    def gone(self) -> bool:
        return self.ports[0] not in self._exchange.servers


class MemoryWire:
    name: Literal["tcp", "ucxx"] = "tcp"
    lane = 0

    def __init__(self, exchange: MemoryExchange) -> None:
        self._exchange = exchange

    def connect(self, host: str, port: int, hello: bytes, deadline: float) -> MemoryConnection:
        carrier = self._exchange.carrier
        _wait(carrier.latency_s, deadline)
        trouble = carrier.trouble(port, "connect")
        if trouble == "silent":
            _time_out(deadline)
        server = self._exchange.servers.get(port)
        if server is None or trouble is not None:
            raise Broken("refused", "cannot connect: connection refused")
        return MemoryConnection(carrier, server, port, hello)

    def close(self) -> None:
        """Nothing to close."""


class MemoryConnection:
    """One connection, with the server's side of it."""

    def __init__(self, carrier: Carrier, server: MemoryServer, port: int, hello: bytes) -> None:
        self.born = monotonic()
        self.reusable = True
        self._carrier = carrier
        self._server = server
        self._port = port
        self._unread = hello
        self._answer = b""
        self._body = memoryview(b"")
        self._handler = Handler(server.service, self)

    def ask(self, request: bytes, body: memoryview, deadline: float) -> bytes:
        self._body, self._answer = body, b""
        self._unread += request
        carrier, exchange = self._carrier, self._handler.exchange
        _wait(carrier.latency_s, deadline)
        trouble = carrier.trouble(self._port, "ask")
        if trouble == "silent":
            _time_out(deadline)
        if self._server.gone or trouble in ("refused", "reset"):
            raise self._broken("reset", "closed by the server")
        while not self._handler.closed and 0 < exchange.expects_bytes <= len(self._unread):
            piece, self._unread = self._unread[: exchange.expects_bytes], self._unread[exchange.expects_bytes :]
            self._handler.handle(Received(piece))
        _wait(carrier.latency_s, deadline)
        if trouble in ("confirmation lost", "truncated"):
            raise self._broken("reset", "the answer was lost")
        if len(self._answer) < STATUS.size:
            raise self._broken("reset", "closed without an answer")
        if trouble == "corrupt" and len(self._answer) > STATUS.size:
            self._answer = self._answer[:-1] + bytes([self._answer[-1] ^ 0xFF])
        return self._answer[: STATUS.size]

    def receive_body(self, deadline: float, hasher: xxhash.xxh3_64 | None) -> None:
        found = self._answer[STATUS.size :]
        self._body[:] = found
        if hasher is not None:
            hasher.update(found)

    def receive_text(self, size_bytes: int, deadline: float) -> bytes:
        return self._answer[STATUS.size : STATUS.size + size_bytes]

    def break_off(self) -> None:
        self.reusable = False

    def close(self) -> bool:
        self.reusable = False
        if not self._handler.closed:
            self._handler.handle(ConnectionFailed("closed by the client"))
        return True

    # The server side: `Outlet`.

    def send_body(self, header: bytes, body: memoryview) -> Event:
        self._answer += header + bytes(body)
        return BodySent()

    def send_status(self, data: bytes) -> Event | None:
        self._answer += data
        return None

    def end(self, reason: str) -> None:
        self.reusable = False

    def _broken(self, fault: Fault, detail: str) -> Broken:
        self.close()
        return Broken(fault, detail)


def _wait(seconds: float, deadline: float) -> None:
    left_s = deadline - monotonic()
    if seconds >= left_s:
        _time_out(deadline)
    sleep(seconds)


def _time_out(deadline: float) -> None:
    sleep(max(0.0, deadline - monotonic()))
    raise Broken("timed_out", "no answer in time")
