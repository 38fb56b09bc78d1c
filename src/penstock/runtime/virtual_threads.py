"""Threads for a loop with virtual time: one runs at a time, the loop waits for it, and its work takes virtual time.

The counterpart of `Offload` in a simulation. A function that sleeps (`clock.sleep`) returns control to the loop and
resumes when its time has passed, so a wait for space in a ring is a wait in virtual time.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol, TypeVar

from penstock.errors import LocalProtocolError
from penstock.runtime.offload import Offload

S = TypeVar("S")
T = TypeVar("T")

POLL_EVERY_S = 0.01


class Unwound(BaseException):
    """Raised in a function that still sleeps when the simulation ends."""


class _Thread:
    """Alternates with the thread of the loop: exactly one of the two runs."""

    def __init__(self, idle: list[_Thread]) -> None:
        self._idle = idle
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._work: Callable[[], None] | None = None
        self.unwinding = False
        threading.Thread(target=self._serve, name="virtual", daemon=True).start()

    def begin(self, work: Callable[[], None]) -> None:
        self._work = work
        self.resume()

    def resume(self) -> None:
        """Called by the thread of the loop: returns when the work has ended or sleeps."""
        self._go.release()
        self._back.acquire()

    def pause(self) -> None:
        """Called by the work: returns control to the loop until `resume`."""
        self._back.release()
        self._go.acquire()
        if self.unwinding:
            raise Unwound

    def _serve(self) -> None:
        _here.thread = self
        while True:
            self._go.acquire()
            if self._work is None:
                return
            self._work()
            self._work = None
            self._idle.append(self)
            self._back.release()

    def end(self) -> None:
        self._work = None
        self._go.release()


class _Here(threading.local):
    thread: _Thread | None = None


_here = _Here()


class Durations(Protocol):
    """How long offloaded work takes."""

    def __call__(self, offload: str, function: str) -> float: ...


class VirtualThreads:
    """All simulated threads of one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, durations: Durations) -> None:
        self._loop = loop
        self._idle: list[_Thread] = []
        self._asleep: set[_Thread] = set()
        self.durations = durations

    @property
    def in_one(self) -> bool:
        """Whether the caller is a virtual thread."""
        return _here.thread is not None

    def offload(self, threads: int, name: str) -> Offload:
        return VirtualOffload(self, self._loop, threads, name)

    def begin(self, work: Callable[[], None]) -> None:
        thread = self._idle.pop() if self._idle else _Thread(self._idle)
        thread.begin(work)

    def sleep(self, seconds: float) -> None:
        """`clock.sleep` in a simulation."""
        thread = _here.thread
        if thread is None:
            raise LocalProtocolError(f"the loop's own thread would block for {seconds} s")
        self._asleep.add(thread)
        self._loop.call_later(seconds, self._wake, thread)
        thread.pause()

    def sleep_until(self, predicate: Callable[[], bool], timeout_s: float | None) -> None:
        """Sleeps until it holds, or until the timeout. The loop polls it: far cheaper than a switch of threads."""
        thread = _here.thread
        assert thread is not None
        until = self._loop.time() + timeout_s if timeout_s is not None else float("inf")

        def poll() -> None:
            left_s = until - self._loop.time()
            if left_s <= 0 or predicate():
                self._wake(thread)
            else:
                self._loop.call_later(min(POLL_EVERY_S, left_s), poll)

        self._asleep.add(thread)
        self._loop.call_soon(poll)
        thread.pause()

    def _wake(self, thread: _Thread) -> None:
        if thread in self._asleep:  # not ended by `close`
            self._asleep.remove(thread)
            thread.resume()

    def close(self) -> None:
        """Ends functions that still sleep, and all threads."""
        for thread in list(self._asleep):
            thread.unwinding = True
            self._wake(thread)
        for thread in self._idle:
            thread.end()
        self._idle.clear()


class VirtualOffload(Offload):
    """Behaves as `Offload` with that number of threads; the work runs at the end of its duration."""

    def __init__(self, threads: VirtualThreads, loop: asyncio.AbstractEventLoop, count: int, name: str) -> None:
        self._name = name
        self._pool = threads
        self._loop = loop
        self._free = count
        self._count = count
        self._queue: deque[tuple[Future[Any], Callable[[], Any], contextvars.Context, str]] = deque()
        self._closed = False

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        if self._closed:
            raise LocalProtocolError(f"offload {self._name!r} is closed and accepts no more work")
        future: Future[T] = Future()
        context = contextvars.copy_context()
        self._queue.append((future, partial(function, *arguments), context, name_of(function)))
        self._next()
        return future

    def map(self, function: Callable[[S], T], items: Iterable[S]) -> list[T]:
        return [function(item) for item in items]

    @property
    def queued(self) -> int:
        return len(self._queue)

    def close(self, timeout_s: float) -> bool:
        self._closed = True
        while self._queue:
            self._queue.popleft()[0].cancel()
        until = self._loop.time() + timeout_s
        while _here.thread is not None and self._free < self._count and self._loop.time() < until:
            self._pool.sleep(POLL_EVERY_S)
        return self._free == self._count

    def _next(self) -> None:
        while self._free and self._queue:
            job = self._queue.popleft()
            self._free -= 1
            self._loop.call_later(self._pool.durations(self._name, job[3]), self._begin, job, context=job[2])

    def _begin(self, job: tuple[Future[Any], Callable[[], Any], contextvars.Context, str]) -> None:
        future, work, context, _ = job
        if future.set_running_or_notify_cancel():
            self._pool.begin(lambda: context.copy().run(self._do, future, work))
        else:
            self._free += 1
            self._next()

    def _do(self, future: Future[Any], work: Callable[[], Any]) -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - it belongs to the caller that awaits the future
            self._free += 1
            future.set_exception(error)
        else:
            self._free += 1
            future.set_result(result)
        self._next()

    def __repr__(self) -> str:
        return f"VirtualOffload({self._name!r}, free={self._free}, queued={self.queued}, closed={self._closed})"


def name_of(function: Callable[..., Any]) -> str:
    while isinstance(function, partial):
        function = function.args[0] if function.func.__name__ == "run" and function.args else function.func
    return getattr(function, "__qualname__", type(function).__name__)
