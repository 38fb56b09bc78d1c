"""The exchange over UCX (extra `ucxx`), server side: control on an endpoint's stream, bodies as tagged messages.

Each port has one thread, which owns a UCX worker and drives its connections. A client begins each connection with the
random tag of its bodies; then the exchange is the same as on every transport.

UCX buffers unexpected messages without a configurable limit: use these ports on trusted networks only. UCX cannot
listen on one address. With a loopback host the server uses no other network device and refuses connections through
one. With any other host it is reachable through all devices, and only the token protects it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

from penstock.errors import LocalProtocolError, RunFailed
from penstock.payload.exchange import HELLO, BodySent, ConnectionFailed, Event, ExchangeLimits, ExchangeState, Received
from penstock.payload.io.mapping import DIRECTORY
from penstock.payload.io.serving import Handler, ServerStatistics, Service
from penstock.records.section import LOOPBACK
from penstock.runtime.listening import turned_away
from penstock.runtime.ucx import (
    TAG,
    Transfer,
    UCXError,
    Worker,
    body_send,
    close,
    core,
    pieces,
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
        host: str = LOOPBACK,
        ports: Sequence[int] = (0,),
        directory: str = DIRECTORY,
        limits: ExchangeLimits | None = None,
        max_strangers: int = 64,
    ) -> None:
        """`self.ports` are the bound ports; 0 in `ports` means any free one."""
        self._service = Service(ring, token, directory=directory, limits=limits, label="ucxx server")
        self._ports: list[_Port] = []
        try:
            for port in ports:
                self._ports.append(_Port(self._service, Worker(host), port, max_strangers))
            self.ports = tuple(port.wait_bound() for port in self._ports)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<UcxxServer ports {self.ports}, {self.statistics()}>"

    def statistics(self) -> ServerStatistics:
        return self._service.statistics(sum(len(port.connections) for port in self._ports))

    def check(self) -> None:
        """Raises if a port stopped although the server was not closed."""
        for port in self._ports:
            if port.failure is not None:
                raise LocalProtocolError(f"UCXX payload port stopped: {port.failure!r}") from port.failure

    def break_off(self) -> int:
        """Ends all connections like a network failure; returns their number. The server continues."""
        return sum(port.break_off() for port in self._ports)

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends connections and threads and frees the ports within `timeout_s`; payloads being sent stay readable."""
        deadline = time.monotonic() + timeout_s
        for port in self._ports:
            port.stop()
        for port in self._ports:
            port.thread.join(max(0.0, deadline - time.monotonic()))
        self._service.reader.close()


