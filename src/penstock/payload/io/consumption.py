"""Reports used payloads to their producers, over a wire and in the background."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from penstock.payload.exchange import MAX_CONSUMED
from penstock.payload.io.received import Cancellation
from penstock.payload.io.wire_client import WireClient
from penstock.payload.retry import Failure
from penstock.records.payload import PayloadRef, RingAddress
from penstock.runtime.backoff import Backoff
from penstock.runtime.clock import monotonic, wait_for
from penstock.runtime.offload import Offload

log = logging.getLogger(__name__)

CALL_S = 3.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
CONFIRM_TIMEOUT_S = 60.0
"""A producer that has not confirmed for this long is assumed dead, with its ring."""


class _Used(NamedTuple):
    client: WireClient
    address: RingAddress
    refs: tuple[PayloadRef, ...]
    until: float


class _Failing:
    """A ring whose producer did not confirm the last report."""

    def __init__(self) -> None:
        self.backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self.not_before = 0.0


class Consumption:
    """Repeats each report of used payloads until the producer has confirmed it. Only `close` waits for this.

    Reports to producers that answer go first: all reports to one that does not are postponed.

    Consumes: used payloads. Produces: free slots. Waits for: confirmations. Unblocked by: replies, time, `close`.
    A report that is not confirmed in time is logged: its payloads occupy the ring until the producer ends or discards
    them.
    """

    def __init__(self, threads: Callable[[int, str], Offload] = Offload) -> None:
        self._changed = threading.Condition()
        self._threads = threads
        self._unconfirmed: list[_Used] = []
        self._end: float | None = None
        self._cancellation = Cancellation()
        self._failing: dict[str, _Failing] = {}
        self._offload: Offload | None = None
        self._running = False

    def __repr__(self) -> str:
        return f"<Consumption {sum(len(used.refs) for used in self._unconfirmed)} payloads not confirmed>"

    def add(self, client: WireClient, address: RingAddress, refs: Sequence[PayloadRef]) -> None:
        until = monotonic() + CONFIRM_TIMEOUT_S
        parts = [refs[start : start + MAX_CONSUMED] for start in range(0, len(refs), MAX_CONSUMED)]
        used = [_Used(client, address, tuple(part), until) for part in parts]
        with self._changed:
            if self._end is not None:
                for one in used:
                    _warn(one, Failure("cancelled", "the fetcher was already closed"))
                return
            self._unconfirmed += used
            if self._offload is None:
                self._offload = self._threads(1, "payload-consumption")
                self._running = True
                self._offload.submit(self._run)
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Tries once more to send the remaining reports, for `timeout_s` at most."""
        with self._changed:
            self._end = monotonic() + timeout_s
            self._changed.notify_all()
            wait_for(self._changed, lambda: not self._running, timeout_s)
        if self._offload is not None:
            self._cancellation.cancel("the fetcher is closing")
            self._offload.close(timeout_s)

    def _run(self) -> None:
        try:
            self._send_all()
        finally:
            with self._changed:
                self._running = False
                self._changed.notify_all()

    def _send_all(self) -> None:
        while (used := self._take_next()) is not None:
            last = self._end is not None
            failure = self._send(used)
            ring = used.address.ring
            with self._changed:
                if failure is not None and (last or monotonic() >= used.until):
                    _warn(used, failure)
                elif failure is not None:
                    self._unconfirmed.insert(0, used)
                if failure is None or all(other.address.ring != ring for other in self._unconfirmed):
                    self._failing.pop(ring, None)
                else:
                    failing = self._failing.setdefault(ring, _Failing())
                    failing.not_before = monotonic() + failing.backoff.next_s()

    def _take_next(self) -> _Used | None:
        """Waits for the next report that is due; None when there are none and the end was requested."""
        with self._changed:
            while True:
                wait_for(self._changed, lambda: bool(self._unconfirmed) or self._end is not None)
                if not self._unconfirmed:
                    return None
                used = min(self._unconfirmed, key=self._due_at)
                wait_s = self._due_at(used) - monotonic()
                if self._end is not None or wait_s <= 0:
                    self._unconfirmed.remove(used)
                    return used
                wait_for(self._changed, lambda: self._end is not None or self._has_unfailing(), wait_s)

    def _has_unfailing(self) -> bool:
        return any(used.address.ring not in self._failing for used in self._unconfirmed)

    def _due_at(self, used: _Used) -> float:
        failing = self._failing.get(used.address.ring)
        return float("-inf") if failing is None else failing.not_before

    def _send(self, used: _Used) -> Failure | None:
        """Two attempts; None when the report is confirmed."""
        until = min(used.until, self._end or used.until)
        failure: Failure | None = Failure("timed_out", "no time was left")
        tried: set[int] = set()
        for _ in range(2):
            now = monotonic()
            if failure is not None and now < until:
                deadline = min(until, now + CALL_S)
                failure = used.client.consume(used.address, used.refs, deadline, tried, self._cancellation)
        return failure


def _warn(used: _Used, failure: Failure) -> None:
    log.warning(
        "%d payloads of ring %s were used, but the producer did not confirm it: %s, %s",
        len(used.refs),
        used.address.ring,
        failure.kind,
        failure.detail,
    )
