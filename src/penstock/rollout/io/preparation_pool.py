"""Processes for preparation in pure Python, which threads cannot overlap with other Python code."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from penstock.errors import PeerLost

T = TypeVar("T")


class PreparationPool:
    """Runs plain functions in other processes. Call `run` from a workload's `prepare`; set `preparations` to match."""

    def __init__(
        self,
        processes: int,
        *,
        timeout_s: float = 300.0,
        begin: Callable[..., None] | None = None,
        arguments: tuple[Any, ...] = (),
    ) -> None:
        """Every process calls `begin(*arguments)` first."""
        self._processes = processes
        self._begin, self._arguments = begin, arguments
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._pool = self._started()

    def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Blocks for the result. Function, arguments and result must be picklable. If a process dies, the pool is
        replaced and the call retried once, since another call may have killed the process."""
        pool = self._pool
        try:
            return self._result(pool.submit(function, *arguments))
        except BrokenProcessPool:
            self._replace(pool)
        return self._result(self._pool.submit(function, *arguments))

    def close(self) -> None:
        """Ends the processes; calls that have not begun are dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _result(self, call: Future[T]) -> T:
        try:
            return call.result(self._timeout_s)
        except TimeoutError as error:
            if call.done():  # the function raised it
                raise
            raise PeerLost(f"a preparation process did not answer within {self._timeout_s:.0f} s") from error

    def _started(self) -> ProcessPoolExecutor:
        # Forking a process that has threads, as a worker does, can deadlock the child.
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self._processes, context, self._begin, self._arguments)

    def _replace(self, broken: ProcessPoolExecutor) -> None:
        with self._lock:
            if self._pool is broken:
                broken.shutdown(wait=False, cancel_futures=True)
                self._pool = self._started()
