"""The exchange over TCP, server side: one thread per port accepts, one thread per client serves.

Threads block in the kernel and use no CPU while idle.
"""

from __future__ import annotations

import hmac
import os
import time
from collections.abc import Sequence

from penstock.errors import LocalProtocolError, RunFailed
from penstock.payload.exchange import (
    HELLO,
    BodySent,
    ConnectionFailed,
    Event,
    ExchangeLimits,
    Received,
    hello,
    refused_hello,
)
from penstock.payload.io.mapping import DIRECTORY
from penstock.payload.io.serving import Handler, ServerStatistics, Service
from penstock.payload.io.timed_socket import TimedSocket
from penstock.records.section import LOOPBACK
from penstock.runtime.listening import Peer, ThreadedPort

RECEIVE_BYTES = 4096
"""The most that is read ahead from a client."""


class TcpServer:
    """Serves one ring on several ports. All of them are bound when the constructor returns."""

    def __init__(
        self,
        ring: str,
        token: str,
        *,
        host: str = LOOPBACK,
        ports: Sequence[int] = (0, 0),
        directory: str = DIRECTORY,
        limits: ExchangeLimits | None = None,
        max_strangers: int | None = None,
    ) -> None:
        """`ports` are the requested ports; 0 means any free one. `self.ports` are the bound ones."""
        limits = limits or ExchangeLimits()
        self._service = Service(ring, token, directory=directory, limits=limits, label="tcp server")
        self._pid = os.getpid()
        self._served: list[ThreadedPort] = []
        expected = hello(token)
        try:
            for port in ports:
                self._served.append(
                    ThreadedPort(
                        self._serve,
                        "payload",
                        hello_bytes=HELLO.size,
                        has_token=lambda received: hmac.compare_digest(received, expected),
                        refusal=refused_hello(),
                        host=host,
                        port=port,
                        hello_s=limits.hello_s,
                        max_strangers=max_strangers,
                    )
                )
        except OSError as error:
            self.close()
            raise RunFailed(
                f"cannot serve payloads on {host}: {error}; choose other ports, or 0 for any free one"
            ) from error

    def __repr__(self) -> str:
        return f"<TcpServer ports {self.ports}, {self.statistics()}>"

    @property
    def ports(self) -> tuple[int, ...]:
        """Ports to advertise: bound and still accepting."""
        return tuple(port.port for port in self._served if port.door.failure is None)

    def statistics(self) -> ServerStatistics:
        found = self._service.statistics(sum(map(len, self._served)))
        return found._replace(
            accepted=sum(port.door.accepted for port in self._served),
            turned_away=sum(port.door.turned_away for port in self._served),
        )

    def check(self) -> None:
        """Raises if a port stopped accepting although the server was not closed."""
        for port in self._served:
            if (error := port.door.failure) is not None:
                raise LocalProtocolError(f"payload port {port.port} stopped accepting: {error!r}") from error

    def break_off(self) -> int:
        """Ends all connections like a network failure; returns their number. The server continues."""
        return sum(port.break_off() for port in self._served)

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends all connections and threads within `timeout_s`; payloads being sent stay readable.

        In a forked child this does nothing: the parent continues to serve.
        """
        if os.getpid() != self._pid:
            return
        deadline = time.monotonic() + timeout_s
        for port in self._served:
            port.close(max(0.0, deadline - time.monotonic()))
        self._service.reader.close()

    def _serve(self, peer: Peer) -> None:
        _Connection(self._service, peer).serve()


class _Connection:
    """One client, served with blocking calls that all end by the exchange's deadline."""

    def __init__(self, service: Service, peer: Peer) -> None:
        self._peer = TimedSocket(peer.connection)
        self._buffer = peer.hello
        self._handler = Handler(service, self)
        self._exchange = self._handler.exchange

    def __repr__(self) -> str:
        return f"<TCP connection, {self._handler!r}>"

    def send_body(self, header: bytes, body: memoryview) -> Event:
        failed = self._send(header, body)
        return BodySent() if failed is None else failed

    def send_status(self, data: bytes) -> Event | None:
        return self._send(data)

    def end(self, reason: str) -> None:
        """Nothing to do: the serving thread checks whether the exchange is closed."""

    def serve(self) -> None:
        try:
            while not self._handler.closed:
                self._handler.handle(self._receive(self._exchange.expects_bytes, self._exchange.deadline))
        finally:
            if not self._handler.closed:
                self._handler.handle(ConnectionFailed("the serving thread failed"))

    def _send(self, *parts: bytes | memoryview) -> ConnectionFailed | None:
        try:
            self._peer.send(self._exchange.deadline, *parts)
        except OSError as error:
            return ConnectionFailed(f"while sending: {error}")
        return None

    def _receive(self, count: int, deadline: float) -> Received | ConnectionFailed:
        """Receives exactly `count` bytes. Several requests may arrive together: the rest is kept."""
        try:
            while len(self._buffer) < count:
                piece = self._peer.receive(deadline, RECEIVE_BYTES)
                if not piece:
                    return ConnectionFailed("closed by the client")
                self._buffer += piece
        except OSError as error:
            return ConnectionFailed(f"while receiving: {error}")
        data, self._buffer = self._buffer[:count], self._buffer[count:]
        return Received(data)
