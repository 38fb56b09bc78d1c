"""The exchange over UCX (extra `ucxx`), client's side: every calling thread has a worker and connections of its own."""

from __future__ import annotations

import secrets
import threading
import time

import xxhash

from penstock.errors import Aborted, RemoteProtocolError, Transient
from penstock.payload.exchange import STATUS, Ack, Code, hello, parse_status, request
from penstock.payload.io.received import Buffers, Cancellation, Received
from penstock.payload.io.rotation import Rotation
from penstock.payload.io.ucxx_core import (
    TAG,
    Transfer,
    UCXError,
    Worker,
    body_receive,
    close,
    core,
    stream_receive,
    stream_send,
)
from penstock.payload.ports import Fault
from penstock.payload.retry import Failure
from penstock.records.payload import PayloadRef, RingAddress

CANCEL_POLL_S = 0.05


class _Broken(Transient):
    """A call that ended in a way that says something about the port. Never leaves this module."""

    def __init__(self, fault: Fault, detail: str) -> None:
        super().__init__(detail)
        self.fault: Fault = fault


class _Link:
    """A client's connection: an endpoint and the tag its bodies come under."""

    def __init__(self, worker: Worker, host: str, port: int, token: str) -> None:
        self.worker = worker
        self.born = time.monotonic()
        self.tag = secrets.randbits(63)
        self.endpoint = core.UCXEndpoint.create(worker.ucx, host, port, True)
        self.in_flight: list[Transfer] = [stream_send(self.endpoint, TAG.pack(self.tag) + hello(token))]

    def send(self, data: bytes) -> None:
        self.in_flight.append(stream_send(self.endpoint, data))

    def receive(self, count: int, deadline: float, cancellation: Cancellation) -> bytes:
        transfer = stream_receive(self.endpoint, count)
        self.finish(transfer, deadline, cancellation)
        data = transfer.memory[0]
        assert isinstance(data, bytearray)
        return bytes(data)

    def receive_body(self, view: memoryview, deadline: float, cancellation: Cancellation) -> None:
        if len(view):
            self.finish(body_receive(self.endpoint, view, self.tag), deadline, cancellation)

    def finish(self, transfer: Transfer, deadline: float, cancellation: Cancellation) -> None:
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
        except UCXError as error:
            raise _Broken(_fault(error), f"UCX: {error or type(error).__name__}") from error


class UcxxClient:
    """Reads payloads by UCXX. Thread-safe: every calling thread has a worker and connections of its own."""

    def __init__(
        self,
        token: str,
        buffers: Buffers,
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
        cancellation: Cancellation,
    ) -> Received | Failure:
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
                    close(link.endpoint, link.in_flight)
                links.clear()

    def _call(
        self, host: str, port: int, ref: PayloadRef, deadline: float, cancellation: Cancellation
    ) -> Received | Failure:
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
                return Received(view.toreadonly(), memory)
            reason = link.receive(status.length, deadline, cancellation).decode(errors="replace")
            if status.code is Code.REFUSED:
                raise _Broken("protocol", f"the server refused our hello: {reason}")
        except BaseException as error:
            self._mine.links.pop((host, port), None)
            if close(link.endpoint, link.in_flight):
                self._buffers.give_back(memory)
            if isinstance(error, RemoteProtocolError):
                raise _Broken("protocol", str(error)) from error
            raise
        self._buffers.give_back(memory)
        return Failure("stale" if status.code is Code.STALE else "busy", reason)

    def _link(self, host: str, port: int) -> _Link:
        if not hasattr(self._mine, "links"):
            self._mine.worker = Worker()
            self._mine.links = {}
            with self._lock:
                self._links.append(self._mine.links)
        links: dict[tuple[str, int], _Link] = self._mine.links
        link = links.get((host, port))
        if link is not None and (time.monotonic() - link.born >= self._max_age_s or not link.endpoint.alive):
            close(link.endpoint, link.in_flight)
            link = None
        if link is None:
            try:
                link = _Link(self._mine.worker, host, port, self._token)
            except UCXError as error:
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
