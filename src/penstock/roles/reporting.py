"""Calls of workers and trainers to the controller: register, heartbeat, report gauges, unregister."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from penstock.control.io.client import ControlClient
from penstock.errors import PeerLost, Transient
from penstock.records.ids import PipelineName
from penstock.roles.process import RoleProcess
from penstock.runtime.lag import LagMonitor
from penstock.runtime.member import StoppedAtStart
from penstock.runtime.process import host_id
from penstock.runtime.shutdown import teardown
from penstock.runtime.tasks import Tasks
from penstock.wire.messages import Register, Registered, ReportMetrics, Role, Unregister

log = logging.getLogger(__name__)

REPORT_EVERY_S = 2.0
LEAVE_S = 5.0
HURRY_S = 2.0


@asynccontextmanager
async def connected(
    process: RoleProcess, role: Role, move_off: Callable[[], Awaitable[Any]], **details: Any
) -> AsyncIterator[ControlClient]:
    """A registered connection with heartbeats; unregisters within a time limit, however the body ends.

    The pool grants devices to others as soon as their holder has unregistered, so the holder moves off them before. If
    it cannot, it does not unregister: its supervisor reports the end of its process.
    """
    pipeline = PipelineName(process.pipeline.name)
    client = process.client()
    try:
        register = Register(
            pipeline=pipeline, member=process.member, role=role, pid=process.pid, host_id=host_id(), **details
        )
        registered = await _register(process, client, register)
        log.info("registered as %s; %s at version %d", process.member, registered.phase, registered.version)
        sidecar = process.heartbeat()
        failure = "it was cancelled"
        try:
            yield client
            failure = ""
        except Exception as error:
            failure = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise
        finally:
            reason = failure or process.stop.reason or "finished"
            unregister = Unregister(pipeline=pipeline, member=process.member, reason=reason, failed=bool(failure))
            on_devices = bool(process.config.pool.devices)

            async def move() -> None:
                nonlocal on_devices
                await move_off()
                on_devices = False

            async def leave() -> None:
                if on_devices:
                    raise Transient("it is still on its devices, which are freed when its process ends")
                await client.call(unregister, timeout_s=LEAVE_S)

            steps: list[tuple[str, Callable[[], Any]]] = [
                *([("move off the devices", move)] if on_devices else []),
                ("unregister", leave),
                ("stop the heartbeat", lambda: asyncio.to_thread(sidecar.stop, LEAVE_S)),
            ]
            client.begin_shutdown(LEAVE_S)
            await teardown(steps, deadline_s=LEAVE_S)
    finally:
        await client.close()


async def _register(process: RoleProcess, client: ControlClient, register: Register) -> Registered:
    """Waits for a controller for the configured time, or until a stop is requested."""
    try:
        async with Tasks() as tasks:
            tasks.spawn("watch for a stop", watch_for_stop(process, client))
            registered = await client.call(register)
            tasks.cancel()
    except PeerLost:
        if process.stop.requested:
            raise StoppedAtStart from None
        raise
    assert isinstance(registered, Registered)
    return registered


async def watch_for_stop(
    process: RoleProcess, client: ControlClient, notify: Callable[[str], None] = lambda reason: None
) -> None:
    """After a stop is requested, no call is retried or waits for long: a dead controller cannot block this process."""
    reason = await process.stop.wait()
    log.info("stopping: %s", reason)
    notify(reason)
    client.begin_shutdown(HURRY_S)


async def report_gauges(
    process: RoleProcess, client: ControlClient, lag: LagMonitor, more: Callable[[], dict[str, float]] = dict
) -> None:
    """Sends this process's figures every few seconds, until cancelled or until the controller ends in a shutdown."""
    while True:
        await asyncio.sleep(REPORT_EVERY_S)
        values = {**lag.report().values(), **more()}
        try:
            await client.call(ReportMetrics(pipeline=client.pipeline, member=process.member, values=values))
        except PeerLost:
            if process.stop.requested:
                return
            raise
