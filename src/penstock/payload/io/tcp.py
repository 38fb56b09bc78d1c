"""The exchange over TCP, server side: one thread per port accepts, one thread per connection serves.

Threads block in the kernel and use no CPU while idle.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence

from penstock.errors import LocalProtocolError, RunFailed
from penstock.payload.exchange import BodySent, ConnectionFailed, Event, ExchangeLimits, Received
from penstock.payload.io.mapping import DIRECTORY
from penstock.payload.io.serving import Handler, ServerStatistics, Service
from penstock.payload.io.timed_socket import TimedSocket
from penstock.records.section import LOOPBACK
from penstock.runtime.listening import accept_until, turned_away

log = logging.getLogger(__name__)

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
        max_connections: int = 64,
    ) -> None:
        """`ports` are the requested ports; 0 means any free one. `self.ports` are the bound ones."""
        self._service = Service(ring, token, directory=directory, limits=limits, label="tcp server")
        self._max_connections = max_connections
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closing = False
        self._failed_ports: dict[int, BaseException] = {}
        self._listeners: dict[int, socket.socket] = {}
        try:
            for port in ports:
                listener = _listen(host, port)
                self._listeners[listener.getsockname()[1]] = listener
        except OSError as error:
            for listener in self._listeners.values():
                listener.close()
            self._service.reader.close()
            raise RunFailed(
                f"cannot serve payloads on {host}: {error}; choose other ports, or 0 for any free one"
            ) from error
        self._connections: dict[int, dict[_Connection, None]] = {port: {} for port in self._listeners}
        self._acceptors = [
            threading.Thread(target=self._accept, args=(port, listener), name=f"payload-accept-{port}", daemon=True)
            for port, listener in self._listeners.items()
        ]
        for thread in self._acceptors:
            thread.start()

    def __repr__(self) -> str:
        return f"<TcpServer ports {self.ports}, {self.statistics()}>"

    @property
    def ports(self) -> tuple[int, ...]:
        """Ports to advertise: bound and still accepting."""
        return tuple(port for port in self._listeners if port not in self._failed_ports)

    def statistics(self) -> ServerStatistics:
        with self._lock:
            connections = sum(len(group) for group in self._connections.values())
        return self._service.statistics(connections)

    def check(self) -> None:
        """Raises if a port stopped accepting although the server was not closed."""
        for port, error in self._failed_ports.items():
            raise LocalProtocolError(f"payload port {port} stopped accepting: {error!r}") from error

    def break_off(self) -> int:
        """Ends all connections like a network failure; returns their number. The server continues."""
        with self._lock:
            connections = [connection for group in self._connections.values() for connection in group]
        for connection in connections:
            connection.break_off()
        return len(connections)

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends all connections and threads within `timeout_s`; payloads being sent stay readable.

        In a forked child this does nothing: the parent continues to serve.
        """
        if os.getpid() != self._pid:
            return
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._closing = True
            serving = [connection.thread for group in self._connections.values() for connection in group]
        for listener in self._listeners.values():
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
        self.break_off()
        for thread in [*self._acceptors, *serving]:
            thread.join(max(0.0, deadline - time.monotonic()))
        for listener in self._listeners.values():
            listener.close()
        self._service.reader.close()

    def _accept(self, port: int, listener: socket.socket) -> None:
        try:
            accept_until(lambda: self._closing, listener, lambda peer: self._admit(port, peer), f"payload port {port}")
        except BaseException as error:
            log.exception("payload port %d stopped accepting", port)
            self._failed_ports[port] = error
            listener.close()
            raise

    def _admit(self, port: int, peer: socket.socket) -> None:
        connection = _Connection(self._service, peer, lambda: self._leave(port, connection))
        with self._lock:
            group = self._connections[port]
            leaving = connection if self._closing else turned_away(group, connection, self._max_connections)
            if leaving is not None:
                group.pop(leaving, None)
            if leaving is not connection:
                group[connection] = None
        self._service.count("accepted")
        if leaving is not None:
            self._service.count("turned_away")
            log.debug("payload port %d: too many connections, closed %s", port, leaving)
            leaving.break_off()
        if leaving is connection:
            connection.close()
            return
        try:
            connection.thread.start()
        except RuntimeError as error:  # the system cannot start more threads now
            log.warning("payload port %d: closed %s: %s", port, connection, error)
            self._service.count("turned_away")
            self._leave(port, connection)
            connection.close()

    def _leave(self, port: int, connection: _Connection) -> None:
        with self._lock:
            self._connections[port].pop(connection, None)


class _Connection:
    """One client, served with blocking calls that all end by the exchange's deadline."""

    def __init__(self, service: Service, peer: socket.socket, on_end: Callable[[], None]) -> None:
        self._peer = TimedSocket(peer)
        self._on_end = on_end
        self._buffer = b""
        self._handler = Handler(service, self)
        self._exchange = self._handler.exchange
        self.thread = threading.Thread(target=self._serve, name="payload-serve", daemon=True)

    def __repr__(self) -> str:
        return f"<TCP connection, {self._handler!r}>"

    @property
    def authenticated(self) -> bool:
        return self._handler.authenticated

    def break_off(self) -> None:
        self._peer.break_off()

    def close(self) -> None:
        self._peer.close()

    def send_body(self, header: bytes, body: memoryview) -> Event:
        failed = self._send(header, body)
        return BodySent() if failed is None else failed

    def send_status(self, data: bytes) -> Event | None:
        return self._send(data)

    def end(self, reason: str) -> None:
        """Nothing to do: the serving thread checks whether the exchange is closed."""

    def _serve(self) -> None:
        try:
            while not self._handler.closed:
                self._handler.handle(self._receive(self._exchange.expects_bytes, self._exchange.deadline))
        finally:
            if not self._handler.closed:
                self._handler.handle(ConnectionFailed("the serving thread failed"))
            self._peer.close()
            self._on_end()

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


def _listen(host: str, port: int) -> socket.socket:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener
