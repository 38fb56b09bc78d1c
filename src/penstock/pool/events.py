"""Events of the pool (past tense), and its effects, which the host carries out (imperative).

Every event is journalled with the time it was handled at, if it changed anything; replaying them gives the same pool.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.pool.settings import PoolSection
from penstock.records.ids import MemberId, PipelineName
from penstock.records.pool import DeviceId, Order, OrderNumber, Priority, Topology
from penstock.wire.messages import AskDevices, ReportOrder

Rejection = Literal["timed_out", "cancelled", "closed"]


class SessionBegan(msgspec.Struct, tag="pool_life_began", frozen=True):
    """The run was started or resumed: no process of an earlier incarnation is left. The pool uses these settings from
    here on."""

    topology: Topology
    settings: PoolSection


class PipelineOpened(msgspec.Struct, tag="pool_pipeline_opened", frozen=True):
    """A pipeline will use the pool. Repeating the event with the same values is harmless."""

    pipeline: PipelineName
    inference: tuple[DeviceId, ...]
    """Devices that its generation workers may use; the pool chooses among them."""
    bundle: int = 1
    """Devices per generation worker."""
    concurrency: int = 1
    """Samples one worker generates at once: fewer remaining samples than this need only one worker."""
    weight: float = 1.0
    """Twice the weight counts like twice the remaining work, and makes a turn twice as long."""
    min_bundles: int = 0
    """Kept for the pipeline whenever it has work for them."""
    max_bundles: int | None = None
    start_s: float = 0.0
    """Added to the timeout of a wake, because an engine has to be started for it."""


class PipelineClosed(msgspec.Struct, tag="pool_pipeline_closed", frozen=True):
    """The pipeline needs no more devices: its workers sleep, its requests end, its devices are released."""

    pipeline: PipelineName
    reason: str = "closed"


class WorkerJoined(msgspec.Struct, tag="pool_worker_joined", frozen=True):
    """A generation worker process exists, asleep, holding no device."""

    pipeline: PipelineName
    member: MemberId
    devices: tuple[DeviceId, ...] = ()
    """Empty: it can wake anywhere. Otherwise the one bundle it is bound to."""


class MemberLost(msgspec.Struct, tag="pool_member_lost", frozen=True):
    """A process has certainly ended: what it held is free at once."""

    pipeline: PipelineName
    member: MemberId
    reason: str = ""


class MemberEvicted(msgspec.Struct, tag="pool_member_evicted", frozen=True):
    """A process is no longer a member, but may still run: what it holds is free when its end is certain."""

    pipeline: PipelineName
    member: MemberId
    reason: str = ""


class DemandCounted(msgspec.Struct, tag="pool_demand_counted", frozen=True):
    """Counts of the pipeline's ledger: samples that can be or are being generated, and all completed."""

    pipeline: PipelineName
    remaining: int
    completed: int


class DevicesRequested(msgspec.Struct, tag="pool_devices_requested", frozen=True):
    """A member requests `count` devices among `among`, all at once or not at all.

    With `release` it first releases an earlier grant, in the same event.
    """

    pipeline: PipelineName
    member: MemberId
    request: int
    """Incremented by the member; a repeated number is the same request."""
    priority: Priority
    among: tuple[DeviceId, ...]
    count: int
    timeout_s: float
    release: int | None = None


class RequestCancelled(msgspec.Struct, tag="pool_request_cancelled", frozen=True):
    pipeline: PipelineName
    member: MemberId
    request: int


class DevicesReleased(msgspec.Struct, tag="pool_devices_released", frozen=True):
    pipeline: PipelineName
    member: MemberId
    request: int


class MoveDone(msgspec.Struct, tag="pool_move_done", frozen=True):
    """The worker finished an order: it serves with published weights, or its devices are verified free."""

    pipeline: PipelineName
    member: MemberId
    order: OrderNumber


class MoveFailed(msgspec.Struct, tag="pool_move_failed", frozen=True):
    """The worker could not finish an order. `released`: it has verified that it holds no device."""

    pipeline: PipelineName
    member: MemberId
    order: OrderNumber
    released: bool
    error: str


class TimePassed(msgspec.Struct, tag="pool_time_passed", frozen=True):
    """Deadlines may have passed."""


class ControllerRestarted(msgspec.Struct, tag="pool_controller_restarted", frozen=True):
    """No report could arrive while the host was down: every deadline is extended."""


Event = (
    SessionBegan
    | PipelineOpened
    | PipelineClosed
    | WorkerJoined
    | MemberLost
    | MemberEvicted
    | DemandCounted
    | DevicesRequested
    | RequestCancelled
    | DevicesReleased
    | MoveDone
    | MoveFailed
    | TimePassed
    | ControllerRestarted
)


def requested(request: AskDevices) -> DevicesRequested:
    return DevicesRequested(
        pipeline=request.pipeline,
        member=request.member,
        request=request.request,
        priority=request.priority,
        among=request.among,
        count=request.count,
        timeout_s=request.timeout_s,
        release=request.release,
    )


def reported(report: ReportOrder) -> MoveDone | MoveFailed:
    if report.done:
        return MoveDone(report.pipeline, report.member, report.order)
    return MoveFailed(report.pipeline, report.member, report.order, report.released, report.error)


class GrantDevices(msgspec.Struct, tag="grant_devices", frozen=True):
    """Answer a waiting request: the devices are verified free and belong to the member."""

    pipeline: PipelineName
    member: MemberId
    request: int
    devices: tuple[DeviceId, ...]


class RejectRequest(msgspec.Struct, tag="reject_request", frozen=True):
    """Answer a waiting request: it will not be served."""

    pipeline: PipelineName
    member: MemberId
    request: int
    kind: Rejection
    reason: str


class WakeWorker(msgspec.Struct, tag="wake_worker", frozen=True):
    """Send the order to the worker: wake, sync weights, publish the version once, route."""

    pipeline: PipelineName
    member: MemberId
    order: Order


class SleepWorker(msgspec.Struct, tag="sleep_worker", frozen=True):
    """Send the order to the worker: close admission, drain or abort, release, verify released."""

    pipeline: PipelineName
    member: MemberId
    order: Order


class FenceMember(msgspec.Struct, tag="fence_member", frozen=True):
    """End this process for certain, then report `MemberLost`: its devices must be freed and it may not answer."""

    pipeline: PipelineName
    member: MemberId
    reason: str


class Log(msgspec.Struct, tag="log", frozen=True):
    level: Literal["info", "warning", "error"]
    message: str


Effect = GrantDevices | RejectRequest | WakeWorker | SleepWorker | FenceMember | Log
