"""Decides what to do when a process of the run ends. Pure: takes an exit code, returns a verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.launch.processes import ProcessSpec
from penstock.runtime.process import exit_cause
from penstock.runtime.rundir import NO_SPACE

STEADY_S = 60.0
"""A process that ran for this long has started well: its counts of earlier crashes are reset."""

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 10.0
FULL_DISK = (
    "no space is left on the disk of the run directory. What was acknowledged is safe: free some space and resume"
)
CRASHES_AT_START = 3
"""Restarts of a process that fails by itself before it has run for `STEADY_S`: such failures rarely go away."""
NOT_ITS_FAULT = ("Stale",)
"""Failure kinds of a process that the controller evicted: it was killed, stopped or cut off, but started well."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended: its exit code (negative: a signal), and in `lost` the reason if its node was lost or it
    exited early."""

    exit_code: int
    lost: str = ""


@dataclass(frozen=True, slots=True)
class Finished:
    """The process completed its work."""


@dataclass(frozen=True, slots=True)
class RestartAfter:
    delay_s: float
    why: str


@dataclass(frozen=True, slots=True)
class FailTheRun:
    sentence: str
    mistake: bool = False
    """The configuration is the cause, not the run."""


Verdict = Finished | RestartAfter | FailTheRun


@dataclass(slots=True)
class RestartPolicy:
    """Counts the crashes of one process and decides after each."""

    process: str
    max_restarts: int
    window_s: float
    """The last `max_restarts` restarts must not all lie within this time: a machine that is lost once a day is no
    defect, however long the run."""
    restarted_at: list[float] = field(default_factory=list)
    """The restarts of the last `window_s`."""
    quick_crashes: int = field(default=0)
    """Consecutive ends soon after the start, for any reason: the backoff grows with them."""
    failures: int = field(default=0)
    """Consecutive failures of the process itself; a kill in between neither counts nor resets the count."""

    def ended(self, ended: Ended, lived_s: float, failure_report: Mapping[str, Any] | None, *, now: float) -> Verdict:
        if ended.exit_code == 0:
            return Finished()
        if ended.exit_code == NO_SPACE:
            return FailTheRun(f"{self.process}: {FULL_DISK}")
        why = describe_exit(ended, failure_report)
        if failure_report is not None and failure_report["kind"] in ("ConfigError", "RunFailed"):
            return FailTheRun(f"{self.process}: {failure_report['message']}", failure_report["kind"] == "ConfigError")
        self.quick_crashes = self.quick_crashes + 1 if lived_s < STEADY_S else 1
        self.failures = self.failures if lived_s < STEADY_S else 0
        if failure_report is not None and failure_report["kind"] not in NOT_ITS_FAULT:
            self.failures += 1
            if self.failures > CRASHES_AT_START:
                return FailTheRun(f"{self.process} failed {self.failures} times in a row; last: {why}")
        self.restarted_at = [at for at in self.restarted_at if now - at < self.window_s]
        if len(self.restarted_at) >= self.max_restarts:
            often = f"ended again after {self.max_restarts} restarts within {self.window_s:g} s"
            return FailTheRun(f"{self.process} {often if self.max_restarts else 'ended'}: {why}")
        self.restarted_at.append(now)
        delay_s = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (self.quick_crashes - 1))
        return RestartAfter(delay_s, why.splitlines()[0])  # the log has the rest


def without_place(spec: ProcessSpec, why: str, running_beside: Sequence[str]) -> FailTheRun | RestartAfter:
    """The verdict on a process that cannot be placed: retry if others do the same work meanwhile, else fail the run."""
    if running_beside:
        return RestartAfter(LONGEST_BACKOFF_S, f"no place for it: {why}")
    return FailTheRun(f"{spec.name} cannot be started: {why}")


def describe_exit(ended: Ended, failure_report: Mapping[str, Any] | None) -> str:
    if failure_report is not None:
        return f"{failure_report['kind']}: {failure_report['message']}"
    return ended.lost or exit_cause(ended.exit_code)