class _Port:
    """One listener with its own thread, worker and connections."""

    def __init__(self, service: Service, worker: Worker, port: int, max_strangers: int) -> None:
        self._service = service
        self._requested = port
        self._max_strangers = max_strangers
        self._worker = worker
        self._bound: queue.SimpleQueue[int | BaseException] = queue.SimpleQueue()
        self._stopping = self._breaking = False
        self.failure: BaseException | None = None
        self.connections: list[_Connection] = []
        self.thread = threading.Thread(target=self._run, name="payload-ucxx", daemon=True)
        self.thread.start()

    def wait_bound(self, timeout_s: float = 10.0) -> int:
        """Returns the bound port; raises the failure of the thread."""
        try:
            bound = self._bound.get(timeout=timeout_s)
        except queue.Empty:
            raise RunFailed(f"UCXX did not start to listen within {timeout_s} s") from None
        if isinstance(bound, BaseException):
            raise RunFailed(f"cannot serve payloads over UCXX on port {self._requested}: {bound}") from bound
        return bound

    def stop(self) -> None:
        self._stopping = True
        self._worker.wake()

    def break_off(self) -> int:
        self._breaking = True
        self._worker.wake()
        return len(self.connections)

    def _run(self) -> None:
        arrived: list[Any] = []
        listener = None
        try:
            listener = core.UCXListener.create(self._worker.ucx, self._requested, arrived.append, deliver_endpoint=True)
            self._bound.put(listener.port)
            self._serve(arrived)
        except BaseException as error:
            self.failure = error
            self._bound.put(error)
            log.exception("UCXX payload port stopped")
        finally:
            self._close_all("the server is closing")
            # The port is freed only when no reference to the listener is left, not even in a traceback.
            arrived.clear()
            del listener
            self._worker.close()

    def _serve(self, arrived: list[Any]) -> None:
        while not self._stopping:
            deadline = min((connection.deadline for connection in self.connections), default=float("inf"))
            self._worker.wait(deadline - time.monotonic())
            if self._breaking:
                self._breaking = False
                self._close_all("broken off")
            while arrived:
                self._admit(_Connection(self._service, self._worker, arrived.pop(0)))
            for connection in self.connections:
                while connection.advance():
                    pass
            self.connections = [connection for connection in self.connections if not connection.closed]

    def _admit(self, connection: _Connection) -> None:
        self.connections.append(connection)
        leaving = turned_away(self.connections, self._max_strangers)
        self._service.count("accepted")
        if leaving is not None:
            self._service.count("turned_away")
            leaving.close("too many connections")
            self.connections.remove(leaving)

    def _close_all(self, reason: str) -> None:
        for connection in self.connections:
            connection.close(reason)
        self.connections = []


class _Connection:
    """One client, driven by completed UCX transfers."""

    def __init__(self, service: Service, worker: Worker, endpoint: Any) -> None:
        self._worker = worker
        self._endpoint: Any = endpoint
        self._handler = Handler(service, self)
        self._exchange = self._handler.exchange
        self._tag = 0
        self._sending: list[Transfer] = []
        self._receiving: Transfer | None = stream_receive(endpoint, TAG.size + HELLO.size)
        self._lingers_until: float | None = None
        """A final refusal is being sent; closing at once would lose it."""

    @property
    def closed(self) -> bool:
        return self._handler.closed and self._lingers_until is None

    @property
    def deadline(self) -> float:
        return self._exchange.deadline if self._lingers_until is None else self._lingers_until

    @property
    def authenticated(self) -> bool:
        return self._handler.authenticated

    def advance(self) -> bool:
        """Handles the next event; true if there was one."""
        if self._handler.closed:
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
        self._handler.handle(event)
        if self._exchange.expects_bytes and self._receiving is None:
            self._receiving = stream_receive(self._endpoint, self._exchange.expects_bytes)
        return True

    def close(self, reason: str) -> None:
        if not self._handler.closed:
            self._handler.handle(ConnectionFailed(reason))
        elif self._lingers_until is not None:
            self._close_endpoint()

    def send_body(self, header: bytes, body: memoryview) -> Event | None:
        self._sending.append(stream_send(self._endpoint, header))
        self._sending += [body_send(self._endpoint, piece, self._tag) for piece in pieces(body)]
        return None

    def send_status(self, data: bytes) -> Event | None:
        self._sending.append(stream_send(self._endpoint, data))
        if self._handler.closed:
            self._lingers_until = time.monotonic() + LINGER_S
        return None

    def end(self, reason: str) -> None:
        if self._lingers_until is None:
            self._close_endpoint()

    def _close_endpoint(self) -> None:
        self._lingers_until = None
        close(self._worker, self._endpoint, [*self._sending, *([self._receiving] if self._receiving else [])])
        # A listener keeps its port for as long as an endpoint of it, or a transfer, is referenced anywhere.
        self._endpoint = None
        self._receiving = None
        self._sending = []

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
            if not self.authenticated:
                (self._tag,) = TAG.unpack_from(data)
                return Received(bytes(data[TAG.size :]))
            return Received(bytes(data))
        if time.monotonic() >= self.deadline:
            return ConnectionFailed("too slow")
        return None
