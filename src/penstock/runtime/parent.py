"""Ending with the process that started us. Imports the standard library alone: it is done before anything else."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1
WATCH_PARENT_EVERY_S = 1.0


def die_with_parent(parent_pid: int | None = None) -> None:
    """From now on this process is killed as soon as its parent ends, however the parent ends.

    `parent_pid` is who started us, when known: a parent that died before this call is then noticed too. The kernel
    counts the end of the *thread* that started us, so start children from a thread that lives as long as the process.
    """
    expected = os.getppid() if parent_pid is None else parent_pid
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"prctl(PR_SET_PDEATHSIG): {os.strerror(code)}")
    else:
        watch_parent(expected)
    if os.getppid() != expected:
        os.kill(os.getpid(), signal.SIGKILL)


def watch_parent(expected: int) -> None:
    """The same by looking every second: for processes that cannot know which thread of their parent started them."""
    _signal_without(expected, signal.SIGKILL)


def stop_with_parent(expected: int) -> None:
    """From now on this process is interrupted, as by Ctrl-C, once its parent has ended."""
    _signal_without(expected, signal.SIGINT)


def _signal_without(parent: int, number: signal.Signals) -> None:
    threading.Thread(target=_watch_parent, args=(parent, number), name="parent-watch", daemon=True).start()


def _watch_parent(expected: int, number: signal.Signals) -> None:
    while os.getppid() == expected:
        time.sleep(WATCH_PARENT_EVERY_S)
    os.kill(os.getpid(), number)
