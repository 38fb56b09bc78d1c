"""Payloads that were handed over, by the version of their samples, until nobody can want them any more.

A backstop. Most payloads are freed by whoever read them, or on the controller's word that nobody will. But a trainer
killed right after its step was acknowledged can no longer say what it had used, and a killed controller takes along
what it had not yet passed on. Both concern samples that are soon too old to be trained, and that is known for certain.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.records.payload import PayloadRef


class Unread:
    """What one producer has handed over and not yet seen expire. Freeing a payload twice does no harm, so those that
    were freed otherwise need not be taken out."""

    def __init__(self) -> None:
        self._by_version: dict[int, list[PayloadRef]] = {}
        self._once_more: list[PayloadRef] = []
        self._oldest = -1

    def delivered(self, version: int, payload: PayloadRef) -> None:
        self._by_version.setdefault(version, []).append(payload)

    def expire(self, oldest: int) -> list[PayloadRef]:
        """Those of samples made with versions below `oldest`: free them.

        Each comes twice, the second time when `oldest` has grown: it may have been on its way to a reader that is
        gone by then.
        """
        gone = [version for version in self._by_version if version < oldest]
        if not gone and oldest <= self._oldest:
            return []
        again, self._oldest = self._once_more, oldest
        self._once_more = [payload for version in gone for payload in self._by_version.pop(version)]
        return again + self._once_more

    def tracked(self) -> Iterable[PayloadRef]:
        """All that will still be freed."""
        return (payload for payloads in (*self._by_version.values(), self._once_more) for payload in payloads)

    def __repr__(self) -> str:
        counts = {version: len(payloads) for version, payloads in sorted(self._by_version.items())}
        return f"<Unread payloads by version: {counts}>"
