"""Long polls: calls that are held until something they wait for is announced."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.records.ids import MemberId, PipelineName

MAX_WAIT_S = 30.0
"""However long a call asks to be held."""


class HeldCalls:
    """By pipeline and topic. A call that finds nothing waits here, and asks again when it is woken."""

    def __init__(self) -> None:
        self._waiters: dict[tuple[PipelineName, str], dict[asyncio.Future[None], MemberId]] = {}
        self._closed = False
        self._held: Counter[tuple[PipelineName, str]] = Counter()

    @contextmanager
    def holding(self, name: PipelineName, kind: str) -> Iterator[None]:
        """Counts a call of this kind as held."""
        self._held[name, kind] += 1
        try:
            yield
        finally:
            self._held[name, kind] -= 1

    async def hold(self, name: PipelineName, topics: tuple[str, ...], member: MemberId, until: float) -> bool:
        """Waits for one of the topics; False once the time is up or they are closed.

        Nothing announced since the caller last looked is missed, as long as it has not awaited anything since.
        """
        loop = asyncio.get_running_loop()
        left_s = until - loop.time()
        if left_s <= 0 or self._closed:
            return False
        waiter: asyncio.Future[None] = loop.create_future()
        for topic in topics:
            self._waiters.setdefault((name, topic), {})[waiter] = member
        timer = loop.call_later(left_s, _resolve, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            for topic in topics:
                self._waiters.get((name, topic), {}).pop(waiter, None)
        return not self._closed

    def wake(self, name: PipelineName, topic: str, only: MemberId | None = None) -> None:
        """Wakes every call that waits for the topic, or only those of one member."""
        for waiter, member in self._waiters.get((name, topic), {}).items():
            if only is None or member == only:
                _resolve(waiter)

    def close(self) -> None:
        """Ends every wait, now and from now on."""
        self._closed = True
        for name, topic in list(self._waiters):
            self.wake(name, topic)

    def statistics(self) -> dict[str, int]:
        """Held calls by kind."""
        total: Counter[str] = Counter()
        for (_, kind), count in self._held.items():
            total[kind] += count
        return {kind: count for kind, count in total.items() if count}


def deadline(wait_s: float) -> float:
    """When a call that asked to be held for `wait_s` is let go, in the loop's time."""
    return asyncio.get_running_loop().time() + min(max(0.0, wait_s), MAX_WAIT_S)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
