"""State machine of one rank of a worker, between two fetches. All ranks receive the same command and decide the same.

Invariants, checked by `check()` and by construction:
- a rank acts only on the command of the fetch, not on local state that other ranks do not have: every rank generates
  the same batches, in the same order, between the same two fetches;
- with prefetch on, one batch is held ahead and prepared while the batch before it is generated. With prefetch off, a
  batch is generated before the next fetch. Every fetch carries the setting;
- at most one batch is being post-processed; its results are sent at the first fetch after it is finished;
- every lease of this rank leaves exactly once: its results are sent, or all ranks drop it on an order to pause.
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
from penstock.rollout.holdings import QUEUED, Held, Holdings

Order = Literal["work", "pause", "end"]
"""`pause`: drop queued batches and put the engine to sleep; `end`: shut down permanently."""

AHEAD = 1
"""Batches held and not yet generating, with prefetch on."""

# Events, besides the ends of hooks


class CommandReceived(msgspec.Struct, frozen=True):
    """The fetch returned rank 0's command."""

    order: Order
    leases: tuple[PromptLease, ...] = ()
    prefetch: bool = False


class BatchPrepared(msgspec.Struct, frozen=True):
    """Preparation has ended for every lease of the batch, successfully or not."""

    batch: int


class ResultsSent(msgspec.Struct, frozen=True):
    """The results of all finished leases have been passed to the fetch."""


Event = CommandReceived | BatchPrepared | ResultsSent | PrepareEnded | GenerateEnded | PostprocessEnded

# Effects, besides the calls of hooks


class AwaitPrepared(msgspec.Struct, frozen=True):
    """Wait for the preparation of these leases; ends with BatchPrepared."""

    batch: int
    tickets: tuple[Ticket, ...]


class AwaitPostprocessed(msgspec.Struct, frozen=True):
    """Wait until these leases are post-processed; None: all that are in post-processing when the effect is executed."""

    tickets: tuple[Ticket, ...] | None = None


class Drop(msgspec.Struct, frozen=True):
    """Drop these leases; rank 0 returns `samples`, those of all ranks, to the controller."""

    tickets: tuple[Ticket, ...]
    samples: tuple[SampleId, ...]


class Sleep(msgspec.Struct, frozen=True):
    """Put the engine to sleep."""


class Wake(msgspec.Struct, frozen=True):
    """Wake the engine, so that it can generate again."""


class Leave(msgspec.Struct, frozen=True):
    """No fetch will follow."""


Effect = Prepare | AwaitPrepared | Generate | Postprocess | AwaitPostprocessed | Drop | Sleep | Wake | Leave


class _Batch(msgspec.Struct, frozen=True):
    number: int
    tickets: tuple[Ticket, ...]
    """Of this rank."""
    samples: tuple[SampleId, ...]
    """Of all ranks."""


