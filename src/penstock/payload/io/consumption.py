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


class Consumption:
    """Repeats each report of used payloads until the producer has confirmed it. Only `close` waits for this.

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
        self._backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
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
        while True:
            with self._changed:
                wait_for(self._changed, lambda: bool(self._unconfirmed) or self._end is not None)
                if not self._unconfirmed:
                    return
                batch, self._unconfirmed = self._unconfirmed, []
            left = [used for used in batch if not self._send(used)]
            with self._changed:
                self._unconfirmed = left + self._unconfirmed
                if not left:
                    self._backoff.reset()
                elif self._end is None:
                    wait_for(self._changed, lambda: self._end is not None, self._backoff.next_s())

    def _send(self, used: _Used) -> bool:
        """True when the report is confirmed or abandoned."""
        last = self._end is not None
        until = min(used.until, self._end or used.until)
        failure: Failure | None = Failure("timed_out", "no time was left")
        tried: set[int] = set()
        for _ in range(2):
            now = monotonic()
            if failure is not None and now < until:
                deadline = min(until, now + CALL_S)
                failure = used.client.consume(used.address, used.refs, deadline, tried, self._cancellation)
        if failure is not None and not last and monotonic() < until:
            return False
        if failure is not None:
            _warn(used, failure)
        return True


def _warn(used: _Used, failure: Failure) -> None:
    log.warning(
        "%d payloads of ring %s were used, but the producer did not confirm it: %s, %s",
        len(used.refs),
        used.address.ring,
        failure.kind,
        failure.detail,
    )
