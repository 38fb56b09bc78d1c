"""What runs on a node of a cluster: one process of the run, below an actor that watches it.

The role is a child process and not the actor itself: it keeps its own loop, signals, threads and exit code, is the same
process that the local launcher starts, and dies with the actor (the kernel sees to that), however the actor's end came.
Nothing here needs Ray: the classes and functions are made remote where they are used.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import penstock
from penstock.errors import ConfigError, LocalProtocolError
from penstock.launch.processes import ProcessSpec, command, environment
from penstock.payload.io.leftovers import sweep, sweep_dead
from penstock.runtime.parent import watch_parent
from penstock.runtime.process import kill_tree
from penstock.runtime.rundir import RunDir, write_atomically

LOG_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Belongings:
    """What a process needs of the run directory where that cannot be seen. Holds the run's secret: never logged."""

    run_id: str
    files: dict[str, str] = field(repr=False)


@dataclass(frozen=True, slots=True)
class StartOrder:
    """One life of a process."""

    spec: ProcessSpec
    member: str
    session: str
    host: str
    """The address to be reached at from other machines; empty: stay on loopback."""
    gpus: int
    extra_path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LastSeen:
    """The end of a process, with the failure report on its node."""

    exit_code: int
    failure_report: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Survey:
    """What a node says of itself."""

    version: str
    sees_directory: bool


def survey_node(run_root: str, run_id: str) -> Survey:
    """Looks whether processes of the run can live here, and clears away what dead runs left."""
    sweep_dead()
    return Survey(penstock.__version__, _sees(Path(run_root), run_id) is not None)


def clear_node(run_id: str) -> None:
    """Removes all that the run has on this node outside of its directory. Call when none of its processes lives."""
    sweep(run_id)
    for folder in Path(tempfile.gettempdir()).glob(f"{_prefix(run_id)}*"):
        if folder.lstat().st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)


class RoleHost:
    """Hosts one process of the run, one life after the other. Several of its methods may run at once."""

    def __init__(self) -> None:
        watch_parent(os.getppid())  # Ray looks too, but takes a raylet that is a zombie for alive
        self._run: RunDir | None = None
        self._shares = True
        self._child: subprocess.Popen[bytes] | None = None
        self._started = threading.Event()
        self._ended = threading.Event()
        self._problem: OSError | None = None

    def open(self, run_root: str, run_id: str) -> bool:
        """Whether the run directory is seen here; otherwise `settle` must follow."""
        self._run = _sees(Path(run_root), run_id)
        return self._run is not None

    def settle(self, belongings: Belongings) -> str:
        """Makes a run directory of its own for the process: where it keeps its logs until they are fetched."""
        root = Path(tempfile.mkdtemp(prefix=_prefix(belongings.run_id)))  # readable by its owner only
        for folder in ("logs", "failures", "weights", "rollouts"):
            (root / folder).mkdir()
        for name, text in belongings.files.items():
            (root / name).write_text(text, encoding="utf-8")
        self._run, self._shares = RunDir.open(root), False
        return str(root)

    def start(self, order: StartOrder) -> int:
        """Starts the process; its pid."""
        missing = [path for path in order.extra_path if not Path(path).is_dir()]
        if missing:
            raise ConfigError(f"run.extra_path {missing[0]!r} is not a directory on node {os.uname().nodename}")
        run = self._open_run()
        run.failure_path(order.spec.name).unlink(missing_ok=True)
        self._started.clear()
        self._ended.clear()
        self._problem = None
        # The kernel ends the child with the thread that started it, so that thread stays until the child has ended.
        threading.Thread(target=self._live, args=(run, order), name=order.spec.name, daemon=True).start()
        self._started.wait()
        if self._problem is not None:
            raise self._problem
        return self._running_child().pid

    def _live(self, run: RunDir, order: StartOrder) -> None:
        spec = order.spec
        hidden = {} if order.gpus else {"CUDA_VISIBLE_DEVICES": ""}  # a process without GPUs must not find one
        try:
            with run.log_path(spec.name).open("ab") as output:
                self._child = subprocess.Popen(
                    command(spec, run.root, order.member, order.session, parent=os.getpid(), host=order.host),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=dict(environment(spec, order.extra_path)) | hidden,
                    start_new_session=True,
                )
        except OSError as error:
            self._problem = error
            return
        finally:
            self._started.set()
        self._child.wait()
        self._ended.set()

    def wait(self, name: str) -> LastSeen:
        """Returns when the process has ended."""
        self._ended.wait()
        code = self._running_child().returncode
        return LastSeen(code, None if self._shares else self._open_run().read_failure(name))

    def ask_to_end(self) -> None:
        if not self._ended.is_set():
            self._running_child().send_signal(signal.SIGTERM)

    def kill_tree(self, timeout_s: float) -> None:
        kill_tree(self._running_child().pid, timeout_s)

    def exchange(self, name: str, endpoint: str | None, log_offset: int) -> bytes:
        """Hears where the controller listens, and hands over what the process has logged since `log_offset`."""
        run = self._open_run()
        if endpoint is None:
            run.endpoint_path.unlink(missing_ok=True)
        else:
            write_atomically(run.endpoint_path, endpoint)
        path = run.log_path(name)
        if not path.exists():
            return b""
        with path.open("rb") as log:
            log.seek(log_offset)
            return log.read(LOG_CHUNK_BYTES)

    def _open_run(self) -> RunDir:
        if self._run is None:
            raise LocalProtocolError("a role host was used before it had a run directory")
        return self._run

    def _running_child(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            raise LocalProtocolError("a role host was asked about a process that it has not started")
        return self._child


def _sees(root: Path, run_id: str) -> RunDir | None:
    """The run directory if it is this very run's, and can be written."""
    try:
        run = RunDir.open(root)
    except ConfigError:
        return None
    return run if run.run_id == run_id and os.access(run.root, os.W_OK) else None


def _prefix(run_id: str) -> str:
    return f"penstock-{run_id}-"
