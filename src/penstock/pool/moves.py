"""Carries out plans: orders with deadlines, and the reactions to reports and timeouts.

Every move has one owner (the worker with the order), one deadline, and one rollback: a wake that fails or is late is
undone by a sleep order; a sleep that fails or is late ends in a fence. Moves of different seats never wait for each
other unless they share a device, so a hang affects only its own pipeline.
"""

from __future__ import annotations

from penstock.errors import InvalidTransition
from penstock.pool import events as ev
from penstock.pool.lease import Hold, Member, Seat, SeatInput
from penstock.pool.plan import Plan
from penstock.pool.settings import PoolSection
from penstock.pool.state import DeviceTable
from penstock.records.ids import MemberId, PipelineName
from penstock.records.pool import DeviceId, Order, OrderNumber, SeatId


class Moves:
    """Turns plans and reports into steps of seats and holds, and collects the effects."""

    def __init__(self, table: DeviceTable, settings: PoolSection, effects: list[ev.Effect]) -> None:
        self._table = table
        self._state = table.state
        self._settings = settings
        self._effects = effects

    def carry_out(self, plan: Plan, now: float) -> None:
        """Starts every move of a validated plan; those that must wait for a device start when it is clear."""
        for shrink in plan.shrinks:
            self.recall(self._state.seats[shrink.seat], now, abort=shrink.abort, reason=shrink.reason)
        for withdrawal in plan.withdrawals:
            self._table.step_hold(self._state.holds[withdrawal.request], "withdrawn")
        for grant in plan.grants:
            hold = self._state.holds[grant.request]
            self._table.promise(hold, grant.devices)
            self._start_if_clear(hold, now)
        sleeping = self._sleeping_workers() if plan.expands else {}
        for expand in plan.expands:
            worker = _pick(sleeping.get(expand.pipeline, []), expand.devices)
            seat = Seat(SeatId(self._state.next_seat), expand.pipeline, worker.member, expand.devices, "planned", now)
            self._state.next_seat += 1
            self._table.add_seat(seat)
            self._start_if_clear(seat, now)

    def recall(self, seat: Seat, now: float, *, abort: bool, reason: str) -> None:
        """Removes a worker from its devices (or drops a seat that was only planned)."""
        self._step(seat, "recalled", now, abort=abort, reason=reason)

    def done(self, event: ev.MoveDone, now: float) -> bool:
        seat = self._reported(event.pipeline, event.member, event.order)
        if seat is None:
            return False
        took_s = now - seat.since
        self._step(seat, "finished", now)
        entry = self._state.pipelines.get(seat.pipeline)
        if entry is not None:
            entry.failures = 0
            if seat.state == "serving":
                # A slow wake may be an exception (first weights, busy machine): it counts half, the next corrects it.
                entry.wake_s = (entry.wake_s + took_s) / 2 if 0 < entry.wake_s < took_s else took_s
                if self._table.serving(seat.pipeline) == 1:
                    entry.demand.heard_at = now
        return True

    def failed(self, event: ev.MoveFailed, now: float) -> bool:
        seat = self._reported(event.pipeline, event.member, event.order)
        if seat is None:
            return False
        self._bench(seat, event.error, now)
        self._step(seat, "released" if event.released else "failed", now, abort=True, reason=event.error)
        return True

    def expire(self, now: float) -> bool:
        """Handles missed deadlines. True if there were any."""
        late = [seat for seat in self._state.seats.values() if seat.deadline is not None and seat.deadline <= now]
        for seat in late:
            if seat.state != "fenced":
                self._bench(seat, f"no answer to the order to {'wake' if seat.state == 'waking' else 'sleep'}", now)
            elif seat.member in self._state.members:
                del self._state.members[seat.member]
            self._step(seat, "overdue", now, abort=True, reason="the last order was not answered in time")
        overdue = [hold for hold in self._state.holds.values() if hold.deadline is not None and hold.deadline <= now]
        for hold in overdue:
            if hold.state == "fenced":
                self.start_cleared(self._table.step_hold(hold, "overdue"), now)
            else:
                waited_s = now - hold.since
                self.reject(hold, "timed_out", f"not served within {waited_s:.1f} s", now)
        return bool(late or overdue)

    def lose(self, member: MemberId, now: float) -> bool:
        """The process has ended: all its devices are free."""
        record = self._state.members.pop(member, None)
        seat = self._table.seat_of.get(member)
        holds = [hold for hold in self._state.holds.values() if hold.member == member]
        if seat is not None:
            self.start_cleared(self._table.step_seat(seat, "lost"), now)
        for hold in holds:
            self.start_cleared(self._table.step_hold(hold, "lost"), now)
        return record is not None or seat is not None or bool(holds)

    def evict(self, name: MemberId, reason: str, now: float) -> bool:
        """The process may still run: its devices are fenced, and it gets no more."""
        member = self._state.members.get(name)
        if member is None or member.evicted:
            return False
        member.evicted = True
        holds = [hold for hold in self._state.holds.values() if hold.member == name]
        seat = self._table.seat_of.get(name)
        if seat is not None and seat.state != "fenced":
            self._step(seat, "evicted", now, reason=reason)
        for hold in holds:
            if hold.state == "held":
                self._table.step_hold(hold, "evicted")
                hold.deadline = now + self._settings.fence_s
                self._effects.append(ev.FenceMember(hold.pipeline, hold.member, reason))
            elif hold.state != "fenced":
                self.reject(hold, "timed_out", f"{name} was evicted: {reason}", now)
        self._effects.append(ev.Log("warning", f"pipeline {member.pipeline}: {name} was evicted: {reason}"))
        return True

    def fence_again(self) -> None:
        """Repeats the fence effect of every fenced process: effects are not stored."""
        for claim in (*self._state.seats.values(), *self._state.holds.values()):
            if claim.state == "fenced":
                self._effects.append(ev.FenceMember(claim.pipeline, claim.member, "it was fenced before the restart"))

    def reject(self, hold: Hold, kind: ev.Rejection, reason: str, now: float) -> None:
        """End a request that has not been granted."""
        self.start_cleared(self._table.step_hold(hold, "ended"), now)
        self._effects.append(ev.RejectRequest(hold.pipeline, hold.member, hold.request, kind, reason))

    def start_cleared(self, cleared: list[Seat | Hold], now: float) -> None:
        """Starts the claims whose devices became clear."""
        for claim in cleared:
            self._start_if_clear(claim, now)

    def order(self, seat: Seat) -> Order:
        """The current order of a waking or leaving seat."""
        settings = self._settings
        waking = seat.state == "waking"
        wake_s = settings.wake_s + self._state.pipelines[seat.pipeline].shape.start_s if waking else 0.0
        drain_s = 0.0 if waking or seat.abort else settings.drain_s
        return Order(
            number=seat.order,
            seat=seat.seat,
            action="wake" if waking else "sleep",
            devices=seat.devices,
            abort=seat.abort,
            drain_s=drain_s,
            within_s=wake_s if waking else drain_s + settings.sleep_s,
            reason=seat.reason,
        )

    # ------------------------------------------------------------------------------------------------ internals

    def _start_if_clear(self, claim: Seat | Hold, now: float) -> None:
        if not self._table.is_clear(claim):
            return
        if isinstance(claim, Seat):
            self._step(claim, "cleared", now)
        else:
            self._table.step_hold(claim, "cleared")
            claim.deadline, claim.since = None, now
            entry = self._state.pipelines.get(claim.pipeline)
            if entry is not None:
                entry.home = claim.devices
            self._effects.append(ev.GrantDevices(claim.pipeline, claim.member, claim.request, claim.devices))

    def _step(self, seat: Seat, what: SeatInput, now: float, *, abort: bool = False, reason: str = "") -> None:
        cleared = self._table.step_seat(seat, what)
        seat.deadline, seat.since = None, now
        if seat.state in ("waking", "leaving"):
            seat.order = OrderNumber(self._state.next_order)
            self._state.next_order += 1
            self._state.moves += 1
            seat.abort, seat.reason = abort, reason
            order = self.order(seat)
            seat.deadline = now + order.within_s + self._settings.report_s
            if seat.state == "waking":
                self._effects.append(ev.WakeWorker(seat.pipeline, seat.member, order))
            else:
                self._effects.append(ev.SleepWorker(seat.pipeline, seat.member, order))
        elif seat.state == "fenced":
            seat.deadline = now + self._settings.fence_s
            self._effects.append(ev.FenceMember(seat.pipeline, seat.member, reason))
        elif seat.state == "gone" and (member := self._state.members.get(seat.member)) is not None:
            member.last_devices = seat.devices
        self.start_cleared(cleared, now)

    def _reported(self, pipeline: PipelineName, member: MemberId, order: OrderNumber) -> Seat | None:
        """The seat of this report; None for an outdated report."""
        seat = self._table.seat_of.get(member)
        if seat is None or seat.pipeline != pipeline or seat.order != order or seat.state not in ("waking", "leaving"):
            return None
        return seat

    def _bench(self, seat: Seat, error: str, now: float) -> None:
        self._state.failed_moves += 1
        entry = self._state.pipelines.get(seat.pipeline)
        if entry is None:
            return
        settings = self._settings
        pause_s = min(settings.bench_max_s, settings.bench_s * 2.0**entry.failures)
        entry.failures += 1
        entry.benched_until = now + pause_s
        self._effects.append(
            ev.Log(
                "warning",
                f"pipeline {seat.pipeline}: worker {seat.member} on {list(seat.devices)} failed while {seat.state}: "
                f"{error}; waking none of its workers for {pause_s:g} s",
            )
        )

    def _sleeping_workers(self) -> dict[PipelineName, list[Member]]:
        sleeping: dict[PipelineName, list[Member]] = {}
        for member in self._state.members.values():
            if member.worker and not member.evicted and member.member not in self._table.seat_of:
                sleeping.setdefault(member.pipeline, []).append(member)
        return sleeping


def _pick(sleeping: list[Member], devices: tuple[DeviceId, ...]) -> Member:
    """The worker that is bound to these devices, or was last on them, or else the first."""
    fitting = [member for member in sleeping if not member.bound or member.bound == devices]
    if not fitting:
        raise InvalidTransition(f"a plan wakes a worker on {devices}, but none of its pipeline's workers is free")
    worker = next((member for member in fitting if member.last_devices == devices), fitting[0])
    sleeping.remove(worker)
    return worker
