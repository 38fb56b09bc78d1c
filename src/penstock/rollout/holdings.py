"""The leases that a worker holds, by stage. Every transition is made here and updates the counts."""

from __future__ import annotations

from collections import Counter

import msgspec

from penstock.errors import InvalidTransition, LocalProtocolError
from penstock.records.prompt import PromptLease
from penstock.rollout.flow import TRANSITIONS, Stage, Ticket

QUEUED = (Stage.LEASED, Stage.PREPARING, Stage.READY)
"""Leased and not yet generating."""
OUTPUT = (Stage.GENERATING, Stage.GENERATED, Stage.POSTPROCESSING, Stage.FINISHED, Stage.DELIVERING)
"""Generating, or generated and not yet delivered; except leases that wait for rewards, which have their own bound."""


class Held(msgspec.Struct):
    """One held lease."""

    ticket: Ticket
    lease: PromptLease
    stage: Stage
    since: float
    size_bytes: int = 0
    """Of its prepared and generated data; 0 once it is stored."""
    alone: bool = False
    """Its batch failed; it is retried alone."""

    @property
    def samples(self) -> int:
        return len(self.lease.samples)


class Holdings:
    """Invariant: samples taken = delivered + returned + held, at every moment."""

    def __init__(self) -> None:
        self.next_ticket: Ticket = 0
        self.taken = 0
        self.delivered = 0
        self.returned = 0
        self._all: dict[Ticket, Held] = {}
        self._stages: dict[Stage, dict[Ticket, Held]] = {stage: {} for stage in Stage}
        self._samples: Counter[Stage] = Counter()
        self._bytes: Counter[Stage] = Counter()

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, ticket: Ticket) -> bool:
        return ticket in self._all

    def __getitem__(self, ticket: Ticket) -> Held:
        return self._all[ticket]

    def get(self, ticket: Ticket) -> Held | None:
        return self._all.get(ticket)

    def at(self, stage: Stage) -> dict[Ticket, Held]:
        """The leases of one stage, in the order they reached it. Read-only."""
        return self._stages[stage]

    def samples(self, *stages: Stage) -> int:
        return sum(self._samples[stage] for stage in stages)

    @property
    def size_bytes(self) -> int:
        return self._bytes.total()

    def oldest(self) -> Held | None:
        """The lease that has been in its stage for longest."""
        return min(self._all.values(), key=lambda held: held.since, default=None)

    def take(self, lease: PromptLease, now: float) -> Held:
        """Adds a granted lease."""
        held = Held(self.next_ticket, lease, Stage.LEASED, now)
        self.next_ticket += 1
        self.taken += held.samples
        self._all[held.ticket] = held
        self._enter(held)
        return held

    def move(self, held: Held, stage: Stage, now: float, *, size_bytes: int | None = None) -> None:
        """Moves a lease to another stage; `size_bytes` replaces its size if given."""
        self._check_move(held, stage)
        self._exit(held)
        held.stage, held.since = stage, now
        if size_bytes is not None:
            held.size_bytes = size_bytes
        self._enter(held)

    def leave(self, held: Held, stage: Stage) -> None:
        """Removes a lease: delivered or returned."""
        self._check_move(held, stage)
        self._exit(held)
        del self._all[held.ticket]
        if stage is Stage.DELIVERED:
            self.delivered += held.samples
        else:
            self.returned += held.samples

    def depths(self) -> dict[str, int]:
        """Samples by stage."""
        return {str(stage): self._samples[stage] for stage in (*QUEUED, *OUTPUT, Stage.SCORING)}

    def _check_move(self, held: Held, stage: Stage) -> None:
        if stage not in TRANSITIONS[held.stage].values():
            raise InvalidTransition(f"lease {held.ticket} cannot move from {held.stage} to {stage}")

    def _enter(self, held: Held) -> None:
        self._stages[held.stage][held.ticket] = held
        self._samples[held.stage] += held.samples
        self._bytes[held.stage] += held.size_bytes

    def _exit(self, held: Held) -> None:
        del self._stages[held.stage][held.ticket]
        self._samples[held.stage] -= held.samples
        self._bytes[held.stage] -= held.size_bytes

    def check(self) -> None:
        """Raises if an invariant is broken."""
        for stage, members in self._stages.items():
            samples = sum(held.samples for held in members.values())
            size_bytes = sum(held.size_bytes for held in members.values())
            if any(held.stage is not stage for held in members.values()):
                raise LocalProtocolError(f"a lease listed under {stage} has another stage")
            if (samples, size_bytes) != (self._samples[stage], self._bytes[stage]):
                raise LocalProtocolError(f"the counts of {stage} differ from its leases: {self!r}")
        if self.taken != self.delivered + self.returned + self.samples(*QUEUED, *OUTPUT, Stage.SCORING):
            raise LocalProtocolError(f"samples taken != delivered + returned + held: {self!r}")

    def __repr__(self) -> str:
        stages = ", ".join(f"{stage}={samples}" for stage, samples in self.depths().items() if samples)
        return f"samples: {stages or 'none'}, bytes={self.size_bytes}"
