"""A program in a process group of its own, bounded in time and output. When `run` returns, its group has ended."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, NamedTuple

KEPT_BYTES = 16 << 10
"""Kept of each output, from its end."""
TERMINATE_S = 2.0
"""Between SIGTERM and SIGKILL."""
LOOK_EVERY_S = 0.25
"""While another process holds the outputs open: how often the program itself is looked at."""
REAP_S = 5.0
READ_BYTES = 64 << 10
PIPE_READS = 16
"""Reads that empty a pipe."""


class Ended(NamedTuple):
    exit_code: int
    output: str
    errors: str


class Program:
    """One run of a program. `cancel` and `kill` may be called from any thread."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        # Its own group, but the worker's session: what its descendants leave behind is found by the session.
        self._process = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
        )
        self._signalling = threading.Lock()
        self._cancelled = False
        self._group_ended = False
        self._kept: dict[int, bytes] = {}
        self._open = selectors.DefaultSelector()
        for pipe in self._pipes():
            os.set_blocking(pipe.fileno(), False)
            self._kept[pipe.fileno()] = b""
            self._open.register(pipe, selectors.EVENT_READ)

    def run(self, timeout_s: float) -> Ended:
        """Blocks until the program ends. Raises TimeoutError if it is late, InterruptedError if it was cancelled."""
        try:
            if not self._read_until(lambda: self._process.poll() is not None, timeout_s):
                if self._cancelled:
                    raise InterruptedError("the program was cancelled")
                raise TimeoutError(f"did not end within {timeout_s:g} s and was killed")
            for _ in range(PIPE_READS):
                self._read(0.0)  # what it wrote before it ended, but not for as long as its children write
            output, errors = (self._kept[pipe.fileno()].decode(errors="replace") for pipe in self._pipes())
            return Ended(self._process.returncode, output, errors)
        finally:
            self._end_group()

    def cancel(self) -> None:
        self._cancelled = True

    def kill(self) -> None:
        """Kills the whole group now."""
        self._cancelled = True
        self._signal(signal.SIGKILL)

    def _end_group(self) -> None:
        self._signal(signal.SIGTERM)
        self._read_until(lambda: self._process.poll() is not None and not self._open.get_map(), TERMINATE_S, force=True)
        self._signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # only the kernel can hold it now
            self._process.wait(REAP_S)
        with self._signalling:
            self._group_ended = True
        self._open.close()
        for pipe in self._pipes():
            pipe.close()

    def _signal(self, number: signal.Signals) -> None:
        with self._signalling, contextlib.suppress(ProcessLookupError, PermissionError):
            if not self._group_ended:
                os.killpg(self._process.pid, number)

    def _read_until(self, over: Callable[[], bool], timeout_s: float, *, force: bool = False) -> bool:
        """Reads outputs until `over`; False at the deadline, or once it is cancelled, unless `force`."""
        deadline = time.monotonic() + timeout_s
        while not over():
            left_s = deadline - time.monotonic()
            if left_s <= 0 or (self._cancelled and not force):
                return False
            self._read(min(left_s, LOOK_EVERY_S))
        return True

    def _read(self, wait_s: float) -> None:
        """Reads once from each output that has something; waits at most `wait_s` for one."""
        if not self._open.get_map():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(wait_s)
            return
        for key, _ in self._open.select(wait_s):
            read = os.read(key.fd, READ_BYTES)
            self._kept[key.fd] = (self._kept[key.fd] + read)[-KEPT_BYTES:]
            if not read:
                self._open.unregister(key.fileobj)

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        return self._process.stdout, self._process.stderr

    def __repr__(self) -> str:
        return f"Program(pid={self._process.pid}, exit_code={self._process.returncode})"
