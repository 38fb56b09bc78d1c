"""Long polls: calls that wait until one of their topics is announced."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.records.ids import MemberId, PipelineName

MAX_WAIT_S = 30.0
"""Upper bound for the `wait_s` of a call."""


class HeldCalls:
    """Held calls by pipeline and topic. A call without a result waits here, and is decided again when it is woken."""

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
        """Waits for one of the topics, at most until `until`. False if that time had passed already, or after `close`.

        No announcement since the last decision of the caller is missed, if it has not awaited anything since.
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
        """Ends all waits; later ones end at once."""
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
    """The time of the event loop at which a call with this `wait_s` is answered."""
    return asyncio.get_running_loop().time() + min(max(0.0, wait_s), MAX_WAIT_S)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
