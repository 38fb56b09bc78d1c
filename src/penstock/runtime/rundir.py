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
  origin.json      the mark of the user who made the run
  controller.json  current address of the controller
  code/            functions and classes that were passed to `penstock.train`, as a module
  ending.json      how the run ended; absent while it runs, and if it was killed
  ray.json         the Ray cluster of the run, if it was started on one
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

from penstock.errors import ConfigError, RunFailed
from penstock.records.ids import RunId
from penstock.runtime.beneath import check_beneath, files_beneath, open_beneath, read_beneath, write_beneath
from penstock.runtime.origin import is_marked, mark
from penstock.runtime.run_token import checked, kept, kept_for_commands, new_token

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
    """Paths and small files of one run, made by `create` or `open`.

    An opened directory may come from a stranger: commands other than its own processes read and write its files by
    `open_file`, `read`, `files` and `write`, which follow no link.
    """

    def __init__(self, root: Path, run_id: RunId) -> None:
        self.root = root
        self.run_id = run_id
        self._token = ""

    @classmethod
    def create(cls, parent: Path, name: str, config_toml: str, version: str) -> RunDir:
        """Creates a directory with a new run id, for its owner only. The token is in memory."""
        stamp = time.strftime("%Y%m%d-%H%M%S")
        root = parent / f"{name}-{stamp}"
        try:
            parent.mkdir(parents=True, exist_ok=True)
            for count in range(2, 100):
                with contextlib.suppress(FileExistsError):
                    root.mkdir(mode=0o700)
                    break
                root = parent / f"{name}-{stamp}-{count}"
            else:
                raise FileExistsError(f"its names are taken in {parent}")
        except OSError as error:
            raise ConfigError(f"cannot make the run directory {root}: {error}; choose another run.dir") from error
        run = cls(root.resolve(), RunId(secrets.token_hex(8)))
        run.hold_token(new_token())
        try:
            for folder in ("logs", "failures", "checkpoints", "weights", "rollouts", "plots"):
                (run.root / folder).mkdir()
            run.config_path.write_text(config_toml, encoding="utf-8")
            made = {"run_id": run.run_id, "format": FORMAT, "penstock": version, "made_at": time.time(), "name": name}
            write_atomically(run.root / "run.json", json.dumps(made, indent=2))
            mark(run.root, run.run_id)
        except OSError as error:
            raise RunFailed(f"cannot write to the run directory {run.root}: {error}") from error
        return run

    @classmethod
    def open(cls, root: Path) -> RunDir:
        """Opens an existing run directory. Raises `ConfigError` for one of another format."""
        marker = root / "run.json"
        try:
            made = json.loads(read_beneath(root, marker))
            run_id, found = RunId(str(made["run_id"])), made["format"]
            if not re.fullmatch(r"[\w-]{1,64}", run_id, re.ASCII):  # it becomes a part of names
                raise ValueError(f"its run id is {run_id!r}")
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

    def write_config(self, config_toml: str) -> None:
        """Replaces the configuration and marks the run as this user's."""
        write_atomically(self.config_path, config_toml)
        mark(self.root, self.run_id)

    def require_own(self, trusts: bool, why: str) -> None:
        """Raises `ConfigError` if another user made the run, unless this one `trusts` it. `why` ends the sentence that
        begins with the run."""
        if not trusts and not self.is_own:
            raise ConfigError(
                f"{self.root} was made by another user or on another machine, and {why}. Read {self.config_path}; if "
                "you trust the run, add --trust"
            )

    @property
    def is_own(self) -> bool:
        """Whether this user made the run: only then it may name code that is run without asking."""
        return is_marked(self.root, self.run_id)

    def open_file(self, path: Path) -> BinaryIO:
        """Opens a file of the run for reading. Raises `OSError` for a link, and for a file in a linked folder."""
        return open_beneath(self.root, path)

    def read(self, path: Path) -> bytes:
        return read_beneath(self.root, path)

    def files(self, pattern: str) -> list[Path]:
        """The files of the run that match, such as `logs/*.log`; links are left out."""
        return files_beneath(self.root, pattern)

    def write(self, path: Path, content: bytes) -> None:
        """Replaces a file of the run, and a link with its name. Makes its folder if there is none."""
        write_beneath(self.root, path, content)

    def check(self, *paths: Path) -> None:
        """Raises `OSError` for links: for libraries that open these paths themselves."""
        check_beneath(self.root, *paths)

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
        """The secret of the run's processes: received at their start, or kept for this user's commands."""
        return self._token or kept(self.root, self.run_id)

    def hold_token(self, token: str) -> None:
        self._token = checked(token, "the run's processes")

    @contextlib.contextmanager
    def with_new_token(self) -> Iterator[None]:
        """A new token for one start of the run. Enter only while no process of the run is alive."""
        self.hold_token(new_token())
        with kept_for_commands(self._token, self.root, self.run_id):
            yield

    @property
    def in_place(self) -> bool:
        """Whether the directory still exists."""
        return (self.root / "run.json").exists()

    def is_supervised(self) -> bool:
        """Whether a supervisor on this machine holds the lock of the run."""
        return bool(self._lock_holders())

    def supervisor_pid(self) -> int | None:
        """The supervisor on this machine: the process that the lock file names, if it also holds the lock."""
        try:
            with self.open_file(self.lock_path) as file:
                pid = int(file.read(32))
        except (OSError, ValueError):
            return None
        return pid if pid in self._lock_holders() else None

    def _lock_holders(self) -> list[int]:
        """Processes with a lock on the lock file.

        Reads the kernel's list of locks: taking the lock, even briefly, could make a starting supervisor fail.
        """
        try:
            with self.open_file(self.lock_path) as file:
                inode = os.fstat(file.fileno()).st_ino
            locks = [line.split() for line in Path("/proc/locks").read_text(encoding="ascii").splitlines()]
        except OSError:
            return []
        # For instance: 4: FLOCK ADVISORY WRITE 1234 08:01:5678 0 EOF
        flocks = [lock for lock in locks if len(lock) > 5 and lock[1] == "FLOCK"]
        return [int(lock[4]) for lock in flocks if lock[5].endswith(f":{inode}")]

    def write_endpoint(self, endpoint: Endpoint) -> None:
        body = {"host": endpoint.host, "port": endpoint.port, "pid": endpoint.pid}
        write_atomically(self.endpoint_path, json.dumps(body))

    def read_endpoint(self) -> Endpoint | None:
        """None until the controller has written its address."""
        body = self._read_json(self.endpoint_path)
        return None if body is None else Endpoint(str(body["host"]), int(body["port"]), int(body["pid"]))

    def write_failure(self, process: str, kind: str, sentence: str, exit_code: int) -> None:
        """Writes the failure report of a process, which the supervisor shows."""
        body = {"kind": kind, "message": sentence, "exit_code": exit_code, "at": time.time()}
        write_atomically(self.failure_path(process), json.dumps(body))

    def read_failure(self, process: str) -> dict[str, Any] | None:
        return self._read_json(self.failure_path(process))

    def write_ending(self, how: Ending, sentence: str = "", **details: Any) -> None:
        """Records how the run ended."""
        body = {"how": how, "sentence": sentence, "at": time.time(), **details}
        write_atomically(self.ending_path, json.dumps(body))

    def read_ending(self) -> dict[str, Any] | None:
        """None while the run is live, and if it was killed."""
        body = self._read_json(self.ending_path)
        if body is not None and body.get("how") not in get_args(Ending):
            raise ConfigError(f"{self.ending_path} is damaged: `how` is {body.get('how')!r}; delete the file")
        return body

    def _read_json(self, path: Path) -> dict[str, Any] | None:
        try:
            body = json.loads(self.read(path))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ConfigError(f"{path} is damaged: {error}; delete the file") from error
        if not isinstance(body, dict):
            raise ConfigError(f"{path} is damaged: it holds no object; delete the file")
        return body


def require_own_configuration(path: Path, trusts: bool) -> None:
    """The same for the configuration of a run; any other is the user's own to run."""
    try:
        run = RunDir.open(path.parent)
    except ConfigError:
        return
    run.require_own(trusts, "its configuration names code that would be run")


def _no_run(root: Path) -> str:
    if not root.is_dir():
        return f"{root} is not a run directory: it does not exist. Give one such as runs/NAME-DATE-TIME"
    runs = sorted(root.glob("*/run.json"), key=lambda marker: marker.stat().st_mtime)
    hint = f". It holds {len(runs)}, the newest is {runs[-1].parent}" if runs else ""
    return f"{root} is not a run directory: it has no run.json{hint}"


def write_atomically(path: Path, text: str) -> None:
    """Replaces the file: readers see the old text or the new text, never a part."""
    write_beneath(path.parent, path, text.encode("utf-8"))
