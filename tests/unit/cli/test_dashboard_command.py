"""`penstock dashboard --open` starts a browser, whose arguments every user of the machine can read."""

from __future__ import annotations

import os
import re
import signal
import socket
import webbrowser
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlparse

import pytest

from penstock.cli import dashboard as command
from penstock.runtime.rundir import RunDir


def interrupted() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("end", "raised"),
    [(lambda: None, None), (interrupted, KeyboardInterrupt), (lambda: signal.raise_signal(signal.SIGTERM), SystemExit)],
    ids=["end", "Ctrl-C", "SIGTERM"],
)
def test_the_key_is_in_no_argument_of_the_browser(
    end: Callable[[], None], raised: type[BaseException] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = RunDir.create(tmp_path, "r", "", "0")
    opened: list[str] = []
    pages: list[Path] = []

    def serve(app: object, token: str, listener: socket.socket) -> None:
        listener.close()
        [url] = opened
        assert token not in url
        page = Path(urlparse(url).path)
        pages.append(page)
        assert f"/{token}/" in page.read_text()
        assert re.search(r'http-equiv="refresh" content="0; url=http://127\.0\.0\.1:\d+/', page.read_text())
        assert not (page.stat().st_mode | page.parent.stat().st_mode) & 0o077
        assert page.stat().st_uid == os.geteuid()
        end()

    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setattr(command, "serve", serve)
    try:
        command.dashboard_command(run.root, host="127.0.0.1", port=0, open_browser=True, export_to=None)
    except (KeyboardInterrupt, SystemExit) as error:
        assert raised is type(error)  # noqa: PT017
    else:
        assert raised is None
    [page] = pages
    assert not page.parent.exists()
