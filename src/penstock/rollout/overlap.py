"""Decides by measurement whether overlapping the stages is faster than a plain loop.

Stages on threads share one interpreter. Where generation is Python code, other stages slow it down, and a plain loop
may be faster. So both modes run in turn, for a few batches each, and the faster one is kept until the next trial. A
trial continues until one mode is clearly ahead, which takes longer on a busy machine. Trials become rarer.
"""

from __future__ import annotations

from statistics import median

AHEAD = 3
"""Number of pairs of windows by which one mode must be ahead of the other."""
MOST_PAIRS = 9
"""After this number of pairs the median decides."""
WINDOW_BATCHES = 3
"""Batches measured per window, after those that were leased or generated in the other mode."""
WINDOW_S = 0.1
"""Minimum length of a window: shorter ones are noise."""
MIN_SPEEDUP = 1.02
"""Ratio by which the plain loop must be faster to be chosen."""
FIRST_INTERVAL_S = 30.0
LONGEST_INTERVAL_S = 600.0


class Overlap:
    """Decides between two modes of running the same stages. Reads no clock: the caller passes the time."""

    def __init__(self, batch_samples: int, queue_samples: int, *, measured: bool) -> None:
        """Without `measured`, overlap is always on."""
        self.on = True
        self._batch_samples = batch_samples
        self._queue_samples = queue_samples
        self._measured = measured
        self._began: float | None = None
        self._samples = 0
        self._warm_up = batch_samples
        self._rates: dict[bool, list[float]] = {True: [], False: []}
        """Samples per second of the current or last trial, by window."""
        self._interval_s = FIRST_INTERVAL_S
        self._next_trial_at: float | None = None

    @property
    def settled(self) -> bool:
        """No trial is running."""
        return not self._measured or self._next_trial_at is not None

    def delivered(self, samples: int, now: float) -> None:
        """Samples were delivered. A window begins and ends with a delivery."""
        if not self._measured:
            return
        if self._next_trial_at is not None:
            if now < self._next_trial_at:
                return
            self._next_trial_at = None
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
        """Restarts the window: the controller had no lease to grant, so the window does not measure the stages."""
        if not self.settled:
            self._begin_window(self.on)

    def _next_window(self, now: float) -> None:
        """A pair has one window of each mode. The order alternates, so that drift affects both equally."""
        pairs = [plain / overlapped for overlapped, plain in zip(self._rates[True], self._rates[False], strict=False)]
        if len(self._rates[True]) != len(self._rates[False]):
            self._begin_window(not self.on)
            return
        lead = sum(1 if ratio > 1 else -1 for ratio in pairs)
        if abs(lead) < AHEAD and len(pairs) < MOST_PAIRS:
            self._began, self._samples = now, 0  # the next pair begins in the same mode: no warm-up
            return
        self.on = median(pairs) <= MIN_SPEEDUP
        self._next_trial_at = now + self._interval_s
        self._interval_s = min(2 * self._interval_s, LONGEST_INTERVAL_S)

    def _begin_window(self, on: bool) -> None:
        self.on = on
        self._began, self._samples = None, 0
        self._warm_up = self._batch_samples if on else self._batch_samples + self._queue_samples

    def __repr__(self) -> str:
        rates = {("overlapped" if on else "plain"): [f"{rate:.1f}/s" for rate in of] for on, of in self._rates.items()}
        return f"Overlap({'on' if self.on else 'off'}, {'settled' if self.settled else 'trying'}, {rates})"
