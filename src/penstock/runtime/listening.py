"""Ports served by threads: accept loops that survive errors, a limit that drops unauthenticated connections first."""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection
from typing import Protocol, TypeVar

from penstock.records.section import LOOPBACK

logger = logging.getLogger(__name__)

ACCEPT_PAUSE_S = 0.05
"""Pause after a failed accept, for example without free file descriptors."""
LOG_EVERY_S = 10.0
LISTENER_GONE = (errno.EINVAL, errno.EBADF, errno.ENOTSOCK)
"""Errors after which accept always fails."""


class Connection(Protocol):
    @property
    def authenticated(self) -> bool: ...


C = TypeVar("C", bound=Connection)


def turned_away(connections: Collection[C], newest: C, limit: int) -> C | None:
    """The connection to close for `newest`: none, the oldest unauthenticated one, or `newest` itself.

    This way unauthenticated clients cannot block the clients of the run.
    """
    if len(connections) < limit:
        return None
    return next((connection for connection in connections if not connection.authenticated), newest)


def accept_until(
    closing: Callable[[], bool], listener: socket.socket, admit: Callable[[socket.socket], None], port: str
) -> None:
    """Passes every connection to `admit`. Returns when `closing`; raises only if the listener is unusable."""
    logged_at = -LOG_EVERY_S
    while not closing():
        try:
            peer, _ = listener.accept()
        except OSError as error:
            if closing():
                return
            if error.errno in LISTENER_GONE:
                raise
            if time.monotonic() - logged_at > LOG_EVERY_S:
                logged_at = time.monotonic()
                logger.warning("%s: accept failed: %s; retrying", port, error)
            time.sleep(ACCEPT_PAUSE_S)
            continue
        admit(peer)


class Peer:
    """One connection; its server sets `authenticated` when it has received the token."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.authenticated = False

    def receive(self, target: memoryview, timeout_s: float | None = None) -> bool:
        """Fills the target, within `timeout_s` in all; False when the peer closed before its first byte."""
        return receive(self.connection, target, timeout_s)


class ThreadedPort:
    """A port with one thread per connection, bound when the constructor returns.

    At `max_connections`, a new connection replaces the oldest unauthenticated one.
    """

    def __init__(
        self,
        serve: Callable[[Peer], None],
        name: str,
        *,
        host: str = LOOPBACK,
        port: int = 0,
        max_connections: int = 64,
    ) -> None:
        """`serve` is called in a separate thread; its connection is closed when it returns or raises `OSError`."""
        self._serve = serve
        self._name = name
        self._max_connections = max_connections
        self._lock = threading.Lock()
        self._peers: dict[Peer, None] = {}
        self.closing = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=128)
        self.host, self.port = self._listener.getsockname()[:2]
        self.address = f"{self.host}:{self.port}"
        self._thread = threading.Thread(target=self._accept, name=f"{name}-accept", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Number of connections."""
        return len(self._peers)

    def close(self, timeout_s: float) -> None:
        """Closes every connection; returns when no more are accepted, or at the deadline."""
        self.closing = True
        with self._lock:
            connections = [peer.connection for peer in self._peers]
        for connection in [self._listener, *connections]:
            _shut_down(connection)
        self._listener.close()
        self._thread.join(timeout_s)

    def _accept(self) -> None:
        try:
            accept_until(lambda: self.closing, self._listener, self._admit, f"{self._name} port {self.address}")
        except OSError:
            logger.exception("the %s port %s stopped accepting", self._name, self.address)

    def _admit(self, connection: socket.socket) -> None:
        newest = Peer(connection)
        with self._lock:
            leaving = newest if self.closing else turned_away(self._peers, newest, self._max_connections)
            if leaving is not None:
                self._peers.pop(leaving, None)
            if leaving is not newest:
                self._peers[newest] = None
        if leaving is not None:
            _shut_down(leaving.connection)  # its thread detects that
        if leaving is newest:
            connection.close()
            return
        try:
            threading.Thread(target=self._serve_one, args=(newest,), name=f"{self._name}-serve", daemon=True).start()
        except RuntimeError as error:  # the system cannot start more threads
            logger.warning("%s port %s: a connection was rejected: %s", self._name, self.address, error)
            self._leave(newest)

    def _serve_one(self, peer: Peer) -> None:
        try:
            peer.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._serve(peer)
        except OSError as error:
            logger.debug("a connection to the %s port ended: %s", self._name, error)
        finally:
            self._leave(peer)

    def _leave(self, peer: Peer) -> None:
        with self._lock:
            self._peers.pop(peer, None)
        peer.connection.close()


def receive(connection: socket.socket, target: memoryview, timeout_s: float | None = None) -> bool:
    """Fills the target, within `timeout_s` in all; False when the peer closed before its first byte."""
    filled = 0
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while filled < len(target):
        if deadline is not None:
            connection.settimeout(max(1e-3, deadline - time.monotonic()))
        read = connection.recv_into(target[filled:])
        if read == 0:
            if filled == 0:
                return False
            raise ConnectionResetError(f"the peer closed after {filled} of {len(target)} bytes")
        filled += read
    return True


def _shut_down(connection: socket.socket) -> None:
    """Interrupts calls of other threads on this socket; the peer may have closed it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
