"""The exchange over UCX (extra `ucxx`): control on an endpoint's stream, bodies as tagged messages.

Uses UCXX's core interface from threads that own their worker, and blocks in the kernel on the worker's event
descriptor: the asyncio interface spins while it waits, and here an idle server must use no CPU. A client begins each
connection with the tag under which it wants its bodies, chosen at random; then the exchange is as on every carrier.

UCX buffers what arrives unasked, without a bound that we could set: offer these ports on trusted networks only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import select
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")  # it warns of variables that it sets itself

import ucxx  # pyright: ignore[reportMissingImports]
import xxhash
from ucxx._lib.arr import Array  # pyright: ignore[reportMissingImports]

from penstock.errors import Aborted, LocalProtocolError, PenstockError, RemoteProtocolError, RunFailed, Stale, Transient
from penstock.payload.exchange import (
    HELLO,
    STATUS,
    Ack,
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
    hello,
    parse_status,
    request,
)
from penstock.payload.io import received
from penstock.payload.io.mapping import DIRECTORY
from penstock.payload.io.rotation import Rotation
from penstock.payload.io.shm import Lease, RingReader
from penstock.payload.io.tcp import ServerStatistics
from penstock.payload.ports import Fault
from penstock.payload.retry import Failure
from penstock.records.payload import PayloadRef, RingAddress

log = logging.getLogger(__name__)

core = ucxx.libucxx
TAG = struct.Struct("<Q")
CLOSE_PERIOD_NS = 500_000_000
CANCEL_POLL_S = 0.05
LONGEST_WAIT_S = 60.0

_unfinished: list[object] = []
"""Requests that outlived their endpoint, with their memory: UCX may still write to it, so it is never used again."""


class _Worker:
    """A UCX worker used by one thread at a time."""

    def __init__(self) -> None:
        self.ucx = core.UCXWorker(core.UCXContext({}))
        self.ucx.init_blocking_progress_mode()
        self._poll = select.poll()
        self._poll.register(self.ucx.epoll_file_descriptor, select.POLLIN)

    def also_wake_on(self, fd: int) -> None:
        self._poll.register(fd, select.POLLIN)

    def wait(self, timeout_s: float) -> None:
        """Sleep until there is something to do, at most `timeout_s`, and do it.

        What completed before must have been looked at: arming sees what is still to come only.
        """
        if self.ucx.arm():
            self._poll.poll(max(0.0, min(timeout_s, LONGEST_WAIT_S)) * 1000)
        self.ucx.progress()


class _Transfer:
    """One UCX request and the memory it needs for as long as it lasts."""

    def __init__(self, request: Any, *memory: object) -> None:
        self._request = request
        self.memory = memory

    @property
    def done(self) -> bool:
        return self._request.completed

    def check(self) -> None:
        self._request.check_error()


def _stream_send(endpoint: Any, data: bytes) -> _Transfer:
    array = Array(data)
    return _Transfer(endpoint.stream_send(array), data, array)


def _stream_receive(endpoint: Any, count: int) -> _Transfer:
    data = bytearray(count)
    array = Array(data)
    return _Transfer(endpoint.stream_recv(array), data, array)


def _body_send(endpoint: Any, view: memoryview, tag: int) -> _Transfer:
    array = Array(view)
    return _Transfer(endpoint.tag_send(array, core.UCXXTag(tag)), view, array)


def _body_receive(endpoint: Any, view: memoryview, tag: int) -> _Transfer:
    array = Array(view)
    return _Transfer(endpoint.tag_recv(array, core.UCXXTag(tag)), view, array)


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
            worker = _Worker()
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

    def _serve(self, worker: _Worker, arrived: list[Any]) -> None:
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
        self._sending: list[_Transfer] = []
        self._receiving: _Transfer | None = _stream_receive(endpoint, TAG.size + HELLO.size)

    @property
    def closed(self) -> bool:
        return self._exchange.state is ExchangeState.CLOSED

    @property
    def deadline(self) -> float:
        return self._exchange.deadline

    @property
    def is_stranger(self) -> bool:
        return self._exchange.state is ExchangeState.AWAITING_HELLO

    def advance(self) -> bool:
        """Handle what was completed; true if there was something."""
        if self.closed:
            return False
        try:
            event = self._next_event()
        except ucxx.exceptions.UCXError as error:
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
            self._receiving = _stream_receive(self._endpoint, self._exchange.expects_bytes)
        return True

    def close(self, reason: str) -> None:
        if not self.closed:
            for effect in self._exchange.handle(ConnectionFailed(reason), time.monotonic()):
                self._perform(effect)

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
                self._sending.append(_stream_send(self._endpoint, header))
                if len(self._lease.view):
                    self._sending.append(_body_send(self._endpoint, self._lease.view, self._tag))
            case SendRefusal(data):
                self._sending.append(_stream_send(self._endpoint, data))
            case FinaliseSlot(consumed):
                lease, self._lease = self._lease, None
                assert lease is not None
                owned = lease.consumed() if consumed else lease.released()
                self._server.count("consumed" if consumed and owned else "orphans" if not owned else "released")
            case CloseConnection(reason):
                log.debug("UCXX payload connection closes after %d served: %s", self._exchange.served, reason)
                _close(self._endpoint, [*self._sending, *([self._receiving] if self._receiving else [])])
        return None


def _close(endpoint: Any, transfers: Sequence[_Transfer]) -> bool:
    """End a connection and everything in flight on it. False when UCX would not let go of some memory."""
    with contextlib.suppress(ucxx.exceptions.UCXError):
        endpoint.close_blocking(CLOSE_PERIOD_NS, 1)
    left = [transfer for transfer in transfers if not transfer.done]
    _unfinished.extend(left)
    return not left


class _Broken(Transient):
    """A call that ended in a way that says something about the port. Never leaves this module."""

    def __init__(self, fault: Fault, detail: str) -> None:
        super().__init__(detail)
        self.fault: Fault = fault


class _Link:
    """A client's connection: an endpoint and the tag its bodies come under."""

    def __init__(self, worker: _Worker, host: str, port: int, token: str) -> None:
        self.worker = worker
        self.born = time.monotonic()
        self.tag = secrets.randbits(63)
        self.endpoint = core.UCXEndpoint.create(worker.ucx, host, port, True)
        self.in_flight: list[_Transfer] = [_stream_send(self.endpoint, TAG.pack(self.tag) + hello(token))]

    def send(self, data: bytes) -> None:
        self.in_flight.append(_stream_send(self.endpoint, data))

    def receive(self, count: int, deadline: float, cancellation: received.Cancellation) -> bytes:
        transfer = _stream_receive(self.endpoint, count)
        self.finish(transfer, deadline, cancellation)
        data = transfer.memory[0]
        assert isinstance(data, bytearray)
        return bytes(data)

    def receive_body(self, view: memoryview, deadline: float, cancellation: received.Cancellation) -> None:
        if len(view):
            self.finish(_body_receive(self.endpoint, view, self.tag), deadline, cancellation)

    def finish(self, transfer: _Transfer, deadline: float, cancellation: received.Cancellation) -> None:
        self.in_flight.append(transfer)
        try:
            while not transfer.done:
                now = time.monotonic()
                if cancellation.reason is not None:
                    raise Aborted(cancellation.reason)
                if now >= deadline:
                    raise _Broken("timed_out", "no answer in time")
                self.worker.wait(min(deadline - now, CANCEL_POLL_S))
            for done in [one for one in self.in_flight if one.done]:
                self.in_flight.remove(done)
                done.check()
        except ucxx.exceptions.UCXError as error:
            raise _Broken(_fault(error), f"UCX: {error or type(error).__name__}") from error


