"""When to repeat calls for the payloads of one batch, and when to report a payload as missing.

Three nested deadlines: of one call, of all calls for one payload (the slot), of all payloads (the batch). No call gets
more time than is left of the other two. A failed call is repeated immediately (on another port); a payload that failed
again waits for the next round. A stale payload is never requested again. At the end every payload has arrived or is
missing for a stated reason.

All three grow with the size, as those of a server do. Calls share the link: when one times out although its payload was
arriving, half as many are made at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from penstock.errors import InvalidTransition, LocalProtocolError
from penstock.payload.exchange import ExchangeLimits
from penstock.payload.ports import Fault
from penstock.records.payload import PayloadRef

FailureKind = Fault | Literal["stale", "busy", "cancelled", "unknown_ring", "unreachable"]
FINAL: frozenset[FailureKind] = frozenset(["stale", "cancelled", "unknown_ring"])


@dataclass(frozen=True)
class RetryPolicy:
    """Nested deadlines and the number of attempts."""

    call_s: float = 10.0
    slot_s: float = 45.0
    batch_s: float = 120.0
    rounds: int = 3
    calls_per_round: int = 2
    pause_s: float = 0.25
    """Before the second round; doubles for each further one."""
    concurrency: int = 8
    bytes_per_s: float = ExchangeLimits().send_bytes_per_s
    """Each deadline is extended by the size of the payload at this rate, that of the batch by its largest payload."""

    def __post_init__(self) -> None:
        if not 0 < self.call_s < self.slot_s < self.batch_s:
            raise LocalProtocolError(
                f"deadlines must nest, each shorter than the next: call_s={self.call_s}, slot_s={self.slot_s}, "
                f"batch_s={self.batch_s}"
            )
        if self.bytes_per_s <= 0:
            raise LocalProtocolError(f"bytes_per_s must be positive, found {self.bytes_per_s}")
        if min(self.rounds, self.calls_per_round, self.concurrency) < 1 or self.pause_s < 0:
            raise LocalProtocolError(f"rounds, calls_per_round, concurrency must be >= 1 and pause_s >= 0: {self}")


class Failure(NamedTuple):
    """Why one call, or in the end one payload, failed."""

    kind: FailureKind
    detail: str
    partial: bool = False
    """Part of the answer had arrived."""


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
    """0 for the first call for this payload."""


class ReportMissing(NamedTuple):
    ref: PayloadRef
    failure: Failure


Effect = BeginCall | ReportMissing


@dataclass(eq=False)
class _Pending:
    ref: PayloadRef
    calls: int = 0
    began: float = float("-inf")
    """The last call."""
    allowed_s: float = 0.0
    """From the first call to the deadline."""
    deadline: float = float("inf")
    not_before: float = float("-inf")
    failures: list[Failure] = field(default_factory=list)


class BatchRetry:
    """Every payload of one batch is queued, in flight, arrived or missing."""

    def __init__(self, refs: Iterable[PayloadRef], policy: RetryPolicy, now: float) -> None:
        self._policy = policy
        self._fresh = deque(_Pending(ref) for ref in dict.fromkeys(refs))
        largest = max((pending.ref.size_bytes for pending in self._fresh), default=0)
        self._allowed_s = policy.batch_s + largest / policy.bytes_per_s
        self.deadline = now + self._allowed_s
        self._concurrency = policy.concurrency
        self._slowed_at = now
        self._at_once: deque[_Pending] = deque()
        self._next_round: list[_Pending] = []
        self._in_flight: dict[PayloadRef, _Pending] = {}
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
                self.arrived.add(self._end_call(ref).ref)
            case CallFailed(ref, failure):
                effects += self._failed(self._end_call(ref), failure, now)
            case BatchCancelled(reason):
                self._cancelled = reason
            case TimePassed():
                pass
        return effects + self._expire(now) + self._begin(now)

    def wake_at(self, now: float) -> float:
        """When to send `TimePassed` if no call ends before."""
        return min([self.deadline, *(pending.not_before for pending in self._next_round if pending.not_before > now)])

    def check(self) -> None:
        counted = self._queued + len(self._in_flight) + len(self.arrived) + len(self.missing)
        if counted != self._total:
            raise InvalidTransition(f"{self!r} does not add up to {self._total}")
        if len(self._in_flight) > self._policy.concurrency:
            raise InvalidTransition(f"{self!r} exceeds its concurrency of {self._policy.concurrency}")

    def _end_call(self, ref: PayloadRef) -> _Pending:
        try:
            return self._in_flight.pop(ref)
        except KeyError:
            raise InvalidTransition(f"no call for {ref} is in flight") from None

    def _failed(self, pending: _Pending, failure: Failure, now: float) -> list[Effect]:
        pending.failures.append(failure)
        policy = self._policy
        if failure.kind == "timed_out" and failure.partial and pending.began >= self._slowed_at:
            self._concurrency = max(1, self._concurrency // 2)
            self._slowed_at = now
        if failure.kind in FINAL or pending.calls >= policy.rounds * policy.calls_per_round:
            return [self._mark_missing(pending, failure)]
        if pending.calls % policy.calls_per_round:
            self._at_once.append(pending)
        else:
            pending.not_before = now + policy.pause_s * 2 ** (pending.calls // policy.calls_per_round - 1)
            self._next_round.append(pending)
        return []

    def _expire(self, now: float) -> list[Effect]:
        """Marks late payloads as missing. Payloads never called have only the batch's deadline."""
        if self._cancelled is not None or now >= self.deadline:
            failure = (
                Failure("timed_out", f"batch deadline of {self._allowed_s:g} s passed")
                if self._cancelled is None
                else Failure("cancelled", self._cancelled)
            )
            everything = [*self._at_once, *self._fresh, *self._next_round]
            self._at_once.clear()
            self._fresh.clear()
            self._next_round.clear()
            return [self._mark_missing(pending, failure) for pending in everything]
        late = [pending for pending in (*self._at_once, *self._next_round) if now >= pending.deadline]
        for pending in late:
            (self._at_once if pending in self._at_once else self._next_round).remove(pending)
        return [
            self._mark_missing(pending, Failure("timed_out", f"payload deadline of {pending.allowed_s:g} s passed"))
            for pending in late
        ]

    def _mark_missing(self, pending: _Pending, failure: Failure) -> ReportMissing:
        if pending.failures and failure is not pending.failures[-1]:
            last = pending.failures[-1]
            failure = Failure(failure.kind, f"{failure.detail}; last failure: {last.kind}, {last.detail}")
        if pending.calls > 1:
            failure = Failure(failure.kind, f"{failure.detail} (after {pending.calls} calls)")
        self.missing[pending.ref] = failure
        return ReportMissing(pending.ref, failure)

    def _begin(self, now: float) -> list[Effect]:
        begun: list[Effect] = []
        policy = self._policy
        while len(self._in_flight) < self._concurrency:
            pending = self._take_next(now)
            if pending is None:
                break
            transfer_s = pending.ref.size_bytes / policy.bytes_per_s
            if pending.calls == 0:
                pending.allowed_s = policy.slot_s + transfer_s
                pending.deadline = min(now + pending.allowed_s, self.deadline)
            deadline = min(now + policy.call_s + transfer_s, pending.deadline)
            begun.append(BeginCall(pending.ref, deadline, pending.calls))
            pending.began = now
            pending.calls += 1
            self._in_flight[pending.ref] = pending
        return begun

    def _take_next(self, now: float) -> _Pending | None:
        """Immediate repeats first, then payloads never called, then the next round."""
        if self._at_once:
            return self._at_once.popleft()
        if self._fresh:
            return self._fresh.popleft()
        for pending in self._next_round:
            if pending.not_before <= now:
                self._next_round.remove(pending)
                return pending
        return None
