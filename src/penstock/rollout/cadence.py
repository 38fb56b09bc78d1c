"""Decides what one rank of a worker does between two fetches. All ranks hear the same, so all decide alike.

Invariants, checked by `check()` and by construction:
- what a rank does depends on what was heard in the fetch and on nothing that only this rank knows: every rank generates
  the same batches, in the same order, between the same two fetches;
- with prefetch on one batch is held ahead, so that it is being prepared while the one before it is generated; with
  prefetch off a batch is generated before anything more is fetched. The setting is heard with every fetch;
- at most one batch is being post-processed; it is told at the next fetch after it is finished;
- every lease of this rank leaves exactly once: told in a fetch, or dropped because all ranks got an order to rest.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Literal

import msgspec

from penstock.errors import InvalidTransition, LocalProtocolError
from penstock.records.ids import SampleId
from penstock.records.prompt import PromptLease
from penstock.rollout.flow import (
    Generate,
    GenerateEnded,
    Postprocess,
    PostprocessEnded,
    Prepare,
    PrepareEnded,
    Stage,
    Ticket,
)
from penstock.rollout.holdings import LINE, Held, Holdings

Order = Literal["work", "rest", "end"]
"""`rest`: nothing is held and the engine sleeps; `end`: for good."""

AHEAD = 1
"""Batches held and not yet generating, with prefetch on."""

# Events, besides the ends of hooks


class Heard(msgspec.Struct, frozen=True):
    """The fetch brought rank 0's word."""

    order: Order
    leases: tuple[PromptLease, ...] = ()
    prefetch: bool = False


class BatchPrepared(msgspec.Struct, frozen=True):
    """Preparation has ended for every lease of the batch, well or badly."""

    batch: int


class Told(msgspec.Struct, frozen=True):
    """What was finished has been handed to the fetch."""


Event = Heard | BatchPrepared | Told | PrepareEnded | GenerateEnded | PostprocessEnded

# Effects, besides the calls of hooks


class AwaitPrepared(msgspec.Struct, frozen=True):
    """Wait for the preparation of these leases; ends with BatchPrepared."""

    batch: int
    tickets: tuple[Ticket, ...]


class Settle(msgspec.Struct, frozen=True):
    """Wait for the end of post-processing: of these leases, or of all there are when it comes to this."""

    tickets: tuple[Ticket, ...] | None = None


class Drop(msgspec.Struct, frozen=True):
    """Forget these leases; rank 0 gives their `samples`, those of all ranks, back."""

    tickets: tuple[Ticket, ...]
    samples: tuple[SampleId, ...]


class Rest(msgspec.Struct, frozen=True):
    """Put the engine to sleep."""


class Wake(msgspec.Struct, frozen=True):
    """Let the engine generate again."""


class Leave(msgspec.Struct, frozen=True):
    """No fetch will follow."""


Effect = Prepare | AwaitPrepared | Generate | Postprocess | Settle | Drop | Rest | Wake | Leave


class _Batch(msgspec.Struct, frozen=True):
    number: int
    tickets: tuple[Ticket, ...]
    """Of this rank."""
    samples: tuple[SampleId, ...]
    """Of all ranks."""


