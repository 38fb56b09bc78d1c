"""Client of the controller without a network: replaces HTTP in a simulation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from penstock.control.io.client import ControlClient, _Unreachable
from penstock.records.ids import MemberId, PipelineName

Answer = tuple[int, bytes, bytes]
"""Status, content type and body."""


class Link(Protocol):
    """The link of one process to the controller."""

    def send(self, body: bytes, answered: Callable[[Answer], None], failed: Callable[[str], None]) -> None:
        """Sends a request. Later calls `answered` or `failed` at most once; neither if a message was lost."""
        ...


class MemoryClient(ControlClient):
    """Encodes, retries and times out like the HTTP client."""

    def __init__(
        self,
        link: Link,
        pipeline: PipelineName,
        member: MemberId,
        *,
        unreachable_timeout_s: float = 60.0,
        attempt_timeout_s: float = 10.0,
    ) -> None:
        super().__init__(
            ("memory", 0),
            "",
            pipeline,
            member,
            unreachable_timeout_s=unreachable_timeout_s,
            attempt_timeout_s=attempt_timeout_s,
        )
        self._link = link
        self._exchanges: Any = self._open

    async def _attempt(self, body: bytes, timeout_s: float) -> Answer:
        exchange = _Exchange(timeout_s)
        self._exchanges.add(exchange)
        try:
            self._link.send(body, exchange.answer, exchange.close)
            return await exchange.answered
        finally:
            exchange.end()
            self._exchanges.discard(exchange)


class _Exchange:
    """One pending call."""

    def __init__(self, timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self.answered: asyncio.Future[Answer] = self._loop.create_future()
        self._timer = self._loop.call_later(max(0.0, timeout_s), self._expire, timeout_s)

    def answer(self, answer: Answer) -> None:
        if not self.answered.done():
            self.answered.set_result(answer)

    def close(self, reason: str) -> None:
        if not self.answered.done():
            self.answered.set_exception(_Unreachable(reason))

    def expire_in(self, timeout_s: float) -> None:
        if self._timer.when() > self._loop.time() + timeout_s:
            self._timer.cancel()
            self._timer = self._loop.call_later(timeout_s, self._expire, timeout_s)

    def end(self) -> None:
        self._timer.cancel()

    def _expire(self, timeout_s: float) -> None:
        self.close(f"no answer within {timeout_s:.1f} s")
