"""Blocking work in threads, so that it does not block the event loop."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar, runtime_checkable

from penstock.errors import LocalProtocolError

S = TypeVar("S")
T = TypeVar("T")

Work = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class Offload:
    """A few daemon threads and one queue.

    The standard executor joins its threads at interpreter exit without a timeout, so one hanging call would keep the
    process alive; here `close` is bounded and a hanging thread dies with the process.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Queues the call and returns at once."""
        if self._closed:
            raise LocalProtocolError(f"offload {self._name!r} is closed and accepts no more work")
        future: Future[T] = Future()
        self._work.put((future, function, arguments))
        return future

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Awaits the result. Cancelling the wait cancels a call that has not started; one that has runs to its end."""
        return await asyncio.wrap_future(self.submit(function, *arguments))

    def map(self, function: Callable[[S], T], items: Iterable[S]) -> list[T]:
        """The results in order. Blocks the caller; if that is one of these threads, another one must be free."""
        return [future.result() for future in [self.submit(function, item) for item in items]]

    @property
    def queued(self) -> int:
        return self._work.qsize()

    def close(self, timeout_s: float) -> bool:
        """Cancels calls that have not started, waits for the others; False if a thread is busy at the deadline."""
        deadline = time.monotonic() + timeout_s
        self._closed = True
        while True:
            try:
                item = self._work.get_nowait()
            except queue.Empty:
                break
            if item is not None:
                item[0].cancel()
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            future, function, arguments = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function(*arguments))
            except BaseException as error:  # noqa: BLE001 - it is raised where the future is awaited
                future.set_exception(error)
            del item, future, function, arguments  # an idle thread must not keep a large argument alive

    def __repr__(self) -> str:
        return f"Offload({self._name!r}, threads={len(self._threads)}, queued={self.queued}, closed={self._closed})"


def background(threads: int, name: str) -> Offload:
    """Threads for the running loop. A loop with virtual time provides threads whose work takes virtual time."""
    return offloads()(threads, name)


def offloads() -> Callable[[int, str], Offload]:
    """The factory behind `background`, for code that creates threads later and not on the loop."""
    loop = asyncio.get_running_loop()
    return loop.offload if isinstance(loop, OffloadingLoop) else Offload


@runtime_checkable
class OffloadingLoop(Protocol):
    """A loop that provides the threads for blocking work."""

    def offload(self, threads: int, name: str) -> Offload: ...
