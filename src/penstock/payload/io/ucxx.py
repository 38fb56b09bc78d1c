"""The exchange over UCX (extra `ucxx`), server's side: control on an endpoint's stream, bodies as tagged messages.

Each port has a thread of its own, which owns a UCX worker and drives its connections. A client begins each connection
with the tag under which it wants its bodies, chosen at random; then the exchange is as on every carrier.

UCX buffers what arrives unasked, without a bound that we could set: offer these ports on trusted networks only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

from penstock.errors import LocalProtocolError, PenstockError, RunFailed, Stale
from penstock.payload.exchange import (
    HELLO,
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
from penstock.payload.io.tcp import ServerStatistics
from penstock.payload.io.ucxx_core import (
    CLOSE_PERIOD_NS,
    TAG,
    Transfer,
    UCXError,
    Worker,
    body_send,
    close,
    core,
    stream_receive,
    stream_send,
)

log = logging.getLogger(__name__)

LINGER_S = 1.0


class UcxxServer:
    """Serves one ring on several ports, each with its own thread and UCX worker."""

    def __init__(
        self,
        ring: str,
        token: str,
        *,
        ports: Sequence[int] = (0,),
        directory: str = DIRECTORY,
        limits: ExchangeLimits | None = None,
        max_connections: int = 64,
    ) -> None:
        """UCX listens on all interfaces. `self.ports` are the ports really bound; 0 in `ports` means any free one."""
        self.token = token
        self.limits = limits or ExchangeLimits()
        self.max_connections = max_connections
        self.reader = RingReader.attach(ring, directory=directory, label="ucxx server", verify=False)
        names = ("accepted", "turned_away", "consumed", "released", "refused", "orphans")
        self.counts: dict[str, int] = dict.fromkeys(names, 0)
        self.lock = threading.Lock()
        self._ports = [_Port(self, port) for port in ports]
        try:
            self.ports = tuple(port.wait_bound() for port in self._ports)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<UcxxServer ports {self.ports}, {self.statistics()}>"

    def count(self, what: str) -> None:
        with self.lock:
            self.counts[what] += 1

    def statistics(self) -> ServerStatistics:
        with self.lock:
            return ServerStatistics(connections=sum(len(port.connections) for port in self._ports), **self.counts)

    def check(self) -> None:
        """Raise if a port stopped although the server was not closed."""
        for port in self._ports:
            if port.failure is not None:
                raise LocalProtocolError(f"UCXX payload port stopped: {port.failure!r}") from port.failure

    def close(self, timeout_s: float = 5.0) -> None:
        """End all connections and threads within `timeout_s`; what was being sent stays readable."""
        deadline = time.monotonic() + timeout_s
        for port in self._ports:
            port.stop()
        for port in self._ports:
            port.thread.join(max(0.0, deadline - time.monotonic()))
        self.reader.close()


class _Port:
    """One listener with its own thread, worker and connections."""

    def __init__(self, server: UcxxServer, port: int) -> None:
        self._server = server
        self._wish = port
        self._bound: queue.SimpleQueue[int | BaseException] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._stopping = False
        self.failure: BaseException | None = None
        self.connections: list[_Connection] = []
        self.thread = threading.Thread(target=self._run, name="payload-ucxx", daemon=True)
        self.thread.start()

    def wait_bound(self, timeout_s: float = 10.0) -> int:
        """The port really bound; what went wrong in the thread is raised here."""
        try:
            bound = self._bound.get(timeout=timeout_s)
        except queue.Empty:
            raise RunFailed(f"UCXX did not begin to listen within {timeout_s} s") from None
        if isinstance(bound, BaseException):
            raise RunFailed(f"cannot serve payloads by UCXX on port {self._wish}: {bound}") from bound
        return bound

    def stop(self) -> None:
        self._stopping = True
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"!")

    def _run(self) -> None:
        try:
            worker = Worker()
            worker.also_wake_on(self._wake_read)
            arrived: list[Any] = []
            listener = core.UCXListener.create(worker.ucx, self._wish, arrived.append, deliver_endpoint=True)
            self._bound.put(listener.port)
            self._serve(worker, arrived)
        except BaseException as error:
            self.failure = error
            self._bound.put(error)
            log.exception("UCXX payload port stopped")
        finally:
            for connection in self.connections:
                connection.close("the server is closing")
            self.connections.clear()
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _serve(self, worker: Worker, arrived: list[Any]) -> None:
        while not self._stopping:
            deadline = min((connection.deadline for connection in self.connections), default=float("inf"))
            worker.wait(deadline - time.monotonic())
            while arrived:
                self._admit(arrived.pop(0))
            for connection in self.connections:
                while connection.advance():
                    pass
            self.connections = [connection for connection in self.connections if not connection.closed]

    def _admit(self, endpoint: Any) -> None:
        self._server.count("accepted")
        if len(self.connections) >= self._server.max_connections:
            self._server.count("turned_away")
            strangers = [connection for connection in self.connections if connection.is_stranger]
            if not strangers:
                endpoint.close_blocking(CLOSE_PERIOD_NS, 1)
                return
            strangers[0].close("made room")
            self.connections.remove(strangers[0])
        self.connections.append(_Connection(self._server, endpoint))


class _Connection:
    """One client: drives its `ServerExchange` by what UCX has completed."""

    def __init__(self, server: UcxxServer, endpoint: Any) -> None:
        self._server = server
        self._endpoint = endpoint
        self._exchange = ServerExchange(
            server.token, server.reader.name, server.reader.epoch, time.monotonic(), server.limits
        )
        self._tag = 0
        self._lease: Lease | None = None
        self._sending: list[Transfer] = []
        self._receiving: Transfer | None = stream_receive(endpoint, TAG.size + HELLO.size)
        self._lingers_until: float | None = None
        """A last refusal is on its way; closing at once would lose it."""

    @property
    def closed(self) -> bool:
        return self._exchange.state is ExchangeState.CLOSED and self._lingers_until is None

    @property
    def deadline(self) -> float:
        return self._exchange.deadline if self._lingers_until is None else self._lingers_until

    @property
    def is_stranger(self) -> bool:
        return self._exchange.state is ExchangeState.AWAITING_HELLO

    def advance(self) -> bool:
        """Handle what was completed; true if there was something."""
        if self._exchange.state is ExchangeState.CLOSED:
            if self._lingers_until is not None and (
                time.monotonic() >= self._lingers_until or not self._endpoint.alive
            ):
                self._close_endpoint()
            return False
        try:
            event = self._next_event()
        except UCXError as error:
            event = ConnectionFailed(f"UCX: {error}")
        if event is None:
            return False
        while event is not None:
            effects = self._exchange.handle(event, time.monotonic())
            event = None
            for effect in effects:
                outcome = self._perform(effect)
                event = event if outcome is None else outcome
        if self._exchange.expects_bytes and self._receiving is None:
            self._receiving = stream_receive(self._endpoint, self._exchange.expects_bytes)
        return True

    def close(self, reason: str) -> None:
        if self._exchange.state is not ExchangeState.CLOSED:
            for effect in self._exchange.handle(ConnectionFailed(reason), time.monotonic()):
                self._perform(effect)
        elif self._lingers_until is not None:
            self._close_endpoint()

    def _close_endpoint(self) -> None:
        self._lingers_until = None
        close(self._endpoint, [*self._sending, *([self._receiving] if self._receiving else [])])

    def _next_event(self) -> Event | None:
        if self._sending and all(transfer.done for transfer in self._sending):
            finished, self._sending = self._sending, []
            for transfer in finished:
                transfer.check()
            if self._exchange.state is ExchangeState.SENDING:
                return BodySent()
        if self._receiving is not None and self._receiving.done:
            finished, self._receiving = self._receiving, None
            finished.check()
            data = finished.memory[0]
            assert isinstance(data, bytearray)
            if self.is_stranger:
                (self._tag,) = TAG.unpack_from(data)
                return Received(bytes(data[TAG.size :]))
            return Received(bytes(data))
        if time.monotonic() >= self.deadline:
            return ConnectionFailed("too slow")
        return None

    def _perform(self, effect: Effect) -> Event | None:
        match effect:
            case TakeSlot(ref):
                try:
                    self._lease = self._server.reader.take(ref)
                except PenstockError as error:
                    self._server.count("refused")
                    return SlotRefused(Code.STALE if isinstance(error, Stale) else Code.BUSY, str(error))
                return SlotTaken(ref.size_bytes)
            case SendBody(header):
                assert self._lease is not None
                self._sending.append(stream_send(self._endpoint, header))
                if len(self._lease.view):
                    self._sending.append(body_send(self._endpoint, self._lease.view, self._tag))
            case SendRefusal(data):
                self._sending.append(stream_send(self._endpoint, data))
                if self._exchange.state is ExchangeState.CLOSED:
                    self._lingers_until = time.monotonic() + LINGER_S
            case FinaliseSlot(consumed):
                lease, self._lease = self._lease, None
                assert lease is not None
                owned = lease.consumed() if consumed else lease.released()
                self._server.count("consumed" if consumed and owned else "orphans" if not owned else "released")
            case CloseConnection(reason):
                log.debug("UCXX payload connection closes after %d served: %s", self._exchange.served, reason)
                if self._lingers_until is None:
                    self._close_endpoint()
        return None
