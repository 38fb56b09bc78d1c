"""The exchange over UCX (extra `ucxx`), client side: one UCX worker per calling thread."""

from __future__ import annotations

import secrets
import threading
import time
from typing import Any, Literal

import xxhash

from penstock.errors import Aborted
from penstock.payload.exchange import STATUS
from penstock.payload.io.wire_client import Broken
from penstock.payload.ports import Fault
from penstock.runtime.ucx import (
    TAG,
    Transfer,
    UCXError,
    Worker,
    body_receive,
    close,
    core,
    pieces,
    stream_receive,
    stream_send,
)


class UcxxWire:
    """One worker per calling thread: creating it takes a quarter of a second, and only one thread may use it."""

    name: Literal["tcp", "ucxx"] = "ucxx"

    def __init__(self) -> None:
        self._of_thread = threading.local()
        self._lock = threading.Lock()
        self._workers: list[Worker] = []

    @property
    def lane(self) -> int:
        return threading.get_ident()

    def connect(self, host: str, port: int, hello: bytes, deadline: float) -> UcxxConnection:
        """Does not wait: without a listener the first request fails."""
        if not hasattr(self._of_thread, "worker"):
            self._of_thread.worker = Worker()
            with self._lock:
                self._workers.append(self._of_thread.worker)
        worker: Worker = self._of_thread.worker
        try:
            return UcxxConnection(worker, core.UCXEndpoint.create(worker.ucx, host, port, True), hello)
        except (UCXError, ValueError, OverflowError) as error:  # the latter two: an invalid host or port
            raise Broken("refused", f"UCX: {error}") from error

    def close(self) -> None:
        with self._lock:
            for worker in self._workers:
                worker.close()
            self._workers.clear()


class UcxxConnection:
    """One connection to a server: requests and statuses on the endpoint's stream, bodies under its tag."""

    def __init__(self, worker: Worker, endpoint: Any, hello: bytes) -> None:
        self.born = time.monotonic()
        self._worker = worker
        self._endpoint = endpoint
        self._tag = secrets.randbits(63)
        self._preamble = TAG.pack(self._tag) + hello
        """Sent together with the first request."""
        self._in_flight: list[Transfer] = []
        self._pieces: list[Transfer] = []
        self._answered = False
        """The status of the current call has arrived."""
        self._unanswered = True
        """Nothing has arrived from the server yet."""
        self._broken_off = False

    @property
    def reusable(self) -> bool:
        self._worker.ucx.progress()
        return not self._pieces and self._endpoint.alive

    def ask(self, request: bytes, body: memoryview, deadline: float) -> bytes:
        self._answered = False
        # Posted before the request is sent: unexpected messages would be copied once more.
        self._pieces = [body_receive(self._endpoint, piece, self._tag) for piece in pieces(body)]
        status = stream_receive(self._endpoint, STATUS.size)
        self._in_flight.append(stream_send(self._endpoint, self._preamble + request))
        self._preamble = b""
        data = self._finish(status, deadline)
        self._answered = True
        self._unanswered = False
        return data

    def receive_body(self, deadline: float, hasher: xxhash.xxh3_64 | None) -> None:
        while self._pieces:
            self._finish(self._pieces[0], deadline)
            piece = self._pieces.pop(0).memory[0]
            assert isinstance(piece, memoryview)
            if hasher is not None:
                hasher.update(piece)

    def receive_text(self, size_bytes: int, deadline: float) -> bytes:
        return self._finish(stream_receive(self._endpoint, size_bytes), deadline) if size_bytes else b""

    def break_off(self) -> None:
        self._broken_off = True
        self._worker.wake()

    def close(self) -> bool:
        return close(self._worker, self._endpoint, [*self._in_flight, *self._pieces])

    def _finish(self, transfer: Transfer, deadline: float) -> bytes:
        """Waits for `transfer`; returns the bytes that a stream transfer received."""
        try:
            while not transfer.done:
                if self._broken_off:
                    raise Aborted("broken off")
                now = time.monotonic()
                if now >= deadline:
                    raise Broken("timed_out", "no answer in time", self._answered)
                self._worker.wait(deadline - now)
            transfer.check()
            for done in [one for one in self._in_flight if one.done]:
                self._in_flight.remove(done)
                done.check()
        except UCXError as error:
            fault: Fault = "truncated" if self._answered else "refused" if self._unanswered else "reset"
            raise Broken(fault, f"UCX: {error or type(error).__name__}", self._answered) from error
        finally:
            if not transfer.done and transfer not in self._pieces:
                self._in_flight.append(transfer)
        data = transfer.memory[0]
        return bytes(data) if isinstance(data, bytearray) else b""
