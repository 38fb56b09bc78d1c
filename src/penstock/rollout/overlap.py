"""Whether overlapping the stages pays, by what is measured while running.

Stages on threads share one interpreter. Where generation computes in Python, what runs beside it slows it down, and a
plain loop may be faster. So both are tried in turn, for a few batches each, and the faster one is kept until the next
trial. A trial goes on until one way is clearly ahead: on a busy machine that takes longer. Trials become rarer.
"""

from __future__ import annotations

from statistics import median

AHEAD = 3
"""By how many pairs of windows one way must be ahead of the other."""
MOST_PAIRS = 9
"""After which the median decides."""
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
        self._began: float | None = None
        self._samples = 0
        self._warm_up = batch_samples
        self._rates: dict[bool, list[float]] = {True: [], False: []}
        """Of the trial that is under way or was the last, window by window."""
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
            self._rest_until = None
            self._rates = {True: [], False: []}
            self._begin_window(True)
        if self._began is None:
            self._warm_up -= samples
            if self._warm_up <= 0:
                self._began = now
            return
        self._samples += samples
        if self._samples >= WINDOW_BATCHES * self._batch_samples and now - self._began >= WINDOW_S:
            self._rates[self.on].append(self._samples / (now - self._began))
            self._next_window(now)

    def disturbed(self) -> None:
        """The controller had no lease to give, so the window says nothing of the stages. Begin it anew."""
        if not self.settled:
            self._begin_window(self.on)

    def _next_window(self, now: float) -> None:
        """A pair has one window of each way. Which comes first alternates, so that drift hits both alike."""
        pairs = [plain / overlapped for overlapped, plain in zip(self._rates[True], self._rates[False], strict=False)]
        if len(self._rates[True]) != len(self._rates[False]):
            self._begin_window(not self.on)
            return
        lead = sum(1 if ratio > 1 else -1 for ratio in pairs)
        if abs(lead) < AHEAD and len(pairs) < MOST_PAIRS:
            self._began, self._samples = now, 0  # the next pair begins as this one ended: there is nothing to wait for
            return
        self.on = median(pairs) <= WORTH
        self._rest_until = now + self._rest_s
        self._rest_s = min(2 * self._rest_s, LONGEST_REST_S)

    def _begin_window(self, on: bool) -> None:
        self.on = on
        self._began, self._samples = None, 0
        self._warm_up = self._batch_samples if on else self._batch_samples + self._queue_samples

    def __repr__(self) -> str:
        rates = {("overlapped" if on else "plain"): [f"{rate:.1f}/s" for rate in of] for on, of in self._rates.items()}
        return f"Overlap({'on' if self.on else 'off'}, {'settled' if self.settled else 'trying'}, {rates})"
