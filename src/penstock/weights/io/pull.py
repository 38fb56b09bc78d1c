"""Versions over TCP, for replicas that cannot read the trainer's files.

A request names a version by its digest, a bucket by its number and a range of bytes; never a path. The server serves
only versions that were offered, and only to clients with the run's token. It keeps their files open, so that
removing a version does not affect a transfer. A client uses several connections at once and verifies every byte
as it arrives.
"""

from __future__ import annotations

import errno
import hmac
import logging
import socket
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch

from penstock.errors import LocalProtocolError, RemoteProtocolError, Stale, Transient
from penstock.records.section import LOOPBACK
from penstock.records.weights import Manifest
from penstock.runtime.listening import Peer, ThreadedPort, receive, watch_link
from penstock.weights.io.digest import PIECE_BYTES, torch_dtype
from penstock.weights.io.fetch import BucketSource, fetch, fits
from penstock.weights.io.files import FileSource, FileTransport
from penstock.weights.manifest import check_manifest, describe, tensors_of
from penstock.weights.settings import WeightsSection

logger = logging.getLogger(__name__)

REQUEST = struct.Struct("<4s32s32sIQQ")
"""Magic, token digest, digest of the version, bucket, offset, length."""
REPLY = struct.Struct("<BQ")
"""Status and length of the body."""
MAGIC = b"PSW1"
OK, GONE, REFUSED = 0, 1, 2
IDLE_S = 20.0
"""A replica gives up a connection on which nothing arrives for this time, and asks for the rest on another one."""
CONNECT_S = 5.0
CUT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
"""Errors of a link that may heal; a server that is gone refuses or resets connections."""
RETRY_S = 0.5


class Offered:
    """One offered version and its number of transfers; closed when it is retired and the last transfer has ended."""

    def __init__(self, run_dir: Path, manifest: Manifest) -> None:
        self.sizes = [bucket.size_bytes for bucket in manifest.buckets]
        self.source = FileSource(run_dir, manifest)
        self.users = 0
        self.retired = False

    def has(self, bucket: int, offset: int, length: int) -> bool:
        return bucket < len(self.sizes) and length > 0 and offset + length <= self.sizes[bucket]

    def close_if_unused(self) -> None:
        if self.retired and self.users == 0:
            self.source.close()


class OfferedVersions:
    """The newest versions of a run directory, kept open: removing one does not affect its readers. Thread-safe."""

    def __init__(self, run_dir: Path, keep: int) -> None:
        self._run_dir = run_dir
        self._keep = keep
        self._lock = threading.Lock()
        self._offered: OrderedDict[str, Offered] = OrderedDict()

    def __len__(self) -> int:
        return len(self._offered)

    def offer(self, manifest: Manifest) -> None:
        """Offers this version from now on, and only the newest `keep` of those offered."""
        with self._lock:  # retires before it opens: each version has many files
            if manifest.digest in self._offered:
                self._retire(manifest.digest)
            while len(self._offered) >= self._keep:
                self._retire(next(iter(self._offered)))
            self._offered[manifest.digest] = Offered(self._run_dir, manifest)

    def take(self, digest: bytes) -> Offered | None:
        """The version, to be released after use; None if it is not offered."""
        with self._lock:
            offered = self._offered.get(digest.decode("ascii", "replace"))
            if offered is not None:
                offered.users += 1
            return offered

    def release(self, offered: Offered) -> None:
        with self._lock:
            offered.users -= 1
            offered.close_if_unused()

    def clear(self) -> None:
        with self._lock:
            for digest in list(self._offered):
                self._retire(digest)

    def _retire(self, digest: str) -> None:
        offered = self._offered.pop(digest)
        offered.retired = True
        offered.close_if_unused()


WEIGHTS = WeightsSection()


