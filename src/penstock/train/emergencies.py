"""Emergency checkpoints: saved when the controller requests one."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from penstock.control.io.client import ControlClient
from penstock.errors import PeerLost, RemoteProtocolError
from penstock.runtime.member import RunMember
from penstock.wire.messages import AskCheckpoint, CheckpointWanted, NotYet

log = logging.getLogger(__name__)

LONG_POLL_S = 20.0


async def save_on_request(process: RunMember, client: ControlClient, save: Callable[[], Awaitable[None]]) -> None:
    """Saves whenever the controller requests it, until the run stops.

    Consumes: the controller's requests. Produces: checkpoints, and weights published again. Waits for: a request.
    Unblocked by: replicas that cannot load the published weights, shutdown.
    """
    while not process.stop.requested:
        try:
            reply = await client.call(
                AskCheckpoint(pipeline=client.pipeline, member=process.member, wait_s=LONG_POLL_S)
            )
        except PeerLost:
            if process.stop.requested:  # the shutdown ended the call
                return
            raise
        match reply:
            case CheckpointWanted(reason=reason):
                log.warning("saving an emergency checkpoint: %s", reason)
                await save()
            case NotYet(phase=phase):
                if phase == "stopped":
                    return
            case _:
                raise RemoteProtocolError(f"the controller answered AskCheckpoint with {reply!r}")
