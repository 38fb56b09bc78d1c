"""An asyncio loop with virtual time: when nothing is ready, the clock jumps to the next timer.

Each task and callback belongs to a `Process` (or to the simulation), given by an inherited context variable. The
callbacks of a killed process never run again; those of a stopped process are held until it continues. So the real loops
of a role can be killed and stopped at any await.

Order is fixed: ready callbacks run in the order they became ready, timers by time and then in the order they were set,
and sets of tasks iterate in order of creation.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import heapq
import inspect
import itertools
import linecache
import time
import warnings
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

from penstock.errors import RunFailed
from penstock.runtime import clock
from penstock.runtime.garbage import freeze_existing_objects
from penstock.runtime.offload import Offload
from penstock.runtime.virtual_threads import Durations, VirtualThreads, name_of

_spare_what_exists = cache(freeze_existing_objects)
"""Before the first simulation: the garbage collection after each one then skips all imported objects."""

EPOCH_S = 1_700_000_000.0
"""Value of `time.time()` at the beginning."""

UNWINDINGS = 1_000
"""Rounds in which all tasks are cancelled at the end."""

State = Literal["running", "stopped", "dead", "unwinding"]


class Deadlock(RunFailed):
    """No callback is ready and no timer is set: the simulation cannot continue."""


class TooSlow(RunFailed):
    """The simulation exceeded its limit of processor time, which does not depend on the load of the machine."""


class Process:
    """A simulated operating-system process."""

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.name = name
        self.state: State = "running"
        self.started_at = loop.time()
        self.context = contextvars.copy_context()
        self.context.run(CURRENT.set, self)
        self.held: list[asyncio.Handle] = []
        self.tasks: dict[int, SimTask] = {}
        self.at_death: list[Callable[[], None]] = []
        """Clean-up by the kernel when a process ends: connections, locks, children."""
        self._loop = loop
        loop.processes.append(self)

    def __repr__(self) -> str:
        return f"<Process {self.name} {self.state}>"

    @property
    def alive(self) -> bool:
        return self.state in ("running", "stopped")

    def run(self, main: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self._loop.create_task(main, name=self.name, context=self.context)

    def kill(self) -> None:
        """SIGKILL: no callback of the process runs again."""
        if not self.alive:
            return
        self.state = "dead"
        self.held.clear()
        for clean_up in self.at_death:
            clean_up()

    def stop(self) -> None:
        """SIGSTOP."""
        if self.state == "running":
            self.state = "stopped"

    def resume(self) -> None:
        """SIGCONT: runs the callbacks that became due meanwhile."""
        if self.state != "stopped":
            return
        self.state = "running"
        held, self.held = self.held, []
        self._loop.requeue(held)

    def ended(self) -> None:
        """The process exited; its remaining tasks do not run."""
        if self.alive:
            self.kill()


CURRENT: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class _Handle(asyncio.Handle):
    __slots__ = ()

    def _run(self) -> None:
        process = self._context.get(CURRENT)  # type: ignore[attr-defined]
        if process is None or process.state == "running" or process.state == "unwinding":
            super()._run()  # type: ignore[misc]
        elif process.state == "stopped":
            process.held.append(self)


class _Timer(asyncio.TimerHandle):
    __slots__ = ("number",)
    number: int

    def __lt__(self, other: _Timer) -> bool:  # type: ignore[override]
        return (self._when, self.number) < (other._when, other.number)  # type: ignore[attr-defined]

    def _run(self) -> None:
        process = self._context.get(CURRENT)  # type: ignore[attr-defined]
        if process is None or process.state == "running" or process.state == "unwinding":
            super()._run()  # type: ignore[misc]
        elif process.state == "stopped":
            process.held.append(self)


class SimTask(asyncio.Task[Any]):
    """Hashes by number, so that sets of tasks have a deterministic order."""

    def __init__(
        self, coro: Any, *, loop: VirtualLoop, number: int, context: contextvars.Context | None = None
    ) -> None:
        self.number = number
        self.process = context.get(CURRENT) if context is not None else CURRENT.get()
        super().__init__(coro, loop=loop, context=context)
        if self.process is not None:
            self.process.tasks[number] = self
            self.add_done_callback(_forget)

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


def _forget(task: asyncio.Task[Any]) -> None:
    if isinstance(task, SimTask) and task.process is not None:
        task.process.tasks.pop(task.number, None)


class VirtualLoop(asyncio.BaseEventLoop):
    """Created by `virtual_loop`."""

    def __init__(self, durations: Durations, *, real_limit_s: float) -> None:
        super().__init__()
        self._now = 0.0
        self._numbers = itertools.count()
        self._task_numbers = itertools.count()
        self._selector = self
        self._real_until = time.process_time() + real_limit_s
        self._real_limit_s = real_limit_s
        self.iterations = 0
        self.processes: list[Process] = []
        """All processes, also ended ones: the tasks of a killed process must not be collected while others run."""
        self.threads = VirtualThreads(self, durations)
        self.set_task_factory(self._make_task)  # type: ignore[arg-type]

    # -- time -------------------------------------------------------------------------------------------------------

    def time(self) -> float:
        return self._now

    monotonic = time

    def sleep(self, seconds: float) -> None:
        self.threads.sleep(seconds)

    def select(self, timeout: float | None) -> tuple[()]:
        """Called by asyncio to wait."""
        self.iterations += 1
        if self.iterations % 1000 == 0 and time.process_time() > self._real_until:
            raise TooSlow(
                f"the simulation did not end within {self._real_limit_s:g} s of processor time, at {self._now:.1f} "
                f"virtual seconds:\n{self.waits()}"
            )
        if timeout is None:
            raise Deadlock(f"no callback is ready and no timer is set, at {self._now:.3f} s:\n{self.waits()}")
        if timeout > 0:
            self._now = max(self._now, self._scheduled[0]._when)  # type: ignore[attr-defined]
        return ()

    def _process_events(self, event_list: Any) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    # -- callbacks and tasks ----------------------------------------------------------------------------------------

    def _call_soon(self, callback: Any, args: Any, context: contextvars.Context | None) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def call_at(
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        timer = _Timer(when, callback, args, self, context)
        timer.number = next(self._numbers)
        heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def requeue(self, handles: list[asyncio.Handle]) -> None:
        self._ready.extend(handle for handle in handles if not handle.cancelled())  # type: ignore[attr-defined]

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coro: Any, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        return SimTask(coro, loop=self, number=next(self._task_numbers), context=context)

    # -- threads ----------------------------------------------------------------------------------------------------

    def offload(self, threads: int, name: str) -> Offload:
        return self.threads.offload(threads, name)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Runs the calls of `asyncio.to_thread`."""
        once = self.threads.offload(1, "thread")
        return asyncio.wrap_future(once.submit(func, *args), loop=self)

    # -- diagnosis --------------------------------------------------------------------------------------------------

    def waits(self) -> str:
        """What every task waits for, by process."""
        lines: list[str] = []
        owners: dict[str, list[str]] = {}
        for task in sorted(asyncio.all_tasks(self), key=lambda task: getattr(task, "number", 0)):
            process = getattr(task, "process", None)
            if process is not None and not process.alive:
                continue
            owners.setdefault(process.name if process else "simulation", []).append(
                f"  {task.get_name()}: {_where(task)}"
            )
        for owner, tasks in owners.items():
            lines += [owner, *tasks]
        return "\n".join(lines)

    def unwind(self) -> None:
        """Ends all tasks, also those of dead processes, whose effects are discarded."""
        for process in self.processes:
            process.state = "unwinding"
        self.threads.close()
        tasks: list[asyncio.Task[Any]] = []
        for _ in range(UNWINDINGS):
            tasks = [task for task in asyncio.all_tasks(self) if not task.done()]
            if not tasks:
                break
            for task in tasks:
                if task.cancelling() == 0 or self.iterations % 50 == 0:
                    task.cancel()
            self.call_soon(self.stop)
            self.call_later(1.0, lambda: None)  # time advances, so that bounded waits end
            self.run_forever()
        for task in tasks:  # a group whose process died before its last task was reported
            _close(task.get_coro())