class ArtifactServer:
    """Serves the newest versions of a run directory. Bound when the constructor returns; one thread per connection of a
    replica, however many there are."""

    def __init__(
        self,
        run_dir: Path,
        token: bytes,
        *,
        keep: int = WEIGHTS.keep,
        host: str = LOOPBACK,
        port: int = 0,
        max_strangers: int | None = None,
        idle_timeout_s: float = 60.0,
        hello_timeout_s: float = 5.0,
    ) -> None:
        """The first request of a connection shows the token, within `hello_timeout_s`."""
        self._versions = OfferedVersions(run_dir, keep)
        self._token = token_digest(token)
        self._idle_timeout_s = idle_timeout_s
        self._lock = threading.Lock()
        self.served_bytes = 0
        self._refusals = 0
        self._port = ThreadedPort(
            self._serve,
            "weights",
            hello_bytes=REQUEST.size,
            has_token=self._has_token,
            refusal=REPLY.pack(REFUSED, 0),
            host=host,
            port=port,
            hello_s=hello_timeout_s,
            max_strangers=max_strangers,
        )
        self.address = self._port.address

    def __repr__(self) -> str:
        return f"ArtifactServer({self.address}, {len(self._versions)} versions, {len(self._port)} connections)"

    def offer(self, manifest: Manifest) -> None:
        """Serves this version from now on, and only the newest `keep` of those offered."""
        self._versions.offer(manifest)

    def close(self, timeout_s: float) -> None:
        """Ends every connection."""
        self._versions.clear()
        self._port.close(timeout_s)

    @property
    def refusals(self) -> int:
        """Requests without the token, or for bytes that no version has."""
        return self._refusals + self._port.refused

    def _has_token(self, request: bytes) -> bool:
        magic, token, *_ = REQUEST.unpack(request)
        return magic == MAGIC and hmac.compare_digest(token, self._token)

    def _serve(self, peer: Peer) -> None:
        request = bytearray(peer.hello)
        while not self._port.closing:
            peer.connection.settimeout(self._idle_timeout_s)
            if not self._answer(peer.connection, bytes(request)):
                return
            if not peer.receive(memoryview(request), self._idle_timeout_s):
                return

    def _answer(self, connection: socket.socket, request: bytes) -> bool:
        """Sends one range; False if the connection must be closed."""
        _, _, digest, bucket, offset, length = REQUEST.unpack(request)
        if not self._has_token(request):
            return self._refuse(connection)
        offered = self._versions.take(digest)
        if offered is None:
            connection.sendall(REPLY.pack(GONE, 0))
            return True
        try:
            return self._send(connection, offered, bucket, offset, length)
        finally:
            self._versions.release(offered)

    def _send(self, connection: socket.socket, offered: Offered, bucket: int, offset: int, length: int) -> bool:
        if not offered.has(bucket, offset, length):
            return self._refuse(connection)
        with self._lock:
            self.served_bytes += length  # counted first: a peer that has the bytes finds them counted
        connection.sendall(REPLY.pack(OK, length))
        # Opened again: without `sendfile` the file is read at its position, which copies of a descriptor share.
        with open(f"/proc/self/fd/{offered.source.fileno(bucket)}", "rb") as file:
            return connection.sendfile(file, offset, length) == length

    def _refuse(self, connection: socket.socket) -> bool:
        with self._lock:
            self._refusals += 1
        connection.sendall(REPLY.pack(REFUSED, 0))
        return False


def token_digest(token: bytes) -> bytes:
    """Sent instead of the token: it has a fixed size, and a log of it does not reveal the token."""
    return hmac.digest(token, b"penstock weights", "sha256")


