"""The process that sends metrics to external services. A library that hangs on a network delays no other process."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from penstock.roles.process import RoleProcess
from penstock.runtime.offload import Offload
from penstock.runtime.sinks import Publication

log = logging.getLogger(__name__)

POLL_EVERY_S = 2.0
CLOSE_S = 30.0


async def main(process: RoleProcess) -> None:
    """Sends metrics until a stop is requested, including all that were written before it."""
    section = process.config.metrics
    sending = Offload(1, "sink")
    name = section.sinks[process.index]
    config = process.config.model_dump(mode="json")
    publication = await sending.run(Publication, process.run, name, section.project, config)
    while True:
        stopping = process.stop.requested
        while await sending.run(publication.send):
            pass
        if stopping:
            break
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.stop.wait(), POLL_EVERY_S)
    async with asyncio.timeout(CLOSE_S):
        await sending.run(publication.close)
    sending.close(timeout_s=1.0)
    log.info("sent %d lines to %s", publication.sent, name)
