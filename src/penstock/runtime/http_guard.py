"""Limits for unauthenticated HTTP clients: the size of a head, a deadline for the credential, the connections.

Used by every HTTP port of a run. A connection is authenticated once a request on it has the credential. The number of
unauthenticated connections is limited: a new one closes the oldest, so idle connections cannot block clients of the
run. Authenticated connections stay open and do not count.
"""

from __future__ import annotations

import asyncio
import hmac
import resource
from collections.abc import Callable
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

MAX_HEAD_BYTES = 16 * 1024
HELLO_S = 10.0
"""Deadline from the connection to the first request with the credential."""
MAX_UNAUTHENTICATED = 256

HasCredential = Callable[[bytes, list[tuple[bytes, bytes]]], bool]
"""`(url, headers)`: whether a request has the credential."""


def bearer(token: str) -> HasCredential:
    """The token in the header `Authorization`."""
    credential = f"Bearer {token}".encode()

    def has_credential(url: bytes, headers: list[tuple[bytes, bytes]]) -> bool:
        return any(name == b"authorization" and hmac.compare_digest(value, credential) for name, value in headers)

    return has_credential


class PortGuard:
    """The unauthenticated connections of one port. Pass `protocol` to uvicorn as `http`."""

    def __init__(
        self, has_credential: HasCredential, *, max_unauthenticated: int | None = None, hello_s: float = HELLO_S
    ) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.has_credential = has_credential
        self.hello_s = hello_s
        self.max_unauthenticated = max_unauthenticated or max(8, min(MAX_UNAUTHENTICATED, files // 4))
        self.unauthenticated: dict[Guarded, None] = {}
        self.turned_away = 0
        """Connections closed without the credential: for a newer one, for a head too long, or at the deadline."""

    def protocol(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> Guarded:
        return Guarded(self, config, server_state, app_state, _loop)

    def enter(self, connection: Guarded) -> None:
        if len(self.unauthenticated) >= self.max_unauthenticated:
            self.turn_away(next(iter(self.unauthenticated)))
        self.unauthenticated[connection] = None

    def leave(self, connection: Guarded) -> None:
        self.unauthenticated.pop(connection, None)

    def turn_away(self, connection: Guarded) -> None:
        self.turned_away += 1
        self.leave(connection)
        connection.transport.abort()


class Guarded(HttpToolsProtocol):
    """One connection."""

    def __init__(self, guard: PortGuard, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._guard = guard
        self._head_bytes = 0
        self._in_head = True
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline = self.loop.call_later(self._guard.hello_s, self._guard.turn_away, self)
        self._guard.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._authenticated()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # The parser never receives more bytes at once than a head may have: a longer head is not parsed.
        while data and self._in_head and not self.transport.is_closing():
            room = MAX_HEAD_BYTES - self._head_bytes
            if room <= 0:
                self._guard.turned_away += 1
                self.send_400_response("The head of the request is too long.")
                return
            piece, data = data[:room], data[room:]
            self._head_bytes += len(piece)
            super().data_received(piece)
        if data and not self.transport.is_closing():
            super().data_received(data)

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes = False, 0
        if self._deadline is not None and self._guard.has_credential(self.url, self.headers):
            self._authenticated()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        super().on_message_complete()

    def _authenticated(self) -> None:
        """Removes the connection from the limit and cancels its deadline."""
        self._guard.leave(self)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
