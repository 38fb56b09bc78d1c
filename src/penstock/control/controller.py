"""The controller: one state machine over all pipelines, the replicas of each, and the device pool they share.

`handle(event, now)` takes a request of a member or `TimePassed`, and returns effects, the reply first. It has no clock,
no socket and no randomness. Each pipeline has the only table of its members: replicas and pool workers are added and
removed in the event in which a member joins or leaves. No other table expires members.

There are two kinds of state. Pipelines and pool are *journalled*: every event that changed one of them is returned as a
`Record`, and replaying the records gives the same state bit for bit. The state of the replicas is *soft*: after a
restart it is rebuilt from their reports. Its consequences (an eviction, the end of the run) are events of the pipeline
and are journalled there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from penstock.control import events
from penstock.control.effects import Announce, Effect, EvictMember, FenceMember, Log, Record, Topic
from penstock.control.events import ReplicaEvicted, RunResumed, SettingsTaken, TimePassed
from penstock.control.pipeline import PipelineControl
from penstock.errors import ConfigError, InvalidTransition, PenstockError, RunFailed, Stale
from penstock.pool import events as pool_events
from penstock.pool.pool import Pool
from penstock.records.ids import POOL, MemberId, PipelineName, Version
from penstock.records.weights import Held
from penstock.weights import events as weights_events
from penstock.weights.coordination import Coordination, Level
from penstock.weights.published import PublishedVersions
from penstock.weights.settings import WeightsSection
from penstock.wire import messages
from penstock.wire.codec import decode_section
from penstock.wire.messages import NotYet, Ok, Refused, Reply, Request

EVENT_CHARACTERS = 200
"""Length of an event's text in an error message."""

Decided = list[tuple[PipelineName, Effect]]
"""Effects, each with its pipeline; the reply to a request comes first."""

_pipeline_event: Callable[[bytes], events.Event] = msgspec.msgpack.Decoder(events.Event, dec_hook=decode_section).decode
_pool_event: Callable[[bytes], pool_events.Event] = msgspec.msgpack.Decoder(
    pool_events.Event, dec_hook=decode_section
).decode


