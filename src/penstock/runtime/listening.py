"""TCP ports: what callers without the token may cost, threads for those with it, and links that are cut.

A `Door` accepts the connections of one port in one thread. A connection gets a thread, a parser or a place on an event
loop only after its first bytes have shown the token; until then it is a *stranger*, and all that strangers may cost is
bounded. `ThreadedPort` serves the admitted connections with a thread each; HTTP ports are in `http_guard`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import resource
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from penstock.records.section import LOOPBACK

logger = logging.getLogger(__name__)

LINK_TIMEOUT_S = 30.0
"""After this time without an answer of the peer's machine, the kernel ends a connection."""
BACKLOG = 512
ACCEPTS_AT_ONCE = 64
STRANGERS_PER_S, STRANGERS_BURST = 6000.0, 1000.0
"""Connections and reads of all strangers of a port; beyond that its door pauses. Then new clients of the run wait
behind strangers, so the bound is far above what most floods reach; it limits the processor time of the others."""
MAX_STRANGERS = 256
MAX_READS = 32
"""Of one stranger."""
ACCEPT_PAUSE_S = 0.05
"""Pause after a failed accept, for example without free file descriptors."""
LOG_EVERY_S = 10.0
LISTENER_GONE = (errno.EINVAL, errno.EBADF, errno.ENOTSOCK)
"""Errors after which accept always fails."""


def watch_link(connection: socket.socket) -> None:
    """Both ends call this: no call on the connection waits for a machine that is gone or cut off. Small messages are
    sent at once."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(LINK_TIMEOUT_S / 3))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, int(LINK_TIMEOUT_S / 6))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1e3 * LINK_TIMEOUT_S))


def default_strangers() -> int:
    """So many that a client of the run has time to show its token, and few enough to leave files for clients."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(8, min(MAX_STRANGERS, files // 4))