def peer_of(manifest: Manifest, address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise RemoteProtocolError(f"{describe(manifest)} names address {address!r}, expected host:port")
    return host, int(port)


def check_reply(manifest: Manifest, peer: tuple[str, int], status: int, length: int, expected: int) -> None:
    """Raises unless the server is about to send exactly the requested bytes."""
    if status == GONE:
        raise Stale(f"{describe(manifest)} is no longer offered by {peer}; request the newest version")
    if status != OK:
        raise RemoteProtocolError(f"{peer} refused to serve {describe(manifest)}: wrong token or range")
    if length != expected:
        raise RemoteProtocolError(f"{peer} announced {length} bytes where {expected} were requested")


class PullSource:
    """A version's bytes at an `ArtifactServer`: each thread that reads has its own connection.

    When nothing arrives for `idle_s`, or the host cannot be reached, the link is cut: the rest is requested again on a
    new connection until the deadline, so that a transfer goes on as soon as the link is healed.
    """

    def __init__(
        self, manifest: Manifest, address: str, token: bytes, deadline: float, *, idle_s: float = IDLE_S
    ) -> None:
        self._manifest = manifest
        self._peer = peer_of(manifest, address)
        self._token = token_digest(token)
        self._deadline = deadline
        self._idle_s = idle_s
        self._own = threading.local()
        self._all: list[socket.socket] = []
        self._lock = threading.Lock()
        self._warned = False

    def _connection(self) -> socket.socket:
        connection: socket.socket | None = getattr(self._own, "connection", None)
        if connection is None:
            connection = socket.create_connection(self._peer, timeout=self._at_most_s(CONNECT_S))
            watch_link(connection)
            self._own.connection = connection
            with self._lock:
                self._all.append(connection)
        return connection

    def _disconnect(self) -> None:
        connection: socket.socket | None = getattr(self._own, "connection", None)
        self._own.connection = None
        if connection is not None:
            with self._lock:
                if connection in self._all:
                    self._all.remove(connection)
            connection.close()

    def _at_most_s(self, timeout_s: float) -> float:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise Transient(f"{describe(self._manifest)} did not arrive from {self._peer} before the deadline")
        return min(left_s, timeout_s)

    def pieces(self, bucket: int, offset: int, target: memoryview) -> Iterator[memoryview]:
        while target:
            try:
                for piece in self._range(bucket, offset, target):
                    yield piece
                    offset, target = offset + len(piece), target[len(piece) :]
            except OSError as error:
                self._disconnect()
                if not isinstance(error, TimeoutError) and error.errno not in CUT:
                    raise Transient(f"pulling {describe(self._manifest)} from {self._peer} failed: {error}") from error
                if not self._warned:
                    self._warned = True
                    logger.warning(
                        "pulling %s: nothing arrives from %s (%s); trying again",
                        describe(self._manifest),
                        self._peer,
                        error,
                    )
                time.sleep(self._at_most_s(RETRY_S))

    def _range(self, bucket: int, offset: int, target: memoryview) -> Iterator[memoryview]:
        """One request and its answer."""
        connection = self._connection()
        connection.settimeout(self._at_most_s(self._idle_s))
        digest = self._manifest.digest.encode()
        connection.sendall(REQUEST.pack(MAGIC, self._token, digest, bucket, offset, len(target)))
        reply = bytearray(REPLY.size)
        if not receive(connection, memoryview(reply)):
            raise ConnectionResetError("closed without an answer")
        status, length = REPLY.unpack(reply)
        check_reply(self._manifest, self._peer, status, length, len(target))
        while target:
            piece = target[:PIECE_BYTES]
            connection.settimeout(self._at_most_s(self._idle_s))
            if not receive(connection, piece):
                raise ConnectionResetError("closed before the end")
            yield piece
            target = target[len(piece) :]

    def close(self) -> None:
        with self._lock:
            for connection in self._all:
                connection.close()
            self._all.clear()


class OtherTransport(Protocol):
    """Reads versions by another protocol, from one thread."""

    def open(self, manifest: Manifest, address: str, deadline: float) -> BucketSource: ...


class PullTransport:
    """Fetches versions over the network, into reused memory: tensors are valid until the next `fetch`."""

    def __init__(
        self,
        token: bytes,
        *,
        streams: int = WEIGHTS.streams,
        ucxx: OtherTransport | None = None,
        idle_s: float = IDLE_S,
    ) -> None:
        """`ucxx` fetches versions that have a UCX address; over TCP, `streams` connections are used at once, each given
        up when nothing arrives on it for `idle_s`."""
        if streams < 1:
            raise LocalProtocolError(f"streams must be at least 1, found {streams}")
        self._token = token
        self._streams = streams
        self._ucxx = ucxx
        self._idle_s = idle_s
        self._buffers: dict[str, torch.Tensor] = {}
        self._turn = 0

    def fetch(self, manifest: Manifest, timeout_s: float, *, verify: bool = True) -> Mapping[str, torch.Tensor]:
        """Always verified: hashing bytes that are in the cache costs little."""
        check_manifest(manifest)
        by_ucxx = self._ucxx is not None and bool(manifest.ucxx_addresses)
        addresses = manifest.ucxx_addresses if by_ucxx else manifest.addresses
        if not addresses:
            raise RemoteProtocolError(f"{describe(manifest)} names no address to pull it from")
        if not fits(self._buffers, manifest):
            self._buffers = {
                spec.name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype)) for spec in tensors_of(manifest)
            }
        address = addresses[self._turn % len(addresses)]
        self._turn += 1  # the next attempt uses another address
        deadline = time.monotonic() + timeout_s
        if self._ucxx is not None and by_ucxx:
            buffers, self._buffers = self._buffers, {}  # after a failure UCX may still write to it: not reused
            fetch(self._ucxx.open(manifest, address, deadline), manifest, buffers)
            self._buffers = buffers
            return buffers
        source = PullSource(manifest, address, self._token, deadline, idle_s=self._idle_s)
        try:
            fetch(source, manifest, self._buffers, threads=self._streams)
        finally:
            source.close()
        return self._buffers


class NearestTransport:
    """Maps the files of versions on this host if it can read them, and pulls the others."""

    def __init__(self, host_id: str, files: FileTransport, pull: PullTransport) -> None:
        self._host_id = host_id
        self._files = files
        self._pull = pull

    def fetch(self, manifest: Manifest, timeout_s: float, *, verify: bool = True) -> Mapping[str, torch.Tensor]:
        here = manifest.host_id in ("", self._host_id) and self._files.has_files(manifest)
        near = here or not manifest.addresses
        return (self._files if near else self._pull).fetch(manifest, timeout_s, verify=verify)
