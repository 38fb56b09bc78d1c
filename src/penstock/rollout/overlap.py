"""Whether overlapping the stages pays, by what is measured while running.

Stages on threads share one interpreter. Where generation computes in Python, what runs beside it slows it down, and a
plain loop may be faster. So both are tried in turn, for a few batches each, and the faster one is kept until the next
trial. Trials become rarer.
"""

from __future__ import annotations

from statistics import fmean

WINDOWS = (True, False, True, False, True, False)
"""Of a trial: overlapping or not. In turn, so that drift hits both alike."""
WINDOW_BATCHES = 3
"""Measured in each, after those that were leased, or made, the other way."""
WINDOW_S = 0.1
"""At the least: shorter ones say nothing."""
WORTH = 1.02
"""How much faster the plain loop must be to be chosen."""
FIRST_REST_S = 30.0
LONGEST_REST_S = 600.0


class Overlap:
    """Decides between two ways of running the same stages. No clock inside: it is told when things happened."""

    def __init__(self, batch_samples: int, queue_samples: int, *, measured: bool) -> None:
        """Not `measured`: always on."""
        self.on = True
        self._batch_samples = batch_samples
        self._queue_samples = queue_samples
        self._measured = measured
        self._window = 0
        """Of the trial that is under way."""
        self._began: float | None = None
        self._samples = 0
        self._warm_up = batch_samples
        self._rates: dict[bool, list[float]] = {True: [], False: []}
        self._rest_s = FIRST_REST_S
        self._rest_until: float | None = None

    @property
    def settled(self) -> bool:
        """No trial is under way."""
        return not self._measured or self._rest_until is not None

    def delivered(self, samples: int, now: float) -> None:
        """Samples were delivered. A window begins and ends with a delivery."""
        if not self._measured:
            return
        if self._rest_until is not None:
            if now < self._rest_until:
                return
            self._begin_trial()
        if self._began is None:
            self._warm_up -= samples
            if self._warm_up <= 0:
                self._began = now
            return
        self._samples += samples
        if self._samples >= WINDOW_BATCHES * self._batch_samples and now - self._began >= WINDOW_S:
            self._rates[self.on].append(self._samples / (now - self._began))
            self._next_window(self._window + 1, now)

    def disturbed(self) -> None:
        """The controller had no lease to give, so the window says nothing of the stages. Begin it anew."""
        if not self.settled:
            self._restart_window()

    def _begin_trial(self) -> None:
        self._rest_until = None
        self._rates = {True: [], False: []}
        self._next_window(0, 0.0)

    def _next_window(self, window: int, now: float) -> None:
        self._window = window
        if window < len(WINDOWS):
            self.on = WINDOWS[window]
            self._restart_window()
            return
        self.on = fmean(self._rates[False]) <= WORTH * fmean(self._rates[True])
        self._rest_until = now + self._rest_s
        self._rest_s = min(2 * self._rest_s, LONGEST_REST_S)

    def _restart_window(self) -> None:
        self._began, self._samples = None, 0
        self._warm_up = self._batch_samples if self.on else self._batch_samples + self._queue_samples

    def __repr__(self) -> str:
        rates = {("overlapped" if on else "plain"): [f"{rate:.1f}/s" for rate in of] for on, of in self._rates.items()}
        return f"Overlap({'on' if self.on else 'off'}, {'settled' if self.settled else 'trying'}, {rates})"
