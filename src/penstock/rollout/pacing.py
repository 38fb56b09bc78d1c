"""How soon the controller is asked again after it had nothing to give."""

from __future__ import annotations

from penstock.rollout.flow import LeaseAnswered
from penstock.runtime.backoff import Backoff

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0


class Pacing:
    def __init__(self) -> None:
        self.pause_s = 0.0
        """Before the next ask."""
        self._backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)

    def answered(self, answer: LeaseAnswered) -> None:
        """A controller that held the call has done the waiting; one that said no at once is not asked at once."""
        self.pause_s = self._backoff.next_s()
        if answer.leases or answer.waited_s >= self.pause_s:
            self.reset()

    def reset(self) -> None:
        self.pause_s = 0.0
        self._backoff.reset()
