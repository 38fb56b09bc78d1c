"""One pool of devices for all pipelines: its state, its promises, and the resulting orders.

The pool is a state machine: `handle(event, now)` changes its state and returns the effects for the host. Orders and
grants are *state*, not messages: a worker polls `orders(member)`, a waiting caller polls `granted(member, request)`,
and the effects only signal a change. So a lost reply or a restarted controller loses nothing.

Invariants (see `check`): a device has at most one occupant and at most one next owner; it passes from one to the
other only when the first has verified the release, has certainly ended, or was fenced; and the validator accepted every
plan before any of it was carried out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec

from penstock.errors import InvalidTransition, LocalProtocolError, Stale
from penstock.pool import events as ev
from penstock.pool.checks import check_request, check_shape
from penstock.pool.demand import Demand
from penstock.pool.lease import Hold, Member
from penstock.pool.moves import Moves
from penstock.pool.plan import Plan, Snapshot
from penstock.pool.planner import make_plan
from penstock.pool.settings import PoolSection
from penstock.pool.state import DeviceTable, Entry, State, compare_shapes, new_incarnation
from penstock.pool.status import describe, troubles
from penstock.pool.validate import validate
from penstock.pool.view import longest_wait_s, view_of, workers_by_pipeline
from penstock.records.ids import MemberId, PipelineName
from penstock.records.pool import GrantedDevices, Order, PoolStatus, Topology
from penstock.wire.codec import decode_section, encode_section


class Pool:
    """Assigns devices to processes. Independent of real processes, sockets and clocks."""

    def __init__(
        self,
        topology: Topology,
        settings: PoolSection = PoolSection(),
        planner: Callable[[Snapshot], Plan] = make_plan,
    ) -> None:
        """`planner` can be another pure function of a snapshot, to compare rules on the same pool. `topology` and
        `settings` apply until `SessionBegan` replaces them."""
        self.topology, self.settings = topology, settings
        self._planner = planner
        self.revision = 0
        """Grows if and only if an event changed the state: exactly those events belong in the journal."""
        self._effects: list[ev.Effect] = []
        self._adopt(State())

    def _adopt(self, state: State) -> None:
        self.topology, self.settings = state.topology or self.topology, state.settings or self.settings
        compare_shapes(state)
        self._state = state
        self._table = DeviceTable(state)
        self._moves = Moves(self._table, self.settings, self._effects)

    # ------------------------------------------------------------------------------------------------ the machine

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """Handles one event. An event that breaks the protocol raises before anything has changed."""
        self._effects.clear()
        changed = self._apply(event, now)
        if isinstance(event, ev.TimePassed) or (changed and not self._can_wait(event)):
            changed = self._replan(now) or changed
        if changed:
            self.revision += 1
        return list(self._effects)

    def _can_wait(self, event: ev.Event) -> bool:
        """Whether planning can wait for the next tick: nothing waits for this event."""
        if isinstance(event, ev.WorkerJoined):  # thousands of workers join, and each plan reads all of them
            return self._entry(event.pipeline).waiting_since is None
        if isinstance(event, ev.DemandCounted):
            return self._entry(event.pipeline).waiting_since is not None or self._table.serving(event.pipeline) > 0
        return isinstance(event, ev.MoveDone)

    def _apply(self, event: ev.Event, now: float) -> bool:
        match event:
            case ev.TimePassed():
                return self._expire(now)
            case ev.DemandCounted():
                return self._count(event, now)
            case ev.DevicesRequested():
                return self._request(event, now)
            case ev.DevicesReleased():
                return self._release(event, now)
            case ev.RequestCancelled():
                return self._cancel(event, now)
            case ev.MoveDone():
                return self._moves.done(event, now)
            case ev.MoveFailed():
                return self._moves.failed(event, now)
            case ev.WorkerJoined():
                return self._join(event)
            case ev.MemberLost(member=member):
                return self._moves.lose(member, now)
            case ev.MemberEvicted(member=member, reason=reason):
                return self._moves.evict(member, reason, now)
            case ev.SessionBegan(topology=topology, settings=settings):
                self._adopt(new_incarnation(self._state, topology, settings))
                return True
            case ev.PipelineOpened():
                return self._open(event)
            case ev.PipelineClosed():
                return self._close(event, now)
            case ev.ControllerRestarted():
                return self._restart_deadlines(now)

    # --------------------------------------------------------------------------------------------------- queries

    def orders(self, member: MemberId) -> tuple[Order, ...]:
        """The current order of this worker; empty when it has none."""
        seat = self._table.seat_of.get(member)
        return () if seat is None or seat.state not in ("waking", "leaving") else (self._moves.order(seat),)

    def granted(self, member: MemberId, request: int) -> GrantedDevices | None:
        """The devices a request holds; None while it waits and after it ended."""
        hold = self._table.hold_of(member, request)
        if hold is None or hold.state != "held":
            return None
        return GrantedDevices(hold.request, hold.priority, hold.devices)

    def members(self) -> tuple[MemberId, ...]:
        """Every registered process."""
        return tuple(self._state.members)

    def pipeline_of(self, member: MemberId) -> PipelineName | None:
        """The pipeline of a process; None if it is not registered."""
        record = self._state.members.get(member)
        return None if record is None else record.pipeline

    def serving(self, pipeline: PipelineName) -> int:
        """Workers of the pipeline that serve now."""
        return self._table.serving(pipeline)

    def is_open(self, pipeline: PipelineName) -> bool:
        return pipeline in self._state.pipelines

    def status(self, now: float) -> PoolStatus:
        return describe(self._state, self.topology, now)

    def troubles(self, now: float) -> dict[PipelineName, str]:
        return troubles(self._state, self.topology, now)

    def snapshot(self) -> bytes:
        """The whole state, for a journal snapshot."""
        return msgspec.msgpack.encode((self.revision, self._state), enc_hook=encode_section)

    def restore(self, data: bytes) -> None:
        """Adopts a state written by `snapshot`."""
        self.revision, state = msgspec.msgpack.decode(data, type=tuple[int, State], dec_hook=decode_section)
        self._adopt(state)

    def check(self) -> None:
        """Raises if an invariant is broken."""
        self._table.check()
        if self._state.refused_plans:
            raise InvalidTransition(f"{self._state.refused_plans} plans were refused by the validator")

    def __repr__(self) -> str:
        state = self._state
        seats = ", ".join(f"{s.pipeline}@{list(s.devices)} {s.state}" for s in state.seats.values())
        holds = ", ".join(f"{h.pipeline} {h.priority.name.lower()} {h.state}" for h in state.holds.values())
        return f"<Pool {self.topology.device_count} devices; seats: {seats or 'none'}; holds: {holds or 'none'}>"

    def _entry(self, pipeline: PipelineName) -> Entry:
        entry = self._state.pipelines.get(pipeline)
        if entry is None:
            raise LocalProtocolError(f"pipeline {pipeline!r} is not open in the pool: open it before using it")
        return entry

    # ------------------------------------------------------------------------------------- pipelines and members

    def _open(self, event: ev.PipelineOpened) -> bool:
        existing = self._state.pipelines.get(event.pipeline)
        if existing is not None:
            if existing.shape != event:
                raise LocalProtocolError(
                    f"pipeline {event.pipeline!r} is already open with another shape: close it first"
                )
            return False
        check_shape(event, self.topology)
        for seat in self._state.seats.values():
            if seat.pipeline == event.pipeline and len(seat.devices) != event.bundle:
                raise LocalProtocolError(
                    f"pipeline {event.pipeline!r} cannot have bundles of {event.bundle} while {seat.member} still "
                    f"leaves {list(seat.devices)}: open it when that worker is gone"
                )
        self._state.pipelines[event.pipeline] = Entry(event, Demand())
        compare_shapes(self._state)
        return True

    def _close(self, event: ev.PipelineClosed, now: float) -> bool:
        if self._state.pipelines.pop(event.pipeline, None) is None:
            return False
        compare_shapes(self._state)
        for seat in [seat for seat in self._state.seats.values() if seat.pipeline == event.pipeline and seat.stays]:
            self._moves.recall(seat, now, abort=True, reason=event.reason)
        for hold in [hold for hold in self._state.holds.values() if hold.pipeline == event.pipeline]:
            if hold.state in ("waiting", "assigned"):
                self._moves.reject(hold, "closed", f"pipeline {event.pipeline} closed", now)
        return True

    def _count(self, event: ev.DemandCounted, now: float) -> bool:
        entry = self._entry(event.pipeline)
        had_work = entry.demand.remaining > 0
        if not entry.demand.count(event.remaining, event.completed, self._table.serving(event.pipeline), now):
            return False
        if had_work and not event.remaining:
            entry.paused_since = now
        elif event.remaining and entry.paused_since is not None:
            entry.last_pause_s, entry.paused_since = now - entry.paused_since, None
        return True

    def _join(self, event: ev.WorkerJoined) -> bool:
        shape = self._entry(event.pipeline).shape
        if event.devices and (len(event.devices) != shape.bundle or not set(event.devices) <= set(shape.inference)):
            raise LocalProtocolError(
                f"worker {event.member} is bound to {list(event.devices)}; pipeline {event.pipeline} has bundles of "
                f"{shape.bundle} among {list(shape.inference)}"
            )
        member = self._state.members.get(event.member)
        if member is not None and member.worker:
            return False
        member = self._member(event.pipeline, event.member)
        member.worker, member.bound = True, tuple(sorted(event.devices))
        return True

    def _member(self, pipeline: PipelineName, member: MemberId) -> Member:
        return self._state.members.setdefault(member, Member(member, pipeline))

    # --------------------------------------------------------------------------------------- requests and grants

    def _request(self, event: ev.DevicesRequested, now: float) -> bool:
        if not self.is_open(event.pipeline):
            raise Stale(f"pipeline {event.pipeline!r} is closed: it gets no more devices")
        among = check_request(event, self.topology)
        if self._table.hold_of(event.member, event.request) is not None:
            return False
        record = self._state.members.get(event.member)
        if record is not None and record.evicted:
            raise Stale(f"{event.member} was evicted: it gets no more devices")
        if record is not None and event.request <= record.last_request:
            raise Stale(
                f"request {event.request} of {event.member} has ended; the latest is number {record.last_request}"
            )
        old = None
        if event.release is not None:
            old = self._table.hold_of(event.member, event.release)
            if old is None or old.state != "held":
                raise LocalProtocolError(f"{event.member} cannot release request {event.release}: it does not hold it")
        self._member(event.pipeline, event.member).last_request = event.request
        if old is not None:
            # Released and requested in one event: the next plan includes both or neither.
            self._moves.start_cleared(self._table.step_hold(old, "released"), now)
        number = self._state.next_hold
        self._state.next_hold += 1
        self._table.add_hold(
            Hold(
                hold=number,
                pipeline=event.pipeline,
                member=event.member,
                request=event.request,
                priority=event.priority,
                among=among,
                count=event.count,
                since=now,
                deadline=now + event.timeout_s,
            )
        )
        return True

    def _release(self, event: ev.DevicesReleased, now: float) -> bool:
        hold = self._table.hold_of(event.member, event.request)
        if hold is None:
            return False
        if hold.state in ("waiting", "assigned"):
            raise LocalProtocolError(
                f"{event.member} releases request {event.request}, which was not granted: cancel it"
            )
        self._moves.start_cleared(self._table.step_hold(hold, "released"), now)
        return True

    def _cancel(self, event: ev.RequestCancelled, now: float) -> bool:
        hold = self._table.hold_of(event.member, event.request)
        if hold is None or hold.state not in ("waiting", "assigned"):
            return False
        self._moves.reject(hold, "cancelled", "cancelled by the caller", now)
        return True

    # ------------------------------------------------------------------------------------------ time and planning

    def _expire(self, now: float) -> bool:
        changed = self._moves.expire(now)
        changed = self._warn_of_long_waits(now) or changed
        serving = {seat.pipeline for seat in self._state.seats.values() if seat.state == "serving"}
        for name in serving & self._state.pipelines.keys():
            demand = self._state.pipelines[name].demand
            silent_s = now - demand.heard_at
            if demand.remaining and not demand.lapsed and silent_s >= self.settings.demand_lease_s:
                demand.lapsed = changed = True
                self._effects.append(
                    ev.Log(
                        "warning",
                        f"pipeline {name} has workers but completed no sample for {silent_s:.0f} s: it keeps one "
                        f"worker until it completes one",
                    )
                )
        return changed

    def _warn_of_long_waits(self, now: float) -> bool:
        """Warns, once per wait, if a pipeline has had no worker for longer than the bound."""
        bound_s = longest_wait_s(self._state, self.settings)
        late = {
            name
            for name, entry in self._state.pipelines.items()
            if not entry.missed and entry.waiting_since is not None and now > entry.waiting_since + bound_s
        }
        for share in self.status(now).shares if late else ():
            if share.pipeline in late:
                self._state.pipelines[share.pipeline].missed = True
                self._effects.append(ev.Log("warning", f"{share.trouble}; expected one within {bound_s:g} s"))
        return bool(late)

    def _restart_deadlines(self, now: float) -> bool:
        for seat in self._state.seats.values():
            if seat.deadline is not None:
                within_s = self.settings.fence_s if seat.state == "fenced" else self._moves.order(seat).within_s
                seat.deadline = now + within_s + self.settings.report_s
        for hold in self._state.holds.values():
            if hold.deadline is not None:
                hold.deadline = max(hold.deadline, now + self.settings.patience_s)
        for entry in self._state.pipelines.values():
            entry.demand.heard_at = now
        self._moves.fence_again()
        return True

    def _replan(self, now: float) -> bool:
        """Plan, validate, carry out. True if anything changed."""
        workers = workers_by_pipeline(self._state)
        changed = self._mark_waiting(now)
        view = view_of(self._state, self.topology, self.settings, workers, now)
        plan = self._planner(view)
        changed = self._mark_short(plan, now) or changed
        if not plan:
            return changed
        try:
            validate(view, plan)
        except InvalidTransition as refusal:
            # Moving nothing is always safe; `check` and the diagnosis report the count.
            self._state.refused_plans += 1
            self._effects.append(ev.Log("error", f"refused an invalid plan, nothing was moved: {refusal}"))
            return True
        self._moves.carry_out(plan, now)
        self._mark_waiting(now)
        return True

    def _mark_waiting(self, now: float) -> bool:
        """Records since when each pipeline has had work and no worker."""
        held = Counter(seat.pipeline for seat in self._state.seats.values() if seat.stays)
        changed = False
        for name, entry in self._state.pipelines.items():
            waits = entry.demand.remaining > 0 and not held[name]
            if waits != (entry.waiting_since is not None):
                entry.waiting_since, entry.missed = (now if waits else None), False
                changed = True
        return changed

    def _mark_short(self, plan: Plan, now: float) -> bool:
        """Records since when plans have left each pipeline below its share."""
        short = set(plan.short)
        changed = False
        for name, entry in self._state.pipelines.items():
            if (name in short) != (entry.short_since is not None):
                entry.short_since = now if name in short else None
                changed = True
        return changed
