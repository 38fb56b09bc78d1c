"""Client of the controller.

Every call is idempotent, so after a lost connection the client retries for a bounded time. Each retry reads the address
from the endpoint file again: a restarted controller may listen on another port. Connections are kept open; each carries
one call at a time.

The client implements HTTP/1.1 with the same parser as the server: a general HTTP client needs several times more CPU
time per call than the controller needs to answer it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import httptools

from penstock import errors
from penstock.errors import LocalProtocolError, PeerLost, RemoteProtocolError
from penstock.records.ids import MemberId, PipelineName
from penstock.runtime.backoff import Backoff
from penstock.runtime.listening import watch_link
from penstock.wire.codec import MAX_MESSAGE_BYTES, Codec
from penstock.wire.messages import Refused, Reply, Request

logger = logging.getLogger(__name__)

MSGPACK = b"application/msgpack"


class _Unreachable(Exception):
    """This attempt failed; a retry may succeed."""


class ControlClient:
    """The calls of one process. Used from one event loop; any number of calls may run concurrently."""

    def __init__(
        self,
        endpoint: Path | str | tuple[str, int],
        token: str,
        pipeline: PipelineName,
        member: MemberId,
        *,
        unreachable_timeout_s: float = 60.0,
        attempt_timeout_s: float = 10.0,
    ) -> None:
        """`endpoint` is the controller's endpoint file, or a fixed (host, port).

        A call fails with `PeerLost` if the controller cannot be reached for `unreachable_timeout_s`. An attempt without
        a reply within the `wait_s` of its request plus `attempt_timeout_s` counts as a lost connection.
        """
        self.pipeline = pipeline
        self.member = member
        self._endpoint = Path(endpoint) if isinstance(endpoint, str) else endpoint
        self._token = token
        self._unreachable_timeout_s = unreachable_timeout_s
        self._attempt_timeout_s = attempt_timeout_s
        self._requests: Codec[Request] = Codec(Request)
        self._replies: Codec[Reply] = Codec(Reply)
        self._address: tuple[str, int] | None = None
        self._address_is_stale = True
        """The address must be read again before the next connection."""
        self._call_head = b""
        """Head of every call, up to the value of Content-Length."""
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._connecting: set[asyncio.Timeout] = set()
        """Timeouts of the connections that are being made."""
        self._hurried = asyncio.Event()
        self._hurry_timeout_s = 0.0
        self.reconnects = 0

    async def call(self, request: Request, timeout_s: float | None = None) -> Reply:
        """Sends the request until it is answered; raises the error that a `Refused` names.

        `timeout_s` bounds the whole call; the default is the `wait_s` of the request plus `unreachable_timeout_s`.
        """
        body = self._requests.encode(request)
        loop = asyncio.get_running_loop()
        wait_s = getattr(request, "wait_s", 0.0)
        deadline = loop.time() + (timeout_s if timeout_s is not None else wait_s + self._unreachable_timeout_s)
        backoff = Backoff(0.05, 1.0)
        while True:
            attempt_s = min(deadline - loop.time(), wait_s + self._attempt_timeout_s)
            if self._hurried.is_set():
                attempt_s = min(attempt_s, self._hurry_timeout_s)
            began = loop.time()
            try:
                status, kind, answer = await self._attempt(body, attempt_s)
                return self._decoded(status, kind, answer)
            except _Unreachable as failure:
                # An attempt that took longer than its timeout was not the controller's fault: this process was stopped,
                # perhaps with the whole machine.
                deadline += max(0.0, loop.time() - began - attempt_s)
                pause_s = backoff.next_s()
                if self._hurried.is_set():
                    raise PeerLost(f"the controller did not answer during shutdown: {failure}") from failure
                if loop.time() + pause_s >= deadline:
                    raise PeerLost(
                        f"the controller at {self._where()} could not be reached in {backoff.attempts} attempts: "
                        f"{failure}"
                    ) from failure
                if backoff.attempts == 1:
                    logger.info("controller at %s: %s; trying again", self._where(), failure)
                self.reconnects += 1
                self._address_is_stale = True
                await self._pause(pause_s)

    async def page(self, name: str, timeout_s: float) -> Any:
        """Fetches a JSON page of the controller, in one attempt; raises `PeerLost` if that fails."""
        try:
            status, _, answer = await self._exchange(lambda: self._head(f"GET /v1/{name}") + b"\r\n", timeout_s)
            if status != 200:
                raise _Unreachable(f"status {status}")
        except _Unreachable as failure:
            self._address_is_stale = True
            raise PeerLost(f"cannot fetch page {name!r} from the controller at {self._where()}: {failure}") from failure
        return json.loads(answer)

    def begin_shutdown(self, timeout_s: float) -> None:
        """Shutdown began: calls are not retried any more, and none waits longer than `timeout_s`."""
        self._hurry_timeout_s = timeout_s
        self._hurried.set()
        for connection in list(self._open):
            connection.expire_in(timeout_s)
        until = asyncio.get_running_loop().time() + timeout_s
        for bound in self._connecting:
            when = bound.when()
            if when is not None and when > until and not bound.expired():
                bound.reschedule(until)

    async def close(self) -> None:
        """Closes all connections; pending calls fail with `PeerLost`."""
        self.begin_shutdown(0.0)
        for connection in list(self._open):
            connection.close("the client was closed")
        self._idle.clear()

    async def _pause(self, pause_s: float) -> None:
        try:
            async with asyncio.timeout(pause_s):
                await self._hurried.wait()
        except TimeoutError:
            return

    def _head(self, what: str) -> bytes:
        return f"{what} HTTP/1.1\r\nHost: {self._where()}\r\nAuthorization: Bearer {self._token}\r\n".encode()

    def _posted(self, body: bytes) -> bytes:
        if not self._call_head:
            self._call_head = self._head("POST /v1/call") + b"Content-Type: application/msgpack\r\nContent-Length: "
        return self._call_head + b"%d\r\n\r\n" % len(body) + body

    async def _attempt(self, body: bytes, timeout_s: float) -> tuple[int, bytes, bytes]:
        return await self._exchange(lambda: self._posted(body), timeout_s)

    async def _exchange(self, written: Callable[[], bytes], timeout_s: float) -> tuple[int, bytes, bytes]:
        """`written` is called once the address of the controller has been read."""
        connection = self._idle.pop() if self._idle else await self._connect(timeout_s)
        if self._hurried.is_set():  # perhaps while it connected
            timeout_s = min(timeout_s, self._hurry_timeout_s)
        try:
            answer = await connection.exchange(written(), timeout_s)
        except BaseException:
            connection.close("the call was cancelled or failed")
            raise
        if connection.reusable:
            self._idle.append(connection)
        return answer

    async def _connect(self, timeout_s: float) -> _Connection:
        if self._address is None or self._address_is_stale:
            self._address = self._locate()
            self._address_is_stale = False
            self._call_head = b""
        host, port = self._address
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s) as bound:
                self._connecting.add(bound)
                try:
                    _, connection = await loop.create_connection(lambda: _Connection(self._forget), host, port)
                finally:
                    self._connecting.discard(bound)
        except TimeoutError as error:
            raise _Unreachable("cannot connect: timed out") from error
        except OSError as error:
            raise _Unreachable(f"cannot connect: {error}") from error
        self._open.add(connection)
        connection.watch()
        return connection

    def _locate(self) -> tuple[str, int]:
        if isinstance(self._endpoint, tuple):
            return self._endpoint
        try:
            found: dict[str, Any] = json.loads(self._endpoint.read_text(encoding="utf-8"))
            return str(found["host"]), int(found["port"])
        except FileNotFoundError:
            raise _Unreachable(f"no controller has written its address to {self._endpoint}") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _Unreachable(f"{self._endpoint} cannot be read: {error}") from error

    def _where(self) -> str:
        return f"{self._address[0]}:{self._address[1]}" if self._address is not None else "an unknown address"

    def _forget(self, connection: _Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def _decoded(self, status: int, kind: bytes, answer: bytes) -> Reply:
        if kind == MSGPACK:
            reply = self._replies.decode(answer)
            if isinstance(reply, Refused):
                raise getattr(errors, reply.kind)(reply.message)
            return reply
        sentence = answer.decode(errors="replace")[:500]
        if status == 401:
            # The controller of another run may have taken the port: read the address again.
            raise _Unreachable(f"the token was refused ({sentence}); this may be the controller of another run")
        if 400 <= status < 500:
            raise LocalProtocolError(f"the controller rejected the call with status {status}: {sentence}")
        if status >= 500:
            raise _Unreachable(f"status {status}: {sentence}")
        raise RemoteProtocolError(f"the controller answered a call with status {status} and {kind.decode()!r}")

    def __repr__(self) -> str:
        return f"ControlClient({self.pipeline}/{self.member} at {self._where()}, open={len(self._open)})"


class _Connection(asyncio.Protocol):
    """One connection: one exchange at a time."""

    def __init__(self, on_lost: Any) -> None:
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._parser: Any = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[tuple[int, bytes, bytes]] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._kind = b""
        self._body = bytearray()
        self.reusable = True

    async def exchange(self, request: bytes, timeout_s: float) -> tuple[int, bytes, bytes]:
        """Sends a request and returns status, content type and body of the response."""
        if self._transport is None or self._transport.is_closing():
            raise _Unreachable("the connection was closed")
        loop = asyncio.get_running_loop()
        self._answer = loop.create_future()
        self._timer = loop.call_later(timeout_s, self._expire, timeout_s)
        self._transport.write(request)
        try:
            return await self._answer
        finally:
            self._timer.cancel()
            self._answer = None

    def watch(self) -> None:
        """An idle connection to a machine that is cut off is closed, and not used for the next call."""
        assert self._transport is not None
        with contextlib.suppress(OSError):  # the controller may have closed it
            watch_link(self._transport.get_extra_info("socket"))

    def expire_in(self, timeout_s: float) -> None:
        """Shortens the timeout of the current exchange, if there is one."""
        if self._timer is not None and self._answer is not None:
            loop = asyncio.get_running_loop()
            if self._timer.when() > loop.time() + timeout_s:
                self._timer.cancel()
                self._timer = loop.call_later(timeout_s, self._expire, timeout_s)

    def close(self, reason: str) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()
        self._fail(reason)

    def _expire(self, timeout_s: float) -> None:
        self.close(f"no answer within {timeout_s:.1f} s")

    def _fail(self, reason: str) -> None:
        self.reusable = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(_Unreachable(reason))

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.close(f"the answer is not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the connection was lost{f': {exc}' if exc else ''}")
        self._on_lost(self)

    # httptools callbacks

    def on_message_begin(self) -> None:
        self._kind = b""
        self._body.clear()

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._kind = value

    def on_body(self, body: bytes) -> None:
        self._body += body
        if len(self._body) > MAX_MESSAGE_BYTES:
            self.close(f"the answer exceeds {MAX_MESSAGE_BYTES} bytes")

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.reusable = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((self._parser.get_status_code(), self._kind, bytes(self._body)))
