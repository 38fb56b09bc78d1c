"""Delivered payloads by the version of their samples, until they can no longer be requested.

A backstop. Most payloads are freed by their reader, or when the controller reports that they will not be read. But a
trainer killed right after its step was acknowledged cannot report the payloads it used, and a killed controller loses
the reports it had not forwarded. The samples concerned soon exceed the staleness limit and are then never read.
"""

from __future__ import annotations

from penstock.payload.exchange import ExchangeLimits
from penstock.records.payload import PayloadRef

LONGEST_READ_S = 120.0
"""A read is assumed to take less than this, or than a server allows for its size."""
LIMITS = ExchangeLimits()


class Unread:
    """Payloads that one producer delivered and that have not expired. Freeing a payload twice is harmless, so payloads
    freed otherwise are not removed."""

    def __init__(self) -> None:
        self._by_version: dict[int, list[PayloadRef]] = {}
        self._to_repeat: list[tuple[float, list[PayloadRef]]] = []
        """When to repeat, and which."""

    def delivered(self, version: int, payload: PayloadRef) -> None:
        self._by_version.setdefault(version, []).append(payload)

    def expire(self, oldest: int, now: float) -> list[PayloadRef]:
        """Returns the payloads to free: those of samples generated with versions below `oldest`.

        Each is returned again after the longest read: the first time, a server may still have been sending it to a
        reader that has timed out.
        """
        expired = [payload for at, payloads in self._to_repeat if at <= now for payload in payloads]
        self._to_repeat = [(at, payloads) for at, payloads in self._to_repeat if at > now]
        expired_versions = [version for version in self._by_version if version < oldest]
        if expired_versions:
            fresh = [payload for version in expired_versions for payload in self._by_version.pop(version)]
            longest_s = max(LONGEST_READ_S, LIMITS.body_s(max(payload.size_bytes for payload in fresh)))
            self._to_repeat.append((now + longest_s, fresh))
            expired += fresh
        return expired

    def __repr__(self) -> str:
        counts = {version: len(payloads) for version, payloads in sorted(self._by_version.items())}
        return f"<Unread payloads by version: {counts}>"
