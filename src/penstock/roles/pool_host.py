"""The controller's side of the device pool: journals its events, answers its calls, derives demand from the ledgers."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from penstock.config.devices import Devices
from penstock.config.run import Config
from penstock.control.io.waiting import HeldCalls, deadline
from penstock.control.pipeline import PipelineControl
from penstock.errors import ConfigError, PenstockError, Stale
from penstock.journal.writer import Journal
from penstock.pool import events as pool
from penstock.pool.pool import Pool
from penstock.pool.settings import PoolSettings
from penstock.records.ids import POOL, MemberId, PipelineName
from penstock.records.pool import DeviceId, Topology
from penstock.roles.pool_notes import noteworthy
from penstock.wire import messages
from penstock.wire.messages import NotYet, Ok, Refused, Reply

log = logging.getLogger(__name__)

_decoder = msgspec.msgpack.Decoder(pool.Event)
_encode = msgspec.msgpack.Encoder().encode
_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class PoolHost:
    """Hosts the one pool of a run."""

    def __init__(
        self,
        config: Config,
        devices: Devices,
        machines: Mapping[PipelineName, PipelineControl],
        journal: Journal,
        now: Callable[[], float],
    ) -> None:
        unwired = [section.name for section in config.pipeline if PipelineName(section.name) not in machines]
        if unwired:
            raise ConfigError(f"the pool cannot count what {', '.join(unwired)} still needs: there is no ledger for it")
        self._wanted = PoolSettings(Topology((devices.count,)), payback=config.pool.payback)
        self.pool = Pool(self._wanted)
        self.waiting = HeldCalls()
        self.fenced: dict[MemberId, str] = {}
        """Members that must be ended for certain: their devices are wanted and they do not answer."""
        self._config = config
        self._devices = devices
        self._machines = machines
        self._journal = journal
        self._now = now
        self._ticked_at = 0.0
        self._rejected: dict[tuple[MemberId, int], Refused] = {}
        self.answerers: dict[type, Callable[[Any], Awaitable[Reply]]] = {
            messages.AskDevices: self._ask_devices,
            messages.CancelDevices: self._cancel_devices,
            messages.ReleaseDevices: self._release_devices,
            messages.AskOrders: self._ask_orders,
            messages.ReportOrder: self._report_order,
        }

    # -- a machine that shares the controller's journal -----------------------------------------------------------

    def replay(self, body: bytes, at: float) -> None:
        self.pool.handle(_decoder.decode(body), at)

    def snapshot(self) -> bytes:
        return self.pool.snapshot()

    def restore(self, snapshot: bytes) -> None:
        self.pool.restore(snapshot)

    def check(self) -> None:
        self.pool.check()

    def happen(self, event: pool.Event) -> None:
        """Feeds one event to the pool, journals it if it changed anything, and wakes those who waited for it."""
        now = self._now()
        before = self.pool.revision
        decided = self.pool.handle(event, now)
        if self.pool.revision != before:
            self._journal.append(POOL, now, _encode(event), noteworthy(decided))
        for effect in decided:
            match effect:
                case pool.WakeWorker(pipeline=name) | pool.SleepWorker(pipeline=name):
                    self.waiting.wake(name, "orders")
                case pool.GrantDevices(pipeline=name):
                    self.waiting.wake(name, "devices")
                case pool.RejectRequest(kind="cancelled"):
                    pass  # whoever cancelled it does not ask for it again
                case pool.RejectRequest(pipeline=name, member=member, request=request, kind=kind, reason=reason):
                    error = "Transient" if kind == "timed_out" else "Stale"
                    self._rejected[member, request] = Refused(error, reason)
                    self.waiting.wake(name, "devices")
                case pool.FenceMember(member=member, reason=reason):
                    self.fenced[member] = reason
                case pool.Log(level=level, message=line):
                    log.log(_LEVELS[level], "%s", line)

    # -- what the controller learns otherwise ---------------------------------------------------------------------

    def open(self, *, new_life: bool) -> None:
        """To be called once after replaying. In a new life of the run none of the former processes is left; when only
        the controller was started again all of them are, and the pool goes on by what it had."""
        if new_life:
            self.happen(pool.LifeBegan(self._wanted))
        for section in self._config.pipeline:
            rollout = self._devices.placements[section.name].rollout
            self.happen(
                pool.PipelineOpened(
                    pipeline=PipelineName(section.name),
                    inference=tuple(DeviceId(device) for device in rollout),
                    bundle=section.rollout.devices_per_worker,
                    concurrency=section.rollout.batch_samples,
                    weight=section.weight,
                    min_bundles=section.min_workers,
                    max_bundles=section.max_workers,
                    start_s=section.engine.starting_s,
                )
            )
        if not new_life:
            self.happen(pool.ControllerRestarted())
        self._ticked_at = self._now()

    def registered(self, request: messages.Register) -> None:
        if request.role == "rollout" and self.pool.is_open(request.pipeline):
            self.happen(pool.WorkerJoined(request.pipeline, request.member))

    def beaten(self, request: messages.Heartbeat) -> None:
        self.happen(pool.LeaseRenewed(request.pipeline, request.member))

    def lost(self, member: MemberId, reason: str) -> None:
        pipeline = self.pool.pipeline_of(member)
        if pipeline is not None:
            self.happen(pool.MemberLost(pipeline, member, reason))
        self.fenced.pop(member, None)
        for key in [key for key in self._rejected if key[0] == member]:
            del self._rejected[key]

    def given_up(self, member: MemberId, reason: str) -> None:
        pipeline = self.pool.pipeline_of(member)
        if pipeline is not None:
            self.happen(pool.MemberGivenUp(pipeline, member, reason))

    def tick(self) -> None:
        """Deadlines, and demand: what each ledger could still lease or has leased, until training is over.

        After a long time without a tick it was this process that was away (stopped, or with a suspended machine).
        """
        now = self._now()
        if now - self._ticked_at > self.pool.settings.lease_s / 2:
            self.happen(pool.ControllerRestarted())
        self._ticked_at = now
        for name, machine in self._machines.items():
            demand = machine.demand()
            if demand is not None:
                self.happen(pool.DemandCounted(name, *demand))
            else:
                self.happen(pool.PipelineClosed(name, f"its training is {machine.phase}"))
        self.happen(pool.TimePassed())

    def troubles(self) -> dict[PipelineName, str]:
        """Per pipeline, why the pool does not serve it; only those with something to say."""
        return self.pool.troubles(self._now())

    # -- calls ----------------------------------------------------------------------------------------------------

    async def _ask_devices(self, request: messages.AskDevices) -> Reply:
        asked = pool.DevicesRequested(
            pipeline=request.pipeline,
            member=request.member,
            request=request.request,
            priority=request.priority,
            among=request.among,
            count=request.count,
            timeout_s=request.timeout_s,
            release=request.release,
        )
        until = deadline(request.wait_s)
        with self.waiting.holding(request.pipeline, "ask_devices"):
            while True:
                if (rejected := self._rejected.pop((request.member, request.request), None)) is not None:
                    return rejected
                if (refused := self._try(asked)) is not None:
                    return refused
                if (grant := self.pool.granted(request.member, request.request)) is not None:
                    await self._journal.committed(self._journal.last_seq)
                    return messages.DevicesGranted(grant)
                if not await self.waiting.hold(request.pipeline, ("devices",), until):
                    return NotYet("devices", self._machines[request.pipeline].phase)

    async def _cancel_devices(self, request: messages.CancelDevices) -> Reply:
        return await self._done(pool.RequestCancelled(request.pipeline, request.member, request.request))

    async def _release_devices(self, request: messages.ReleaseDevices) -> Reply:
        return await self._done(pool.DevicesReleased(request.pipeline, request.member, request.request))

    async def _ask_orders(self, request: messages.AskOrders) -> Reply:
        until = deadline(request.wait_s)
        with self.waiting.holding(request.pipeline, "ask_orders"):
            while True:
                orders = self.pool.orders(request.member)
                if any(order.number != request.seen for order in orders):
                    await self._journal.committed(self._journal.last_seq)
                    return messages.Orders(orders)
                if not await self.waiting.hold(request.pipeline, ("orders",), until):
                    return messages.Orders(())

    async def _report_order(self, request: messages.ReportOrder) -> Reply:
        if request.done:
            return await self._done(pool.MoveDone(request.pipeline, request.member, request.order))
        failed = pool.MoveFailed(request.pipeline, request.member, request.order, request.released, request.error)
        return await self._done(failed)

    async def _done(self, event: pool.Event) -> Reply:
        refused = self._try(event)
        await self._journal.committed(self._journal.last_seq)
        return refused if refused is not None else Ok()

    def _try(self, event: pool.Event) -> Refused | None:
        try:
            self.happen(event)
        except Stale as error:
            return Refused("Stale", error.message)
        except PenstockError as error:
            return Refused("LocalProtocolError", error.message)
        return None
