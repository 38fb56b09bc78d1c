"""State machine of rank 0 for its group: when to request leases, what to order all ranks, what to deliver.

Invariants, checked by `check()`:
- samples taken = reported + returned + outstanding; each sample leaves once, and late outcomes are discarded;
- a fetch carries leases only with the order to work;
- generation ends when the ranks are paused, no sample is outstanding, and the controller has answered all calls.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from penstock.errors import InvalidTransition, LocalProtocolError
from penstock.records.ids import SampleId
from penstock.records.prompt import PromptLease
from penstock.rollout.cadence import Order
from penstock.rollout.flow import Abandoned, AskLease, Finish, LeaseAnswered, PrefetchSet, StopRequested
from penstock.rollout.pacing import Pacing

# Events, besides those of `flow`


class WorkBegan(msgspec.Struct, frozen=True):
    """Generation may begin or begin again."""


class FetchDue(msgspec.Struct, frozen=True):
    """The next fetch is about to begin."""


class CommandRequested(msgspec.Struct, frozen=True):
    """The fetch needs rank 0's command for all ranks; ends with `Command`."""


class OutcomesReceived(msgspec.Struct, frozen=True):
    """A fetch returned the outcomes of these samples."""

    samples: tuple[SampleId, ...]


class Dropped(msgspec.Struct, frozen=True):
    """Every rank dropped these samples before they were generated."""

    samples: tuple[SampleId, ...]


class RanksPaused(msgspec.Struct, frozen=True):
    """Every rank reported that it is paused and has no more outcomes."""


class ControllerAnswered(msgspec.Struct, frozen=True):
    """The controller accepted a delivery, or returned leases."""


class ShutdownRequested(msgspec.Struct, frozen=True):
    """The worker shuts down."""


Event = (
    WorkBegan
    | FetchDue
    | CommandRequested
    | OutcomesReceived
    | Dropped
    | RanksPaused
    | ControllerAnswered
    | ShutdownRequested
    | LeaseAnswered
    | PrefetchSet
    | StopRequested
    | Abandoned
)

# Effects, besides those of `flow`


class Command(msgspec.Struct, frozen=True):
    """Send this to all ranks in the fetch."""

    order: Order
    leases: tuple[PromptLease, ...]
    prefetch: bool


class Deliver(msgspec.Struct, frozen=True):
    """Report the outcomes of these samples to the controller."""

    samples: frozenset[SampleId]


class Discard(msgspec.Struct, frozen=True):
    """Discard the payloads of these samples: their outcomes are late, no reader will fetch them."""

    samples: frozenset[SampleId]


class ReturnSamples(msgspec.Struct, frozen=True):
    """Return these samples to the controller at once."""

    samples: tuple[SampleId, ...]


Effect = AskLease | Command | Deliver | Discard | ReturnSamples | Finish


