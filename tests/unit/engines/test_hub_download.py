"""A model is downloaded from a server that speaks the hub's protocol; a mistyped path asks it for nothing."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from penstock.engines.models import LanguagePolicy, TinyLanguageModel, build

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "someone/tiny-letters"
UNWANTED = {"pytorch_model.bin": b"a pickle"}


class Hub(ThreadingHTTPServer):
    """Has one model. Remembers what it was asked for."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.files = files
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answering(BaseHTTPRequestHandler):
    server: Hub  # type: ignore[assignment]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(path)
        if path.startswith(f"/api/models/{NAME}/tree/{COMMIT}"):
            listed = [
                {"type": "file", "oid": "0" * 40, "size": len(body), "path": name}
                for name, body in self.server.files.items()
            ]
            self._send(200, json.dumps(listed).encode(), {"content-type": "application/json"})
        elif path in (
            f"/api/models/{NAME}/revision/main",
            f"/api/models/{NAME}/revision/{COMMIT}",
            f"/api/models/{NAME}",
        ):
            siblings = [{"rfilename": name} for name in self.server.files]
            told: dict[str, Any] = {
                "id": NAME,
                "modelId": NAME,
                "sha": COMMIT,
                "private": False,
                "siblings": siblings,
                "tags": [],
            }
            self._send(200, json.dumps(told).encode(), {"content-type": "application/json"})
        elif (name := path.rpartition("/")[2]) in self.server.files and f"/{NAME}/resolve/{COMMIT}/" in path:
            body = self.server.files[name]
            etag = hashlib.sha1(body, usedforsecurity=False).hexdigest()
            self._send(200, body, {"x-repo-commit": COMMIT, "etag": f'"{etag}"', "accept-ranges": "bytes"})
        else:
            self._send(404, b"{}", {"x-error-code": "RevisionNotFound" if NAME in path else "RepoNotFound"})

    def _send(self, code: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    policy = build(TinyLanguageModel(alphabet="abc>", hidden_size=16, heads=2))
    assert isinstance(policy, LanguagePolicy)
    model: Any = policy.module
    model.save_pretrained(tmp_path / "model")
    policy.tokenizer.save(tmp_path / "model")
    served = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    with Hub(served | UNWANTED) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def asked(hub: Hub, folder: Path, *setting: str, offline: bool = False) -> subprocess.CompletedProcess[str]:
    """In a process of its own: huggingface_hub reads its environment when it is imported."""
    script = (
        "import sys; from penstock.engines.hub import directory_of; from penstock.engines.settings import HubModel\n"
        "print(directory_of(HubModel(name=sys.argv[1], revision=sys.argv[2], cache=sys.argv[3])))"
    )
    environment = os.environ | {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": str(int(offline)),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "NO_PROXY": "127.0.0.1",
        "HF_HOME": str(folder / "home"),
    }
    name, revision = setting if len(setting) == 2 else (setting[0], "")
    return subprocess.run(
        [sys.executable, "-c", script, name, revision, str(folder / "cache")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )


def test_a_model_is_downloaded_once_by_revision_and_found_offline(hub: Hub, tmp_path: Path):
    first = asked(hub, tmp_path, NAME, "main")
    assert first.returncode == 0, first.stderr
    directory = Path(first.stdout.strip())
    assert directory.name == COMMIT
    assert directory.is_relative_to(tmp_path / "cache")
    assert (directory / "model.safetensors").read_bytes() == hub.files["model.safetensors"]
    assert not (directory / "pytorch_model.bin").exists()  # nothing that would have to be unpickled
    before = len(hub.asked)
    again = asked(hub, tmp_path, NAME, COMMIT, offline=True)
    assert again.stdout == first.stdout, again.stderr
    assert len(hub.asked) == before


def test_what_the_hub_does_not_have_is_one_sentence(hub: Hub, tmp_path: Path):
    missing = asked(hub, tmp_path, "someone/other")
    assert "ConfigError: model 'someone/other' could not be downloaded from the hub" in missing.stderr
    revision = asked(hub, tmp_path, NAME, "v9")
    assert "at revision 'v9' could not be downloaded from the hub" in revision.stderr


def test_a_mistyped_path_asks_the_hub_for_nothing(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    config = tmp_path / "run.toml"
    config.write_text(
        '[[pipeline]]\nname = "a"\nsteps = 1\n[pipeline.env]\nname = "copy"\n[pipeline.model]\nkind = "path"\n'
    )
    command = [sys.executable, "-m", "penstock.cli.main", "run", str(config), "--set", f"run.dir={tmp_path}/runs"]
    refused = subprocess.run(
        [*command, "--set", f"pipeline.a.model.path={NAME}"], capture_output=True, text=True, check=False, timeout=90
    )
    assert refused.returncode == 2
    assert "is not a directory" in refused.stderr
    assert hub.asked == []
