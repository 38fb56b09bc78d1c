"""The controller's side of the device pool in the simulation: the real pool, journalled, with its calls answered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import msgspec

from penstock.control.pipeline import PipelineControl
from penstock.errors import InvalidTransition, PenstockError
from penstock.pool import events as pool
from penstock.pool.plan import Plan, Snapshot
from penstock.pool.planner import make_plan
from penstock.pool.pool import Pool
from penstock.pool.settings import PoolSection
from penstock.records.ids import MemberId, PipelineName
from penstock.records.pool import DeviceId, Order, Priority, Topology
from penstock.sim.floor import Floor
from penstock.wire.codec import decode_section, encode_section

_encode = msgspec.msgpack.Encoder(enc_hook=encode_section).encode
_decoder = msgspec.msgpack.Decoder(pool.Event, dec_hook=decode_section)


class AskOrders(msgspec.Struct, frozen=True):
    """A worker waits for an order it has not seen."""

    member: MemberId
    seen: int


class ReportOrder(msgspec.Struct, frozen=True):
    member: MemberId
    order: int
    done: bool


class AskDevices(msgspec.Struct, frozen=True):
    """A trainer waits for its turn, and gives back an earlier one in the same call."""

    member: MemberId
    request: int
    priority: Priority
    timeout_s: float
    release: int | None = None


class ReleaseDevices(msgspec.Struct, frozen=True):
    member: MemberId
    request: int


class Rejected(msgspec.Struct, frozen=True):
    reason: str


PoolCall = AskOrders | ReportOrder | AskDevices | ReleaseDevices


class SimPoolHost:
    """One pool for all pipelines. `fence` ends a process for certain."""

    def __init__(
        self,
        devices: int,
        announce: Callable[[PipelineName, str], None],
        fence: Callable[[PipelineName, MemberId], None],
        now: Callable[[], float],
    ) -> None:
        self.settings = PoolSection(wake_s=40.0, drain_s=10.0, sleep_s=30.0)
        self.pool = Pool(Topology((devices,)), self.settings, self._plan)
        self._shapes: list[pool.PipelineOpened] = []
        self.training: dict[PipelineName, tuple[DeviceId, ...]] = {}
        self.floor = Floor()
        self.turns: Counter[str] = Counter()
        """Grants that were answered, by class."""
        self.withdrawn = 0
        """Promises that passed to a higher class."""
        self._announce = announce
        self._fence = fence
        self._now = now
        self._journal: list[tuple[bytes, float]] = []

    def _plan(self, snapshot: Snapshot) -> Plan:
        plan = make_plan(snapshot)
        self.withdrawn += len(plan.withdrawals)
        return plan

    def open(self, name: PipelineName, inference: range, training: range, concurrency: int) -> None:
        self.training[name] = tuple(DeviceId(device) for device in training)
        devices = tuple(DeviceId(device) for device in inference)
        self._shapes.append(pool.PipelineOpened(name, devices, concurrency=concurrency))
        self.happen(self._shapes[-1])

    def begin_another_life(self) -> None:
        """The run is resumed with none of its processes, and shares by turns of another length."""
        turn_s = 25.0 - self.pool.settings.turn_s
        self.happen(pool.LifeBegan(self.pool.topology, self.settings.model_copy(update={"turn_s": turn_s})))
        for shape in self._shapes:
            self.happen(shape)

    def happen(self, event: pool.Event) -> None:
        before = self.pool.revision
        decided = self.pool.handle(event, self._now())
        if self.pool.revision != before:
            self._journal.append((_encode(event), self._now()))
            self.pool.check()
        for effect in decided:
            match effect:
                case pool.WakeWorker(pipeline=name) | pool.SleepWorker(pipeline=name):
                    self._announce(name, "orders")
                case pool.GrantDevices(pipeline=name) | pool.RejectRequest(pipeline=name):
                    self._announce(name, "devices")
                case pool.FenceMember(pipeline=name, member=member):
                    self._fence(name, member)
                case pool.Log():
                    pass

    def answer(self, name: PipelineName, call: PoolCall) -> tuple[object, str]:
        """The answer to a call, and what to hold the call for if that may bring a better one."""
        match call:
            case AskOrders(member=member, seen=seen):
                fresh: tuple[Order, ...] = tuple(o for o in self.pool.orders(member) if o.number != seen)
                return fresh, "" if fresh else "orders"
            case ReportOrder(member=member, order=number, done=done):
                if done:
                    self._try(pool.MoveDone(name, member, number))  # type: ignore[arg-type]
                else:
                    self._try(pool.MoveFailed(name, member, number, True, "simulated"))  # type: ignore[arg-type]
                return None, ""
            case ReleaseDevices(member=member, request=request):
                self._try(pool.DevicesReleased(name, member, request))
                return None, ""
            case AskDevices(member=member, request=request, priority=priority, timeout_s=timeout_s, release=release):
                among = self.training[name]
                asked = pool.DevicesRequested(name, member, request, priority, among, len(among), timeout_s, release)
                if (refused := self._try(asked)) is not None:
                    return Rejected(refused), ""
                granted = self.pool.granted(member, request)
                if granted is not None:
                    self.turns[granted.priority.name.lower()] += 1
                return granted, "" if granted is not None else "devices"

    def _try(self, event: pool.Event) -> str | None:
        try:
            self.happen(event)
        except PenstockError as error:
            return error.message
        return None

    def joined(self, name: PipelineName, member: MemberId) -> None:
        if self.pool.is_open(name):
            self.happen(pool.WorkerJoined(name, member))

    def lost(self, member: MemberId, reason: str) -> None:
        name = self.pool.pipeline_of(member)
        if name is not None:
            self.happen(pool.MemberLost(name, member, reason))

    def evicted(self, member: MemberId, reason: str) -> None:
        name = self.pool.pipeline_of(member)
        if name is not None:
            self.happen(pool.MemberEvicted(name, member, reason))

    def tick(self, machines: Mapping[PipelineName, PipelineControl]) -> None:
        """Deadlines, and demand: what each ledger could still lease or has leased, until training is over."""
        for name, machine in machines.items():
            demand = machine.demand()
            if demand is not None:
                self.happen(pool.DemandCounted(name, *demand))
            else:
                self.happen(pool.PipelineClosed(name, f"its training is {machine.phase}"))
        self.happen(pool.TimePassed())

    def restart(self) -> None:
        """The controller comes back: the replayed pool must be the lost one, bit for bit."""
        replayed = Pool(self.pool.topology, self.settings)
        for event, at in self._journal:
            replayed.handle(_decoder.decode(event), at)
        if replayed.snapshot() != self.pool.snapshot():
            raise InvalidTransition(f"replay gave {replayed!r}, the lost pool was {self.pool!r}")
        self.pool.restore(replayed.snapshot())
        self.happen(pool.ControllerRestarted())
