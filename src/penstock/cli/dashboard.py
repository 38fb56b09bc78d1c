"""`penstock dashboard`: a run, or a folder of runs, in a browser."""

from __future__ import annotations

import contextlib
import html
import secrets
import signal
import sys
import tempfile
import webbrowser
from collections.abc import Iterator
from pathlib import Path

from penstock.cli.printing import say
from penstock.dashboard.io.export import export
from penstock.dashboard.io.files import plotly_script
from penstock.dashboard.io.server import Dashboard, bind, serve
from penstock.dashboard.io.shelf import Shelf
from penstock.errors import ConfigError

LOOPBACK = ("127.0.0.1", "::1", "localhost")
REDIRECT = (
    '<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer">'
    '<meta http-equiv="refresh" content="0; url={}"><title>Penstock</title>'
)


def dashboard_command(path: Path, *, host: str, port: int, open_browser: bool, export_to: Path | None) -> int:
    shelf = Shelf(path)
    plotly = plotly_script()
    if export_to is not None:
        names = shelf.names()
        if len(names) != 1:
            raise ConfigError(f"{path} holds {len(names)} runs: give the directory of the one to export")
        size = export(shelf, names[0], export_to, plotly)
        say(f"{export_to}: {names[0]} in {size / 1e6:.1f} MB")
        return 0
    token = secrets.token_urlsafe(16)
    listener = bind(host, port)
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{listener.getsockname()[1]}/{token}/"
    say(f"dashboard: {address}")
    if host not in LOOPBACK:
        say("anyone with this address can read samples and logs; the connection is not encrypted", err=True)
    dashboard = Dashboard(shelf, plotly=plotly)
    try:
        with _redirect(address) if open_browser else contextlib.nullcontext() as page:
            if page is not None:
                webbrowser.open(page.as_uri())
            serve(dashboard.app(token), token, listener)
    finally:
        dashboard.close()
    return 0


@contextlib.contextmanager
def _redirect(address: str) -> Iterator[Path]:
    """A page that leads to the address, which only this user can read: the arguments of a browser are public."""
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:  # readable by its owner only
        page = Path(folder) / "open.html"
        page.touch(mode=0o600)
        page.write_text(REDIRECT.format(html.escape(address)), encoding="utf-8")
        before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # else it would stay
        try:
            yield page
        finally:
            signal.signal(signal.SIGTERM, before)
