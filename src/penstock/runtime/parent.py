"""Ending with the parent process. Imports only the standard library, since it is used before all other imports."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1
WATCH_PARENT_EVERY_S = 1.0
MEMBER_VARIABLE = "PENSTOCK_MEMBER"
"""Inherited by all descendants of a process of a run, which are found by it when the process has ended."""


def die_with_parent(parent_pid: int | None = None) -> None:
    """After this call, this process is killed as soon as its parent ends, for any reason.

    With `parent_pid`, a parent that died before this call is detected too. The kernel reacts to the end of the *thread*
    that started this process, so start children in a thread that lives as long as the parent.
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
    """The same by polling every second: for processes that may be started by a thread that ends before the parent."""
    _signal_when_orphaned(expected, signal.SIGKILL)


def stop_with_parent(expected: int) -> None:
    """Sends this process SIGINT, as Ctrl-C does, once its parent has ended."""
    _signal_when_orphaned(expected, signal.SIGINT)


def _signal_when_orphaned(parent: int, number: signal.Signals) -> None:
    threading.Thread(target=_watch_parent, args=(parent, number), name="parent-watch", daemon=True).start()


def _watch_parent(expected: int, number: signal.Signals) -> None:
    while os.getppid() == expected:
        time.sleep(WATCH_PARENT_EVERY_S)
    os.kill(os.getpid(), number)
