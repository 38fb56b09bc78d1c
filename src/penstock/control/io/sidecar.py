"""The heartbeat as its parent sees it: started, started again when it was killed, stopped."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec

from penstock.control.io import heartbeat
from penstock.control.io.heartbeat import Settings
from penstock.records.ids import MemberId, PipelineName
from penstock.runtime.process import how_ended
from penstock.runtime.progress import ProgressCell
from penstock.wire.messages import Heartbeat

logger = logging.getLogger(__name__)

RESTART_S = 0.5


class Sidecar:
    """The parent's side. Start it from a thread that lives as long as the process, best the main one."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._stopping = False
        self._process = self._launch()
        self._watch = threading.Thread(target=self._keep, name="heartbeat-watch", daemon=True)
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
        """Starts beating for `member` at the controller that the endpoint file names."""
        call = msgspec.to_builtins(Heartbeat(pipeline, member, progressed_ago_s=0.0))
        return cls(Settings(str(endpoint), token, call, os.getpid(), cell.fileno(), every_s))

    def _launch(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", heartbeat.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(self._settings.cell_fd,),
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended at once, which is noticed below
            process.stdin.write(msgspec.json.encode(self._settings) + b"\n")
            process.stdin.flush()  # and left open: its end is how the sidecar hears of ours
        return process

    def _keep(self) -> None:
        """A sidecar that was killed alone is started again: without it this process would pass for dead."""
        while True:
            process = self._process
            process.wait()
            time.sleep(RESTART_S)
            with self._lock:
                if self._stopping:
                    return
                logger.warning("the heartbeat %s; it is started again", how_ended(process.returncode))
                if process.stdin is not None:
                    with contextlib.suppress(OSError):
                        process.stdin.close()
                try:
                    self._process = self._launch()
                except OSError as error:  # the machine has no process to give: tried again
                    logger.warning("the heartbeat cannot be started: %s", error)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def stop(self, timeout_s: float) -> None:
        """Ends the sidecar; returns when it is gone, after `timeout_s` at most."""
        with self._lock:
            self._stopping = True
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            logger.warning("the heartbeat did not end within %g s and was killed", timeout_s)
            self._process.kill()
            self._process.wait()

    def __repr__(self) -> str:
        return f"Sidecar(pid={self.pid}, alive={self.alive})"
