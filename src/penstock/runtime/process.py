"""Operating-system processes: whether a process is still the same one, ending a tree, exit codes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import psutil

from penstock.runtime.parent import MEMBER_VARIABLE

POLL_S = 0.01
PR_SET_CHILD_SUBREAPER = 36
GPUS_VARIABLE = "PENSTOCK_GPUS"
"""Number of GPUs of the machine, in the environment of processes that see only their own."""


MAX_FILES = 1 << 16
"""Enough for the files of large models. Some programs that a process starts take long if it may open many more."""


def raise_file_limit() -> None:
    """Raises the limit of open files, often 1,024, to the hard limit, `MAX_FILES` at most; children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def start_time(pid: int) -> float | None:
    """When the process started (in the kernel's unit); None if there is no such process.

    Together with the pid this identifies one process: a reused pid has another start time.
    """
    if sys.platform == "linux":
        try:
            status = Path(f"/proc/{pid}/stat").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return float(status.rpartition(b")")[2].split()[19])  # the name in parentheses may contain anything
    try:
        return psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return None


def is_alive(pid: int, started: float | None = None) -> bool:
    """True while this process runs; a zombie has ended."""
    if started is not None and start_time(pid) != started:
        return False
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill_tree(pid: int, timeout_s: float) -> list[int]:
    """Ends the process and its descendants: SIGTERM, then SIGKILL for those alive after half of the time.

    Returns the pids that were still alive at the end (none, unless the kernel holds them). Exit codes are left to
    the real parent. Blocks; call it through `Offload` from a loop.
    """
    begun = time.monotonic()
    found: dict[int, psutil.Process] = {}
    signalled: set[int] = set()
    number = signal.SIGTERM
    while True:
        for process in _tree(pid, found):
            found[process.pid] = process
        alive = [process for process in found.values() if _runs(process)]
        if not alive:
            return []
        passed_s = time.monotonic() - begun
        if passed_s > timeout_s:
            return sorted(process.pid for process in alive)
        if passed_s > timeout_s / 2 and number == signal.SIGTERM:
            number = signal.SIGKILL
            signalled.clear()
        for process in alive:
            if process.pid not in signalled:
                signalled.add(process.pid)
                try:
                    process.send_signal(number)
                except psutil.NoSuchProcess:
                    continue
        time.sleep(POLL_S)


def kill_left_behind(leader: int, member: str, timeout_s: float) -> list[int]:
    """Kills the processes that an ended process left running, within `timeout_s`; returns their pids.

    They are found by the session that it led, and by the environment that descendants inherit: a double fork and a new
    session change the parent of a process, but not its environment.
    """

    def was_left(process: psutil.Process) -> bool:
        return os.getsid(process.pid) == leader or process.environ().get(MEMBER_VARIABLE) == member

    return _kill_all(lambda: [one for one in psutil.process_iter() if one.pid != leader], was_left, timeout_s)


def kill_of_earlier_starts(prefix: str, timeout_s: float) -> list[int]:
    """Kills the processes whose member begins so; returns their pids. They outlived a supervisor that was killed."""
    return _kill_all(
        psutil.process_iter, lambda one: one.environ().get(MEMBER_VARIABLE, "").startswith(prefix), timeout_s
    )


def adopt_orphans() -> None:
    """From now on, descendants whose parent has ended become children of this process, and not of init."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(code)}")


def reap_adopted(known: Collection[int]) -> None:
    """Removes adopted orphans that have ended from the kernel's table. `known` are children that others wait for."""
    for process in _adopted(known):
        if not _runs(process):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


def kill_adopted(known: Collection[int], timeout_s: float) -> list[int]:
    """Kills the adopted orphans and their descendants, however they were detached; returns their pids."""
    killed = _kill_all(lambda: _adopted(known), lambda one: True, timeout_s)
    reap_adopted(known)
    return killed


def _adopted(known: Collection[int]) -> list[psutil.Process]:
    """Children of another session that this process did not start."""
    ours, found = os.getsid(0), []
    for child in psutil.Process().children():
        with contextlib.suppress(ProcessLookupError):
            if child.pid not in known and os.getsid(child.pid) != ours:
                found.append(child)
    return found


def _kill_all(
    listed: Callable[[], Iterable[psutil.Process]], chosen: Callable[[psutil.Process], bool], timeout_s: float
) -> list[int]:
    """Kills the chosen ones until none is left, or for `timeout_s`: they may start others meanwhile."""

    def to_kill(process: psutil.Process) -> bool:
        try:
            return process.pid != os.getpid() and _runs(process) and chosen(process)
        except (psutil.Error, OSError):  # it has ended, or belongs to another user
            return False

    deadline = time.monotonic() + timeout_s
    killed: set[int] = set()
    while found := [one for one in listed() if to_kill(one)]:
        for process in found:
            killed.add(process.pid)
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process.kill()
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    return sorted(killed)


def _tree(pid: int, found: dict[int, psutil.Process]) -> list[psutil.Process]:
    """The process, its descendants, and descendants of those already found whose parent has ended."""
    roots = [*found.values()]
    if not roots:
        try:
            roots = [psutil.Process(pid)]
        except psutil.NoSuchProcess:
            return []
    tree: list[psutil.Process] = []
    for root in roots:
        try:
            tree += [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    return tree


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def host_id() -> str:
    """Equal for two processes if and only if they can map the same named shared memory."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.stat('/dev/shm').st_dev}"  # containers of one machine each have their own
    except OSError:
        return f"{os.uname().nodename}:{psutil.boot_time():.0f}"


def exit_cause(exit_code: int) -> str:
    """Why a child ended: `killed by SIGKILL`, or `exit code 3`."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:  # a real-time signal has no name
        return f"killed by signal {-exit_code}"


def how_ended(exit_code: int) -> str:
    """The cause as a predicate, to follow the name of the child: `was killed by SIGKILL`, `ended with exit code 3`."""
    return f"{'was' if exit_code < 0 else 'ended with'} {exit_cause(exit_code)}"
