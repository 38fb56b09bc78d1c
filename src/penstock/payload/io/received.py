"""Shared by the clients of all wires: received bodies, reused buffers, cancellation of calls."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec
import numpy as np

from penstock.errors import Aborted

SMALLEST_BYTES = 4096


class Received(msgspec.Struct, frozen=True):
    """A complete, verified body in local memory. Return `memory` to its `Buffers` when the view is not needed."""

    view: memoryview
    memory: np.ndarray


class Buffers:
    """Reused memory for bodies: fresh pages would cost more than receiving into warm ones.

    `allocate` may return pinned memory.
    """

    def __init__(self, keep_bytes: int = 1 << 30, allocate: Callable[[int], np.ndarray] | None = None) -> None:
        self._keep_bytes = keep_bytes
        self._allocate = allocate or (lambda size_bytes: np.empty(size_bytes, np.uint8))
        self._lock = threading.Lock()
        self._idle: dict[int, list[np.ndarray]] = {}
        self.idle_bytes = 0

    def take(self, size_bytes: int) -> np.ndarray:
        """An array of at least `size_bytes` bytes."""
        rounded = max(SMALLEST_BYTES, 1 << max(0, size_bytes - 1).bit_length())
        with self._lock:
            idle = self._idle.get(rounded)
            if idle:
                self.idle_bytes -= rounded
                return idle.pop()
        return self._allocate(rounded)

    def release(self, memory: np.ndarray) -> None:
        with self._lock:
            if self.idle_bytes + memory.nbytes <= self._keep_bytes:
                self._idle.setdefault(memory.nbytes, []).append(memory)
                self.idle_bytes += memory.nbytes


class Cancellation:
    """Ends every registered call at once and refuses further ones."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._breakers: dict[int, Callable[[], None]] = {}
        self._next = 0
        self.reason: str | None = None

    def __repr__(self) -> str:
        return f"<Cancellation {self.reason or 'not requested'}, {len(self._breakers)} registered>"

    def cancel(self, reason: str) -> None:
        with self._lock:
            self.reason = reason
            breakers = list(self._breakers.values())
            self._breakers.clear()
        for breaker in breakers:
            breaker()

    def register(self, breaker: Callable[[], None]) -> int:
        """Calls `breaker` on cancellation; raises `Aborted` when already cancelled."""
        with self._lock:
            if self.reason is not None:
                raise Aborted(self.reason)
            self._next += 1
            self._breakers[self._next] = breaker
            return self._next

    def unregister(self, number: int) -> None:
        with self._lock:
            self._breakers.pop(number, None)
