"""The whole controller in the simulation: control, weights, and unread payloads back to their owners."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.control import effects, events
from penstock.payload.discards import Discards
from penstock.records.ids import MemberId, Version
from penstock.records.payload import PayloadRef
from penstock.records.weights import Held
from penstock.sim.desk import AskWeights, Pending, SimDesk
from penstock.sim.pool_host import AskDevices, AskOrders, ReleaseDevices, ReportOrder, SimPoolHost
from penstock.weights import events as weights
from penstock.weights.coordination import Coordination
from penstock.weights.settings import WeightsSection
from penstock.wire import messages

FLEET = WeightsSection(
    min_healthy=1, deadline_s=60.0, unloaded_timeout_s=60.0, unhealthy_timeout_s=900.0, max_fleet_restarts=3
)


class AskCheckpoint(msgspec.Struct, frozen=True):
    """The trainer waits for a reason to save out of turn."""

    member: MemberId


class Publish(msgspec.Struct, frozen=True):
    """Weights were published, perhaps on disk for good."""

    event: messages.PublishWeights
    durable: bool


class LeaseReply(msgspec.Struct, frozen=True):
    """What a worker is answered: a verdict, and the payloads of its own that nobody will read."""

    verdict: messages.Leased
    discard: tuple[PayloadRef, ...]
    oldest: Version
    """No sample made with a lower version will ever be read."""


class FrontDesk(SimDesk):
    """Answers as the simulated desk does, and does what only the whole controller can do."""

    def __init__(self, pool: SimPoolHost, *args: Any, **kwargs: Any) -> None:
        self.pool = pool
        self.discards = Discards()
        self.fleet = self._new_fleet()
        super().__init__(*args, **kwargs)
        self._held |= {"checkpoint": [], "orders": [], "devices": []}

    def _new_fleet(self) -> Coordination:
        """It is lost with the controller, and rebuilt from reports."""
        return Coordination(FLEET, lambda: self.control.state.published, self.announce, lambda level, line: None)

    def announce(self, topic: str) -> None:
        self.engine.after(0.0, self._wake, topic)

    def release(self, refs: tuple[PayloadRef, ...]) -> None:
        self.discards.add(refs)

    def _decide(self, pending: Pending) -> tuple[Any, str]:
        request, now = pending.call.request, self.engine.now
        match request:
            case AskWeights(held=held, member=member):
                if (refusal := self._refusal(member)) is not None:
                    return refusal, ""
                none = self.control.weights is None or self.control.keeps_weights(member, held)
                offer = None if none else self.fleet.offer(member, held, now)
                self._settle()
                return offer, "weights" if offer is None else ""
            case weights.ReplicaReported(member=member):
                if (refusal := self._refusal(member)) is not None:
                    return refusal, ""
                self._tell(request)
                if self.control.evaluation.lacks_evaluator:
                    self.announce("leases")
                return messages.Ok(), ""
            case AskCheckpoint():
                wanted = self.fleet.transaction.checkpoint_wanted
                return wanted, "" if wanted else "checkpoint"
            case Publish(event=event, durable=durable):
                answer = self.happen(event)
                if isinstance(answer, messages.Ok):
                    self._tell(weights.VersionPublished(event.manifest, durable))
                return answer, ""
            case AskOrders() | ReportOrder() | AskDevices() | ReleaseDevices():
                if (refusal := self._refusal(request.member)) is not None:
                    return refusal, ""
                return self.pool.answer(self.settings.name, request)
            case messages.AskLease() if (verdict := self._held_back(request)) is not None:
                return verdict, ""
        answer, topic = super()._decide(pending)
        match request, answer:
            case messages.AckCheckpoint(), messages.Ok():
                digest = self.control.state.published.valid.get(Version(request.step))
                if digest is not None:
                    self._tell(weights.VersionMadeDurable(Held(Version(request.step), digest)))
            case messages.Register(role="rollout"), messages.Registered():
                self.pool.joined(self.settings.name, request.member)
            case messages.Unregister(), messages.Ok():
                self.pool.lost(request.member, request.reason)
        return answer, topic

    def _reply(self, pending: Pending, answer: Any) -> None:
        if isinstance(answer, messages.Leased):
            request = pending.call.request
            member = self.control.members.get(request.member)
            discard = self.discards.answer(member.rings if member is not None else (), request.request)
            answer = LeaseReply(answer, discard, self.control.oldest_trainable)
        super()._reply(pending, answer)

    def _refusal(self, member: MemberId) -> messages.Refused | None:
        if self.control.members.get(member) is not None:
            return None
        return messages.Refused("Stale", self.control.members.why_unknown(member))

    def _held_back(self, request: messages.AskLease) -> messages.Leased | None:
        """A replica that may not serve, or a fleet without weights, is given nothing."""
        verdict = self.fleet.holds_back(request.member)
        return None if verdict is None else messages.Leased((), verdict, self.control.phase)

    def is_steady(self, request: messages.AskLease) -> bool:
        return self.fleet.is_steady(request.member, request.version)

    def awake(self) -> int:
        return self.pool.pool.serving(self.settings.name)

    def _tell(self, event: weights.TransactionEvent) -> None:
        self.fleet.tell(event, self.engine.now)
        self.fleet.check()
        self._settle()

    def _settle(self) -> None:
        """Does what the fleet decided about members, and ends the run if it must."""
        fleet = self.fleet
        while fleet.evicted:
            member, reason = fleet.evicted.popitem()
            self.happen(messages.Unregister(self.settings.name, member, reason, died=True))
        while fleet.dismissed:
            member, reason = fleet.dismissed.popitem()
            self._on_effect(effects.EvictMember(member, reason))
        if fleet.failure:
            self.happen(messages.Stop(self.settings.name, MemberId(""), fleet.failure, failed=True))

    def _tick(self) -> None:
        super()._tick()
        if self.up:
            self.fleet.reconcile(*self.control.attendance(), self.engine.now)
            self._tell(weights.Ticked())

    def _restart(self) -> None:
        super()._restart()
        self.discards = Discards()
        self.fleet = self._new_fleet()
        self.happen(events.TimePassed())
        if self.control.weights is not None:
            self._tell(weights.VersionPublished(self.control.weights))
