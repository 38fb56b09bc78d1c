"""References to payload bytes. Only references pass through the controller, never the bytes."""

from __future__ import annotations

import msgspec


class PayloadRef(msgspec.Struct, frozen=True, array_like=True):
    """Identifies one payload in one producer's ring. An old reference can never fetch a newer payload."""

    ring: str
    epoch: int
    slot: int
    generation: int
    size_bytes: int
    digest: int
    """xxh3-64 of the body."""


class RingAddress(msgspec.Struct, frozen=True):
    """The address of a ring: its name for readers on the same host, its ports for readers on other hosts."""

    ring: str
    epoch: int
    host_id: str
    """Identifies the machine (boot id). If it equals the reader's, the ring can be mapped directly."""
    host: str
    tcp_ports: tuple[int, ...] = ()
    ucxx_ports: tuple[int, ...] = ()
