"""What the controller may want of a trainer out of turn."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from penstock.control.io.client import ControlClient
from penstock.errors import PeerLost, RemoteProtocolError
from penstock.runtime.member import RunMember
from penstock.wire.messages import AskCheckpoint, CheckpointWanted, NotYet

log = logging.getLogger(__name__)

ASK_FOR_S = 20.0


async def heed_checkpoints(process: RunMember, client: ControlClient, save: Callable[[], Awaitable[None]]) -> None:
    """Saves whenever the controller asks for it, until the run stops.

    Consumes: the controller's wishes. Produces: checkpoints, and weights written afresh. Waits for: a wish.
    Unblocked by: a fleet that cannot load what was published, shutdown.
    """
    while not process.stop.requested:
        try:
            reply = await client.call(AskCheckpoint(pipeline=client.pipeline, member=process.member, wait_s=ASK_FOR_S))
        except PeerLost:
            if process.stop.requested:  # the call was cut short by the shutdown
                return
            raise
        match reply:
            case CheckpointWanted(reason=reason):
                log.warning("saving out of turn: %s", reason)
                await save()
            case NotYet(phase=phase):
                if phase == "stopped":
                    return
            case _:
                raise RemoteProtocolError(f"the controller answered a wish to hear of checkpoints with {reply!r}")
