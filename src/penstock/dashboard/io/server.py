"""HTTP server of the dashboard: the page, its files, and queries about runs, for clients with the token."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn import Config

from penstock.dashboard import page, settings_table, views
from penstock.dashboard.io.answers import answer
from penstock.dashboard.io.files import own_files
from penstock.dashboard.io.shelf import Shelf
from penstock.errors import ConfigError, PenstockError
from penstock.runtime.http_guard import GuardedServer
from penstock.runtime.listening import BACKLOG, bound
from penstock.runtime.offload import Offload

READ_BUDGET_S = 0.5
"""How long one request may read files; the answer then contains the data read so far."""
REFRESH_EVERY_S = 0.5
MOST_COMPARED = 8
STORIES_AT_ONCE = 2
TYPES = {".js": "text/javascript", ".css": "text/css"}
HEADERS = {
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}


class Dashboard:
    """Serves the runs of a shelf. All reading happens in threads."""

    def __init__(self, shelf: Shelf, *, plotly: Path) -> None:
        self._shelf = shelf
        self._plotly = plotly
        self._files = own_files()
        self._reading = Offload(4, "dashboard")
        self._stories = asyncio.Semaphore(STORIES_AT_ONCE)

    def app(self, token: str) -> ASGIApp:
        routes = [
            Route("/", self._page),
            Route("/plotly.js", self._charts),
            Route("/static/{name}", self._static),
            Route("/api/runs", self._runs),
            Route("/api/compare", self._compare),
            Route("/api/runs/{run}/{view}", self._view),
        ]
        return Guarded(Starlette(routes=routes), token)

    def close(self) -> None:
        self._reading.close(timeout_s=1.0)

    async def _page(self, request: Request) -> Response:
        text = page.served(self._files["index.html"])
        return Response(text, media_type="text/html")

    async def _charts(self, request: Request) -> Response:
        return FileResponse(self._plotly, media_type="text/javascript", headers={"cache-control": "max-age=86400"})

    async def _static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name == "index.html" or name not in self._files:
            return PlainTextResponse("there is no such file\n", 404)
        return Response(self._files[name], media_type=TYPES[Path(name).suffix])

    async def _runs(self, request: Request) -> Response:
        return _json({"runs": await self._reading.run(self._shelf.listing)})

    async def _view(self, request: Request) -> Response:
        run, view = request.path_params["run"], request.path_params["view"]
        query = dict(request.query_params)
        try:
            async with self._stories if view == "story" else contextlib.nullcontext():
                return _json(await self._reading.run(self._answer, run, view, query))
        except ConfigError as error:
            return _json({"error": error.message}, 404)
        except (PenstockError, OSError, ValueError) as error:
            return _json({"error": str(error)}, 500)

    async def _compare(self, request: Request) -> Response:
        names = request.query_params.getlist("run")[:MOST_COMPARED]
        metric = request.query_params.get("metric") or "reward"
        try:
            return _json(await self._reading.run(self._compared, names, metric))
        except (PenstockError, OSError, ValueError) as error:
            return _json({"error": str(error)}, 404)

    def _answer(self, run: str, view: str, query: Mapping[str, str]) -> dict[str, Any]:
        reader = self._shelf.reader(run)
        reader.refresh_if_due(REFRESH_EVERY_S, READ_BUDGET_S)
        return answer(reader, view, query)

    def _compared(self, names: list[str], metric: str) -> dict[str, Any]:
        compared, metrics, settings = {}, {"reward": None}, {}
        for name in names:
            reader = self._shelf.reader(name)
            reader.refresh_if_due(REFRESH_EVERY_S, READ_BUDGET_S)
            with reader.lock:
                curves = {one.name: views.compared(reader.folds, one.name, metric) for one in reader.pipelines}
                compared[name] = {"share_read": reader.share_read(), "pipelines": curves}
                metrics |= dict.fromkeys(
                    one for pipe in reader.pipelines for one in views.others(reader.folds, pipe.name)
                )
                settings[name] = reader.settings
        return {"runs": compared, "metrics": list(metrics), "differences": settings_table.differences(settings)}


class Guarded:
    """Admits paths that begin with the token: the address is the credential, and relative links keep it."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        first, slash, rest = scope["path"].removeprefix("/").partition("/")
        response: ASGIApp = self._app
        if not secrets.compare_digest(first.encode("utf-8", "replace"), self._token):
            response = PlainTextResponse(
                "open the address that `penstock dashboard` printed: it contains the access token\n", 403
            )
        elif not slash:
            response = Response(status_code=307, headers={"location": f"/{self._token.decode()}/"})
        elif scope["method"] not in ("GET", "HEAD"):
            response = PlainTextResponse("this page is read-only\n", 405)

        async def send_guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                present = {name for name, _ in message["headers"]}
                more = [
                    (name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in present
                ]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        await response({**scope, "path": f"/{rest}", "raw_path": f"/{rest}".encode()}, receive, send_guarded)


def bind(host: str, port: int) -> socket.socket:
    """Binds the port; raises `ConfigError` if that fails."""
    try:
        listener = bound(host, port)
        listener.listen(BACKLOG)  # before `serve`, so that an early browser waits instead of being refused
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"the dashboard cannot listen on {host}:{port}: {error}; choose another port, or 0 for any"
        ) from error
    return listener


def serve(app: ASGIApp, token: str, listener: socket.socket) -> None:
    """Serves until interrupted."""
    key = f"/{token}/".encode()
    config = Config(
        app,  # type: ignore[arg-type]
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=2,
    )

    def has_credential(url: bytes, headers: list[tuple[bytes, bytes]]) -> bool:
        return secrets.compare_digest(url[: len(key)], key)

    with listener:
        GuardedServer(config, has_credential, handles_signals=True).run(sockets=[listener])


def _json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")
