"""The exchange over TCP, server's side: one thread per port accepts, one thread per connection serves.

Threads block in the kernel and use no CPU while idle. The number of connections per port is bounded; when it is
reached, the oldest that has not said hello yet makes room, so that strangers cannot keep the run's own clients out.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from penstock.errors import LocalProtocolError, PenstockError, RunFailed, Stale
from penstock.payload.exchange import (
    BodySent,
    CloseConnection,
    Code,
    ConnectionFailed,
    Effect,
    Event,
    ExchangeLimits,
    ExchangeState,
    FinaliseSlot,
    Received,
    SendBody,
    SendRefusal,
    ServerExchange,
    SlotRefused,
    SlotTaken,
    TakeSlot,
)
from penstock.payload.io.mapping import DIRECTORY
from penstock.payload.io.reader import Lease, RingReader
from penstock.payload.io.timed_socket import TimedSocket

log = logging.getLogger(__name__)

ACCEPT_PAUSE_S = 0.05
"""Before accepting again after the system refused (out of file descriptors, say)."""
RECEIVE_BYTES = 256
"""All that is ever read ahead of a client."""


class ServerStatistics(NamedTuple):
    connections: int
    accepted: int
    turned_away: int
    """Closed at the door, or to make room: more connections than allowed."""
    consumed: int
    released: int
    """Read attempts that ended without an acknowledged receipt."""
    refused: int
    orphans: int


class TcpServer:
    """Serves one ring on several ports. All of them are bound when the constructor returns."""

    def __init__(
        self,
        ring: str,
        token: str,
        *,
        host: str = "127.0.0.1",
        ports: Sequence[int] = (0, 0),
        directory: str = DIRECTORY,
        limits: ExchangeLimits | None = None,
        max_connections: int = 64,
    ) -> None:
        """`ports` are the ports wished for; 0 means any free one. `self.ports` are the ones really bound."""
        self._token = token
        self._limits = limits or ExchangeLimits()
        self._max_connections = max_connections
        self._lock = threading.Lock()
        self._closing = False
        self._connections: dict[int, dict[_Connection, None]] = {}
        self._failed_ports: dict[int, BaseException] = {}
        self._accepted = self._turned_away = self._consumed = self._released = self._refused = self._orphans = 0
        self._reader = RingReader.attach(ring, directory=directory, label="tcp server", verify=False)
        self._listeners: dict[int, socket.socket] = {}
        try:
            for port in ports:
                listener = _listen(host, port)
                self._listeners[listener.getsockname()[1]] = listener
        except OSError as error:
            for listener in self._listeners.values():
                listener.close()
            self._reader.close()
            raise RunFailed(
                f"cannot serve payloads on {host}: {error}; choose other ports, or 0 for any free one"
            ) from error
        self._acceptors = [
            threading.Thread(target=self._accept, args=(port, listener), name=f"payload-accept-{port}", daemon=True)
            for port, listener in self._listeners.items()
        ]
        for port in self._listeners:
            self._connections[port] = {}
        for thread in self._acceptors:
            thread.start()

    def __repr__(self) -> str:
        return f"<TcpServer ports {self.ports}, {self.statistics()}>"

    @property
    def ports(self) -> tuple[int, ...]:
        """What to advertise: bound, and still accepting."""
        return tuple(port for port in self._listeners if port not in self._failed_ports)

    def statistics(self) -> ServerStatistics:
        with self._lock:
            return ServerStatistics(
                connections=sum(len(connections) for connections in self._connections.values()),
                accepted=self._accepted,
                turned_away=self._turned_away,
                consumed=self._consumed,
                released=self._released,
                refused=self._refused,
                orphans=self._orphans,
            )

    def check(self) -> None:
        """Raise if a port stopped accepting although the server was not closed."""
        for port, error in self._failed_ports.items():
            raise LocalProtocolError(f"payload port {port} stopped accepting: {error!r}") from error

    def close(self, timeout_s: float = 5.0) -> None:
        """End all connections and threads within `timeout_s`; what was being sent stays readable."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._closing = True
            connections = [connection for group in self._connections.values() for connection in group]
        for listener in self._listeners.values():
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
        for connection in connections:
            connection.break_off()
        for thread in [*self._acceptors, *(connection.thread for connection in connections)]:
            thread.join(max(0.0, deadline - time.monotonic()))
        for listener in self._listeners.values():
            listener.close()
        self._reader.close()

    def _accept(self, port: int, listener: socket.socket) -> None:
        try:
            while not self._closing:
                try:
                    peer, _ = listener.accept()
                except OSError as error:
                    if not self._closing:
                        log.warning("payload port %d: accept failed: %s", port, error)
                        time.sleep(ACCEPT_PAUSE_S)
                    continue
                self._admit(port, peer)
        except BaseException as error:
            log.exception("payload port %d stopped accepting", port)
            with self._lock:
                self._failed_ports[port] = error
            listener.close()
            raise

    def _admit(self, port: int, peer: socket.socket) -> None:
        connection = _Connection(self, port, peer)
        with self._lock:
            group = self._connections[port]
            strangers = [other for other in group if other.is_stranger]
            full = len(group) >= self._max_connections
            turned_away = strangers[0] if full and strangers else connection if full else None
            if self._closing:
                turned_away = connection
            self._accepted += 1
            if turned_away is not None:
                self._turned_away += 1
                group.pop(turned_away, None)
            if turned_away is not connection:
                group[connection] = None
        if turned_away is not None:
            log.debug("payload port %d: turned away %s", port, turned_away)
            turned_away.break_off()
        if turned_away is not connection:
            connection.thread.start()
        else:
            connection.close()


