"""Delivered payloads by the version of their samples, until they can no longer be requested.

A backstop. Most payloads are freed by their reader, or on the controller's report that they will not be read. But a
trainer killed right after its step was acknowledged can no longer report what it used, and a killed controller loses
what it had not yet passed on. Both concern samples that are soon too old to be trained, and that is known for certain.
"""

from __future__ import annotations

from collections import deque

from penstock.records.payload import PayloadRef

LONGEST_READ_S = 120.0
"""No server sends one body for as long as this."""


class Unread:
    """What one producer has handed over and not yet seen expire. Freeing a payload twice does no harm, so those that
    were freed otherwise need not be taken out."""

    def __init__(self) -> None:
        self._by_version: dict[int, list[PayloadRef]] = {}
        self._once_more: deque[tuple[float, list[PayloadRef]]] = deque()

    def delivered(self, version: int, payload: PayloadRef) -> None:
        self._by_version.setdefault(version, []).append(payload)

    def expire(self, oldest: int, now: float) -> list[PayloadRef]:
        """Those of samples made with versions below `oldest`: free them.

        Each comes a second time when no read of it can still be going on: the first time it may have been on its way
        to a reader that has given up.
        """
        expired: list[PayloadRef] = []
        while self._once_more and now - self._once_more[0][0] >= LONGEST_READ_S:
            expired += self._once_more.popleft()[1]
        gone = [version for version in self._by_version if version < oldest]
        if gone:
            fresh = [payload for version in gone for payload in self._by_version.pop(version)]
            self._once_more.append((now, fresh))
            expired += fresh
        return expired

    def __repr__(self) -> str:
        counts = {version: len(payloads) for version, payloads in sorted(self._by_version.items())}
        return f"<Unread payloads by version: {counts}>"
