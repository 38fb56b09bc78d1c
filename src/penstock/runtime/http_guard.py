"""HTTP ports: a caller without the credential gets one short request and one reply, and reaches no parser before.

Used by every HTTP port of a run. A `Door` reads the head of the first request of a connection. If it has the
credential, the connection is handed to uvicorn with those bytes, and stays open. If not, only its method and path are
passed on: the application answers it as a request without headers and body, and the connection is closed. So no chunk,
trailer or second request of such a caller is ever read, and it cannot leave replies unread.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penstock.errors import LocalProtocolError
from penstock.runtime.listening import Allowance, Door, close_with

MAX_HEAD_BYTES = 16 * 1024
MAX_HEADERS = 100
"""Of the first head: the credential is searched in these."""
HELLO_S = 10.0
"""Deadline for the first head; without the credential, as long again for the reply."""
ANSWERS_PER_S, ANSWERS_BURST = 20.0, 100.0
"""Replies to callers without the credential, all together; beyond that they are closed without one."""
REQUEST_LINE = re.compile(rb"(GET|HEAD|POST|PUT|PATCH|DELETE|OPTIONS) (/[\x21-\x7e]*) HTTP/1\.[01]")
BAD_REQUEST = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"

HasCredential = Callable[[bytes, list[tuple[bytes, bytes]]], bool]
"""`(url, headers)`: whether a request has the credential. Called in the port's own thread for each new connection, and
must take the same short time for any."""


def bearer(token: str) -> HasCredential:
    """The token in the header `Authorization`."""
    if not token:
        raise LocalProtocolError("a server with an empty token would admit everyone")
    credential = f"Bearer {token}".encode()

    def has_credential(url: bytes, headers: list[tuple[bytes, bytes]]) -> bool:
        return any(name == b"authorization" and hmac.compare_digest(value, credential) for name, value in headers)

    return has_credential


class GuardedServer(uvicorn.Server):
    """A uvicorn server on one listening socket, which only callers with the credential reach."""

    door: Door

    def __init__(
        self,
        config: Config,
        has_credential: HasCredential,
        *,
        max_strangers: int | None = None,
        hello_s: float = HELLO_S,
        handles_signals: bool = False,
    ) -> None:
        super().__init__(config)
        self._has_credential = has_credential
        self._max_strangers = max_strangers
        self._hello_s = hello_s
        self._handles_signals = handles_signals
        self._answers = Allowance(ANSWERS_PER_S, ANSWERS_BURST)
        self._serving: asyncio.AbstractEventLoop | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if self._handles_signals:
            with super().capture_signals():
                yield
        else:
            yield  # the process handles them

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None
        await super().startup(sockets=[])  # uvicorn itself listens on none
        self._serving = asyncio.get_running_loop()
        (listener,) = sockets
        self.door = Door(
            listener,
            f"http-{listener.getsockname()[1]}",
            self._inspect,
            self._admit,
            self._refuse,
            limit_bytes=MAX_HEAD_BYTES,
            hello_s=self._hello_s,
            max_strangers=self._max_strangers,
        )
        self.door.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.door.close(1.0)
        await super().shutdown(sockets)

    # In the thread of the door

    def _inspect(self, received: bytearray) -> bool | None:
        end = received.find(b"\r\n\r\n")
        if end < 0:
            return None
        first, *lines = bytes(received[:end]).split(b"\r\n", MAX_HEADERS)
        headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
        _, _, rest = first.partition(b" ")
        return self._has_credential(rest.partition(b" ")[0], headers)

    def _admit(self, connection: socket.socket, received: bytes) -> None:
        self._hand_over(connection, received, stranger=False)

    def _refuse(self, connection: socket.socket, received: bytes) -> None:
        if not self._answers.take_if_left(time.monotonic()):
            connection.close()
            return
        line = REQUEST_LINE.fullmatch(received[: received.find(b"\r\n")])
        if line is None:
            close_with(connection, BAD_REQUEST)
            return
        head = b"%s %s HTTP/1.1\r\nhost: none\r\nconnection: close\r\n\r\n" % line.groups()
        self._hand_over(connection, head, stranger=True)

    def _hand_over(self, connection: socket.socket, received: bytes, *, stranger: bool) -> None:
        assert self._serving is not None
        try:
            self._serving.call_soon_threadsafe(self._enter, connection, received, stranger)
        except RuntimeError:  # the loop has ended
            connection.close()

    # On the event loop

    def _enter(self, connection: socket.socket, received: bytes, stranger: bool) -> None:
        loop = asyncio.get_running_loop()
        connection.setblocking(False)
        kind = Answered if stranger else Admitted
        arguments = (self.config, self.server_state, self.lifespan.state)
        entering = loop.create_task(self._connect(connection, lambda: kind(received, self._hello_s, *arguments)))
        self.server_state.tasks.add(entering)
        entering.add_done_callback(self.server_state.tasks.discard)

    async def _connect(self, connection: socket.socket, protocol: Callable[[], Admitted]) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(protocol, connection)
        except OSError:  # the peer has gone
            connection.close()


class Admitted(HttpToolsProtocol):
    """A connection that has shown the credential, in the bytes that it sent first."""

    def __init__(self, first: bytes, hello_s: float, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._first = first
        self._hello_s = hello_s

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        first, self._first = self._first, b""
        super().data_received(first)


class Answered(Admitted):
    """A connection without the credential: it gets one reply."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._deadline = self.loop.call_later(self._hello_s, transport.abort)
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Dropped: the connection is about to be closed."""
