"""The part of the Ray launcher that runs on a node: an actor that starts and watches one process of the run.

The role is a child process and not the actor itself: it keeps its own loop, signals, threads and exit code, is the same
process that the local launcher starts, and the kernel kills it when the actor ends for any reason.
This module does not import Ray: its classes and functions are made remote where they are used.
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
from penstock.engines.vllm.leftovers import homes_in, remove_leftovers
from penstock.errors import ConfigError, LocalProtocolError
from penstock.launch.processes import ProcessSpec, command, environment
from penstock.payload.io.leftovers import sweep, sweep_dead
from penstock.runtime.parent import watch_parent
from penstock.runtime.process import kill_left_behind, kill_tree
from penstock.runtime.run_token import handed_over
from penstock.runtime.rundir import RunDir, write_atomically

LOG_CHUNK_BYTES = 1 << 20
LEFT_BEHIND_S = 4.0


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Files that a process needs where the run directory is not accessible."""

    run_id: str
    files: dict[str, str] = field(repr=False)


@dataclass(frozen=True, slots=True)
class StartOrder:
    """How to start one incarnation of a process."""

    spec: ProcessSpec
    member: str
    session: str
    host: str
    """The address for other machines; empty: listen on loopback only."""
    gpus: int
    extra_path: tuple[str, ...]
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """The exit of a process, with the failure report on its node."""

    exit_code: int
    failure_report: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Survey:
    """The properties of a node that a run depends on."""

    version: str
    sees_directory: bool


def survey_node(run_root: str, run_id: str) -> Survey:
    """Checks whether processes of the run can run here, and removes leftovers of dead runs."""
    sweep_dead()
    return Survey(penstock.__version__, _accessible_run(Path(run_root), run_id) is not None)


def clear_node(run_id: str) -> None:
    """Removes files of the run on this node, except for its directory. Call when none of its processes is alive."""
    sweep(run_id)
    for folder in Path(tempfile.gettempdir()).glob(f"{_prefix(run_id)}*"):
        if folder.lstat().st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)


class RoleHost:
    """Hosts one process of the run, one incarnation after the other. Its methods may run concurrently."""

    def __init__(self) -> None:
        watch_parent(os.getppid())  # Ray checks too, but treats a zombie raylet as alive
        self._run: RunDir | None = None
        self._shares = True
        self._child: subprocess.Popen[bytes] | None = None
        self._started = threading.Event()
        self._ended = threading.Event()
        self._problem: OSError | None = None

    def open(self, run_root: str, run_id: str) -> bool:
        """Whether the run directory is accessible here; if not, call `create_directory` next."""
        self._run = _accessible_run(Path(run_root), run_id)
        return self._run is not None

    def create_directory(self, run_files: RunFiles) -> str:
        """Creates a temporary run directory for the process; its logs stay there until they are fetched."""
        root = Path(tempfile.mkdtemp(prefix=_prefix(run_files.run_id)))  # readable by its owner only
        for folder in ("logs", "failures", "weights", "rollouts"):
            (root / folder).mkdir()
        for name, text in run_files.files.items():
            (root / name).write_text(text, encoding="utf-8")
        self._run, self._shares = RunDir.open(root), False
        return str(root)

    def start(self, order: StartOrder) -> int:
        """Starts the process and returns its pid."""
        missing = [path for path in order.extra_path if not Path(path).is_dir()]
        if missing:
            raise ConfigError(f"run.extra_path {missing[0]!r} is not a directory on node {os.uname().nodename}")
        run = self._open_run()
        run.failure_path(order.spec.name).unlink(missing_ok=True)
        self._started.clear()
        self._ended.clear()
        self._problem = None
        # The kernel kills the child when the thread that started it ends, so that thread waits for the child.
        threading.Thread(target=self._run_child, args=(run, order), name=order.spec.name, daemon=True).start()
        self._started.wait()
        if self._problem is not None:
            raise self._problem
        return self._running_child().pid

    def _run_child(self, run: RunDir, order: StartOrder) -> None:
        spec = order.spec
        hidden = {} if order.gpus else {"CUDA_VISIBLE_DEVICES": ""}  # a process without GPUs must not see one
        try:
            with run.log_path(spec.name).open("ab") as output, handed_over(order.token) as token:
                begun = command(spec, run.root, order.member, order.session, parent=os.getpid(), host=order.host)
                self._child = subprocess.Popen(
                    [*begun, "--token-fd", str(token)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=environment(spec, order.extra_path, order.member) | hidden,
                    pass_fds=(token,),
                    start_new_session=True,
                )
        except OSError as error:
            self._problem = error
            return
        finally:
            self._started.set()
        self._child.wait()
        kill_left_behind(self._child.pid, order.member, LEFT_BEHIND_S)
        remove_leftovers(homes_in(run.root, spec.name))
        self._ended.set()

    def wait(self, name: str) -> ProcessExit:
        """Returns when the process has ended."""
        self._ended.wait()
        code = self._running_child().returncode
        return ProcessExit(code, None if self._shares else self._open_run().read_failure(name))

    def terminate(self) -> None:
        if not self._ended.is_set():
            self._running_child().send_signal(signal.SIGTERM)

    def kill_tree(self, timeout_s: float) -> None:
        kill_tree(self._running_child().pid, timeout_s)

    def exchange(self, name: str, endpoint: str | None, log_offset: int) -> bytes:
        """Writes the address of the controller, and returns the log of the process from `log_offset` on."""
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
            raise LocalProtocolError("a role host has not started its process")
        return self._child


def _accessible_run(root: Path, run_id: str) -> RunDir | None:
    """The run directory, if it belongs to this run and is writable; otherwise None."""
    try:
        run = RunDir.open(root)
    except ConfigError:
        return None
    return run if run.run_id == run_id and os.access(run.root, os.W_OK) else None


def _prefix(run_id: str) -> str:
    return f"penstock-{run_id}-"
