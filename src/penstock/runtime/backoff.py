"""Exponential backoff."""

from __future__ import annotations


class Backoff:
    """Doubles from `first_s` to `cap_s`; `reset()` after a success starts again from `first_s`."""

    def __init__(self, first_s: float, cap_s: float) -> None:
        if not 0 < first_s <= cap_s:
            raise ValueError(f"backoff needs 0 < first_s <= cap_s, found first_s={first_s}, cap_s={cap_s}")
        self._first_s = first_s
        self._cap_s = cap_s
        self._next_s = first_s
        self.attempts = 0

    def next_s(self) -> float:
        """Seconds to wait before the next attempt."""
        wait_s = self._next_s
        self._next_s = min(self._cap_s, self._next_s * 2)
        self.attempts += 1
        return wait_s

    def reset(self) -> None:
        self._next_s = self._first_s
        self.attempts = 0

    def __repr__(self) -> str:
        return f"Backoff(next_s={self._next_s}, attempts={self.attempts})"
