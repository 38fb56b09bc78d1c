"""The controller process: one loop, one port, one journal, the state machines of all pipelines. Wiring only."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.batch import filters
from penstock.config.devices import devices_of
from penstock.config.pipeline import PipelineSection
from penstock.config.run import Config
from penstock.control.controller import Controller
from penstock.control.io.http import ControlApp, ControlServer
from penstock.control.io.metric_lines import MetricLines, write_gauges
from penstock.control.io.service import ControlService, EventLog
from penstock.control.pipeline import PipelineControl
from penstock.control.settings import (
    ControlSection,
    GroupSection,
    LivenessSection,
    PipelineSettings,
    StepSection,
)
from penstock.errors import RunFailed
from penstock.journal.writer import Journal
from penstock.pool.events import PipelineOpened
from penstock.pool.pool import Pool
from penstock.records.ids import PipelineName
from penstock.records.pool import DeviceId, Topology
from penstock.records.section import Section
from penstock.roles.live_settings import LiveSettings
from penstock.roles.process import RoleProcess
from penstock.runtime.clock import Clock, SystemClock, monotonic
from penstock.runtime.lag import LagMonitor
from penstock.runtime.member import POLL_EVERY_S
from penstock.runtime.metrics import JsonLines
from penstock.runtime.rundir import Endpoint, write_atomically
from penstock.runtime.shutdown import teardown
from penstock.runtime.tasks import Tasks

log = logging.getLogger(__name__)

TEARDOWN_S = 5.0
STAY_SHARE = 0.8
"""Of `run.grace_s`: how long the controller waits for trainers to leave. The rest is for its own shutdown."""


async def main(process: RoleProcess) -> None:
    """Serves until a stop is requested. Raises `RunFailed` with one sentence if a pipeline cannot continue."""
    run, config = process.run, process.config
    journal = Journal(run.journal_path, run.run_id)
    lines = JsonLines(run.metrics_path)
    lag = process.lag_monitor()
    live = LiveSettings(run.config_path, config)
    service = service_of(config, journal, SystemClock(), lines, lag)
    service.prefetch = live.prefetch
    server = ControlServer(ControlApp(service, run.token()), host=config.control.host, port=config.control.port)
    try:
        replayed = service.start(new_session=_is_new_session(process), lines_on_file=_lines_of(run.metrics_path))
        await service.settle()
        write_atomically(_session_path(process), process.session)
        port = server.bind()
        async with Tasks() as tasks:
            tasks.spawn("service", service.run())
            tasks.spawn("server", server.serve())
            tasks.spawn("watch the loop", lag.run())
            tasks.spawn("poll the settings", live.run())
            tasks.spawn("write gauges", write_gauges(service.status, lines))
            run.write_endpoint(Endpoint(config.control.host, port, os.getpid()))
            log.info("listening on %s:%d after replaying %d events", config.control.host, port, replayed)
            await until_stopped(process, service)
            service.close()
            await teardown([("close the port", lambda: server.stop(TEARDOWN_S / 2))], TEARDOWN_S)
            tasks.cancel()
        service.check()
    finally:
        journal.close(TEARDOWN_S)
        lines.close(TEARDOWN_S)
    if service.failure:
        raise RunFailed(service.failure)


def _lines_of(path: Path) -> Iterator[bytes]:
    """Lazily: after a day of training they need not all be in memory."""
    if path.exists():
        with path.open("rb") as file:
            yield from file


def service_of(config: Config, journal: EventLog, clock: Clock, lines: JsonLines, lag: LagMonitor) -> ControlService:
    return ControlService(
        controller_of(config),
        journal,
        clock,
        lines=MetricLines(lines, clock),
        lag=lambda: lag.report().values(prefix=""),
        snapshot_every=config.journal.snapshot_every_events,
    )


def controller_of(config: Config) -> Controller:
    devices = devices_of(config)
    pipelines = {PipelineName(section.name): machine_of(section, config.control) for section in config.pipeline}
    weights = {PipelineName(section.name): section.weights for section in config.pipeline}
    shapes = [
        PipelineOpened(
            pipeline=PipelineName(section.name),
            inference=tuple(DeviceId(device) for device in devices.placements[section.name].rollout),
            bundle=section.worker_devices,
            concurrency=section.rollout.batch_samples,
            weight=section.weight,
            min_bundles=section.min_workers,
            max_bundles=section.max_workers,
            start_s=section.engine.starting_s,
        )
        for section in config.pipeline
    ]
    pool = Pool(Topology((devices.count,)), config.pool)
    return Controller(pipelines, weights=weights, pool=pool, shapes=shapes)


def machine_of(pipeline: PipelineSection, control: ControlSection) -> PipelineControl:
    settings = PipelineSettings(
        name=PipelineName(pipeline.name),
        steps=pipeline.steps,
        epochs=pipeline.epochs,
        evaluation=pipeline.evaluation,
        **_fields(LivenessSection, control),
        **_fields(GroupSection, pipeline.rollout),
        **_fields(StepSection, pipeline.train),
    )
    return PipelineControl(settings, filters.build(pipeline.train.filters))


def _fields(part: type[Section], section: Section) -> dict[str, Any]:
    """The values in `section` of the fields of `part`."""
    return {name: getattr(section, name) for name in part.model_fields}


def _session_path(process: RoleProcess) -> Path:
    return process.run.root / "session"


def _is_new_session(process: RoleProcess) -> bool:
    """A new start of the run has none of the old processes; a restarted controller still has all of them."""
    path = _session_path(process)
    return not path.exists() or path.read_text() != process.session


async def until_stopped(process: RoleProcess, service: ControlService) -> None:
    """Returns when the run failed, or when a stop was requested and all trainers have left.

    A trainer needs the controller to complete its last step and to save it. A signal to all processes at once reaches
    the controller before that. It ends without a trainer that does not leave in time, and after a second signal.
    """

    async def stop_on_failure() -> None:
        await service.failed.wait()
        process.stop.request(service.failure)

    async with asyncio.TaskGroup() as group:
        watching = group.create_task(stop_on_failure())
        await process.stop.wait()
        ends_at = monotonic() + STAY_SHARE * process.config.run.grace_s
        pipelines = service.controller.pipelines.values()
        while monotonic() < ends_at and any(one.members.trainer() is not None for one in pipelines):
            if service.failure or process.stop.insisted.is_set():
                break
            await asyncio.sleep(POLL_EVERY_S)
        watching.cancel()