class Cadence:
    """The machine. One per rank; single-threaded."""

    def __init__(self, *, rank: int, ranks: int, share: bool) -> None:
        """`share`: each lease belongs to one rank. Otherwise every rank generates every lease, and rank 0 reports."""
        if not 0 <= rank < ranks:
            raise LocalProtocolError(f"there is no rank {rank} among {ranks}")
        self.rank = rank
        self.ranks = ranks
        self.share = share
        self.prefetch = False
        self.resting = False
        self.left = False
        self.branches: Counter[str] = Counter()
        self.held = Holdings()
        self._heard_leases = 0
        self._line: deque[_Batch] = deque()
        self._due: dict[int, _Batch] = {}
        self._generating: dict[int, tuple[Ticket, ...]] = {}
        self._next_batch = 0

    @property
    def reports(self) -> bool:
        """Whether this rank's outcomes count."""
        return self.share or self.rank == 0

    @property
    def idle(self) -> bool:
        """Nothing waits for its turn: the next fetch may wait for leases."""
        return not self._line

    @property
    def generating(self) -> int:
        return len(self._generating)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """What to do now, in this order; late news about dropped leases is counted and changes nothing."""
        if self.left and isinstance(event, Heard):
            raise InvalidTransition("something was heard after the end")
        match event:
            case Heard():
                return self._on_heard(event, now)
            case BatchPrepared(number):
                return self._on_batch_prepared(number, now)
            case PrepareEnded(ticket, size_bytes, failed):
                if (held := self._known(ticket)) is not None:
                    self.held.move(held, Stage.FINISHED if failed else Stage.READY, now, size_bytes=size_bytes)
            case GenerateEnded():
                return self._on_generate_ended(event, now)
            case PostprocessEnded(ticket):
                if (held := self._known(ticket)) is not None:
                    self.held.move(held, Stage.FINISHED, now, size_bytes=0)
            case Told():
                for held in list(self.held.at(Stage.FINISHED).values()):
                    self.held.move(held, Stage.DELIVERING, now)
                    self.held.leave(held, Stage.DELIVERED)
        return []

    def _on_heard(self, heard: Heard, now: float) -> list[Effect]:
        if heard.prefetch != self.prefetch:
            self.branches["prefetch_on" if heard.prefetch else "prefetch_off"] += 1
            self.prefetch = heard.prefetch
        if heard.order != "work":
            return self._on_rest(heard)
        effects: list[Effect] = []
        if self.resting:
            self.resting = False
            effects.append(Wake())
        if heard.leases:
            effects += self._take(heard.leases, now)
        else:
            self.branches["fetch_empty"] += 1
        ahead = AHEAD if heard.prefetch and heard.leases else 0
        while len(self._line) > ahead:
            batch = self._line.popleft()
            self._due[batch.number] = batch
            effects.append(AwaitPrepared(batch.number, batch.tickets))
        if not heard.prefetch:
            effects.append(Settle())
        return effects

    def _take(self, leases: tuple[PromptLease, ...], now: float) -> list[Effect]:
        mine: list[Ticket] = []
        for lease in leases:
            if not self.share or self._heard_leases % self.ranks == self.rank:
                held = self.held.take(lease, now)
                self.held.move(held, Stage.PREPARING, now)
                mine.append(held.ticket)
            self._heard_leases += 1
        samples = tuple(sample for lease in leases for sample in lease.samples)
        self._line.append(_Batch(self._number(), tuple(mine), samples))
        self.branches["fetch_ahead" if self.prefetch else "fetch_plain"] += 1
        return [Prepare(tuple(mine))] if mine else []

    def _on_rest(self, heard: Heard) -> list[Effect]:
        effects: list[Effect] = []
        dropped, self._line = list(self._line), deque()
        if dropped:
            self.branches["batch_dropped"] += len(dropped)
            tickets = tuple(ticket for batch in dropped for ticket in batch.tickets)
            for ticket in tickets:
                self.held.leave(self.held[ticket], Stage.RETURNED)
            effects.append(Drop(tickets, tuple(sample for batch in dropped for sample in batch.samples)))
        effects.append(Settle())
        if heard.order == "end":
            self.left = True
            effects.append(Leave())
        elif not self.resting:
            self.resting = True
            effects.append(Rest())
        return effects

    def _on_batch_prepared(self, number: int, now: float) -> list[Effect]:
        batch = self._due.pop(number)
        unprepared = [ticket for ticket in batch.tickets if self.held[ticket].stage is Stage.PREPARING]
        if unprepared:
            raise InvalidTransition(f"batch {number} is called prepared, but leases {unprepared} are not")
        ready = tuple(ticket for ticket in batch.tickets if self.held[ticket].stage is Stage.READY)
        self._settle_unreported()
        return [self._generate(ready, now)] if ready else []

    def _generate(self, tickets: tuple[Ticket, ...], now: float) -> Generate:
        number = self._number()
        for ticket in tickets:
            self.held.move(self.held[ticket], Stage.GENERATING, now)
        self._generating[number] = tickets
        return Generate(number, tickets)

    def _on_generate_ended(self, event: GenerateEnded, now: float) -> list[Effect]:
        tickets = self._generating.pop(event.batch)
        if event.failed and len(tickets) > 1:
            # One of them may be to blame: each is tried once more by itself.
            self.branches["batch_split"] += 1
            for ticket in tickets:
                self.held.move(self.held[ticket], Stage.READY, now)
            return [self._generate((ticket,), now) for ticket in tickets]
        if event.failed:
            for ticket in tickets:
                self.held.move(self.held[ticket], Stage.FINISHED, now, size_bytes=0)
            self._settle_unreported()
            return []
        sizes = event.sizes_bytes or tuple(self.held[ticket].size_bytes for ticket in tickets)
        for ticket, size_bytes in zip(tickets, sizes, strict=True):
            self.held.move(self.held[ticket], Stage.GENERATED, now, size_bytes=size_bytes)
        if not self.reports:
            self._settle_unreported()
            return []
        before = tuple(self.held.at(Stage.POSTPROCESSING))
        effects: list[Effect] = [Settle(before)] if before else []
        for ticket in tickets:
            self.held.move(self.held[ticket], Stage.POSTPROCESSING, now)
        return [*effects, Postprocess(tickets)]

    def _settle_unreported(self) -> None:
        """What another rank reports is over for this one."""
        if not self.reports:
            for stage in (Stage.GENERATED, Stage.FINISHED):
                for held in list(self.held.at(stage).values()):
                    self.held.leave(held, Stage.RETURNED)

    def _known(self, ticket: Ticket) -> Held | None:
        held = self.held.get(ticket)
        if held is None:
            self.branches["late_news"] += 1
        return held

    def _number(self) -> int:
        self._next_batch += 1
        return self._next_batch - 1

    def check(self) -> None:
        """Raises if an invariant is broken."""
        self.held.check()
        if len(self._line) > AHEAD + len(self._due):
            raise LocalProtocolError(f"more than {AHEAD} batch is held ahead: {self!r}")
        if self.resting and self.held.samples(*LINE, Stage.GENERATING):
            raise LocalProtocolError(f"a resting rank holds leases: {self!r}")
        in_batches = sorted(ticket for tickets in self._generating.values() for ticket in tickets)
        if in_batches != sorted(self.held.at(Stage.GENERATING)):
            raise LocalProtocolError(f"the engine's batches are not the generating leases: {self!r}")

    def __repr__(self) -> str:
        doing = "left" if self.left else "resting" if self.resting else "prefetch" if self.prefetch else "plain"
        return f"Cadence(rank {self.rank} of {self.ranks}, {doing}, ahead={len(self._line)}, {self.held!r})"
