"""One incarnation of a simulated rollout worker: generation, weights, a ring, and obedience to the pool."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import msgspec

from penstock.payload.unread import Unread
from penstock.records.ids import MemberId, PipelineName
from penstock.records.pool import Order
from penstock.rollout.prefetch import Bounds
from penstock.sim.actors import Pace, send_beat
from penstock.sim.desk import AskWeights
from penstock.sim.engine import Body, Call, Engine, Owner, Signal, Sleep, Until
from penstock.sim.faults import FaultLog, WholeFaults
from penstock.sim.floor import Floor
from penstock.sim.generation import SimRunner
from penstock.sim.pool_host import AskOrders, ReportOrder
from penstock.sim.replica import Artifacts, SimEngine, SimUpdater, Way
from penstock.sim.rings import SimRing
from penstock.weights import events as weights
from penstock.weights.replica import ReplicaState
from penstock.wire import messages

ORDERS_S = 10.0
LOOK_EVERY_S = 0.1


class WorkerShape(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker is built."""

    bounds: Bounds
    way: Way
    host: str
    prefetch: bool
    slow: float
    ring_slots: int
    ring_bytes: int
    ports: int


class WholeWorker:
    def __init__(
        self,
        sim: Engine,
        name: str,
        pipeline: str,
        random: Random,
        faults: FaultLog,
        settings: WholeFaults,
        pace: Pace,
        shape: WorkerShape,
        artifacts: Artifacts,
        floor: Floor,
        witness: Callable[[SimEngine, SimUpdater], None],
    ) -> None:
        """`witness` sees engine and replica at every decode boundary."""
        self.owner = Owner(name, PipelineName(pipeline))
        self.member = MemberId(name)
        self.ring = SimRing(
            self.owner, shape.host, slots=shape.ring_slots, capacity_bytes=shape.ring_bytes, ports=shape.ports
        )
        self.unread = Unread()
        self.engine = SimEngine()
        self.runner: SimRunner | None = None
        self.awake = False
        self.retired = False
        self.muted = False
        self.busy_s = 0.0
        self._sim = sim
        self._random = random
        self._faults = faults
        self._settings = settings
        self._pace = pace
        self._shape = shape
        self._floor = floor
        self._witness = witness
        self._woken = Signal()
        self._stopping = ""
        self._leaving = False
        self._requests = 0
        self._move = 0
        """Counts orders: a strand of an older one stops when it sees a newer."""
        self.updater = SimUpdater(
            sim,
            self.member,
            self.engine,
            artifacts,
            faults,
            settings,
            way=shape.way,
            bring_s=pace.load_s * shape.slow,
            give_up=self._leave,
            is_awake=lambda: self.awake,
            woken=self._woken,
        )
        sim.spawn(self.owner, self._main())

    def _main(self) -> Body:
        answer = yield Call(messages.Register(self.owner.pipeline, self.member, "rollout", ring=self.ring.address))
        if not isinstance(answer, messages.Registered):
            self.owner.alive = False
            return
        self._beat()
        self._sim.spawn(self.owner, self.updater.run())
        yield from self._obey()

    def stop(self, reason: str) -> None:
        """Asked to end: finishes or gives back what it holds, and leaves."""
        self._stopping = reason
        if self.runner is not None and self.runner.finished is None:
            self.runner.stop(reason)
        else:
            self._leave(reason)

    def flip_prefetch(self) -> bool:
        """Changes the live setting; False if nothing is generating."""
        if self.runner is None or self.runner.finished is not None:
            return False
        self.runner.flip()
        return True

    def _leave(self, reason: str) -> None:
        """Ends this process in good order, however it came to that: off its devices first, and on to none any more."""
        self._leaving = True

        def goodbye() -> Body:
            yield Sleep(self._pace.sleep_s)
            self._floor.leave(self.owner)
            yield Call(messages.Unregister(self.owner.pipeline, self.member, reason))
            self.owner.alive = False

        self._sim.spawn(self.owner, goodbye())

    def _die(self, reason: str) -> None:
        """The controller does not know it any more."""
        self.owner.alive = False

    def _beat(self) -> None:
        if self.owner.alive and not self.muted:
            ago_s = self._sim.now - self.owner.progressed_at if self.owner.wedged else 0.0
            send_beat(self._sim, self.owner, self.member, ago_s)
            self._sim.after(self._pace.heartbeat_s, self._beat)

    # -- orders of the pool -------------------------------------------------------------------------------------

    def _obey(self) -> Body:
        seen = 0
        while True:
            orders = yield Call(AskOrders(self.member, seen), ORDERS_S)
            if isinstance(orders, messages.Refused):
                self.owner.alive = False
                return
            for order in orders:
                if order.number > seen and not self._leaving:
                    seen = order.number
                    self._move += 1
                    self._sim.spawn(self.owner, self._carry_out(order, self._move))

    def _carry_out(self, order: Order, move: int) -> Body:
        if self._faults.strikes("move hung", self._settings.move_hangs, self._sim.now):
            return
        if self._faults.strikes("move failed", self._settings.move_fails, self._sim.now):
            yield from self._fall_asleep(abort=True, drain_s=0.0)
            done = False
        elif order.action == "wake":
            done = yield from self._wake(order, move)
        else:
            yield from self._fall_asleep(abort=order.abort, drain_s=order.drain_s)
            done = True
        if move == self._move:
            yield Call(ReportOrder(self.member, order.number, done))

    def _wake(self, order: Order, move: int) -> Body:
        """On the devices, with the newest weights, and only then routed to. False when that took too long."""
        deadline = self._sim.now + order.within_s
        self._floor.enter(self.owner, order.devices)
        yield Sleep(self._pace.wake_s)
        self.awake = True
        self._sim.fire(self._woken)
        while True:
            if move != self._move:
                return False
            newest = yield Call(AskWeights(self.updater.replica.held, self.member))
            if self.updater.replica.may_serve and newest is None:
                break
            if self._sim.now > deadline:
                yield from self._fall_asleep(abort=True, drain_s=0.0)
                return False
            yield Sleep(LOOK_EVERY_S)
        replica = self.updater.replica
        yield Call(weights.ReplicaReported(self.member, ReplicaState.SERVING, replica.version, replica.digest))
        if move == self._move and not self._stopping and (self.runner is None or self.runner.finished is not None):
            self._route()
        return True

    def _route(self) -> None:
        self.runner = SimRunner(
            self._sim,
            self.owner,
            self.member,
            self.engine,
            self.ring,
            self.unread,
            self._random,
            self._faults,
            self._settings,
            self._pace,
            self._shape.bounds,
            prefetch=self._shape.prefetch,
            slow=self._shape.slow,
            first_request=self._requests,
            witness=lambda engine: self._witness(engine, self.updater),
            refused=self._die,
        )
        self._sim.spawn(self.owner, self._attend(self.runner))

    def _attend(self, runner: SimRunner) -> Body:
        """Waits for the end of one run of the loop, and says whether it was the last."""
        while runner.finished is None:
            yield Until(runner.ended)
        self.busy_s += runner.busy_s
        self._requests = runner.request
        if self._stopping:
            self._leave(self._stopping)
        elif self.awake:
            self.retired = True

    def _fall_asleep(self, *, abort: bool, drain_s: float) -> Body:
        """Admission closed, samples finished or given back, devices released."""
        self.awake = False
        runner = self.runner
        if runner is not None and runner.finished is None:
            runner.stop("asleep by order of the pool", 0.0 if abort else drain_s)
            while runner.finished is None:
                yield Until(runner.ended)
        while self.updater.updating:
            yield Sleep(LOOK_EVERY_S)
        yield Sleep(self._pace.sleep_s)
        self._floor.leave(self.owner)