class _Time:
    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def time(self) -> float:
        return EPOCH_S + self._loop.time()

    def monotonic(self) -> float:
        return self._loop.time()

    def sleep(self, seconds: float) -> None:
        self._loop.threads.sleep(seconds)

    def sleep_until(self, predicate: Callable[[], bool], timeout_s: float | None) -> None:
        self._loop.threads.sleep_until(predicate, timeout_s)

    def may_block(self) -> bool:
        return self._loop.threads.in_one


@contextmanager
def virtual_loop(durations: Durations, *, real_limit_s: float = 600.0) -> Iterator[VirtualLoop]:
    """A loop with virtual time, also for code that uses `clock`."""
    loop = VirtualLoop(durations, real_limit_s=real_limit_s)
    loop.set_exception_handler(_quietly)
    _spare_what_exists()
    with clock.use_time_source(_Time(loop)):
        try:
            yield loop
        finally:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # tasks that are ended before their first step never began
                loop.unwind()
                loop.close()
                loop.processes.clear()
                gc.collect()


def _close(coroutine: Any) -> None:
    """Ends a coroutine, with all that its `finally` blocks await.

    The innermost is closed first: if it awaits again, those that await it would end without it.
    """
    for _ in range(UNWINDINGS):
        innermost = coroutine
        while inspect.iscoroutine(awaited := getattr(innermost, "cr_await", None)) and awaited.cr_frame is not None:
            innermost = awaited
        try:
            innermost.close()
        except RuntimeError:  # it awaited again
            continue
        if innermost is coroutine:
            break


def _quietly(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Killed processes leave exceptions in futures that no task retrieves."""


def _where(task: asyncio.Task[Any]) -> str:
    """The innermost line that a task awaits."""
    coroutine: Any = task.get_coro()
    frame = None
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None) or frame
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    if frame is None:
        return "?"
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    name = frame.f_code.co_filename.rpartition("/")[2]
    return f"{name}:{frame.f_lineno} {frame.f_code.co_qualname}: {line}"


__all__ = ["CURRENT", "Deadlock", "Process", "TooSlow", "VirtualLoop", "name_of", "virtual_loop"]
