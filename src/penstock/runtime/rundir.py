"""The run directory: everything a run leaves behind, and where the processes of a run find each other.

<dir>/<name>-<date>-<time>/
  run.json         run id, format, when and by which Penstock it was made
  config.toml      the resolved configuration
  journal.sqlite   what happened, in order
  metrics.jsonl    one line per step and pipeline, and one per process every few seconds
  logs/            one file per process; failures/ holds the failure reports of those that died
  checkpoints/     per pipeline, what `--resume` starts from
  weights/         per pipeline, the published versions that engines load
  rollouts/        per pipeline, readable samples
  plots/           reward curves
  token            the run's secret, readable by its owner only
  controller.json  where the controller listens at present
  code/            functions and classes that were passed to `penstock.train`, as a module
  ending.json      how the run ended, once it has and was not killed
  ray.json         the Ray cluster that the run was started on, if it was
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.errors import ConfigError, RunFailed
from penstock.records.ids import RunId

Ending = Literal["complete", "interrupted", "failed"]

FORMAT = 1
NO_SPACE = 74
"""Exit code of a process that found the disk of the run directory full: there may be no room for a failure report."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the controller listens. A restarted one may listen elsewhere: read it again after a lost connection."""

    host: str
    port: int
    pid: int

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


class RunDir:
    """Paths and small files of one run. Made by `create` or found by `open`, never guessed."""

    def __init__(self, root: Path, run_id: RunId) -> None:
        self.root = root
        self.run_id = run_id

    @classmethod
    def create(cls, parent: Path, name: str, config_toml: str, version: str) -> RunDir:
        """Makes a new directory with a fresh run id and token; the token is readable by its owner only."""
        stamp = time.strftime("%Y%m%d-%H%M%S")
        root = parent / f"{name}-{stamp}"
        for count in range(2, 100):
            try:
                root.mkdir(parents=True, exist_ok=False)
                break
            except FileExistsError:
                root = parent / f"{name}-{stamp}-{count}"
            except OSError as error:
                raise ConfigError(f"cannot make the run directory {root}: {error}; choose another run.dir") from error
        run = cls(root.resolve(), RunId(secrets.token_hex(8)))
        try:
            for folder in ("logs", "failures", "checkpoints", "weights", "rollouts", "plots"):
                (run.root / folder).mkdir()
            write_private(run.token_path, secrets.token_urlsafe(32))
            run.config_path.write_text(config_toml, encoding="utf-8")
            made = {"run_id": run.run_id, "format": FORMAT, "penstock": version, "made_at": time.time(), "name": name}
            write_atomically(run.root / "run.json", json.dumps(made, indent=2))
        except OSError as error:
            raise RunFailed(f"cannot write to the run directory {run.root}: {error}") from error
        return run

    @classmethod
    def open(cls, root: Path) -> RunDir:
        """Opens an existing run directory; refuses one that another format of Penstock made."""
        marker = root / "run.json"
        try:
            made = json.loads(marker.read_text(encoding="utf-8"))
            run_id, found = RunId(str(made["run_id"])), made["format"]
        except FileNotFoundError:
            raise ConfigError(_no_run(root)) from None
        except PermissionError:
            raise ConfigError(f"this user may not read {marker}: the run belongs to another user") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{marker} cannot be read ({error}); the run directory is damaged") from error
        if found != FORMAT:
            raise ConfigError(
                f"{root} was made by Penstock {made.get('penstock', 'of unknown version')} in format {found}; this one "
                f"reads format {FORMAT}. Use that version to resume it, or start a new run"
            )
        return cls(root.resolve(), run_id)

    def remove(self) -> None:
        """Deletes the directory of a run that never began."""
        shutil.rmtree(self.root, ignore_errors=True)

    @property
    def config_path(self) -> Path:
        return self.root / "config.toml"

    @property
    def journal_path(self) -> Path:
        return self.root / "journal.sqlite"

    @property
    def metrics_path(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def token_path(self) -> Path:
        return self.root / "token"

    @property
    def endpoint_path(self) -> Path:
        return self.root / "controller.json"

    @property
    def ending_path(self) -> Path:
        return self.root / "ending.json"

    @property
    def lock_path(self) -> Path:
        """Held by the supervisor for as long as it lives."""
        return self.root / "supervisor.lock"

    @property
    def plots(self) -> Path:
        return self.root / "plots"

    def log_path(self, process: str) -> Path:
        return self.root / "logs" / f"{process}.log"

    def failure_path(self, process: str) -> Path:
        return self.root / "failures" / f"{process}.json"

    def checkpoints(self, pipeline: str) -> Path:
        return self.root / "checkpoints" / pipeline

    def weights(self, pipeline: str) -> Path:
        return self.root / "weights" / pipeline

    def rollouts(self, pipeline: str) -> Path:
        return self.root / "rollouts" / pipeline

    def token(self) -> str:
        try:
            return self.token_path.read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            raise RunFailed(
                f"the run's token cannot be read from {self.token_path} ({error}): a run that is alive cannot go on "
                "without it; stopped and resumed, it gets a new one"
            ) from error

    def renew_token(self) -> None:
        """Makes a token where there is none; only while no process of the run is alive."""
        if not self.token_path.exists():
            write_private(self.token_path, secrets.token_urlsafe(32))

    @property
    def in_place(self) -> bool:
        """Whether the directory is still there."""
        return (self.root / "run.json").exists()

    def write_endpoint(self, endpoint: Endpoint) -> None:
        body = {"host": endpoint.host, "port": endpoint.port, "pid": endpoint.pid}
        write_atomically(self.endpoint_path, json.dumps(body))

    def read_endpoint(self) -> Endpoint | None:
        """None while no controller has announced itself."""
        body = _read_json(self.endpoint_path)
        return None if body is None else Endpoint(str(body["host"]), int(body["port"]), int(body["pid"]))

    def write_failure(self, process: str, kind: str, sentence: str, exit_code: int) -> None:
        """The failure report of a process that dies, for the supervisor to show."""
        body = {"kind": kind, "message": sentence, "exit_code": exit_code, "at": time.time()}
        write_atomically(self.failure_path(process), json.dumps(body))

    def read_failure(self, process: str) -> dict[str, Any] | None:
        return _read_json(self.failure_path(process))

    def write_ending(self, how: Ending, sentence: str = "", **details: Any) -> None:
        """How the run ended, for later readers of the directory."""
        body = {"how": how, "sentence": sentence, "at": time.time(), **details}
        write_atomically(self.ending_path, json.dumps(body))

    def read_ending(self) -> dict[str, Any] | None:
        """None while the run goes on, and for ever if it was killed."""
        return _read_json(self.ending_path)


def _no_run(root: Path) -> str:
    if not root.is_dir():
        return f"{root} is not a run directory: it does not exist. Give one such as runs/NAME-DATE-TIME"
    runs = sorted(root.glob("*/run.json"), key=lambda marker: marker.stat().st_mtime)
    hint = f". It holds {len(runs)}, the newest is {runs[-1].parent}" if runs else ""
    return f"{root} is not a run directory: it has no run.json{hint}"


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old text or the new text, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def write_private(path: Path, text: str) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(text)
