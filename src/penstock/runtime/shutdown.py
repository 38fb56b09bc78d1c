"""Graceful shutdown: a signal with immediate effect, and a teardown with a deadline."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from penstock.runtime.clock import monotonic

logger = logging.getLogger(__name__)

INSIST_AFTER_S = 1.0
"""Signals closer together count as one: some tools send a signal to a process and then to its process group."""


class ShutdownSignal:
    """Becomes `requested` on a signal or a call of `request`, and stays so. Readable from any thread."""

    def __init__(self) -> None:
        self.requested = False
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._lock = threading.Lock()
        self.reason = ""
        self.insisted = asyncio.Event()
        """A second signal was received: end without a graceful shutdown."""
        self._signalled_at: float | None = None

    def install(self) -> None:
        """Handles SIGINT, SIGTERM and, unless ignored (`nohup`), SIGHUP; call from the loop of the main thread."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            loop.add_signal_handler(number, self._signalled, f"received {number.name}")

    def _signalled(self, reason: str) -> None:
        now = monotonic()
        if self._signalled_at is None:
            self._signalled_at = now
        elif now - self._signalled_at > INSIST_AFTER_S:
            self.insisted.set()
        self.request(reason)

    def request(self, reason: str) -> None:
        """Requests the shutdown; the first `reason` is kept."""
        with self._lock:
            if self.requested:
                return
            self.reason, self.requested = reason, True
            waiters, self._waiters = self._waiters, []
        for loop, future in waiters:
            loop.call_soon_threadsafe(_resolve, future)

    async def wait(self) -> str:
        """Returns the reason once shutdown is requested."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._lock:
            if self.requested:
                return self.reason
            self._waiters.append((loop, future))
        try:
            await future
        finally:
            with self._lock:
                self._waiters = [waiter for waiter in self._waiters if waiter[1] is not future]
        return self.reason

    def __repr__(self) -> str:
        return f"ShutdownSignal(requested={self.requested}, reason={self.reason!r})"


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


@dataclass(frozen=True)
class StepOutcome:
    """How one step of a teardown ended: `problem` is empty on success."""

    name: str
    took_s: float
    problem: str = ""


async def teardown(
    steps: Iterable[tuple[str, Callable[[], Awaitable[object]]]], deadline_s: float
) -> list[StepOutcome]:
    """Runs the named steps in order, all within `deadline_s`, and logs the progress.

    After a step that raises or times out, the later steps still run: each gets the remaining time, and at least a
    tenth of the whole (so n steps take at most `deadline_s * (1 + n / 10)`).
    """
    steps = list(steps)
    end = monotonic() + deadline_s
    outcomes: list[StepOutcome] = []
    for number, (name, step) in enumerate(steps, start=1):
        began = monotonic()
        allowed_s = max(end - began, deadline_s / 10)
        allowed = asyncio.timeout(allowed_s)
        problem = ""
        try:
            async with allowed:
                await step()
        except Exception as error:  # noqa: BLE001 - reported below; the remaining steps must still run
            late = isinstance(error, TimeoutError) and allowed.expired()
            problem = f"not done after {allowed_s:.1f} s, abandoned" if late else f"{type(error).__name__}: {error}"
        outcome = StepOutcome(name, monotonic() - began, problem)
        outcomes.append(outcome)
        if problem:
            logger.warning("teardown %d/%d %s: %s", number, len(steps), name, problem)
        else:
            logger.info("teardown %d/%d %s: done in %.2f s", number, len(steps), name, outcome.took_s)
    return outcomes