class UcxxClient:
    """Reads payloads by UCXX. Thread-safe: every calling thread has a worker and connections of its own."""

    def __init__(
        self,
        token: str,
        buffers: received.Buffers,
        *,
        max_age_s: float = 90.0,
        rotation: Rotation | None = None,
        verify: bool = True,
    ) -> None:
        self._token = token
        self._buffers = buffers
        self._max_age_s = max_age_s
        self._rotation = rotation or Rotation()
        self._verify = verify
        self._mine = threading.local()
        self._lock = threading.Lock()
        self._links: list[dict[tuple[str, int], _Link]] = []

    def read(
        self,
        address: RingAddress,
        ref: PayloadRef,
        deadline: float,
        tried: set[int],
        cancellation: received.Cancellation,
    ) -> received.Received | Failure:
        """One call for one payload, complete and checked by `deadline` (monotonic), or the reason why not."""
        host, ports = address.host, address.ucxx_ports
        port = self._rotation.choose(host, ports, avoid=tried)
        tried.add(port)
        try:
            answer = self._call(host, port, ref, deadline, cancellation)
        except Aborted as error:
            return Failure("cancelled", str(error))
        except _Broken as broken:
            self._rotation.failed(host, ports, port, broken.fault)
            return Failure(broken.fault, f"{host}:{port}: {broken}")
        self._rotation.succeeded(host, ports, port)
        return answer

    def close(self) -> None:
        """End all connections. No thread may be reading any more."""
        with self._lock:
            for links in self._links:
                for link in links.values():
                    _close(link.endpoint, link.in_flight)
                links.clear()

    def _call(
        self, host: str, port: int, ref: PayloadRef, deadline: float, cancellation: received.Cancellation
    ) -> received.Received | Failure:
        link = self._link(host, port)
        memory = self._buffers.take(ref.size_bytes)
        try:
            link.send(request(ref))
            status = parse_status(link.receive(STATUS.size, deadline, cancellation), ref)
            if status.code is Code.OK:
                view = memory.data[: ref.size_bytes]
                link.receive_body(view, deadline, cancellation)
                digest = xxhash.xxh3_64_intdigest(view) if self._verify and ref.digest else ref.digest
                if digest != ref.digest:
                    raise _Broken("corrupt", f"body hashes to {digest:016x}, expected {ref.digest:016x}")
                link.send(bytes([Ack.CONSUMED]))
                return received.Received(view.toreadonly(), memory)
            reason = link.receive(status.length, deadline, cancellation).decode(errors="replace")
            if status.code is Code.REFUSED:
                raise _Broken("protocol", f"the server refused our hello: {reason}")
        except BaseException as error:
            self._mine.links.pop((host, port), None)
            if _close(link.endpoint, link.in_flight):
                self._buffers.give_back(memory)
            if isinstance(error, RemoteProtocolError):
                raise _Broken("protocol", str(error)) from error
            raise
        self._buffers.give_back(memory)
        return Failure("stale" if status.code is Code.STALE else "busy", reason)

    def _link(self, host: str, port: int) -> _Link:
        if not hasattr(self._mine, "links"):
            self._mine.worker = _Worker()
            self._mine.links = {}
            with self._lock:
                self._links.append(self._mine.links)
        links: dict[tuple[str, int], _Link] = self._mine.links
        link = links.get((host, port))
        if link is not None and (time.monotonic() - link.born >= self._max_age_s or not link.endpoint.alive):
            _close(link.endpoint, link.in_flight)
            link = None
        if link is None:
            try:
                link = _Link(self._mine.worker, host, port, self._token)
            except ucxx.exceptions.UCXError as error:
                raise _Broken("refused", f"UCX: {error}") from error
            links[host, port] = link
        return link


def _fault(error: BaseException) -> Fault:
    name = type(error).__name__
    if "Truncated" in name:
        return "truncated"
    if "Unreachable" in name or "Rejected" in name or "NotConnected" in name:
        return "refused"
    return "timed_out" if "Timeout" in name else "reset"
