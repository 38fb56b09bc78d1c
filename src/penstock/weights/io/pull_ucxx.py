"""Versions over UCX (extra `ucxx`): requests and answers on an endpoint's stream, bodies as tagged messages.

The requests are those of the TCP transport. One thread of the server drives all connections and sends from the page
cache; UCX uses all available lanes. UCX buffers unrequested messages, without a limit that can be set: open these
ports on trusted networks only.
"""

from __future__ import annotations

import hmac
import logging
import mmap
import queue
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from penstock.errors import PenstockError, RunFailed, Transient
from penstock.records.section import LOOPBACK
from penstock.records.weights import Manifest
from penstock.runtime.listening import turned_away
from penstock.weights.io.fetch import BucketSource
from penstock.weights.io.pull import (
    GONE,
    MAGIC,
    OK,
    REFUSED,
    REPLY,
    REQUEST,
    Offered,
    OfferedVersions,
    check_reply,
    peer_of,
)
from penstock.weights.io.pull import token_digest as digest_of_token
from penstock.weights.manifest import describe
from penstock.weights.settings import WeightsSection

logger = logging.getLogger(__name__)

PIECE_BYTES = 4 * 1024 * 1024
"""One message: large enough for the network, small enough to be hashed in the cache."""
POLL_EVERY_S = 0.05
MAX_STRANGERS = 64
HELLO_S = 5.0
"""For the first request, which shows the token."""


class Transfer(Protocol):
    memory: tuple[Any, ...]

    @property
    def done(self) -> bool: ...
    def check(self) -> None: ...


class Ucx(Protocol):
    """The part of UCX that this transport needs: the payload transport's binding, passed in."""

    TAG: Any
    UCXError: type[Exception]
    core: Any

    @property
    def Worker(self) -> Any: ...
    @staticmethod
    def stream_send(endpoint: Any, data: bytes) -> Any: ...
    @staticmethod
    def stream_receive(endpoint: Any, count: int) -> Any: ...
    @staticmethod
    def body_send(endpoint: Any, view: memoryview, tag: int) -> Any: ...
    @staticmethod
    def body_receive(endpoint: Any, view: memoryview, tag: int) -> Any: ...
    @staticmethod
    def close(worker: Any, endpoint: Any, transfers: Any) -> bool: ...


class UcxxArtifactServer:
    """Serves the newest versions of a run directory by UCX, from one thread. Bound when the constructor returns."""

    def __init__(
        self, run_dir: Path, token: bytes, ucx: Ucx, *, host: str = LOOPBACK, keep: int = WeightsSection().keep
    ) -> None:
        """`host` is the address that clients use. UCX listens on all interfaces unless it is a loopback address."""
        self.ucx = ucx
        self.token = digest_of_token(token)
        self.versions = OfferedVersions(run_dir, keep)
        self.served_bytes = 0
        self.refusals = 0
        self.worker = ucx.Worker(host)
        self._stopping = False
        self._connections: list[_Connection] = []
        bound: queue.SimpleQueue[int | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(bound,), name="weights-ucxx", daemon=True)
        self._thread.start()
        port = bound.get(timeout=30.0)
        if isinstance(port, BaseException):
            raise RunFailed(f"cannot serve weights by UCXX: {port}") from port
        self.address = f"{host}:{port}"

    def __repr__(self) -> str:
        return (
            f"UcxxArtifactServer({self.address}, {len(self.versions)} versions, {len(self._connections)} connections)"
        )

    def offer(self, manifest: Manifest) -> None:
        self.versions.offer(manifest)

    def close(self, timeout_s: float) -> None:
        """Ends the thread and every connection and frees the port; returns at the deadline at the latest."""
        self._stopping = True
        self.worker.wake()
        self._thread.join(timeout_s)
        self.versions.clear()

    def _run(self, bound: queue.SimpleQueue[int | BaseException]) -> None:
        arrived: list[Any] = []
        listener = None
        try:
            listener = self.ucx.core.UCXListener.create(self.worker.ucx, 0, arrived.append, deliver_endpoint=True)
            bound.put(listener.port)
            while not self._stopping:
                self.worker.wait(1.0)
                while arrived:
                    self._connections.append(_Connection(self, arrived.pop(0)))
                    leaving = turned_away(self._connections, MAX_STRANGERS)
                    if leaving is not None:
                        self._connections.remove(leaving)
                        leaving.close()
                self._connections = [one for one in self._connections if one.advance()]
        except Exception as error:
            bound.put(error)
            logger.exception("the UCXX port for weights stopped")
        finally:
            for connection in self._connections:
                connection.close()
            # A port stays bound for as long as its listener, or an endpoint of it, is referenced.
            self._connections = []
            arrived.clear()
            del listener
            self.worker.close()


