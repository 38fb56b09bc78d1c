"""References to payload bytes. Only references travel through the controller; the bytes never do."""

from __future__ import annotations

import msgspec


class PayloadRef(msgspec.Struct, frozen=True, array_like=True):
    """Names one payload in one producer's ring so exactly that an old reference can never fetch a newer payload."""

    ring: str
    epoch: int
    slot: int
    generation: int
    size_bytes: int
    digest: int
    """xxh3-64 of the body."""


class RingAddress(msgspec.Struct, frozen=True):
    """Where a ring can be read: by name on the same host, by its ports from elsewhere."""

    ring: str
    epoch: int
    host_id: str
    """Identifies the machine (boot id): equal means the ring can be mapped directly."""
    host: str
    tcp_ports: tuple[int, ...] = ()
    ucxx_ports: tuple[int, ...] = ()
