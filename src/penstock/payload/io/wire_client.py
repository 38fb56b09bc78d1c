"""The client side of the exchange on any wire: port rotation, pooled connections, one deadline per call."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Literal, Protocol

import xxhash

from penstock.errors import Aborted, LocalProtocolError, RemoteProtocolError, Stale, Transient
from penstock.payload.exchange import Code, Status, consume, hello, parse_status, read
from penstock.payload.io.received import Buffers, Cancellation, Received
from penstock.payload.io.rotation import Rotation
from penstock.payload.ports import Fault
from penstock.payload.retry import Failure
from penstock.records.payload import PayloadRef, RingAddress
from penstock.runtime.clock import monotonic


class Broken(Transient):
    """A failed call that counts against the port. `WireClient` does not pass it on."""

    def __init__(self, fault: Fault, detail: str, answered: bool = False) -> None:
        super().__init__(detail)
        self.fault: Fault = fault
        self.answered = answered
        """At least one byte of the reply had arrived."""


class Connection(Protocol):
    """One connection of a wire. Every failure is `Broken`, or `Aborted` after `break_off`."""

    born: float

    @property
    def reusable(self) -> bool:
        """No data is in flight to the client, as far as the client can detect."""
        ...

    def ask(self, request: bytes, body: memoryview, deadline: float) -> bytes | bytearray:
        """Sends a request and returns the status. A body, if one follows, is written to `body`."""
        ...

    def receive_body(self, deadline: float, hasher: xxhash.xxh3_64 | None) -> None:
        """Fills the whole body; `hasher` gets the bytes while they are in the CPU cache."""
        ...

    def receive_text(self, size_bytes: int, deadline: float) -> bytes:
        """The text that is sent instead of a body."""
        ...

    def break_off(self) -> None:
        """Called by another thread: ends the current call at once."""
        ...

    def close(self) -> bool:
        """False when the wire may still write to the body."""
        ...


class Wire(Protocol):
    """Opens connections of one transport."""

    name: Literal["tcp", "ucxx"]

    @property
    def lane(self) -> int:
        """The caller's lane: a connection is reused only in the lane that created it."""
        ...

    def connect(self, host: str, port: int, hello: bytes, deadline: float) -> Connection: ...

    def close(self) -> None:
        """Called after all connections are closed."""
        ...


