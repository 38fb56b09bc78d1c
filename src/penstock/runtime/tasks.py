"""Supervised tasks: all are awaited, and an error names the first task that failed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from types import TracebackType
from typing import Any

from penstock.errors import PenstockError, RunFailed

logger = logging.getLogger(__name__)


class Tasks:
    """A scope for named tasks. Leaving it waits for all of them.

    The first task that fails cancels the others, and the scope raises its error: a `PenstockError` unchanged, with a
    note that names the task; any other as a `RunFailed` that names the task and the cause. Errors during the
    cancellation of the others are logged.
    """

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._tasks: dict[asyncio.Task[Any], str] = {}
        self._first: tuple[str, Exception] | None = None

    def spawn(self, name: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Starts `work`; it ends before the scope does."""
        named = self._named(name, work)
        try:
            task = self._group.create_task(named, name=name)
        except RuntimeError:  # the scope is ending and starts no more tasks
            named.close()
            work.close()
            raise
        self._tasks[task] = name
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        task.add_done_callback(lambda done: work.close())  # if cancelled before its first step, `work` never started
        return task

    def cancel(self) -> None:
        """Cancels every running task; the scope then ends without an error."""
        for task in list(self._tasks):
            task.cancel()

    @property
    def running(self) -> list[str]:
        """Names of the tasks that have not ended, for which a teardown waits."""
        return sorted(self._tasks.values())

    async def __aenter__(self) -> Tasks:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._group.__aexit__(kind, error, traceback)
        except BaseExceptionGroup as group:
            if self._first is None:  # the body failed, not a task: raise what it raised
                raise _innermost(error if error is not None else group) from None
            name, first = self._first
            if isinstance(first, PenstockError):
                first.add_note(f"in task {name!r}")
                raise first from None
            raise RunFailed(f"task {name!r} failed: {type(first).__name__}: {first}") from first

    async def _named(self, name: str, work: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await work
        except Exception as error:
            cause = _innermost(error)
            if self._first is not None:
                logger.warning("task %r also failed, after %r: %s", name, self._first[0], cause)
            elif isinstance(cause, Exception):
                self._first = (name, cause)
            raise

    def __repr__(self) -> str:
        return f"Tasks(running={self.running})"


def _innermost(error: BaseException) -> BaseException:
    """The first error inside nested groups: a group itself has no useful message."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
