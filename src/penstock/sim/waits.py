"""Checks that every wait has a deadline: a timer ends each wait of a live process, except the idle waits in `IDLE`.

A task waits without a deadline if it awaits no other task, no work in a thread, and no future that a timer of the loop
will settle or cancel. Each task is checked, so a task that awaits another needs no deadline. The controller's diagnosis
covers work in threads: it names a process that makes no progress.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from types import FrameType
from typing import Any

from penstock.sim.loop import SimTask, VirtualLoop

FAR_S = 3600.0
"""A timer further away does not count as a deadline."""
IDLE: dict[str, str] = {
    "runtime.shutdown.ShutdownSignal.wait": "for a signal",
    "roles.controller.until_stopped.<locals>.stop_on_failure": "for the failure of the run",
    "control.io.service.ControlService._execute_instructions": "for something to do",
    "train.publish.Publishing.run": "for a version, which the training loop offers",
    "rollout.io.runner.Runner._wait_for_event": "for its hooks and its calls, each of which has a deadline",
    "rollout.io.generation.Generation.over": "for the end of the run, which its lease loop reports",
    "launch.supervisor.Supervisor.run": "for the end of the run, which its tasks watch",
    "launch.simulated._PlacedProcess.wait": "for the end of a process, which the operating system reports",
    "launch.simulated._Placer.run": "simulated: nothing to do",
    "sim.system.NoLag.run": "simulated: nothing to do",
}
"""By innermost function of this package: why it may wait during the whole lifetime of its process."""


class Waits:
    """Records since when each task has awaited the same future."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._since: dict[int, tuple[Any, float]] = {}

    def unbounded(self, longer_than_s: float) -> list[tuple[str, str, float]]:
        """Waits without a deadline for longer than that: process, place, and seconds."""
        found: list[tuple[str, str, float]] = []
        now, since = self._loop.time(), self._since
        futures, tasks = self._with_timers()
        seen: dict[int, tuple[Any, float]] = {}
        for task in asyncio.all_tasks(self._loop):
            awaited = getattr(task, "_fut_waiter", None)
            if not isinstance(task, SimTask) or task.process is None or task.process.state != "running":
                continue
            if awaited is None or isinstance(awaited, asyncio.Task) or task in tasks or awaited in futures:
                continue
            before = since.get(task.number)
            at = before[1] if before is not None and before[0] is awaited else now
            seen[task.number] = (awaited, at)
            if now - at > longer_than_s and not _is_offloaded(awaited):
                place = _place(task)
                if place and place not in IDLE:
                    found.append((task.process.name, place, now - at))
        self._since = seen
        return found

    def _with_timers(self) -> tuple[set[Any], set[Any]]:
        """Futures that a timer settles, and tasks that a timer cancels."""
        futures: set[Any] = set()
        tasks: set[Any] = set()
        for timer in self._loop._scheduled:  # type: ignore[attr-defined]
            if timer.cancelled() or timer.when() > self._loop.time() + FAR_S:
                continue
            futures.update(one for one in timer._args if isinstance(one, asyncio.Future))
            owner = getattr(timer._callback, "__self__", None)
            if isinstance(owner, asyncio.Timeout):
                tasks.add(owner._task)  # type: ignore[attr-defined]
            elif owner is not None and owner is not self._loop and hasattr(owner, "__dict__"):
                futures.update(one for one in vars(owner).values() if isinstance(one, asyncio.Future))
        return futures, tasks


def _is_offloaded(awaited: asyncio.Future[Any]) -> bool:
    for callback, _ in awaited._callbacks or ():  # type: ignore[attr-defined]
        for cell in getattr(callback, "__closure__", None) or ():
            if isinstance(cell.cell_contents, concurrent.futures.Future):
                return True
    return False


def _place(task: asyncio.Task[Any]) -> str:
    """The innermost function of this package in which a task waits; nothing for waits on several tasks."""
    coroutine: Any = task.get_coro()
    frame: FrameType | None = None
    place = getattr(coroutine, "__qualname__", "?")
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is not None:
            module = frame.f_globals.get("__name__", "")
            if module.startswith("penstock."):
                place = f"{module.removeprefix('penstock.')}.{frame.f_code.co_qualname}"
            elif frame.f_code.co_name in ("_wait", "__aexit__") and module in ("asyncio.tasks", "asyncio.taskgroups"):
                return ""  # for tasks, each of which is checked separately
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    return place