class _Connection:
    """One replica: reads requests and answers them, one at a time."""

    def __init__(self, server: UcxxArtifactServer, endpoint: Any) -> None:
        self._server, self._ucx, self._endpoint = server, server.ucx, endpoint
        self.authenticated = False
        self._deadline = time.monotonic() + HELLO_S
        self._tag = 0
        self._receiving: Transfer = self._ucx.stream_receive(endpoint, self._ucx.TAG.size + REQUEST.size)
        self._sending: list[Transfer] = []
        self._sent: Offered | None = None

    def advance(self) -> bool:
        """Makes progress without blocking; False once the connection has ended."""
        try:
            while self._step():
                pass
        except (self._ucx.UCXError, PenstockError, OSError) as error:
            logger.debug("a weights connection ended: %s", error)
            self.close()
            return False
        return True

    def _step(self) -> bool:
        if self._sending:
            if not all(transfer.done for transfer in self._sending):
                return False
            finished, self._sending = self._sending, []
            self._release()
            for transfer in finished:
                transfer.check()
            return True
        if not self._receiving.done:
            if not self.authenticated and time.monotonic() > self._deadline:
                raise Transient("the first request did not come in time")
            return False
        self._receiving.check()
        data = bytes(self._receiving.memory[0])
        if not self._tag:
            (self._tag,) = self._ucx.TAG.unpack_from(data)
            data = data[self._ucx.TAG.size :]
        self._answer(*REQUEST.unpack(data))
        self._receiving = self._ucx.stream_receive(self._endpoint, REQUEST.size)
        return True

    def _answer(self, magic: bytes, token: bytes, digest: bytes, bucket: int, offset: int, length: int) -> None:
        allowed = self.authenticated = magic == MAGIC and hmac.compare_digest(token, self._server.token)
        offered = self._server.versions.take(digest) if allowed else None
        status = OK if offered is not None else GONE if allowed else REFUSED
        if offered is not None and not offered.has(bucket, offset, length):
            self._server.versions.release(offered)
            offered, status = None, REFUSED
        self._server.refusals += status == REFUSED
        self._sending = [self._ucx.stream_send(self._endpoint, REPLY.pack(status, length if status == OK else 0))]
        if offered is None:
            return
        self._sent = offered
        start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(
            offered.source.fileno(bucket), offset - start + length, access=mmap.ACCESS_COPY, offset=start
        )
        body = memoryview(mapped)[offset - start :]
        self._sending.append(self._ucx.body_send(self._endpoint, body, self._tag))
        self._server.served_bytes += length

    def _release(self) -> None:
        if self._sent is not None:
            self._server.versions.release(self._sent)
            self._sent = None

    def close(self) -> None:
        self._ucx.close(self._server.worker, self._endpoint, [self._receiving, *self._sending])
        self._release()


class UcxxConnection:
    """Reads versions by UCX, from one thread, over a connection that it keeps from version to version."""

    def __init__(self, token: bytes, ucx: Ucx) -> None:
        self._token = digest_of_token(token)
        self._ucx = ucx
        self._worker: Any = None
        self._link: tuple[tuple[str, int], Any, int] | None = None

    def open(self, manifest: Manifest, address: str, deadline: float) -> BucketSource:
        return _UcxxSource(self, manifest, peer_of(manifest, address), deadline)

    def read(
        self, manifest: Manifest, peer: tuple[str, int], bucket: int, offset: int, piece: memoryview, deadline: float
    ) -> None:
        """Fills the piece, or closes the connection and raises."""
        ucx, in_flight = self._ucx, list[Any]()
        endpoint = None
        try:
            endpoint, tag, hello = self._connect(peer)
            request = REQUEST.pack(MAGIC, self._token, manifest.digest.encode(), bucket, offset, len(piece))
            in_flight.append(ucx.stream_send(endpoint, hello + request))
            answer = ucx.stream_receive(endpoint, REPLY.size)
            in_flight.append(answer)
            self._finish(answer, manifest, peer, deadline)
            status, length = REPLY.unpack(bytes(answer.memory[0]))
            check_reply(manifest, peer, status, length, len(piece))
            body = ucx.body_receive(endpoint, piece, tag)
            in_flight.append(body)
            self._finish(body, manifest, peer, deadline)
            self._finish(in_flight[0], manifest, peer, deadline)
        except BaseException as error:
            self._link = None
            if endpoint is not None:
                ucx.close(self._worker, endpoint, in_flight)
            if isinstance(error, ucx.UCXError):
                raise Transient(f"pulling {describe(manifest)} from {peer} by UCXX failed: {error}") from error
            raise

    def _connect(self, peer: tuple[str, int]) -> tuple[Any, int, bytes]:
        """An endpoint, the tag of its bodies, and the first bytes of a new connection."""
        if self._link is not None and self._link[0] == peer and self._link[1].alive:
            return self._link[1], self._link[2], b""
        if self._worker is None:
            self._worker = self._ucx.Worker()
        if self._link is not None:
            self._ucx.close(self._worker, self._link[1], [])
        tag = secrets.randbits(62) + 1
        endpoint = self._ucx.core.UCXEndpoint.create(self._worker.ucx, *peer, True)
        self._link = (peer, endpoint, tag)
        return endpoint, tag, self._ucx.TAG.pack(tag)

    def _finish(self, transfer: Transfer, manifest: Manifest, peer: tuple[str, int], deadline: float) -> None:
        while not transfer.done:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise Transient(f"{describe(manifest)} did not arrive from {peer} before the deadline")
            self._worker.wait(min(left_s, POLL_EVERY_S))
        transfer.check()


class _UcxxSource:
    """One version at one server."""

    def __init__(self, transport: UcxxConnection, manifest: Manifest, peer: tuple[str, int], deadline: float) -> None:
        self._transport = transport
        self._manifest = manifest
        self._peer = peer
        self._deadline = deadline

    def pieces(self, bucket: int, offset: int, target: memoryview) -> Iterator[memoryview]:
        while target:
            piece = target[:PIECE_BYTES]
            self._transport.read(self._manifest, self._peer, bucket, offset, piece, self._deadline)
            yield piece
            target, offset = target[len(piece) :], offset + len(piece)

    def close(self) -> None:
        """No effect: the transport keeps the connection."""
