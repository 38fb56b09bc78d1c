"""State machine of a rollout worker: lease ‖ prepare ‖ generate ‖ postprocess ‖ deliver, every queue bounded.

Invariants, checked by `check()`:
- every lease taken leaves exactly once: delivered (finished or failed) or returned;
- leases are generated in the order of their grants (one that is retried alone keeps its place); leases of an evaluation
  are in separate batches;
- with prefetch on, a lease request never takes the queue above `queue_samples`; samples on the output side never exceed
  `output_samples` (or one batch, if that is larger); preparation does not start while `queue_bytes` are held;
- leases that wait for rewards are not on the output side; they hold at most `scoring_samples` samples (or one lease);
- with prefetch off, or where overlapping was measured to be slower, nothing is leased while `concurrency` batches are
  in progress: a plain loop. Only the delivery of a batch and the request for the next one overlap.

Backpressure: a slow consumer fills the output side, then the queue, then stops the lease requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import ceil

import msgspec

from penstock.envs.settings import RewardSection
from penstock.errors import InvalidTransition, LocalProtocolError
from penstock.rollout.flow import (
    Abandoned,
    AskLease,
    Deliver,
    DeliverEnded,
    Effect,
    EnginePolled,
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
    ScoringBegan,
    Stage,
    Started,
    StopRequested,
    Ticket,
)
from penstock.rollout.holdings import OUTPUT, QUEUED, Held, Holdings
from penstock.rollout.overlap import Overlap
from penstock.rollout.pacing import Pacing
from penstock.rollout.settings import RolloutSection

DELIVER_AFTER_S = 0.05
"""How long a finished lease may wait for others, so that one delivery carries many."""


_ROLLOUT = RolloutSection()


class Bounds(msgspec.Struct, frozen=True):
    """Bounds on samples, bytes and concurrent calls."""

    batch_samples: int = _ROLLOUT.batch_samples
    """Samples of one batch."""
    queue_samples: int = _ROLLOUT.waiting_samples
    """Samples leased and not yet generating."""
    output_samples: int | None = None
    """Samples generating, or generated and not yet delivered. Default: those in the engine plus one queue."""
    scoring_samples: int = RewardSection().reward_concurrency * _ROLLOUT.group_size
    """Samples whose rewards are being computed."""
    queue_bytes: int = _ROLLOUT.queue_mb << 20
    """Bytes of prepared and generated data; may be exceeded by one lease per preparation thread."""
    concurrency: int = _ROLLOUT.concurrency
    """Concurrent batches in the engine: 1 for a batch engine, many for a request engine."""
    preparations: int = _ROLLOUT.preparations
    """Leases prepared concurrently."""

    @property
    def output_bound(self) -> int:
        if self.output_samples is not None:
            return max(self.output_samples, self.batch_samples)
        return self.concurrency * self.batch_samples + self.queue_samples

    def in_calls_of(self, samples: int) -> Bounds:
        """The same number of samples in the engine, in calls of `samples`: each call is delivered when it is done, and
        waits for its slowest sample."""
        if samples >= self.batch_samples:
            return self
        calls = self.concurrency * self.batch_samples // samples
        return msgspec.structs.replace(self, batch_samples=samples, concurrency=calls)


class Prefetch:
    """The state machine. One instance per worker; single-threaded."""

    def __init__(self, bounds: Bounds, *, prefetch: bool, measured: bool = False) -> None:
        """`measured`: with prefetch on, overlap only if it is measured to be faster than a plain loop."""
        for name in ("batch_samples", "queue_samples", "scoring_samples", "queue_bytes", "concurrency", "preparations"):
            if getattr(bounds, name) < 1:
                raise LocalProtocolError(f"prefetch bound {name} must be at least 1, found {getattr(bounds, name)}")
        self.bounds = bounds
        self.prefetch = prefetch
        self.concurrency = bounds.concurrency
        """Concurrent batches in the engine, adapted to its free room; never above the bound."""
        self.overlap = Overlap(bounds.batch_samples, bounds.queue_samples, measured=measured)
        self.ending: str | None = None
        self.finished = False
        self.branches: Counter[str] = Counter()
        """How often each decision was taken."""
        self.held = Holdings()
        self._batches: dict[int, tuple[Ticket, ...]] = {}
        self._next_batch = 0
        self._started = False
        self._asking = False
        self._stopping = False
        self._abandoned = False
        self._returning = 0
        self._pacing = Pacing()
        self._largest_bytes: int | None = None

    @property
    def line_samples(self) -> int:
        """Leased and not yet generating."""
        return self.held.samples(*QUEUED)

    @property
    def output_samples(self) -> int:
        """Generating, or generated and not yet delivered; except those that wait for rewards."""
        return self.held.samples(*OUTPUT)

    @property
    def scoring_samples(self) -> int:
        """Waiting for their rewards."""
        return self.held.samples(Stage.SCORING)

    @property
    def held_samples(self) -> int:
        return self.line_samples + self.output_samples + self.scoring_samples

    @property
    def held_bytes(self) -> int:
        return self.held.size_bytes

    @property
    def generating(self) -> int:
        """Batches in the engine."""
        return len(self._batches)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Returns the effects, in order. Late events of returned leases are counted and change nothing."""
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
            case ScoringBegan(ticket):
                if (held := self._find(ticket)) is not None:
                    self.held.move(held, Stage.SCORING, now)
            case PostprocessEnded(ticket):
                if (held := self._find(ticket)) is not None:
                    self.held.move(held, Stage.FINISHED, now, size_bytes=0)
            case DeliverEnded():
                self.overlap.delivered(self.held.samples(Stage.DELIVERING), now)
                for held in list(self.held.at(Stage.DELIVERING).values()):
                    self.held.leave(held, Stage.DELIVERED)
            case ReturnEnded():
                self._returning -= 1
            case PrefetchSet(on):
                if on != self.prefetch:
                    self.branches["prefetch_on" if on else "prefetch_off"] += 1
                self.prefetch = on
            case EnginePolled():
                self._adapt(event)
            case StopRequested(reason):
                self.ending = self.ending or reason
                self._stopping = True
                self._return_stages(QUEUED, effects)
            case Abandoned(reason):
                self.ending = reason
                self._stopping = self._abandoned = True
                self._batches.clear()
                unfinished = (stage for stage in (*OUTPUT, Stage.SCORING) if stage is not Stage.DELIVERING)
                self._return_stages((*QUEUED, *unfinished), effects)
        self._plan(now, effects)
        return effects

    def _adapt(self, engine: EnginePolled) -> None:
        """Keeps about as many completions waiting in the engine as it decodes: a free slot is used at once, and the
        rest is left to other workers. A preempted completion is lost work, so preemptions lower the concurrency."""
        if not self.generating or not engine.decoding:  # no load to measure, or paused for new weights
            return
        before = self.concurrency
        if engine.preempted:
            self.concurrency = max(1, self.generating * 3 // 4)
        elif engine.waiting > engine.decoding:
            batch = (engine.decoding + engine.waiting) / self.generating
            self.concurrency = max(1, ceil(2 * engine.decoding / batch))
        elif 2 * engine.waiting < engine.decoding:
            self.concurrency = min(self.bounds.concurrency, before + max(1, before // 4))
        if self.concurrency != before:
            self.branches["concurrency_raised" if self.concurrency > before else "concurrency_lowered"] += 1

    def _on_lease_answered(self, event: LeaseAnswered, now: float, effects: list[Effect]) -> None:
        if not self._asking:
            raise InvalidTransition("the controller answered a lease request that was not sent")
        self._asking = False
        self.branches[f"lease_{event.verdict}"] += 1
        for lease in event.leases:
            self.held.take(lease, now)
        if event.verdict == "exhausted":
            self.ending = self.ending or "the prompts are exhausted"
        if not event.leases:
            self.overlap.disturbed()
        self._pacing.answered(event)
        if self._stopping:
            self._return_stages(QUEUED, effects)

    def _on_prepare_ended(self, event: PrepareEnded, now: float) -> None:
        held = self._find(event.ticket)
        if held is None:
            return
        if event.failed:
            self.held.move(held, Stage.FINISHED, now)
            return
        self._largest_bytes = max(self._largest_bytes or 0, event.size_bytes)
        self.held.move(held, Stage.READY, now, size_bytes=event.size_bytes)

    def _on_generate_ended(self, event: GenerateEnded, now: float, effects: list[Effect]) -> None:
        tickets = self._batches.pop(event.batch, None)
        if tickets is None:
            self.branches["late_news"] += 1
            return
        members = [self.held[ticket] for ticket in tickets]
        if not event.failed:
            sizes = event.sizes_bytes or tuple(held.size_bytes for held in members)
            for held, size_bytes in zip(members, sizes, strict=True):
                self.held.move(held, Stage.GENERATED, now, size_bytes=size_bytes)
        elif len(members) == 1:
            self.held.move(members[0], Stage.FINISHED, now, size_bytes=0)
        elif self._stopping:
            # No time to find the failing lease: the controller issues them again.
            self._return_leases(members, effects)
        else:
            self.branches["batch_split"] += 1
            for held in members:
                held.alone = True
                self.held.move(held, Stage.READY, now)

    def _plan(self, now: float, effects: list[Effect]) -> None:
        if not self._started or self.finished:
            return
        if not self._abandoned:
            self._plan_prepare(now, effects)
            self._plan_generate(now, effects)
            self._plan_postprocess(now, effects)
            self._plan_deliver(now, effects)
            self._plan_ask(effects)
        if self.ending is not None and not self.held and not self._asking and not self._returning:
            self.finished = True
            effects.append(Finish(self.ending))

    def _plan_prepare(self, now: float, effects: list[Effect]) -> None:
        waiting = self.held.at(Stage.LEASED)
        idle = self.bounds.preparations - len(self.held.at(Stage.PREPARING))
        share = -(-len(waiting) // max(idle, 1))
        for _ in range(idle):
            if not waiting:
                return
            if self.held_bytes >= self.bounds.queue_bytes:
                self.branches["prepare_held_bytes"] += 1
                return
            tickets = tuple(waiting)[: min(share, self._certain_to_fit())]
            for ticket in tickets:
                self.held.move(waiting[ticket], Stage.PREPARING, now)
            effects.append(Prepare(tickets))

    def _certain_to_fit(self) -> int:
        """Leases that one preparation thread may get in one call: small ones together, the very first alone."""
        if self._largest_bytes is None:
            return 1
        return max(1, (self.bounds.queue_bytes - self.held_bytes) // max(self._largest_bytes, 1))

    def _plan_generate(self, now: float, effects: list[Effect]) -> None:
        while self.generating < self.concurrency:
            tickets = self._next_batch_tickets()
            if not tickets:
                return
            samples = sum(self.held[ticket].samples for ticket in tickets)
            output = self.output_samples
            if output and output + samples > self.bounds.output_bound:
                self.branches["generate_held_output"] += 1
                return
            self._batches[self._next_batch] = tickets
            for ticket in tickets:
                self.held.move(self.held[ticket], Stage.GENERATING, now)
            self.branches["generate_full" if samples >= self.bounds.batch_samples else "generate_partial"] += 1
            effects.append(Generate(self._next_batch, tickets))
            self._next_batch += 1

    def _next_batch_tickets(self) -> tuple[Ticket, ...]:
        """The next batch from the head of the queue: a full batch, or all leases there are. Empty: wait for more."""
        ready = self.held.at(Stage.READY)
        if not ready:
            return ()
        unready = min((*self.held.at(Stage.PREPARING), *self.held.at(Stage.LEASED)), default=None)
        chosen: list[Ticket] = []
        samples = 0
        for ticket in sorted(ready):
            held = ready[ticket]
            if unready is not None and ticket > unready:
                # Order: no lease overtakes one that is still being prepared. Its PrepareEnded runs this again, unless
                # its preparation cannot start for lack of bytes, which only generating ready leases can free.
                if chosen and not self.held.at(Stage.PREPARING):
                    break
                return () if not chosen or samples < self.bounds.batch_samples else tuple(chosen)
            full = samples + held.samples > self.bounds.batch_samples
            if chosen and (held.alone or full or held.lease.evaluation != ready[chosen[0]].lease.evaluation):
                return tuple(chosen)
            chosen.append(ticket)
            samples += held.samples
            if held.alone or samples >= self.bounds.batch_samples:
                return tuple(chosen)
        if self.held.at(Stage.PREPARING):
            self.branches["generate_waits_for_batch"] += 1
            return ()
        return tuple(chosen)

    def _plan_postprocess(self, now: float, effects: list[Effect]) -> None:
        waiting = self.held.at(Stage.GENERATED)
        if not waiting or self.held.at(Stage.POSTPROCESSING):
            return
        room = self.bounds.scoring_samples - self.scoring_samples
        tickets: list[Ticket] = []
        for ticket, held in waiting.items():
            # Whether rewards are slow is known only once they run: start no more leases than may wait for them.
            if held.samples > room and (tickets or self.scoring_samples):
                break
            room -= held.samples
            tickets.append(ticket)
        if not tickets:
            self.branches["postprocess_held_scoring"] += 1
            return
        for ticket in tickets:
            self.held.move(waiting[ticket], Stage.POSTPROCESSING, now)
        effects.append(Postprocess(tuple(tickets)))

    def _plan_deliver(self, now: float, effects: list[Effect]) -> None:
        waiting = self.held.at(Stage.FINISHED)
        if not waiting or self.held.at(Stage.DELIVERING):
            return
        oldest = next(iter(waiting.values()))
        fresh = now - oldest.since < DELIVER_AFTER_S
        if (
            fresh
            and self.held.at(Stage.POSTPROCESSING)
            and self.held.samples(Stage.FINISHED) < self.bounds.batch_samples
        ):
            return  # more leases finish soon: one call delivers all
        tickets = tuple(waiting)
        for ticket in tickets:
            self.held.move(waiting[ticket], Stage.DELIVERING, now)
        effects.append(Deliver(tickets))

    def _plan_ask(self, effects: list[Effect]) -> None:
        if self._asking or self.ending is not None:
            return
        bounds = self.bounds
        if self.prefetch and self.overlap.on:
            room = bounds.queue_samples - self.line_samples
            if room < min(bounds.batch_samples, bounds.queue_samples):
                self.branches["ask_held_queue"] += 1
                return
            if self.held_bytes >= bounds.queue_bytes:
                self.branches["ask_held_bytes"] += 1
                return
        else:
            in_progress = self.held_samples - self.held.samples(Stage.DELIVERING)
            if self.line_samples or in_progress > (self.concurrency - 1) * bounds.batch_samples:
                self.branches["ask_held_plain"] += 1
                return
            room = bounds.batch_samples
        self._asking = True
        effects.append(AskLease(room, self._pacing.pause_s))

    def _find(self, ticket: Ticket) -> Held | None:
        held = self.held.get(ticket)
        if held is None:
            self.branches["late_news"] += 1
        return held

    def _return_stages(self, stages: Iterable[Stage], effects: list[Effect]) -> None:
        self._return_leases([held for stage in stages for held in self.held.at(stage).values()], effects)

    def _return_leases(self, leaving: list[Held], effects: list[Effect]) -> None:
        if not leaving:
            return
        for held in leaving:
            self.held.leave(held, Stage.RETURNED)
        self._returning += 1
        effects.append(
            ReturnLeases(
                tuple(held.ticket for held in leaving),
                tuple(sample for held in leaving for sample in held.lease.samples),
            )
        )

    def check(self) -> None:
        """Raises if an invariant is broken."""
        self.held.check()
        in_batches = sorted(ticket for tickets in self._batches.values() for ticket in tickets)
        if in_batches != sorted(self.held.at(Stage.GENERATING)):
            raise LocalProtocolError(f"the engine's batches differ from the generating leases: {self!r}")
        if self.generating > self.bounds.concurrency:
            raise LocalProtocolError(f"the engine has more than {self.bounds.concurrency} batches: {self!r}")
        if self.finished and self.held:
            raise LocalProtocolError(f"finished while leases are held: {self!r}")

    def __repr__(self) -> str:
        oldest = self.held.oldest()
        waits = f", oldest: ticket {oldest.ticket} {oldest.stage} since {oldest.since:.3f}" if oldest else ""
        return (
            f"Prefetch({'prefetch' if self.prefetch else 'plain'}, {self.held!r}, asking={self._asking}, "
            f"returning={self._returning}, ending={self.ending!r}{waits})"
        )