class WireClient:
    """Reads payloads from any number of servers. Thread-safe; every call blocks until its deadline at most."""

    def __init__(
        self,
        wire: Wire,
        token: str,
        buffers: Buffers,
        *,
        max_age_s: float = 90.0,
        keep_per_port: int = 8,
        rotation: Rotation | None = None,
        verify: bool = True,
    ) -> None:
        """`max_age_s` must be below the servers' idle limit, so that the server does not close one in use."""
        self._wire = wire
        self._hello = hello(token)
        self._buffers = buffers
        self._max_age_s = max_age_s
        self._keep_per_port = keep_per_port
        self._rotation = rotation or Rotation()
        self._verify = verify
        self._lock = threading.Lock()
        self._idle: dict[tuple[int, str, int], list[Connection]] = {}
        self._closed = False

    def __repr__(self) -> str:
        idle = sum(len(group) for group in self._idle.values())
        return f"<WireClient {self._wire.name}, {idle} idle connections, {self._rotation!r}>"

    def read(
        self, address: RingAddress, ref: PayloadRef, deadline: float, tried: set[int], cancellation: Cancellation
    ) -> Received | Failure:
        """One call for one payload: complete and verified by `deadline` (monotonic), or the failure.

        `tried` holds the ports already tried for this payload; the one used now is added. The payload stays in its
        ring until `consume`.
        """
        try:
            request, memory = read(ref), self._buffers.take(ref.size_bytes)
        except Stale as error:
            return Failure("stale", str(error))
        except MemoryError:
            return Failure("busy", f"the client has no memory for a payload of {ref.size_bytes} bytes")
        body = memory.data[: ref.size_bytes]
        answer, unused = self._call(address, request, body, ref.digest, deadline, tried, cancellation)
        if answer is None:
            return Received(body.toreadonly(), memory)
        if unused:
            self._buffers.release(memory)
        return answer

    def consume(
        self,
        address: RingAddress,
        refs: Sequence[PayloadRef],
        deadline: float,
        tried: set[int],
        cancellation: Cancellation,
    ) -> Failure | None:
        """Reports that these payloads (`MAX_CONSUMED` at most) were used; None when confirmed. May be repeated."""
        return self._call(address, consume(refs), memoryview(bytearray()), 0, deadline, tried, cancellation)[0]

    def close(self) -> None:
        """Closes the connections. No call may be in progress."""
        with self._lock:
            self._closed = True
            idle = [connection for group in self._idle.values() for connection in group]
            self._idle.clear()
        for connection in idle:
            connection.close()
        self._wire.close()

    def _call(
        self,
        address: RingAddress,
        request: bytes,
        body: memoryview,
        digest: int,
        deadline: float,
        tried: set[int],
        cancellation: Cancellation,
    ) -> tuple[Failure | None, bool]:
        """The failure, if any, and whether the memory of the body can be reused."""
        if self._closed:
            raise LocalProtocolError("this payload client is closed")
        host, ports = address.host, address.tcp_ports if self._wire.name == "tcp" else address.ucxx_ports
        port = self._rotation.choose(host, ports, avoid=tried)
        tried.add(port)
        exchange = _Exchange(request, body, digest if self._verify else 0, deadline, cancellation)
        try:
            failure = self._over_some_connection(host, port, exchange)
        except Aborted as error:
            return Failure("cancelled", str(error)), exchange.memory_free
        except Broken as broken:
            if cancellation.reason is not None:
                return Failure("cancelled", cancellation.reason), exchange.memory_free
            self._rotation.failed(host, ports, port, broken.fault)
            return Failure(broken.fault, f"{host}:{port}: {broken}", broken.answered), exchange.memory_free
        self._rotation.succeeded(host, ports, port)
        return failure, exchange.memory_free

    def _over_some_connection(self, host: str, port: int, exchange: _Exchange) -> Failure | None:
        connection = self._pooled(host, port)
        if connection is not None:
            try:
                return self._over(connection, host, port, exchange)
            except Broken as broken:
                # The server may have closed an idle connection: that is no fault of the port.
                if broken.answered or broken.fault == "timed_out" or not exchange.repeatable:
                    raise
                self._drop_idle(host, port)
        return self._over(self._wire.connect(host, port, self._hello, exchange.deadline), host, port, exchange)

    def _over(self, connection: Connection, host: str, port: int, exchange: _Exchange) -> Failure | None:
        failure = exchange.run(connection)
        with self._lock:
            idle = self._idle.setdefault((self._wire.lane, host, port), [])
            if connection.reusable and not self._closed and len(idle) < self._keep_per_port:
                idle.append(connection)
                return failure
        exchange.memory_free = connection.close()
        return failure

    def _pooled(self, host: str, port: int) -> Connection | None:
        while True:
            with self._lock:
                idle = self._idle.get((self._wire.lane, host, port))
                if not idle:
                    return None
                connection = idle.pop()
            if connection.reusable and monotonic() - connection.born < self._max_age_s:
                return connection
            connection.close()

    def _drop_idle(self, host: str, port: int) -> None:
        with self._lock:
            idle = self._idle.pop((self._wire.lane, host, port), [])
        for connection in idle:
            connection.close()


class _Exchange:
    """One request and its reply, on one connection or a second one."""

    def __init__(
        self, request: bytes, body: memoryview, digest: int, deadline: float, cancellation: Cancellation
    ) -> None:
        self._request = request
        self._body = body
        self._digest = digest
        self._cancellation = cancellation
        self.deadline = deadline
        self.memory_free = True

    @property
    def repeatable(self) -> bool:
        return self.memory_free and self._cancellation.reason is None

    def run(self, connection: Connection) -> Failure | None:
        """None when the body is complete and verified. On any error the connection is closed."""
        registered = None
        try:
            registered = self._cancellation.register(connection.break_off)
            status = parse_status(connection.ask(self._request, self._body, self.deadline), len(self._body))
            if status.code is not Code.OK:
                return _refusal(status, connection.receive_text(status.length, self.deadline))
            hasher = xxhash.xxh3_64() if self._digest else None
            connection.receive_body(self.deadline, hasher)
            if hasher is not None and hasher.intdigest() != self._digest:
                found = f"body hashes to {hasher.intdigest():016x}, expected {self._digest:016x}"
                raise Broken("corrupt", found, answered=True)
        except BaseException as error:
            self.memory_free = connection.close()
            if isinstance(error, RemoteProtocolError):
                raise Broken("protocol", str(error), answered=True) from error
            raise
        finally:
            if registered is not None:
                self._cancellation.unregister(registered)
        return None


def _refusal(status: Status, text: bytes) -> Failure:
    reason = text.decode(errors="replace")
    if status.code is Code.REFUSED:
        raise Broken("protocol", f"the server refused the hello: {reason}", answered=True)
    return Failure("stale" if status.code is Code.STALE else "busy", reason)
