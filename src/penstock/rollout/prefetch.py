"""Decides what a rollout worker does next: lease ‖ prepare ‖ generate ‖ postprocess ‖ deliver, bounded everywhere.

Invariants, checked by `check()`:
- every lease taken leaves exactly once: delivered (finished or failed) or given back;
- leases are generated in the order they were granted (one tried again alone keeps its place);
- with prefetch on, an ask never brings the waiting line above `queue_samples`; samples on the output side never exceed
  `output_samples` (or one batch, if that is larger); preparation does not start while `queue_bytes` are held;
- with prefetch off nothing is leased while as many batches as there are engine slots are held: a plain loop.

A slow consumer fills the output side, then the line, then stops the asking: nothing piles up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from penstock.errors import InvalidTransition, LocalProtocolError
from penstock.records.prompt import PromptLease
from penstock.rollout.flow import (
    TRANSITIONS,
    Abandoned,
    AskLease,
    Deliver,
    DeliverEnded,
    Effect,
    Event,
    Finish,
    Generate,
    GenerateEnded,
    LeaseAnswered,
    Postprocess,
    PostprocessEnded,
    PrefetchSet,
    Prepare,
    PrepareEnded,
    ReturnEnded,
    ReturnLeases,
    Stage,
    Started,
    StopAsked,
    Ticket,
)

_LINE = (Stage.LEASED, Stage.PREPARING, Stage.READY)
_OUTPUT = (Stage.GENERATING, Stage.GENERATED, Stage.POSTPROCESSING, Stage.FINISHED, Stage.DELIVERING)
_HOLDS_BYTES = (Stage.READY, Stage.GENERATING, Stage.GENERATED, Stage.POSTPROCESSING)


class Bounds(msgspec.Struct, frozen=True):
    """How much may be held where."""

    batch_samples: int = 64
    """Samples generated at once."""
    queue_samples: int = 128
    """Samples leased and not yet generating."""
    output_samples: int | None = None
    """Samples generating or generated and not yet delivered; by default what the engine holds plus one queue."""
    queue_bytes: int = 1 << 30
    """Bytes of prepared and generated data; one lease per preparation thread may overshoot."""
    concurrency: int = 1
    """Batches in the engine at once: 1 for a batch engine, many for a request engine."""
    preparations: int = 1
    """Leases prepared at once."""
    deliver_after_s: float = 0.05
    """How long a finished lease may wait for its neighbours, so that one delivery carries many."""
    first_backoff_s: float = 0.05
    backoff_cap_s: float = 1.0

    @property
    def output_bound(self) -> int:
        if self.output_samples is not None:
            return max(self.output_samples, self.batch_samples)
        return self.concurrency * self.batch_samples + self.queue_samples


class _Held(msgspec.Struct):
    ticket: Ticket
    lease: PromptLease
    stage: Stage
    since: float
    size_bytes: int = 0
    alone: bool = False
    """Its batch failed; it is tried once more by itself."""

    @property
    def samples(self) -> int:
        return len(self.lease.samples)


class Prefetch:
    """The machine. One instance per worker; single-threaded."""

    def __init__(self, bounds: Bounds, *, prefetch: bool = False) -> None:
        for name in ("batch_samples", "queue_samples", "queue_bytes", "concurrency", "preparations"):
            if getattr(bounds, name) < 1:
                raise LocalProtocolError(f"prefetch bound {name} must be at least 1, found {getattr(bounds, name)}")
        self.bounds = bounds
        self.prefetch = prefetch
        self.ending: str | None = None
        self.finished = False
        self.branches: Counter[str] = Counter()
        """How often each decision was taken."""
        self._held: dict[Ticket, _Held] = {}
        self._stages: dict[Stage, dict[Ticket, _Held]] = {stage: {} for stage in Stage}
        self._samples: Counter[Stage] = Counter()
        self._bytes: Counter[Stage] = Counter()
        self._batches: dict[int, tuple[Ticket, ...]] = {}
        self.next_ticket = 0
        self._next_batch = 0
        self._started = False
        self._asking = False
        self._stopping = False
        self._abandoned = False
        self._returning = 0
        self._backoff_s = 0.0
        self._largest_bytes: int | None = None
        self.taken = 0
        self.delivered = 0
        self.returned = 0

    # What is held, derived from the stages.

    def samples_in(self, stages: Iterable[Stage]) -> int:
        return sum(self._samples[stage] for stage in stages)

    @property
    def line_samples(self) -> int:
        """Leased and not yet generating."""
        return self.samples_in(_LINE)

    @property
    def output_samples(self) -> int:
        """Generating, or generated and not yet delivered."""
        return self.samples_in(_OUTPUT)

    @property
    def held_samples(self) -> int:
        return self.line_samples + self.output_samples

    @property
    def held_bytes(self) -> int:
        return sum(self._bytes[stage] for stage in _HOLDS_BYTES)

    @property
    def generating(self) -> int:
        """Batches in the engine."""
        return len(self._batches)

    def depths(self) -> dict[str, int]:
        """Samples by stage."""
        return {str(stage): self._samples[stage] for stage in (*_LINE, *_OUTPUT)}

    def lease(self, ticket: Ticket) -> PromptLease:
        return self._held[ticket].lease

    def holds(self, ticket: Ticket) -> bool:
        """Whether work on this ticket still matters."""
        return ticket in self._held

    # The machine.

    def handle(self, event: Event, now: float) -> list[Effect]:
        """What to do now. Late news about leases that were given back is counted and changes nothing."""
        effects: list[Effect] = []
        match event:
            case Started():
                self._started = True
            case LeaseAnswered():
                self._on_lease_answered(event, now, effects)
            case PrepareEnded():
                self._on_prepare_ended(event, now)
            case GenerateEnded():
                self._on_generate_ended(event, now, effects)
            case PostprocessEnded(ticket):
                if (held := self._known(ticket)) is not None:
                    self._resize(held, 0)
                    self._move(held, Stage.FINISHED, now)
            case DeliverEnded():
                for held in list(self._stages[Stage.DELIVERING].values()):
                    self._leave(held, Stage.DELIVERED)
            case ReturnEnded():
                self._returning -= 1
            case PrefetchSet(on):
                if on != self.prefetch:
                    self.branches["prefetch_on" if on else "prefetch_off"] += 1
                self.prefetch = on
            case StopAsked(reason):
                self.ending = self.ending or reason
                self._stopping = True
                self._give_back(_LINE, effects)
            case Abandoned(reason):
                self.ending = reason
                self._stopping = self._abandoned = True
                self._batches.clear()
                self._give_back((*_LINE, *(stage for stage in _OUTPUT if stage is not Stage.DELIVERING)), effects)
        self._plan(now, effects)
        return effects

    def _on_lease_answered(self, event: LeaseAnswered, now: float, effects: list[Effect]) -> None:
        if not self._asking:
            raise InvalidTransition("a lease was answered that was not asked for")
        self._asking = False
        self.branches[f"lease_{event.verdict}"] += 1
        for lease in event.leases:
            held = _Held(self.next_ticket, lease, Stage.LEASED, now)
            self.next_ticket += 1
            self._held[held.ticket] = held
            self._enter(held)
            self.taken += held.samples
        if event.verdict == "exhausted":
            self.ending = self.ending or "the prompts are exhausted"
        if event.leases:
            self._backoff_s = 0.0
        else:
            grown = min(max(2 * self._backoff_s, self.bounds.first_backoff_s), self.bounds.backoff_cap_s)
            # A desk that held the call has done the waiting; one that said no at once is not asked at once.
            self._backoff_s = 0.0 if event.waited_s >= grown else grown
        if self._stopping:
            self._give_back(_LINE, effects)

    def _on_prepare_ended(self, event: PrepareEnded, now: float) -> None:
        held = self._known(event.ticket)
        if held is None:
            return
        if event.failed:
            self._move(held, Stage.FINISHED, now)
            return
        self._largest_bytes = max(self._largest_bytes or 0, event.size_bytes)
        self._resize(held, event.size_bytes)
        self._move(held, Stage.READY, now)

    def _on_generate_ended(self, event: GenerateEnded, now: float, effects: list[Effect]) -> None:
        tickets = self._batches.pop(event.batch, None)
        if tickets is None:
            self.branches["late_news"] += 1
            return
        members = [self._held[ticket] for ticket in tickets]
        if not event.failed:
            sizes = event.sizes_bytes or tuple(held.size_bytes for held in members)
            for held, size_bytes in zip(members, sizes, strict=True):
                self._resize(held, size_bytes)
                self._move(held, Stage.GENERATED, now)
        elif len(members) == 1:
            self._resize(members[0], 0)
            self._move(members[0], Stage.FINISHED, now)
        elif self._stopping:
            # No time to find the culprit: let the desk issue them again.
            self._give_back_these(members, effects)
        else:
            self.branches["batch_split"] += 1
            for held in members:
                held.alone = True
                self._move(held, Stage.READY, now)

    def _plan(self, now: float, effects: list[Effect]) -> None:
        if not self._started or self.finished:
            return
        if not self._abandoned:
            self._plan_prepare(now, effects)
            self._plan_generate(now, effects)
            self._plan_postprocess(now, effects)
            self._plan_deliver(now, effects)
            self._plan_ask(effects)
        if self.ending is not None and not self._held and not self._asking and not self._returning:
            self.finished = True
            effects.append(Finish(self.ending))

    def _plan_prepare(self, now: float, effects: list[Effect]) -> None:
        waiting = self._stages[Stage.LEASED]
        idle = self.bounds.preparations - len(self._stages[Stage.PREPARING])
        share = -(-len(waiting) // max(idle, 1))
        for _ in range(idle):
            if not waiting:
                return
            if self.held_bytes >= self.bounds.queue_bytes:
                self.branches["prepare_held_bytes"] += 1
                return
            tickets = tuple(waiting)[: min(share, self._certain_to_fit())]
            for ticket in tickets:
                self._move(waiting[ticket], Stage.PREPARING, now)
            effects.append(Prepare(tickets))

    def _certain_to_fit(self) -> int:
        """How many leases may be handed to a preparation thread at once: small ones together, the first by itself."""
        if self._largest_bytes is None:
            return 1
        return max(1, (self.bounds.queue_bytes - self.held_bytes) // max(self._largest_bytes, 1))

    def _plan_generate(self, now: float, effects: list[Effect]) -> None:
        while self.generating < self.bounds.concurrency:
            tickets = self._next_batch_tickets()
            if not tickets:
                return
            samples = sum(self._held[ticket].samples for ticket in tickets)
            output = self.output_samples
            if output and output + samples > self.bounds.output_bound:
                self.branches["generate_held_output"] += 1
                return
            self._batches[self._next_batch] = tickets
            for ticket in tickets:
                self._move(self._held[ticket], Stage.GENERATING, now)
            self.branches["generate_full" if samples >= self.bounds.batch_samples else "generate_partial"] += 1
            effects.append(Generate(self._next_batch, tickets))
            self._next_batch += 1

    def _next_batch_tickets(self) -> tuple[Ticket, ...]:
        """The head of the line, if it is worth starting: a full batch, or all that is on its way."""
        ready = self._stages[Stage.READY]
        if not ready:
            return ()
        unready = min((*self._stages[Stage.PREPARING], *self._stages[Stage.LEASED]), default=None)
        chosen: list[Ticket] = []
        samples = 0
        for ticket in sorted(ready):
            held = ready[ticket]
            if unready is not None and ticket > unready:
                # Order: nothing overtakes a lease that is still being prepared. Its end will come back here, unless
                # it cannot even start for want of bytes, which only generating what there is can free.
                if chosen and not self._stages[Stage.PREPARING]:
                    break
                return () if not chosen or samples < self.bounds.batch_samples else tuple(chosen)
            if chosen and (held.alone or samples + held.samples > self.bounds.batch_samples):
                return tuple(chosen)
            chosen.append(ticket)
            samples += held.samples
            if held.alone or samples >= self.bounds.batch_samples:
                return tuple(chosen)
        if self._stages[Stage.PREPARING]:
            self.branches["generate_waits_for_batch"] += 1
            return ()
        return tuple(chosen)

    def _plan_postprocess(self, now: float, effects: list[Effect]) -> None:
        waiting = self._stages[Stage.GENERATED]
        if not waiting or self._stages[Stage.POSTPROCESSING]:
            return
        tickets = tuple(waiting)
        for ticket in tickets:
            self._move(waiting[ticket], Stage.POSTPROCESSING, now)
        effects.append(Postprocess(tickets))

    def _plan_deliver(self, now: float, effects: list[Effect]) -> None:
        waiting = self._stages[Stage.FINISHED]
        if not waiting or self._stages[Stage.DELIVERING]:
            return
        oldest = next(iter(waiting.values()))
        fresh = now - oldest.since < self.bounds.deliver_after_s
        if fresh and self._stages[Stage.POSTPROCESSING] and self._samples[Stage.FINISHED] < self.bounds.batch_samples:
            return  # more is about to come: one call carries it all
        tickets = tuple(waiting)
        for ticket in tickets:
            self._move(waiting[ticket], Stage.DELIVERING, now)
        effects.append(Deliver(tickets))

    def _plan_ask(self, effects: list[Effect]) -> None:
        if self._asking or self.ending is not None:
            return
        bounds = self.bounds
        if self.prefetch:
            room = bounds.queue_samples - self.line_samples
            if room < min(bounds.batch_samples, bounds.queue_samples):
                self.branches["ask_held_queue"] += 1
                return
            if self.held_bytes >= bounds.queue_bytes:
                self.branches["ask_held_bytes"] += 1
                return
        else:
            if self.line_samples or self.held_samples > (bounds.concurrency - 1) * bounds.batch_samples:
                self.branches["ask_held_plain"] += 1
                return
            room = bounds.batch_samples
        self._asking = True
        effects.append(AskLease(room, self._backoff_s))

    # Moves: the only places where stages change.

    def _known(self, ticket: Ticket) -> _Held | None:
        held = self._held.get(ticket)
        if held is None:
            self.branches["late_news"] += 1
        return held

    def _enter(self, held: _Held) -> None:
        self._stages[held.stage][held.ticket] = held
        self._samples[held.stage] += held.samples
        self._bytes[held.stage] += held.size_bytes

    def _exit(self, held: _Held) -> None:
        del self._stages[held.stage][held.ticket]
        self._samples[held.stage] -= held.samples
        self._bytes[held.stage] -= held.size_bytes

    def _resize(self, held: _Held, size_bytes: int) -> None:
        self._bytes[held.stage] += size_bytes - held.size_bytes
        held.size_bytes = size_bytes

    def _move(self, held: _Held, stage: Stage, now: float) -> None:
        if stage not in TRANSITIONS[held.stage].values():
            raise InvalidTransition(f"lease {held.ticket} cannot go from {held.stage} to {stage}")
        self._exit(held)
        held.stage = stage
        held.since = now
        self._enter(held)

    def _leave(self, held: _Held, to: Stage) -> None:
        if to not in TRANSITIONS[held.stage].values():
            raise InvalidTransition(f"lease {held.ticket} cannot go from {held.stage} to {to}")
        self._exit(held)
        del self._held[held.ticket]
        if to is Stage.DELIVERED:
            self.delivered += held.samples
        else:
            self.returned += held.samples

    def _give_back(self, stages: Iterable[Stage], effects: list[Effect]) -> None:
        self._give_back_these([held for stage in stages for held in self._stages[stage].values()], effects)

    def _give_back_these(self, leaving: list[_Held], effects: list[Effect]) -> None:
        if not leaving:
            return
        for held in leaving:
            self._leave(held, Stage.RETURNED)
        self._returning += 1
        effects.append(
            ReturnLeases(
                tuple(held.ticket for held in leaving),
                tuple(sample for held in leaving for sample in held.lease.samples),
            )
        )

    def check(self) -> None:
        """Raises if an invariant is broken."""
        for stage, members in self._stages.items():
            samples = sum(held.samples for held in members.values())
            size_bytes = sum(held.size_bytes for held in members.values())
            if any(held.stage is not stage for held in members.values()):
                raise LocalProtocolError(f"prefetch: a lease stands under {stage} and is elsewhere")
            if (samples, size_bytes) != (self._samples[stage], self._bytes[stage]):
                raise LocalProtocolError(f"prefetch: the counts of {stage} drifted from its leases")
        if self.taken != self.delivered + self.returned + self.held_samples:
            raise LocalProtocolError(f"prefetch: samples were lost or made up: {self!r}")
        in_batches = sorted(ticket for tickets in self._batches.values() for ticket in tickets)
        if in_batches != sorted(self._stages[Stage.GENERATING]):
            raise LocalProtocolError(f"prefetch: the engine's batches are not the generating leases: {self!r}")
        if self.generating > self.bounds.concurrency:
            raise LocalProtocolError(f"prefetch: more batches in the engine than {self.bounds.concurrency}: {self!r}")
        if self.finished and self._held:
            raise LocalProtocolError(f"prefetch: finished with leases in hand: {self!r}")

    def __repr__(self) -> str:
        stages = ", ".join(f"{stage}={self._samples[stage]}" for stage in Stage if self._samples[stage])
        oldest = min(self._held.values(), key=lambda held: held.since, default=None)
        waits = f", oldest: ticket {oldest.ticket} {oldest.stage} since {oldest.since:.3f}" if oldest else ""
        return (
            f"Prefetch({'prefetch' if self.prefetch else 'plain'}, samples: {stages or 'none'}, "
            f"bytes={self.held_bytes}, asking={self._asking}, returning={self._returning}, "
            f"ending={self.ending!r}{waits})"
        )
