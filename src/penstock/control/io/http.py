"""The HTTP port of the controller.

    POST /v1/call       a msgpack `Request`, answered by a msgpack `Reply`
    GET  /v1/status     JSON: phases, counts, members, metrics
    GET  /v1/diagnosis  JSON: per pipeline, which process waits for what, since when
    GET  /metrics       for Prometheus
    GET  /healthz       "ok" while the process responds; the only path that needs no token

A request that violates the protocol (malformed, unknown, too large, no token) gets a 4xx with one line of text and
changes nothing. A request that the controller refuses gets an error status with a `Refused` in the body.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import orjson
import uvicorn
from prometheus_client import CollectorRegistry, Counter, generate_latest

from penstock.control.io.exposition import StatusCollector
from penstock.control.io.service import ControlService
from penstock.errors import ConfigError, RemoteProtocolError, RunFailed
from penstock.records.section import LOOPBACK
from penstock.runtime.http_guard import GuardedServer, bearer
from penstock.runtime.listening import BACKLOG, bound
from penstock.wire.codec import MAX_MESSAGE_BYTES, Codec
from penstock.wire.messages import Refused, Reply, Request

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

STATUS_OF_REFUSAL = {"Stale": 410, "PeerLost": 410, "LocalProtocolError": 422, "Transient": 503, "RunFailed": 409}
TEXT = b"text/plain; charset=utf-8"
JSON = b"application/json"
MSGPACK = b"application/msgpack"
PROMETHEUS = b"text/plain; version=0.0.4; charset=utf-8"


class Rejected(Exception):
    """A request that never reaches the controller."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence


class ControlApp:
    """The ASGI application: checks the token, bounds the body, decodes it and calls the controller."""

    def __init__(self, controller: ControlService, token: str, *, max_body_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._controller = controller
        self.has_credential = bearer(token)
        self._max_body_bytes = max_body_bytes
        self._requests: Codec[Request] = Codec(Request, max_bytes=max_body_bytes)
        self._replies: Codec[Reply] = Codec(Reply)
        self.registry = CollectorRegistry()
        self._rejected = Counter(
            "penstock_control_rejected_total",
            "Requests rejected before they reached the controller",
            ("status",),
            registry=self.registry,
        )
        self._calls = Counter(
            "penstock_control_calls_total", "Calls answered by the controller", registry=self.registry
        )
        self._refused = Counter(
            "penstock_control_refused_total", "Calls the controller refused", ("kind",), registry=self.registry
        )
        self.registry.register(StatusCollector(controller.status))
        self._pages: dict[str, Callable[[], tuple[bytes, bytes]]] = {
            "/v1/status": lambda: (JSON, orjson.dumps(controller.status(), option=orjson.OPT_NON_STR_KEYS)),
            "/v1/diagnosis": lambda: (JSON, orjson.dumps(controller.diagnosis())),
            "/metrics": lambda: (PROMETHEUS, generate_latest(self.registry)),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RemoteProtocolError(f"the control port supports HTTP only, not {scope['type']}")
        close = False
        try:
            status, kind, body = await self._answer(scope, receive)
        except Rejected as rejected:
            self._rejected.labels(str(rejected.status)).inc()
            status, kind, body = rejected.status, TEXT, rejected.sentence.encode()
            close = True  # the rest of its body is not read
        headers = [(b"content-type", kind), (b"content-length", b"%d" % len(body))]
        if close:
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Scope, receive: Receive) -> tuple[int, bytes, bytes]:
        path = scope["path"]
        if path == "/healthz":
            return 200, TEXT, b"ok"
        declared_bytes = self._admit(scope)
        if path == "/v1/call":
            if scope["method"] != "POST":
                raise Rejected(405, f"{scope['method']} {path}: use POST")
            return await self._call(await self._body(receive, declared_bytes))
        page = self._pages.get(path)
        if page is None:
            raise Rejected(404, f"no such path: {path}")
        if scope["method"] != "GET":
            raise Rejected(405, f"{scope['method']} {path}: use GET")
        return 200, *page()

    def _admit(self, scope: Scope) -> int:
        """Checks the token and the declared length of the body before reading it; returns that length."""
        declared_bytes = 0
        for name, value in scope["headers"]:
            if name == b"content-length":
                declared_bytes = int(value) if value.isdigit() and len(value) < 16 else self._max_body_bytes + 1
        if not self.has_credential(b"", scope["headers"]):
            raise Rejected(401, "the run's token is missing or wrong")
        if declared_bytes > self._max_body_bytes:
            raise Rejected(413, f"the body exceeds {self._max_body_bytes} bytes")
        return declared_bytes

    async def _body(self, receive: Receive, declared_bytes: int) -> bytes:
        message = await receive()
        body = message.get("body", b"")
        while message.get("more_body"):
            message = await receive()
            body += message.get("body", b"")
            if len(body) > self._max_body_bytes:
                raise Rejected(413, f"the body exceeds {self._max_body_bytes} bytes")
        if message["type"] == "http.disconnect" or len(body) < declared_bytes:
            raise Rejected(400, "the body ended early")
        return body

    async def _call(self, body: bytes) -> tuple[int, bytes, bytes]:
        try:
            request = self._requests.decode(body)
        except RemoteProtocolError as error:
            raise Rejected(400, error.message) from error
        answer = await self._controller.call(request)
        self._calls.inc()
        status = 200
        if isinstance(answer, Refused):
            self._refused.labels(answer.kind).inc()
            status = STATUS_OF_REFUSAL[answer.kind]
        return status, MSGPACK, self._replies.encode(answer)


class ControlServer:
    """Serves the app on one port. Call `bind` first: it fails at once if the port is taken, and returns the port."""

    def __init__(
        self, app: ControlApp, *, host: str = LOOPBACK, port: int = 0, max_strangers: int | None = None
    ) -> None:
        """`max_strangers` limits the connections that have not sent the token yet; None: from the limit of open
        files."""
        self.host = host
        self.port = port
        config = uvicorn.Config(
            app,  # type: ignore[arg-type]
            loop="none",
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=120,
            timeout_graceful_shutdown=2,
        )
        self._server = GuardedServer(config, app.has_credential, max_strangers=max_strangers)
        self._socket: socket.socket | None = None
        self._ended = asyncio.Event()

    def bind(self) -> int:
        """Binds the port and returns its number; for port 0 the kernel chooses one."""
        try:
            listener = bound(self.host, self.port)
            listener.listen(BACKLOG)  # before `serve`, so that early peers wait instead of being refused
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"the controller cannot listen on {self.host}:{self.port}: {error}; choose another port, or 0 for any"
            ) from error
        self.port = listener.getsockname()[1]
        self._socket = listener
        return self.port

    async def serve(self) -> None:
        """Serves until `stop`, or until cancelled."""
        if self._socket is None:
            self.bind()
        assert self._socket is not None
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self._socket.close()
            self._ended.set()

    async def stop(self, timeout_s: float) -> None:
        """Waits for calls in flight and closes the port; raises `RunFailed` if connections outlast `timeout_s`."""
        self._server.should_exit = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        except TimeoutError:
            self._server.force_exit = True
            left = len(self._server.server_state.connections)
            raise RunFailed(f"{left} control connections were still open after {timeout_s:g} s") from None

    def __repr__(self) -> str:
        state = self._server.server_state
        return f"ControlServer({self.host}:{self.port}, connections={len(state.connections)}, calls={len(state.tasks)})"
