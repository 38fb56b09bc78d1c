"""Payloads that will not be read, reported to the producers that must free them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from penstock.records.payload import PayloadRef

DISCARDS_PER_REPLY = 4096


class Discards:
    """Kept per ring and sent with the replies to numbered requests.

    The same list is repeated until the ring's owner sends another request number, so a lost reply loses no slot.
    Freeing a payload twice is harmless.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, list[PayloadRef]] = defaultdict(list)
        self._sent: dict[str, tuple[int, int]] = {}
        """Per ring: the request whose reply carried payloads, and their number."""

    def add(self, payloads: Iterable[PayloadRef]) -> None:
        for ref in payloads:
            self._waiting[ref.ring].append(ref)

    def answer(self, rings: Iterable[str], request: int) -> tuple[PayloadRef, ...]:
        """The payloads to send with the reply to this request of the owner of `rings`."""
        sent: list[PayloadRef] = []
        for ring in rings:
            waiting = self._waiting.get(ring)
            if not waiting:
                continue
            number, count = self._sent.get(ring, (request, 0))
            if number != request:
                del waiting[:count]
            some = waiting[:DISCARDS_PER_REPLY]
            self._sent[ring] = (request, len(some))
            sent += some
        return tuple(sent)

    def waiting(self) -> Iterable[PayloadRef]:
        """All payloads that were not sent or not acknowledged."""
        return (ref for waiting in self._waiting.values() for ref in waiting)

    def __repr__(self) -> str:
        return f"<Discards waiting: { {ring: len(refs) for ring, refs in self._waiting.items() if refs} }>"
