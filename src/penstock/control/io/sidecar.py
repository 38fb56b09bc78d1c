"""Starts the heartbeat process of a parent, restarts it if it was killed, and stops it."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import threading
import time
from pathlib import Path

import msgspec

from penstock.control.io import heartbeat
from penstock.control.io.heartbeat import Settings
from penstock.records.ids import MemberId, PipelineName
from penstock.runtime.interpreter import python_command
from penstock.runtime.process import how_ended
from penstock.runtime.progress import ProgressCell
from penstock.wire.messages import Heartbeat

logger = logging.getLogger(__name__)

RESTART_S = 0.5


class Sidecar:
    """Handle of the heartbeat process. Start it from a thread that lives as long as the process, best the main one."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._stopping = False
        self._process = self._launch()
        self._watch = threading.Thread(target=self._restart_forever, name="heartbeat-watch", daemon=True)
        self._watch.start()

    @classmethod
    def start(
        cls,
        endpoint: Path | str,
        token: str,
        pipeline: PipelineName,
        member: MemberId,
        cell: ProgressCell,
        *,
        every_s: float,
    ) -> Sidecar:
        """Starts heartbeats for `member` to the controller in the endpoint file."""
        call = msgspec.to_builtins(Heartbeat(pipeline, member, progressed_ago_s=0.0))
        return cls(Settings(str(endpoint), token, call, os.getpid(), cell.fileno(), every_s))

    def _launch(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            python_command("-m", heartbeat.__name__),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(self._settings.cell_fd,),
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended at once; the watch thread restarts it
            process.stdin.write(msgspec.json.encode(self._settings) + b"\n")
            process.stdin.flush()  # left open: the sidecar ends when it closes
        return process

    def _restart_forever(self) -> None:
        """Restarts a sidecar that was killed: without heartbeats this process would be evicted."""
        while True:
            process = self._process
            process.wait()
            time.sleep(RESTART_S)
            with self._lock:
                if self._stopping:
                    return
                logger.warning("the heartbeat process %s; restarting it", how_ended(process.returncode))
                if process.stdin is not None:
                    with contextlib.suppress(OSError):
                        process.stdin.close()
                try:
                    self._process = self._launch()
                except OSError as error:  # for example, too many processes: retried
                    logger.warning("the heartbeat process cannot be started: %s", error)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def stop(self, timeout_s: float) -> None:
        """Ends the sidecar and waits for its end; kills it after `timeout_s`."""
        with self._lock:
            self._stopping = True
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            logger.warning("the heartbeat process did not end within %g s and was killed", timeout_s)
            self._process.kill()
            self._process.wait()

    def __repr__(self) -> str:
        return f"Sidecar(pid={self.pid}, alive={self.alive})"
