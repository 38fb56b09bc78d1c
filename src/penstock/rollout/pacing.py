"""Backoff between lease requests when the controller grants nothing."""

from __future__ import annotations

from penstock.rollout.flow import LeaseAnswered
from penstock.runtime.backoff import Backoff

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0


class Pacing:
    def __init__(self) -> None:
        self.pause_s = 0.0
        """Before the next lease request."""
        self._backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)

    def answered(self, answer: LeaseAnswered) -> None:
        """Backs off after an immediate refusal; a call that the controller held needs no further pause."""
        self.pause_s = self._backoff.next_s()
        if answer.leases or answer.waited_s >= self.pause_s:
            self.reset()

    def reset(self) -> None:
        self.pause_s = 0.0
        self._backoff.reset()
