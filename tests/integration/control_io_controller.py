"""A controller process made of the real pieces, for tests that kill it: `python control_io_controller.py FOLDER`."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import uvloop

from penstock.control.controller import Controller as Machine
from penstock.control.io.http import ControlApp, ControlServer
from penstock.control.io.service import ControlService
from penstock.control.pipeline import PipelineControl
from penstock.control.settings import PipelineSettings
from penstock.journal.writer import Journal
from penstock.records.ids import PipelineName, RunId
from penstock.runtime.clock import SystemClock
from penstock.runtime.parent import die_with_parent
from penstock.runtime.rundir import write_atomically
from penstock.runtime.shutdown import ShutdownSignal
from penstock.runtime.tasks import Tasks

PIPELINE = PipelineName("a")
RUN = RunId("run")
TOKEN = "a-secret"
SETTINGS = PipelineSettings(
    name=PIPELINE, groups_per_step=4, group_size=2, max_staleness=2, steps=60, evict_after_s=60.0
)


async def serve(folder: Path) -> None:
    journal = Journal(folder / "journal.sqlite", RUN)
    service = ControlService(
        Machine({PIPELINE: PipelineControl(SETTINGS)}), journal, SystemClock(), snapshot_every=100, tick_s=0.05
    )
    service.start()
    service.check()
    server = ControlServer(ControlApp(service, TOKEN))
    port = server.bind()
    shutdown = ShutdownSignal()
    shutdown.install()
    async with Tasks() as tasks:
        tasks.spawn("service", service.run())
        tasks.spawn("http", server.serve())
        body = f'{{"host": "127.0.0.1", "port": {port}, "pid": {os.getpid()}}}'
        await asyncio.to_thread(write_atomically, folder / "controller.json", body)
        await shutdown.wait()
        service.close()
        await server.stop(5)
        tasks.cancel()
    service.check()
    journal.close(10)


if __name__ == "__main__":
    die_with_parent()
    uvloop.run(serve(Path(sys.argv[1])))
