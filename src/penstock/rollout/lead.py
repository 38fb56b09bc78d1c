"""Decides what rank 0 does for its group: when to ask the controller, what all ranks are ordered, what is reported.

Invariants, checked by `check()`:
- samples taken = reported + returned + outstanding; each leaves once, and what comes late is neither;
- a fetch carries leases only with the order to work;
- generation is over when the ranks rest, nothing is outstanding, and the controller has answered everything.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from penstock.errors import InvalidTransition, LocalProtocolError
from penstock.records.ids import SampleId
from penstock.records.prompt import PromptLease
from penstock.rollout.cadence import Order
from penstock.rollout.flow import Abandoned, AskLease, Finish, LeaseAnswered, PrefetchSet, StopAsked
from penstock.rollout.pacing import Pacing

# Events, besides those of `flow`


class WorkBegan(msgspec.Struct, frozen=True):
    """Generation may begin, for the first time or again."""


class FetchDue(msgspec.Struct, frozen=True):
    """The ranks are about to meet."""


class OrdersTaken(msgspec.Struct, frozen=True):
    """They meet: rank 0 states now what all ranks do."""


class Reported(msgspec.Struct, frozen=True):
    """A fetch brought the outcomes of these samples."""

    samples: tuple[SampleId, ...]


class Dropped(msgspec.Struct, frozen=True):
    """Every rank has let go of these samples before they were generated."""

    samples: tuple[SampleId, ...]


class Rested(msgspec.Struct, frozen=True):
    """Every rank says that it rests, and has nothing left to tell."""


class ControllerAnswered(msgspec.Struct, frozen=True):
    """The controller took a delivery, or leases back."""


class Ended(msgspec.Struct, frozen=True):
    """The worker leaves."""


Event = (
    WorkBegan
    | FetchDue
    | OrdersTaken
    | Reported
    | Dropped
    | Rested
    | ControllerAnswered
    | Ended
    | LeaseAnswered
    | PrefetchSet
    | StopAsked
    | Abandoned
)

# Effects, besides those of `flow`


class Command(msgspec.Struct, frozen=True):
    """Say this in the fetch."""

    order: Order
    leases: tuple[PromptLease, ...]
    prefetch: bool


class Deliver(msgspec.Struct, frozen=True):
    """Report the outcomes of these samples."""

    samples: frozenset[SampleId]


class Discard(msgspec.Struct, frozen=True):
    """The outcomes of these samples come too late: their payloads have no reader."""

    samples: frozenset[SampleId]


class GiveBack(msgspec.Struct, frozen=True):
    """Give these samples back, at once."""

    samples: tuple[SampleId, ...]


Effect = AskLease | Command | Deliver | Discard | GiveBack | Finish


class Lead:
    """The machine. One per worker of several ranks; single-threaded."""

    def __init__(self, batch_samples: int, *, prefetch: bool) -> None:
        self.batch_samples = batch_samples
        self.prefetch = prefetch
        self.order: Order = "rest"
        self.working = False
        self.ending: str | None = None
        self.asking = False
        self.branches: Counter[str] = Counter()
        self.taken = self.reported = self.returned = 0
        self.outstanding: dict[SampleId, None] = {}
        self.ready: tuple[PromptLease, ...] = ()
        """Granted and not yet said in a fetch."""
        self._pacing = Pacing()
        self._answers_due = 0
        self._rested = False
        self._commanded: Order = "rest"

    @property
    def settled(self) -> bool:
        """Nothing is outstanding, and the controller has answered everything."""
        return not (self.outstanding or self.asking or self._answers_due)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """What to do now."""
        effects: list[Effect] = []
        match event:
            case WorkBegan():
                if self.working or self.order == "end":
                    raise InvalidTransition(f"work cannot begin: {self!r}")
                self.working, self.ending, self.order, self._rested = True, None, "work", False
                self._pacing.reset()
            case FetchDue():
                self._plan_ask(effects)
            case OrdersTaken():
                leases, self.ready = self.ready, ()
                self._commanded = self.order
                self._rested &= self.order != "work"
                effects.append(Command(self.order, leases, self.prefetch))
            case Reported(samples):
                self._on_reported(samples, effects)
            case Dropped(samples):
                self._give_back(samples, effects)
            case Rested():
                self._on_rested()
            case ControllerAnswered():
                self._answers_due -= 1
            case LeaseAnswered():
                self._on_lease_answered(event, effects)
            case PrefetchSet(on):
                self.prefetch = on
            case StopAsked(reason):
                self._stop(reason, effects)
            case Abandoned(reason):
                self._stop(reason, effects)
                self._give_back(tuple(self.outstanding), effects)
            case Ended():
                self.order = "end"
        self._plan(effects)
        return effects

    def _on_lease_answered(self, event: LeaseAnswered, effects: list[Effect]) -> None:
        if not self.asking:
            raise InvalidTransition("a lease was answered that was not asked for")
        self.asking = False
        self.branches[f"lease_{event.verdict}"] += 1
        samples = tuple(sample for lease in event.leases for sample in lease.samples)
        self.taken += len(samples)
        self.outstanding.update(dict.fromkeys(samples))
        if self.order != "work":
            self._give_back(samples, effects)
        else:
            self.ready += event.leases
        if event.verdict == "exhausted":
            self.ending = self.ending or "the prompts are exhausted"
        self._pacing.answered(event)

    def _on_reported(self, samples: tuple[SampleId, ...], effects: list[Effect]) -> None:
        known = frozenset(sample for sample in samples if sample in self.outstanding)
        for sample in known:
            del self.outstanding[sample]
        self.reported += len(known)
        if known:
            self._answers_due += 1
            effects.append(Deliver(known))
        if late := frozenset(samples) - known:
            self.branches["late_news"] += len(late)
            effects.append(Discard(late))

    def _on_rested(self) -> None:
        # It was said before this fetch's command was heard, so it holds if that did not call them to work.
        self._rested = self._commanded == "rest"
        if self._rested and self.order == "rest" and self.outstanding:
            raise LocalProtocolError(f"the ranks rest, but {len(self.outstanding)} samples are unaccounted for")

    def _stop(self, reason: str, effects: list[Effect]) -> None:
        if not self.working:
            return
        self.ending = self.ending or reason
        self.order = "rest"
        waiting, self.ready = self.ready, ()
        self._give_back(tuple(sample for lease in waiting for sample in lease.samples), effects)

    def _give_back(self, samples: tuple[SampleId, ...], effects: list[Effect]) -> None:
        leaving = tuple(sample for sample in samples if sample in self.outstanding)
        if not leaving:
            return
        for sample in leaving:
            del self.outstanding[sample]
        self.returned += len(leaving)
        self._answers_due += 1
        effects.append(GiveBack(leaving))

    def _plan(self, effects: list[Effect]) -> None:
        if not self.working:
            return
        if self.prefetch:
            self._plan_ask(effects)
        if self.ending is not None and not self.outstanding:
            self.order = "rest" if self.order == "work" else self.order
            if self._rested and self.settled:
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
            raise LocalProtocolError(f"samples were lost or made up: {self!r}")
        if self.ready and self.order != "work":
            raise LocalProtocolError(f"leases wait for ranks that rest: {self!r}")

    def __repr__(self) -> str:
        return (
            f"Lead(order={self.order}, outstanding={len(self.outstanding)}, asking={self.asking}, "
            f"answers_due={self._answers_due}, ending={self.ending!r})"
        )