class Lead:
    """The state machine. One per worker of several ranks; single-threaded."""

    def __init__(self, batch_samples: int, *, prefetch: bool) -> None:
        self.batch_samples = batch_samples
        self.prefetch = prefetch
        self.order: Order = "pause"
        self.working = False
        self.ending: str | None = None
        self.asking = False
        self.branches: Counter[str] = Counter()
        self.taken = self.reported = self.returned = 0
        self.outstanding: dict[SampleId, None] = {}
        self.ready: tuple[PromptLease, ...] = ()
        """Granted and not yet sent in a fetch."""
        self._pacing = Pacing()
        self._answers_due = 0
        self._ranks_paused = False
        self._sent_order: Order = "pause"

    @property
    def drained(self) -> bool:
        """No sample is outstanding, and the controller has answered all calls."""
        return not (self.outstanding or self.asking or self._answers_due)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Returns the effects, in order."""
        effects: list[Effect] = []
        match event:
            case WorkBegan():
                if self.working or self.order == "end":
                    raise InvalidTransition(f"work cannot begin: {self!r}")
                self.working, self.ending, self.order, self._ranks_paused = True, None, "work", False
                self._pacing.reset()
            case FetchDue():
                self._plan_ask(effects)
            case CommandRequested():
                leases, self.ready = self.ready, ()
                self._sent_order = self.order
                self._ranks_paused &= self.order != "work"
                effects.append(Command(self.order, leases, self.prefetch))
            case OutcomesReceived(samples):
                self._on_outcomes(samples, effects)
            case Dropped(samples):
                self._return_samples(samples, effects)
            case RanksPaused():
                self._on_ranks_paused()
            case ControllerAnswered():
                self._answers_due -= 1
            case LeaseAnswered():
                self._on_lease_answered(event, effects)
            case PrefetchSet(on):
                self.prefetch = on
            case StopRequested(reason):
                self._stop(reason, effects)
            case Abandoned(reason):
                self._stop(reason, effects)
                self._return_samples(tuple(self.outstanding), effects)
            case ShutdownRequested():
                self.order = "end"
        self._plan(effects)
        return effects

    def _on_lease_answered(self, event: LeaseAnswered, effects: list[Effect]) -> None:
        if not self.asking:
            raise InvalidTransition("the controller answered a lease request that was not sent")
        self.asking = False
        self.branches[f"lease_{event.verdict}"] += 1
        samples = tuple(sample for lease in event.leases for sample in lease.samples)
        self.taken += len(samples)
        self.outstanding.update(dict.fromkeys(samples))
        if self.order != "work":
            self._return_samples(samples, effects)
        else:
            self.ready += event.leases
        if event.verdict == "exhausted":
            self.ending = self.ending or "the prompts are exhausted"
        self._pacing.answered(event)

    def _on_outcomes(self, samples: tuple[SampleId, ...], effects: list[Effect]) -> None:
        expected = frozenset(sample for sample in samples if sample in self.outstanding)
        for sample in expected:
            del self.outstanding[sample]
        self.reported += len(expected)
        if expected:
            self._answers_due += 1
            effects.append(Deliver(expected))
        if late := frozenset(samples) - expected:
            self.branches["late_news"] += len(late)
            effects.append(Discard(late))

    def _on_ranks_paused(self) -> None:
        # Ranks report before they receive the command of the same fetch: it holds only if that command was "pause".
        self._ranks_paused = self._sent_order == "pause"
        if self._ranks_paused and self.order == "pause" and self.outstanding:
            raise LocalProtocolError(f"all ranks are paused, but {len(self.outstanding)} samples are outstanding")

    def _stop(self, reason: str, effects: list[Effect]) -> None:
        if not self.working:
            return
        self.ending = self.ending or reason
        self.order = "pause"
        waiting, self.ready = self.ready, ()
        self._return_samples(tuple(sample for lease in waiting for sample in lease.samples), effects)

    def _return_samples(self, samples: tuple[SampleId, ...], effects: list[Effect]) -> None:
        leaving = tuple(sample for sample in samples if sample in self.outstanding)
        if not leaving:
            return
        for sample in leaving:
            del self.outstanding[sample]
        self.returned += len(leaving)
        self._answers_due += 1
        effects.append(ReturnSamples(leaving))

    def _plan(self, effects: list[Effect]) -> None:
        if not self.working:
            return
        if self.prefetch:
            self._plan_ask(effects)
        if self.ending is not None and not self.outstanding:
            self.order = "pause" if self.order == "work" else self.order
            if self._ranks_paused and self.drained:
                self.working = False
                effects.append(Finish(self.ending))

    def _plan_ask(self, effects: list[Effect]) -> None:
        if self.asking or self.ready or self.ending is not None or self.order != "work":
            return
        self.asking = True
        effects.append(AskLease(self.batch_samples, self._pacing.pause_s))

    def check(self) -> None:
        """Raises if an invariant is broken."""
        if self.taken != self.reported + self.returned + len(self.outstanding):
            raise LocalProtocolError(f"samples taken != reported + returned + outstanding: {self!r}")
        if self.ready and self.order != "work":
            raise LocalProtocolError(f"leases are queued for paused ranks: {self!r}")

    def __repr__(self) -> str:
        return (
            f"Lead(order={self.order}, outstanding={len(self.outstanding)}, asking={self.asking}, "
            f"answers_due={self._answers_due}, ending={self.ending!r})"
        )
