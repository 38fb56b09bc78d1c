"""The key-value store for the rendezvous of a broadcast; clients need the run's token.

torch's own store requires no token, and bytes of another protocol stop it permanently. This one implements only what
torch's process groups need of a store: its client can be passed to them.
"""

from __future__ import annotations

import hmac
import socket
import struct
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from penstock.errors import RemoteProtocolError
from penstock.records.section import LOOPBACK
from penstock.runtime.listening import Peer, ThreadedPort, receive, watch_link

MAGIC = b"PSK1"
HELLO = struct.Struct("<4s32s")
"""Magic and token digest, once for each connection."""
LENGTH = struct.Struct("<I")
MAX_MESSAGE_BYTES = 1 << 20
"""Of one message."""
POLL_EVERY_S = 0.005


class Request(msgspec.Struct, array_like=True):
    op: str
    key: str
    value: bytes = b""
    expected: bytes = b""
    amount: int = 0


class Keys:
    """The keys and their values. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}

    def answer(self, request: Request) -> bytes | None:
        """The value after the request, for "delete" the one before; None if there is no such key."""
        with self._lock:
            key, values = request.key, self._values
            match request.op:
                case "set":
                    values[key] = request.value
                case "add":
                    values[key] = str(int(values.get(key, b"0")) + request.amount).encode()
                case "compare_set":
                    if values.get(key, b"") == request.expected:
                        values[key] = request.value
                case "delete":
                    return values.pop(key, None)
                case "get":
                    pass
                case op:
                    raise RemoteProtocolError(f"the store has no operation {op!r}")
            return values.get(key)


class KeyStore(Store):
    """torch's interface of a store, over one kind of request. Waits by polling."""

    local_host: str
    """The address of this host on the network of the other participants."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__()
        self.timeout_s = timeout_s

    def execute(self, request: Request) -> bytes | None:
        """The server executes it, a client sends it."""
        raise NotImplementedError

    def set(self, key: str, value: str | bytes) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.execute(Request("set", key, _bytes(value)))

    def get(self, key: str) -> bytes:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Waits for the key."""
        self.wait([key])
        return self.execute(Request("get", key)) or b""

    def add(self, key: str, amount: int) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        return int(self.execute(Request("add", key, amount=amount)) or 0)

    def check(self, keys: Sequence[str]) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return all(self.execute(Request("get", key)) is not None for key in keys)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.execute(Request("compare_set", key, _bytes(value), _bytes(expected))) or b""

    def delete_key(self, key: str) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.execute(Request("delete", key)) is not None

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        deadline = time.monotonic() + (self.timeout_s if timeout is None else timeout.total_seconds())
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the keys {list(keys)} were not set in time")
            time.sleep(POLL_EVERY_S)


class StoreServer(KeyStore):
    """Holds the keys, and is the store of its own process. Bound when the constructor returns."""

    def __init__(self, token: bytes, *, host: str = LOOPBACK, timeout_s: float = 60.0) -> None:
        super().__init__(timeout_s)
        hello = HELLO.pack(MAGIC, token_digest(token))
        self._keys = Keys()
        self._port = ThreadedPort(
            self._serve,
            "broadcast",
            hello_bytes=HELLO.size,
            has_token=lambda received: hmac.compare_digest(received, hello),
            host=host,
        )
        self.host, self.port = self._port.host, self._port.port
        self.local_host = self.host

    def execute(self, request: Request) -> bytes | None:
        return self._keys.answer(request)

    def close(self, timeout_s: float) -> None:
        self._port.close(timeout_s)

    def _serve(self, peer: Peer) -> None:
        while (body := _read(peer.connection)) is not None:
            try:
                answer = self._keys.answer(msgspec.msgpack.decode(body, type=Request))
            except (msgspec.DecodeError, RemoteProtocolError, ValueError):
                return  # it has the token, but uses another protocol version
            _write(peer.connection, msgspec.msgpack.encode(answer))


class StoreClient(KeyStore):
    """One connection. Calls from several threads are serialized."""

    def __init__(self, host: str, port: int, token: bytes, timeout_s: float) -> None:
        """`OSError` if no store answers there."""
        super().__init__(timeout_s)
        self._lock = threading.Lock()
        self._connection = socket.create_connection((host, port), timeout_s)
        watch_link(self._connection)
        self._connection.sendall(HELLO.pack(MAGIC, token_digest(token)))
        self.check([""])  # a wrong token is noticed here
        self.local_host = self._connection.getsockname()[0]

    def execute(self, request: Request) -> bytes | None:
        with self._lock:
            self._connection.settimeout(self.timeout_s)
            _write(self._connection, msgspec.msgpack.encode(request))
            body = _read(self._connection)
        if body is None:
            raise ConnectionResetError("the store closed the connection: it has ended, or the token is of another run")
        return msgspec.msgpack.decode(body, type=bytes | None)

    def close(self) -> None:
        self._connection.close()

    def __del__(self) -> None:
        if (connection := getattr(self, "_connection", None)) is not None:
            connection.close()


def token_digest(token: bytes) -> bytes:
    """Sent instead of the token."""
    return hmac.digest(token, b"penstock broadcast", "sha256")


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _write(connection: socket.socket, body: bytes) -> None:
    connection.sendall(LENGTH.pack(len(body)) + body)


def _read(connection: socket.socket) -> bytes | None:
    """One message; None at the end of the connection, or if it is too long."""
    header = bytearray(LENGTH.size)
    if not receive(connection, memoryview(header)):
        return None
    (length,) = LENGTH.unpack(header)
    if length > MAX_MESSAGE_BYTES:
        return None
    body = bytearray(length)
    return bytes(body) if receive(connection, memoryview(body)) else None