class Controller:
    """The caller passes every request with its time, and executes every effect in order."""

    def __init__(
        self,
        pipelines: Mapping[PipelineName, PipelineControl],
        *,
        weights: Mapping[PipelineName, WeightsSection] | None = None,
        pool: Pool | None = None,
        shapes: Iterable[pool_events.PipelineOpened] = (),
    ) -> None:
        """`shapes`: where the workers of each pipeline may run in the pool. Without a pool its calls are refused."""
        self.pipelines = dict(pipelines)
        self.pool = pool
        self._pool_settings = (pool.topology, pool.settings) if pool is not None else None
        self._shapes = tuple(shapes)
        self._configured = {name: machine.settings for name, machine in pipelines.items()}
        given = weights or {}
        self.weights = {name: self._coordination(name, given.get(name)) for name in pipelines}
        self.fenced: dict[MemberId, str] = {}
        """Members that must be ended: their devices are requested and they do not respond."""
        self._rejected: dict[tuple[MemberId, int], Refused] = {}
        """Replies to device requests that ended while no call waited for them."""
        self._ticked_at: float | None = None
        self._now = 0.0
        self._out: Decided = []

    def _coordination(self, name: PipelineName, settings: WeightsSection | None) -> Coordination:
        def wake(topic: Topic) -> None:
            self._out.append((name, Announce(topic)))

        def log(level: Level, line: str) -> None:
            self._out.append((name, Log(level, f"{name}: {line}")))

        def published() -> PublishedVersions:
            return self.pipelines[name].state.published

        return Coordination(settings or WeightsSection(), published, wake, log)

    # -- state --------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[PipelineName, bytes]:
        """The journalled state, by pipeline; equal states give equal bytes."""
        states = {name: machine.snapshot() for name, machine in self.pipelines.items()}
        return states | {POOL: self.pool.snapshot()} if self.pool is not None else states

    def has_part(self, name: PipelineName) -> bool:
        return name in self.pipelines or (name == POOL and self.pool is not None)

    def restore(self, name: PipelineName, state: bytes) -> None:
        """Restores one pipeline, or the pool, from its part of a snapshot."""
        if name == POOL and self.pool is not None:
            self.pool.restore(state)
        else:
            self.pipelines[name].restore(state)

    def replay(self, name: PipelineName, event: bytes, at: float) -> Sequence[msgspec.Struct]:
        """Applies one journalled event; returns its effects, which must not be executed again."""
        if name == POOL and self.pool is not None:
            return self.pool.handle(_pool_event(event), at)
        return self.pipelines[name].handle(_pipeline_event(event), at)

    def check(self) -> None:
        """Raises if an invariant is broken, or if a replica is not a member."""
        for name, machine in self.pipelines.items():
            machine.check()
            self.weights[name].check()
            unknown = self.weights[name].transaction.replicas.keys() - machine.state.members.live.keys()
            if unknown:
                raise InvalidTransition(f"{name}: {sorted(unknown)} are replicas but not members")
        if self.pool is not None:
            self.pool.check()

    def status(self, now: float) -> dict[PipelineName, dict[str, float | str]]:
        """Plain numbers for metrics and the live view, per pipeline."""
        return {
            name: machine.status(now) | self.weights[name].transaction.metrics()
            for name, machine in self.pipelines.items()
        }

    def diagnose(self, now: float) -> dict[PipelineName, str]:
        """Per pipeline: which process waits for what, since when, and which one should act."""
        sentences = {name: machine.diagnose(now) for name, machine in self.pipelines.items()}
        for name, trouble in self.pool.troubles(now).items() if self.pool is not None else ():
            sentences[name] += f" In the pool: {trouble}."
        return sentences

    def __repr__(self) -> str:
        return f"Controller({list(self.pipelines.values())}, {list(self.weights.values())}, {self.pool!r})"

    # -- events -------------------------------------------------------------------------------------------------

    def start(self, now: float, *, resumed: bool, new_session: bool) -> Decided:
        """Must be called once, after replaying.

        `new_session`: a session of the run begins (started or resumed), perhaps with other settings; no process of an
        earlier session is left (`resumed`: there was one). Otherwise only the controller restarted, and it keeps its
        settings.
        """
        self._begin(now)
        self._ticked_at = now
        for name, configured in self._configured.items():
            self._feed(name, TimePassed())  # first: the gap is time in which the controller did not run
            if resumed:
                self._feed(name, RunResumed())
            if new_session and isinstance(refusal := self._feed(name, SettingsTaken(configured)), Refused):
                raise ConfigError(f"pipeline {name!r} of this run cannot continue: {refusal.message}")
        if self.pool is not None and self._pool_settings is not None:
            if new_session:
                self._feed_pool(pool_events.SessionBegan(*self._pool_settings))
            for shape in self._shapes:
                self._feed_pool(shape)
            if not new_session:
                self._feed_pool(pool_events.ControllerRestarted())
        for name, machine in self.pipelines.items():
            if machine.weights is not None:
                self._feed_weights(name, weights_events.VersionPublished(machine.weights))
        return self._out

    def handle(self, event: Request | TimePassed, now: float) -> Decided:
        """Handles one event; returns its effects, the reply to a request first."""
        self._begin(now)
        if isinstance(event, TimePassed):
            self._tick()
            return self._out
        out, reply = self._out, self._reply(event)
        out.insert(0, (event.pipeline, reply))
        return out

    def _begin(self, now: float) -> None:
        self._out, self._now = [], now

    def _reply(self, request: Request) -> Reply:
        name, member = request.pipeline, request.member
        machine, weights = self.pipelines[name], self.weights[name]
        match request:
            case messages.AskLease():
                verdict = weights.lease_refusal(member)
                if verdict is not None:  # a replica that may not serve, or a fleet without weights
                    return messages.Leased((), verdict, machine.phase)
                steady = weights.is_steady(member, request.version)
                awake = self.pool.serving(name) if self.pool is not None else 0
                return self._feed(name, msgspec.structs.replace(request, steady=steady, workers=awake))
            case messages.Deliver() | messages.AskBatch() | messages.AckStep() | messages.Heartbeat():
                return self._feed(name, request)
            case messages.Register():
                reply = self._feed(name, request)
                if isinstance(reply, messages.Registered):
                    self._reconcile(name)
                    if request.role == "rollout" and self.pool is not None and self.pool.is_open(name):
                        self._feed_pool(pool_events.WorkerJoined(name, member))
                return reply
            case messages.Unregister():  # in both cases (it left, or it died) it uses no device any more
                self._leave_pool(member, request.reason)
                reply = self._feed(name, request)
                self._reconcile(name)
                return reply
            case messages.Stop():  # stops the whole run
                replies = [self._feed(pipeline, request) for pipeline in self.pipelines]
                return replies[0]
        if machine.members.get(member) is None:  # reports of an evicted member must be ignored
            return Refused("Stale", machine.members.why_unknown(member))
        match request:
            case messages.AckCheckpoint():
                reply = self._feed(name, request)
                digest = machine.state.published.valid.get(Version(request.step))
                if isinstance(reply, Ok) and digest is not None:
                    held = Held(Version(request.step), digest)
                    self._feed_weights(name, weights_events.VersionMadeDurable(held))
                return reply
            case messages.PublishWeights():
                reply = self._feed(name, request)
                if isinstance(reply, Ok):
                    self._feed_weights(name, weights_events.VersionPublished(request.manifest, request.durable))
                return reply
            case messages.ReportReplica():
                self._feed_weights(name, weights_events.reported(request))
                if machine.evaluation.lacks_evaluator:
                    self._out.append((name, Announce("leases")))
                return Ok()
            case messages.AskWeights():
                return self._offer(request, machine, weights)
            case messages.AskCheckpoint():
                if reason := weights.transaction.checkpoint_reason:
                    return messages.CheckpointWanted(reason)
                return NotYet("a request to save an extra checkpoint", machine.phase)
        if self.pool is None:
            return Refused("LocalProtocolError", f"{type(request).__name__} is not answered by this controller")
        return self._reply_of_pool(self.pool, request)

    # -- time ---------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Checks liveness and deadlines, and reports the demand for devices: samples that are or could be leased."""
        for name in self.pipelines:
            self._feed(name, TimePassed())
        if self.pool is not None:
            away_s = self._now - (self._ticked_at if self._ticked_at is not None else self._now)
            if away_s > self.pool.settings.report_s:  # this process was stopped or suspended
                self._feed_pool(pool_events.ControllerRestarted())
            for member in self.pool.members():  # the pool does not expire its members
                name = self.pool.pipeline_of(member)
                if name is not None and self.pipelines[name].members.get(member) is None:
                    self._evict_from_pool(member, self.pipelines[name].members.why_unknown(member))
            for name, machine in self.pipelines.items():
                demand = machine.demand()
                if demand is not None:
                    self._feed_pool(pool_events.DemandCounted(name, *demand))
                else:
                    self._feed_pool(pool_events.PipelineClosed(name, f"its training is {machine.phase}"))
            self._feed_pool(pool_events.TimePassed())
        self._ticked_at = self._now
        for name, machine in self.pipelines.items():
            self._reconcile(name)
            # Workers of a pool may sleep; the pool reports their problems.
            excused = machine.evaluation.evaluators if self.pool is None else frozenset(self.weights[name].replicas)
            self._feed_weights(name, weights_events.Ticked(excused))

    # -- pipelines ----------------------------------------------------------------------------------------------

    def _feed(self, name: PipelineName, event: Any) -> Any:
        """Passes one event to a pipeline; returns the reply and appends the other effects to the output."""
        machine = self.pipelines[name]
        before = machine.revision
        try:
            decided = machine.handle(event, self._now)
        except RunFailed as error:  # from the user's code
            raise RunFailed(f"{name}: {error.message}") from error
        except Exception as error:
            # The event may have been applied in part: the state is undefined.
            what = f"{event!r}"[:EVENT_CHARACTERS]
            raise RunFailed(f"pipeline {name} failed at the event {what}: {type(error).__name__}: {error}") from error
        out = self._out
        if machine.revision != before:
            out.append((name, Record(event, tuple(decided))))
        is_request = not isinstance(event, TimePassed)
        for effect in decided[1:] if is_request else decided:
            out.append((name, effect))
            if isinstance(effect, EvictMember):
                self._evict_from_pool(effect.member, effect.reason)  # it may still use its devices
                self._reconcile(name)
        return decided[0] if is_request else None

    # -- replicas -----------------------------------------------------------------------------------------------

    def _offer(self, request: messages.AskWeights, machine: PipelineControl, weights: Coordination) -> Reply:
        """Offers the newest loadable version, and no other.

        After a trainer rolled back, there is no offer until it publishes again. A worker that evaluates a version, or
        is about to, keeps it.
        """
        if machine.weights is None:
            return NotYet("the first weights of the trainer", machine.phase)
        offer = None
        if not machine.keeps_weights(request.member, request.held):
            offer = weights.offer(request.member, request.held, self._now)
            self._settle_weights(request.pipeline)
        return messages.Weights(offer) if offer is not None else NotYet("newer weights", machine.phase)

    def _reconcile(self, name: PipelineName) -> None:
        """Sets the replicas to the live workers and the trainer to the live trainer, from the member table."""
        self.weights[name].reconcile(*self.pipelines[name].current_members(), self._now)
        self._settle_weights(name)

    def _feed_weights(self, name: PipelineName, event: weights_events.TransactionEvent) -> None:
        self.weights[name].handle(event, self._now)
        self._settle_weights(name)

    def _settle_weights(self, name: PipelineName) -> None:
        """Applies evictions and dismissals of the coordination, and stops the run if it failed."""
        weights = self.weights[name]
        while weights.evicted:
            member, reason = weights.evicted.popitem()
            self._feed(name, ReplicaEvicted(member, reason))
        while weights.dismissed:
            member, reason = weights.dismissed.popitem()
            self._out.append((name, EvictMember(member, reason)))
        if weights.failure and not self.pipelines[name].state.stop_asked:
            self._feed(name, messages.Stop(name, MemberId(""), weights.failure, failed=True))

    # -- the pool -----------------------------------------------------------------------------------------------

    def _reply_of_pool(self, pool: Pool, request: Request) -> Reply:
        name, member = request.pipeline, request.member
        match request:
            case messages.AskDevices():
                if (rejected := self._rejected.pop((member, request.request), None)) is not None:
                    return rejected
                if isinstance(refused := self._try_pool(pool_events.requested(request)), Refused):
                    return refused
                if (grant := pool.granted(member, request.request)) is not None:
                    return messages.DevicesGranted(grant)
                if (rejected := self._rejected.pop((member, request.request), None)) is not None:
                    return rejected
                return NotYet("devices", self.pipelines[name].phase)
            case messages.CancelDevices():
                return self._try_pool(pool_events.RequestCancelled(name, member, request.request))
            case messages.ReleaseDevices():
                return self._try_pool(pool_events.DevicesReleased(name, member, request.request))
            case messages.ReportOrder():
                return self._try_pool(pool_events.reported(request))
            case messages.AskOrders():
                orders = pool.orders(member)
                return messages.Orders(orders if any(order.number != request.seen for order in orders) else ())
        return Refused("LocalProtocolError", f"{type(request).__name__} is not answered by this controller")

    def _try_pool(self, event: pool_events.Event) -> Ok | Refused:
        try:
            self._feed_pool(event)
        except Stale as error:
            return Refused("Stale", error.message)
        except PenstockError as error:
            return Refused("LocalProtocolError", error.message)
        return Ok()

    def _leave_pool(self, member: MemberId, reason: str) -> None:
        """The member has left or died: it uses no device."""
        pipeline = self.pool.pipeline_of(member) if self.pool is not None else None
        if pipeline is not None:
            self._feed_pool(pool_events.MemberLost(pipeline, member, reason))
        self.fenced.pop(member, None)
        for key in [key for key in self._rejected if key[0] == member]:
            del self._rejected[key]

    def _evict_from_pool(self, member: MemberId, reason: str) -> None:
        """The member is evicted, but its process may still run."""
        pipeline = self.pool.pipeline_of(member) if self.pool is not None else None
        if pipeline is not None:
            self._feed_pool(pool_events.MemberEvicted(pipeline, member, reason))

    def _feed_pool(self, event: pool_events.Event) -> None:
        pool, out = self.pool, self._out
        assert pool is not None
        before = pool.revision
        decided = pool.handle(event, self._now)
        if pool.revision != before:
            out.append((POOL, Record(event, tuple(decided))))
        for effect in decided:
            match effect:
                case pool_events.WakeWorker(pipeline=name) | pool_events.SleepWorker(pipeline=name):
                    out.append((name, Announce("orders")))
                case pool_events.GrantDevices(pipeline=name):
                    out.append((name, Announce("devices")))
                case pool_events.RejectRequest(kind="cancelled"):
                    pass  # the caller does not wait for it
                case pool_events.RejectRequest(pipeline=name, member=member, request=request, kind=kind, reason=reason):
                    error = "Transient" if kind == "timed_out" else "Stale"
                    self._rejected[member, request] = Refused(error, reason)
                    out.append((name, Announce("devices")))
                case pool_events.FenceMember(pipeline=name, member=member, reason=reason):
                    self.fenced[member] = reason
                    out.append((name, FenceMember(member, reason)))
                case pool_events.Log(level=level, message=line):
                    out.append((POOL, Log(level, line)))
