"""When to ask again for the payloads of one batch, and when to give up.

Three deadlines, one inside the other: a call ends within its own, all calls for one payload within the slot's, all
payloads within the batch's. No call is ever given more time than what is left of the two around it. A failed call is
repeated once at once (on another port); a payload that failed again waits for the next round. One that is stale is
never asked for again. At the end every payload is either arrived or missing for a stated reason.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from penstock.errors import InvalidTransition, LocalProtocolError
from penstock.payload.ports import Fault
from penstock.records.payload import PayloadRef

FailureKind = Fault | Literal["stale", "busy", "cancelled", "unknown_ring", "unreachable"]
FINAL: frozenset[FailureKind] = frozenset(["stale", "cancelled", "unknown_ring"])


@dataclass(frozen=True)
class RetryPolicy:
    """Deadlines that nest, and how often to try."""

    call_s: float = 10.0
    slot_s: float = 45.0
    batch_s: float = 120.0
    rounds: int = 3
    calls_per_round: int = 2
    pause_s: float = 0.25
    """Before the second round; doubles for each further one."""
    concurrency: int = 8

    def __post_init__(self) -> None:
        if not 0 < self.call_s < self.slot_s < self.batch_s:
            raise LocalProtocolError(
                f"deadlines must nest, each shorter than the next: call_s={self.call_s}, slot_s={self.slot_s}, "
                f"batch_s={self.batch_s}"
            )
        if min(self.rounds, self.calls_per_round, self.concurrency) < 1 or self.pause_s < 0:
            raise LocalProtocolError(f"rounds, calls_per_round and concurrency must be at least 1: {self}")


class Failure(NamedTuple):
    """Why one call, or in the end one payload, failed."""

    kind: FailureKind
    detail: str


# Events


class CallSucceeded(NamedTuple):
    ref: PayloadRef


class CallFailed(NamedTuple):
    ref: PayloadRef
    failure: Failure


class TimePassed(NamedTuple):
    pass


class BatchCancelled(NamedTuple):
    reason: str


Event = CallSucceeded | CallFailed | TimePassed | BatchCancelled

# Effects


class BeginCall(NamedTuple):
    ref: PayloadRef
    deadline: float
    attempt: int
    """0 for the first call ever made for this payload."""


class GiveUp(NamedTuple):
    ref: PayloadRef
    failure: Failure


Effect = BeginCall | GiveUp


@dataclass(eq=False)
class _Wanted:
    ref: PayloadRef
    calls: int = 0
    deadline: float = float("inf")
    not_before: float = float("-inf")
    failures: list[Failure] = field(default_factory=list)


class BatchRetry:
    """Every payload of one batch is queued, in flight, arrived or missing."""

    def __init__(self, refs: Iterable[PayloadRef], policy: RetryPolicy, now: float) -> None:
        self._policy = policy
        self.deadline = now + policy.batch_s
        self._fresh = deque(_Wanted(ref) for ref in dict.fromkeys(refs))
        self._at_once: deque[_Wanted] = deque()
        self._next_round: list[_Wanted] = []
        self._in_flight: dict[PayloadRef, _Wanted] = {}
        self.arrived: set[PayloadRef] = set()
        self.missing: dict[PayloadRef, Failure] = {}
        self._total = len(self._fresh)
        self._cancelled: str | None = None

    def __repr__(self) -> str:
        return (
            f"<BatchRetry {len(self.arrived)} of {self._total} arrived, {len(self._in_flight)} in flight, "
            f"{self._queued} queued, {len(self.missing)} missing>"
        )

    @property
    def done(self) -> bool:
        return not self._queued and not self._in_flight

    @property
    def _queued(self) -> int:
        return len(self._fresh) + len(self._at_once) + len(self._next_round)

    def handle(self, event: Event, now: float) -> list[Effect]:
        effects: list[Effect] = []
        match event:
            case CallSucceeded(ref):
                self.arrived.add(self._landed(ref).ref)
            case CallFailed(ref, failure):
                effects += self._failed(self._landed(ref), failure, now)
            case BatchCancelled(reason):
                self._cancelled = reason
            case TimePassed():
                pass
        return effects + self._give_up_late(now) + self._begin(now)

    def wake_at(self, now: float) -> float:
        """When `TimePassed` is worth sending although no call ended."""
        return min([self.deadline, *(wanted.not_before for wanted in self._next_round if wanted.not_before > now)])

    def check(self) -> None:
        counted = self._queued + len(self._in_flight) + len(self.arrived) + len(self.missing)
        if counted != self._total:
            raise InvalidTransition(f"{self!r} does not add up to {self._total}")
        if len(self._in_flight) > self._policy.concurrency:
            raise InvalidTransition(f"{self!r} exceeds its concurrency of {self._policy.concurrency}")

    def _landed(self, ref: PayloadRef) -> _Wanted:
        try:
            return self._in_flight.pop(ref)
        except KeyError:
            raise InvalidTransition(f"no call for {ref} is in flight") from None

    def _failed(self, wanted: _Wanted, failure: Failure, now: float) -> list[Effect]:
        wanted.failures.append(failure)
        policy = self._policy
        if failure.kind in FINAL or wanted.calls >= policy.rounds * policy.calls_per_round:
            return [self._give_up(wanted, failure)]
        if wanted.calls % policy.calls_per_round:
            self._at_once.append(wanted)
        else:
            wanted.not_before = now + policy.pause_s * 2 ** (wanted.calls // policy.calls_per_round - 1)
            self._next_round.append(wanted)
        return []

    def _give_up_late(self, now: float) -> list[Effect]:
        """What can no longer be called in time. Payloads never called share the batch's end: they are not looked at."""
        if self._cancelled is not None or now >= self.deadline:
            failure = (
                Failure("timed_out", f"the batch had {self._policy.batch_s} s")
                if self._cancelled is None
                else Failure("cancelled", self._cancelled)
            )
            everything = [*self._at_once, *self._fresh, *self._next_round]
            self._at_once.clear()
            self._fresh.clear()
            self._next_round.clear()
            return [self._give_up(wanted, failure) for wanted in everything]
        late = [wanted for wanted in (*self._at_once, *self._next_round) if now >= wanted.deadline]
        for wanted in late:
            (self._at_once if wanted in self._at_once else self._next_round).remove(wanted)
        return [
            self._give_up(wanted, Failure("timed_out", f"the payload had {self._policy.slot_s} s")) for wanted in late
        ]

    def _give_up(self, wanted: _Wanted, failure: Failure) -> GiveUp:
        if wanted.failures and failure is not wanted.failures[-1]:
            last = wanted.failures[-1]
            failure = Failure(failure.kind, f"{failure.detail}; last failure: {last.kind}, {last.detail}")
        if wanted.calls > 1:
            failure = Failure(failure.kind, f"{failure.detail} (after {wanted.calls} calls)")
        self.missing[wanted.ref] = failure
        return GiveUp(wanted.ref, failure)

    def _begin(self, now: float) -> list[Effect]:
        begun: list[Effect] = []
        while len(self._in_flight) < self._policy.concurrency:
            wanted = self._take_next(now)
            if wanted is None:
                break
            if wanted.calls == 0:
                wanted.deadline = min(now + self._policy.slot_s, self.deadline)
            begun.append(BeginCall(wanted.ref, min(now + self._policy.call_s, wanted.deadline), wanted.calls))
            wanted.calls += 1
            self._in_flight[wanted.ref] = wanted
        return begun

    def _take_next(self, now: float) -> _Wanted | None:
        """Repeats come first, then what was never called, then the next round."""
        if self._at_once:
            return self._at_once.popleft()
        if self._fresh:
            return self._fresh.popleft()
        for wanted in self._next_round:
            if wanted.not_before <= now:
                self._next_round.remove(wanted)
                return wanted
        return None