class Allowance:
    """Units that are used up and return at a constant rate. No thread or clock inside."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._left = burst
        self._at = float("-inf")

    def take(self, units: float, now: float) -> float:
        """Takes the units, and returns how many seconds to wait until none is owed; 0 if there were enough."""
        self._refill(now)
        self._left -= units
        return max(0.0, -self._left / self._per_s)

    def take_if_left(self, now: float) -> bool:
        """Takes one unit; False if there is none."""
        self._refill(now)
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def give_back(self, units: float) -> None:
        self._left = min(self._burst, self._left + units)

    def _refill(self, now: float) -> None:
        self._left = min(self._burst, self._left + (now - self._at) * self._per_s)
        self._at = now


class Stranger:
    """A connection that has not shown the token."""

    __slots__ = ("connection", "deadline", "reads", "received")

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self.connection = connection
        self.deadline = deadline
        self.received = bytearray()
        self.reads = 0


class Door:
    """Accepts the connections of one port, in one thread, and admits those that show the token.

    A stranger may send `limit_bytes`, in `MAX_READS` pieces, within `hello_s`. There are at most `max_strangers`; a new
    one closes the oldest. All of them together may cost `STRANGERS_PER_S`: then the door pauses. Admitted connections
    do not count, and what is admitted is never closed for a stranger.
    """

    def __init__(
        self,
        listener: socket.socket,
        name: str,
        inspect: Callable[[bytearray], bool | None],
        admit: Callable[[socket.socket, bytes], None],
        refuse: Callable[[socket.socket, bytes], None],
        *,
        limit_bytes: int,
        hello_s: float,
        max_strangers: int | None = None,
    ) -> None:
        """`inspect` receives the bytes so far: None if more are needed, else whether they show the token. `admit` and
        `refuse` receive the connection, which is theirs from then on, with all bytes that were read. All three are
        called in the door's thread and must not block. The listener belongs to the door; `start` opens it."""
        self.accepted = 0
        self.turned_away = 0
        """Strangers that were closed: for a newer one, at the deadline, or for too many bytes or reads."""
        self.failure: BaseException | None = None
        """Why the door accepts no more, if it was not closed."""
        self.strangers: dict[Stranger, None] = {}
        self._listener = listener
        self._name = name
        self._inspect = inspect
        self._admit = admit
        self._refuse = refuse
        self._limit_bytes = limit_bytes
        self._hello_s = hello_s
        self._max_strangers = max_strangers or default_strangers()
        self._allowance = Allowance(STRANGERS_PER_S, STRANGERS_BURST)
        self._used = 0
        """Units used in this round of the loop."""
        self._closing = threading.Event()
        self._logged_at = -LOG_EVERY_S
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name=f"{name}-door", daemon=True)
        listener.listen(BACKLOG)
        listener.setblocking(False)

    def __repr__(self) -> str:
        counts = f"{self.accepted} accepted, {len(self.strangers)} strangers, {self.turned_away} turned away"
        return f"<Door {self._name}, {counts}>"

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Accepts no more and closes all strangers; returns when that is done, or at the deadline."""
        self._closing.set()
        shut_down(self._listener)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        self._listener.close()

    def _run(self) -> None:
        try:
            self._selector.register(self._listener, selectors.EVENT_READ)
            while not self._closing.is_set():
                self._round()
        except BaseException as error:
            if not self._closing.is_set():
                self.failure = error
                logger.exception("%s stopped accepting", self._name)
                self._listener.close()
        finally:
            for stranger in self.strangers:
                stranger.connection.close()
            self.strangers.clear()
            self._selector.close()

    def _round(self) -> None:
        now = time.monotonic()
        oldest = next(iter(self.strangers), None)
        for key, _ in self._selector.select(None if oldest is None else max(0.0, oldest.deadline - now)):
            if key.fileobj is self._listener:
                self._accept()
            elif key.data in self.strangers:  # else it was turned away in this round
                self._read(key.data)
        now = time.monotonic()
        while self.strangers and (oldest := next(iter(self.strangers))).deadline <= now:
            self._turn_away(oldest)
        used, self._used = self._used, 0
        if (pause_s := self._allowance.take(used, now)) > 0:
            self._closing.wait(pause_s)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if self._closing.is_set():
                    return
                if error.errno in LISTENER_GONE:
                    raise
                if time.monotonic() - self._logged_at > LOG_EVERY_S:
                    self._logged_at = time.monotonic()
                    logger.warning("%s: accept failed: %s; retrying", self._name, error)
                self._closing.wait(ACCEPT_PAUSE_S)
                return
            self.accepted += 1
            connection.setblocking(False)
            if len(self.strangers) >= self._max_strangers:
                self._turn_away(next(iter(self.strangers)))
            stranger = Stranger(connection, time.monotonic() + self._hello_s)
            self.strangers[stranger] = None
            self._selector.register(connection, selectors.EVENT_READ, stranger)
            self._used += 1
            self._read(stranger)

    def _read(self, stranger: Stranger) -> None:
        """Reads once, and decides if that is enough to decide."""
        received = stranger.received
        try:
            piece = stranger.connection.recv(self._limit_bytes - len(received))
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        self._used += 1
        stranger.reads += 1
        received += piece
        known = self._inspect(received) if piece else False
        if known is None and len(received) < self._limit_bytes and stranger.reads < MAX_READS:
            return
        if not piece or known is None:
            self._turn_away(stranger)
            return
        self._forget(stranger)
        if known:
            self._allowance.give_back(1 + stranger.reads)
            stranger.connection.setblocking(True)
            with contextlib.suppress(OSError):  # the peer may have gone
                watch_link(stranger.connection)
            self._admit(stranger.connection, bytes(received))
        else:
            self._refuse(stranger.connection, bytes(received))

    def _turn_away(self, stranger: Stranger) -> None:
        self.turned_away += 1
        self._forget(stranger)
        stranger.connection.close()

    def _forget(self, stranger: Stranger) -> None:
        del self.strangers[stranger]
        self._selector.unregister(stranger.connection)


class Peer:
    """One client of the run."""

    def __init__(self, connection: socket.socket, hello: bytes) -> None:
        self.connection = connection
        self.hello = hello
        """The bytes that showed the token."""

    def receive(self, target: memoryview, timeout_s: float | None = None) -> bool:
        """Fills the target, within `timeout_s` in all; False when the peer closed before its first byte."""
        return receive(self.connection, target, timeout_s)


class ThreadedPort:
    """A port with one thread per client of the run, bound when the constructor returns.

    Clients are not limited in number. When the system can start no more threads, they wait until one ends.
    """

    def __init__(
        self,
        serve: Callable[[Peer], None],
        name: str,
        *,
        hello_bytes: int,
        has_token: Callable[[bytes], bool],
        refusal: bytes = b"",
        host: str = LOOPBACK,
        port: int = 0,
        hello_s: float = 5.0,
        max_strangers: int | None = None,
    ) -> None:
        """A connection begins with `hello_bytes` that `has_token` accepts, else it is sent the `refusal` and closed.
        `serve` is called in a thread of its own; the connection is closed when it returns or raises `OSError`."""
        self._serve = serve
        self._name = name
        self._refusal = refusal
        self._lock = threading.Lock()
        self._peers: dict[Peer, None] = {}
        self._waiting: deque[Peer] = deque()
        self._threads: set[threading.Thread] = set()
        self.refused = 0
        self.closing = False
        listener = bound(host, port)
        self.host, self.port = listener.getsockname()[:2]
        self.address = f"{self.host}:{self.port}"
        self.door = Door(
            listener,
            f"{name}-{self.port}",
            lambda received: None if len(received) < hello_bytes else has_token(bytes(received)),
            self._admit,
            self._refuse,
            limit_bytes=hello_bytes,
            hello_s=hello_s,
            max_strangers=max_strangers,
        )
        self.door.start()

    def __len__(self) -> int:
        """Number of connections, with strangers."""
        return len(self._peers) + len(self._waiting) + len(self.door.strangers)

    def break_off(self) -> int:
        """Ends all connections of clients like a network failure; returns their number."""
        with self._lock:
            peers = [*self._peers, *self._waiting]
        for peer in peers:
            shut_down(peer.connection)
        return len(peers)

    def close(self, timeout_s: float) -> None:
        """Closes every connection; returns when all threads have ended, or at the deadline."""
        deadline = time.monotonic() + timeout_s
        self.closing = True
        self.door.close(timeout_s)
        with self._lock:
            threads = [*self._threads]
            for peer in self._waiting:
                peer.connection.close()
            self._waiting.clear()
        self.break_off()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _admit(self, connection: socket.socket, hello: bytes) -> None:
        peer = Peer(connection, hello)
        thread = threading.Thread(target=self._serve_waiting, name=f"{self._name}-serve", daemon=True)
        with self._lock:
            self._waiting.append(peer)
            self._threads.add(thread)
            try:
                thread.start()
            except RuntimeError as error:  # the system can start no more threads now
                self._threads.discard(thread)
                logger.warning("%s port %s: %d clients wait: %s", self._name, self.address, len(self._waiting), error)
                if not self._threads:  # none will end and serve it
                    self._waiting.remove(peer)
                    connection.close()

    def _refuse(self, connection: socket.socket, hello: bytes) -> None:
        self.refused += 1
        close_with(connection, self._refusal)

    def _serve_waiting(self) -> None:
        while (peer := self._next()) is not None:
            try:
                self._serve(peer)
            except OSError as error:
                logger.debug("a connection to the %s port ended: %s", self._name, error)
            except Exception:
                logger.exception("a connection to the %s port failed", self._name)
            finally:
                with self._lock:
                    self._peers.pop(peer, None)
                peer.connection.close()

    def _next(self) -> Peer | None:
        """The client to be served by this thread, which ends if there is none."""
        with self._lock:
            if self.closing or not self._waiting:
                self._threads.discard(threading.current_thread())
                return None
            peer = self._waiting.popleft()
            self._peers[peer] = None
            return peer


class Connection(Protocol):
    @property
    def authenticated(self) -> bool: ...


C = TypeVar("C", bound=Connection)


def turned_away(connections: Sequence[C], max_strangers: int) -> C | None:
    """For ports without a `Door`: the oldest stranger, if there are too many of them."""
    strangers = [connection for connection in connections if not connection.authenticated]
    return strangers[0] if len(strangers) > max_strangers else None


def bound(host: str, port: int) -> socket.socket:
    """A socket bound to the port, for a `Door`; 0 is any free port."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError):
        listener.close()
        raise
    return listener


def receive(connection: socket.socket, target: memoryview, timeout_s: float | None = None) -> bool:
    """Fills the target, within `timeout_s` in all; False when the peer closed before its first byte.

    Without `timeout_s`, each piece may take the socket's own timeout.
    """
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


def close_with(connection: socket.socket, reply: bytes) -> None:
    """Sends the reply if the peer takes it at once, and closes the connection."""
    with contextlib.suppress(OSError), connection:
        connection.setblocking(False)
        connection.send(reply)
        connection.recv(1 << 16)  # closed with bytes unread, the kernel would discard the reply


def shut_down(connection: socket.socket) -> None:
    """Interrupts calls of other threads on this socket; the peer may have closed it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