class _Connection:
    """One client: drives its `ServerExchange` with blocking calls that all end by the exchange's deadline."""

    def __init__(self, server: TcpServer, port: int, peer: socket.socket) -> None:
        self._server = server
        self._port = port
        self._peer = TimedSocket(peer)
        self._buffer = b""
        self._lease: Lease | None = None
        self._exchange = ServerExchange(
            server._token,
            server._reader.name,
            server._reader.epoch,
            time.monotonic(),
            server._limits,
        )
        self.thread = threading.Thread(target=self._serve, name=f"payload-serve-{port}", daemon=True)

    def __repr__(self) -> str:
        return f"<connection on port {self._port}: {self._exchange!r}>"

    @property
    def is_stranger(self) -> bool:
        return self._exchange.state is ExchangeState.AWAITING_HELLO

    def break_off(self) -> None:
        self._peer.break_off()

    def close(self) -> None:
        self._peer.close()

    def _serve(self) -> None:
        exchange = self._exchange
        try:
            while exchange.state is not ExchangeState.CLOSED:
                self._drive(self._receive(exchange.expects_bytes, exchange.deadline))
        finally:
            if exchange.state is not ExchangeState.CLOSED:
                self._drive(ConnectionFailed("the serving thread failed"))
            self._peer.close()
            with self._server._lock:
                self._server._connections[self._port].pop(self, None)

    def _drive(self, event: Event | None) -> None:
        while event is not None:
            effects = self._exchange.handle(event, time.monotonic())
            event = None
            for effect in effects:
                outcome = self._perform(effect)
                event = event if outcome is None else outcome

    def _perform(self, effect: Effect) -> Event | None:
        match effect:
            case TakeSlot(ref):
                try:
                    self._lease = self._server._reader.take(ref)
                except PenstockError as error:
                    with self._server._lock:
                        self._server._refused += 1
                    return SlotRefused(Code.STALE if isinstance(error, Stale) else Code.BUSY, str(error))
                return SlotTaken(ref.size_bytes)
            case SendBody(header):
                assert self._lease is not None
                failed = self._send(header, self._lease.view)
                return BodySent() if failed is None else failed
            case SendRefusal(data):
                failed = self._send(data)
                return failed if self._exchange.state is not ExchangeState.CLOSED else None
            case FinaliseSlot(consumed):
                self._finalise(consumed)
            case CloseConnection(reason):
                log.debug("payload port %d: closing after %d served: %s", self._port, self._exchange.served, reason)
        return None

    def _finalise(self, consumed: bool) -> None:
        lease, self._lease = self._lease, None
        assert lease is not None
        try:
            owned = lease.consumed() if consumed else lease.released()
        except LocalProtocolError:
            # The server was closed and gave everything back already.
            owned, consumed = True, False
        with self._server._lock:
            self._server._consumed += consumed and owned
            self._server._released += not consumed
            self._server._orphans += not owned

    def _send(self, *parts: bytes | memoryview) -> ConnectionFailed | None:
        try:
            self._peer.send(self._exchange.deadline, *parts)
        except OSError as error:
            return ConnectionFailed(f"while sending: {error}")
        return None

    def _receive(self, count: int, deadline: float) -> Received | ConnectionFailed:
        """Exactly `count` bytes. An acknowledgement and the next request often come together: the rest is kept."""
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
