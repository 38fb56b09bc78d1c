"""Telling producers, over a wire and in the background, which payloads were used."""

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
GIVE_UP_S = 60.0
"""A producer that could not be told for this long is taken for dead, and its ring with it."""


class _Used(NamedTuple):
    client: WireClient
    address: RingAddress
    refs: tuple[PayloadRef, ...]
    until: float


class Consumption:
    """Passes on what was used until each producer has confirmed it. Only `close` waits for this.

    Consumes: used payloads. Produces: free slots. Waits for: confirmations. Unblocked by: answers, time, `close`.
    What cannot be passed on in time is warned of: it occupies its ring until the producer ends or discards it.
    """

    def __init__(self, threads: Callable[[int, str], Offload] = Offload) -> None:
        self._changed = threading.Condition()
        self._threads = threads
        self._untold: list[_Used] = []
        self._end: float | None = None
        self._cancellation = Cancellation()
        self._backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._offload: Offload | None = None
        self._telling = False

    def __repr__(self) -> str:
        return f"<Consumption {sum(len(used.refs) for used in self._untold)} payloads to be told of>"

    def add(self, client: WireClient, address: RingAddress, refs: Sequence[PayloadRef]) -> None:
        until = monotonic() + GIVE_UP_S
        parts = [refs[start : start + MAX_CONSUMED] for start in range(0, len(refs), MAX_CONSUMED)]
        used = [_Used(client, address, tuple(part), until) for part in parts]
        with self._changed:
            if self._end is not None:
                for one in used:
                    _warn(one, Failure("cancelled", "the fetcher was closed before"))
                return
            self._untold += used
            if self._offload is None:
                self._offload = self._threads(1, "payload-consumption")
                self._telling = True
                self._offload.submit(self._run)
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Try once more to pass on what is left, for `timeout_s` at most."""
        with self._changed:
            self._end = monotonic() + timeout_s
            self._changed.notify_all()
            wait_for(self._changed, lambda: not self._telling, timeout_s)
        if self._offload is not None:
            self._cancellation.cancel("the fetcher is closing")
            self._offload.close(timeout_s)

    def _run(self) -> None:
        try:
            self._tell_all()
        finally:
            with self._changed:
                self._telling = False
                self._changed.notify_all()

    def _tell_all(self) -> None:
        while True:
            with self._changed:
                wait_for(self._changed, lambda: bool(self._untold) or self._end is not None)
                if not self._untold:
                    return
                batch, self._untold = self._untold, []
            left = [used for used in batch if not self._tell(used)]
            with self._changed:
                self._untold = left + self._untold
                if not left:
                    self._backoff.reset()
                elif self._end is None:
                    wait_for(self._changed, lambda: self._end is not None, self._backoff.next_s())

    def _tell(self, used: _Used) -> bool:
        """True when there is nothing more to do about it."""
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
        "%d payloads of ring %s were used but its producer could not be told: %s, %s",
        len(used.refs),
        used.address.ring,
        failure.kind,
        failure.detail,
    )