class Cadence:
    """The state machine. One per rank; single-threaded."""

    def __init__(self, *, rank: int, ranks: int, share: bool) -> None:
        """`share`: each lease belongs to one rank. Otherwise every rank generates every lease, and rank 0 reports."""
        if not 0 <= rank < ranks:
            raise LocalProtocolError(f"there is no rank {rank} among {ranks}")
        self.rank = rank
        self.ranks = ranks
        self.share = share
        self.prefetch = False
        self.paused = False
        self.left = False
        self.branches: Counter[str] = Counter()
        self.held = Holdings()
        self._received_leases = 0
        self._queued: deque[_Batch] = deque()
        self._due: dict[int, _Batch] = {}
        self._generating: dict[int, tuple[Ticket, ...]] = {}
        self._next_batch = 0

    @property
    def reports(self) -> bool:
        """Whether this rank reports outcomes."""
        return self.share or self.rank == 0

    @property
    def idle(self) -> bool:
        """No batch is queued: the next fetch may wait for leases."""
        return not self._queued

    @property
    def generating(self) -> int:
        return len(self._generating)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Returns the effects, in order. Late events of dropped leases are counted and change nothing."""
        if self.left and isinstance(event, CommandReceived):
            raise InvalidTransition("a command was received after the end")
        match event:
            case CommandReceived():
                return self._on_command(event, now)
            case BatchPrepared(number):
                return self._on_batch_prepared(number, now)
            case PrepareEnded(ticket, size_bytes, failed):
                if (held := self._find(ticket)) is not None:
                    self.held.move(held, Stage.FINISHED if failed else Stage.READY, now, size_bytes=size_bytes)
            case GenerateEnded():
                return self._on_generate_ended(event, now)
            case PostprocessEnded(ticket):
                if (held := self._find(ticket)) is not None:
                    self.held.move(held, Stage.FINISHED, now, size_bytes=0)
            case ResultsSent():
                for held in list(self.held.at(Stage.FINISHED).values()):
                    self.held.move(held, Stage.DELIVERING, now)
                    self.held.leave(held, Stage.DELIVERED)
        return []

    def _on_command(self, command: CommandReceived, now: float) -> list[Effect]:
        if command.prefetch != self.prefetch:
            self.branches["prefetch_on" if command.prefetch else "prefetch_off"] += 1
            self.prefetch = command.prefetch
        if command.order != "work":
            return self._on_pause(command)
        effects: list[Effect] = []
        if self.paused:
            self.paused = False
            effects.append(Wake())
        if command.leases:
            effects += self._enqueue(command.leases, now)
        else:
            self.branches["fetch_empty"] += 1
        ahead = AHEAD if command.prefetch and command.leases else 0
        while len(self._queued) > ahead:
            batch = self._queued.popleft()
            self._due[batch.number] = batch
            effects.append(AwaitPrepared(batch.number, batch.tickets))
        if not command.prefetch:
            effects.append(AwaitPostprocessed())
        return effects

    def _enqueue(self, leases: tuple[PromptLease, ...], now: float) -> list[Effect]:
        mine: list[Ticket] = []
        for lease in leases:
            if not self.share or self._received_leases % self.ranks == self.rank:
                held = self.held.take(lease, now)
                self.held.move(held, Stage.PREPARING, now)
                mine.append(held.ticket)
            self._received_leases += 1
        samples = tuple(sample for lease in leases for sample in lease.samples)
        self._queued.append(_Batch(self._number(), tuple(mine), samples))
        self.branches["fetch_ahead" if self.prefetch else "fetch_plain"] += 1
        return [Prepare(tuple(mine))] if mine else []

    def _on_pause(self, command: CommandReceived) -> list[Effect]:
        effects: list[Effect] = []
        dropped, self._queued = list(self._queued), deque()
        if dropped:
            self.branches["batch_dropped"] += len(dropped)
            # A lease whose preparation failed may be reported already.
            tickets = tuple(ticket for batch in dropped for ticket in batch.tickets if ticket in self.held)
            for ticket in tickets:
                self.held.leave(self.held[ticket], Stage.RETURNED)
            effects.append(Drop(tickets, tuple(sample for batch in dropped for sample in batch.samples)))
        effects.append(AwaitPostprocessed())
        if command.order == "end":
            self.left = True
            effects.append(Leave())
        elif not self.paused:
            self.paused = True
            effects.append(Sleep())
        return effects

    def _on_batch_prepared(self, number: int, now: float) -> list[Effect]:
        batch = self._due.pop(number)
        stages = {ticket: held.stage for ticket in batch.tickets if (held := self.held.get(ticket)) is not None}
        unprepared = [ticket for ticket, stage in stages.items() if stage is Stage.PREPARING]
        if unprepared:
            raise InvalidTransition(f"batch {number} was reported as prepared, but leases {unprepared} are not")
        ready = tuple(ticket for ticket, stage in stages.items() if stage is Stage.READY)
        self._release_unreported()
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
            # One lease may have caused it: each is retried alone.
            self.branches["batch_split"] += 1
            for ticket in tickets:
                self.held.move(self.held[ticket], Stage.READY, now)
            return [self._generate((ticket,), now) for ticket in tickets]
        if event.failed:
            for ticket in tickets:
                self.held.move(self.held[ticket], Stage.FINISHED, now, size_bytes=0)
            self._release_unreported()
            return []
        sizes = event.sizes_bytes or tuple(self.held[ticket].size_bytes for ticket in tickets)
        for ticket, size_bytes in zip(tickets, sizes, strict=True):
            self.held.move(self.held[ticket], Stage.GENERATED, now, size_bytes=size_bytes)
        if not self.reports:
            self._release_unreported()
            return []
        before = tuple(self.held.at(Stage.POSTPROCESSING))
        effects: list[Effect] = [AwaitPostprocessed(before)] if before else []
        for ticket in tickets:
            self.held.move(self.held[ticket], Stage.POSTPROCESSING, now)
        return [*effects, Postprocess(tickets)]

    def _release_unreported(self) -> None:
        """Drops leases that another rank reports."""
        if not self.reports:
            for stage in (Stage.GENERATED, Stage.FINISHED):
                for held in list(self.held.at(stage).values()):
                    self.held.leave(held, Stage.RETURNED)

    def _find(self, ticket: Ticket) -> Held | None:
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
        if len(self._queued) > AHEAD + len(self._due):
            raise LocalProtocolError(f"more than {AHEAD} batch is held ahead: {self!r}")
        if self.paused and self.held.samples(*QUEUED, Stage.GENERATING):
            raise LocalProtocolError(f"a paused rank holds leases: {self!r}")
        in_batches = sorted(ticket for tickets in self._generating.values() for ticket in tickets)
        if in_batches != sorted(self.held.at(Stage.GENERATING)):
            raise LocalProtocolError(f"the engine's batches differ from the generating leases: {self!r}")

    def __repr__(self) -> str:
        doing = "left" if self.left else "paused" if self.paused else "prefetch" if self.prefetch else "plain"
        return f"Cadence(rank {self.rank} of {self.ranks}, {doing}, ahead={len(self._queued)}, {self.held!r})"
