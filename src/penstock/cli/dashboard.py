"""`penstock dashboard`: a run, or a folder of runs, in a browser."""

from __future__ import annotations

import secrets
import webbrowser
from pathlib import Path

import typer

from penstock.dashboard.io.export import export
from penstock.dashboard.io.files import plotly_script
from penstock.dashboard.io.server import Dashboard, bind, serve
from penstock.dashboard.io.shelf import Shelf
from penstock.errors import ConfigError

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def dashboard_command(path: Path, *, host: str, port: int, open_browser: bool, export_to: Path | None) -> int:
    shelf = Shelf(path)
    plotly = plotly_script()
    if export_to is not None:
        names = shelf.names()
        if len(names) != 1:
            raise ConfigError(f"{path} holds {len(names)} runs: give the directory of the one to export")
        size = export(shelf, names[0], export_to, plotly)
        typer.echo(f"{export_to}: {names[0]} in {size / 1e6:.1f} MB")
        return 0
    token = secrets.token_urlsafe(16)
    listener = bind(host, port)
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{listener.getsockname()[1]}/{token}/"
    typer.echo(f"dashboard: {address}")
    if host not in LOOPBACK:
        typer.echo("anyone with this address can read samples and logs; the connection is not encrypted", err=True)
    if open_browser:
        webbrowser.open(address)
    dashboard = Dashboard(shelf, plotly=plotly)
    try:
        serve(dashboard.app(token), token, listener)
    finally:
        dashboard.close()
    return 0
