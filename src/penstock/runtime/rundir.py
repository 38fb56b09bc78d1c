"""The run directory: all files of a run, through which its processes also find each other.

<dir>/<name>-<date>-<time>/
  run.json         run id, format, time and Penstock version of its creation
  config.toml      the resolved configuration
  journal.sqlite   all events, in order
  metrics.jsonl    one line per step and pipeline, and one per process every few seconds
  logs/            one file per process; failures/ holds the failure reports of those that died
  checkpoints/     per pipeline, from which `--resume` starts
  weights/         per pipeline, the published versions that engines load
  rollouts/        per pipeline, readable samples
  plots/           reward curves
  token            the run's secret, readable by its owner only
  controller.json  current address of the controller
  code/            functions and classes that were passed to `penstock.train`, as a module
  ending.json      how the run ended; absent while it runs, and if it was killed
  ray.json         the Ray cluster of the run, if it was started on one
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
"""Exit code if the disk of the run directory is full: there may be no space for a failure report."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of the controller. A restart may change it: read it again after a lost connection."""

    host: str
    port: int
    pid: int

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


class RunDir:
    """Paths and small files of one run, made by `create` or `open`."""

    def __init__(self, root: Path, run_id: RunId) -> None:
        self.root = root
        self.run_id = run_id

    @classmethod
    def create(cls, parent: Path, name: str, config_toml: str, version: str) -> RunDir:
        """Creates a directory with a new run id and token; only its owner can read the token."""
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
        """Opens an existing run directory. Raises `ConfigError` for one of another format."""
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
        """Deletes the directory of a run that never started."""
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
        """Locked by the supervisor while it is alive."""
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
                f"the run's token cannot be read from {self.token_path} ({error}): a live run cannot continue "
                "without it; stop it and resume it to create a new token"
            ) from error

    def renew_token(self) -> None:
        """Creates a token if there is none. Call only while no process of the run is alive."""
        if not self.token_path.exists():
            write_private(self.token_path, secrets.token_urlsafe(32))

    @property
    def in_place(self) -> bool:
        """Whether the directory still exists."""
        return (self.root / "run.json").exists()

    def is_supervised(self) -> bool:
        """Whether a supervisor on this machine holds the lock of the run.

        Reads the kernel's list of locks: taking the lock, even briefly, could make a starting supervisor fail.
        """
        try:
            inode = self.lock_path.stat().st_ino
            locks = [line.split() for line in Path("/proc/locks").read_text(encoding="ascii").splitlines()]
        except OSError:
            return False
        # For instance: 4: FLOCK ADVISORY WRITE 1234 08:01:5678 0 EOF
        return any(lock[1] == "FLOCK" and lock[5].endswith(f":{inode}") for lock in locks if len(lock) > 5)

    def write_endpoint(self, endpoint: Endpoint) -> None:
        body = {"host": endpoint.host, "port": endpoint.port, "pid": endpoint.pid}
        write_atomically(self.endpoint_path, json.dumps(body))

    def read_endpoint(self) -> Endpoint | None:
        """None until the controller has written its address."""
        body = _read_json(self.endpoint_path)
        return None if body is None else Endpoint(str(body["host"]), int(body["port"]), int(body["pid"]))

    def write_failure(self, process: str, kind: str, sentence: str, exit_code: int) -> None:
        """Writes the failure report of a process, which the supervisor shows."""
        body = {"kind": kind, "message": sentence, "exit_code": exit_code, "at": time.time()}
        write_atomically(self.failure_path(process), json.dumps(body))

    def read_failure(self, process: str) -> dict[str, Any] | None:
        return _read_json(self.failure_path(process))

    def write_ending(self, how: Ending, sentence: str = "", **details: Any) -> None:
        """Records how the run ended."""
        body = {"how": how, "sentence": sentence, "at": time.time(), **details}
        write_atomically(self.ending_path, json.dumps(body))

    def read_ending(self) -> dict[str, Any] | None:
        """None while the run is live, and if it was killed."""
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
    """Replaces the file: readers see the old text or the new text, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def write_private(path: Path, text: str) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(text)
