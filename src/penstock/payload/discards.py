"""Payloads that will not be read, reported to the producers that must free them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from penstock.records.payload import PayloadRef

DISCARDS_PER_REPLY = 4096


class Discards:
    """Kept per ring and sent along with answers to numbered requests.

    The same list is repeated until its ring's owner asks with another number, so a lost answer loses no slot. Freeing
    a payload twice does no harm.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, list[PayloadRef]] = defaultdict(list)
        self._sent: dict[str, tuple[int, int]] = {}
        """Per ring, the request whose answer carried some, and how many."""

    def add(self, payloads: Iterable[PayloadRef]) -> None:
        for ref in payloads:
            self._waiting[ref.ring].append(ref)

    def answer(self, rings: Iterable[str], request: int) -> tuple[PayloadRef, ...]:
        """What goes with the answer to this request of the owner of these rings."""
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
        """All that were not sent, or not heard of as received."""
        return (ref for waiting in self._waiting.values() for ref in waiting)

    def __repr__(self) -> str:
        return f"<Discards waiting: { {ring: len(refs) for ring, refs in self._waiting.items() if refs} }>"
