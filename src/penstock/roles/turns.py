"""Devices to train on: held for the whole run, or only while training when somebody else wants them too."""

from __future__ import annotations

import itertools
import time

from penstock.config.devices import Placement
from penstock.control.io.client import ControlClient
from penstock.errors import PeerLost, RemoteProtocolError, RunFailed
from penstock.records.pool import DeviceId, Priority
from penstock.roles.process import RoleProcess
from penstock.wire.messages import AskDevices, DevicesGranted, NotYet, ReleaseDevices

ASK_FOR_S = 10.0
PATIENCE_S = 600.0
"""Training goes before generation, so a turn that does not come for so long will not come."""


class TrainingTurns:
    """Takes and gives back the training devices of one pipeline."""

    def __init__(self, process: RoleProcess, client: ControlClient, placement: Placement) -> None:
        self._process = process
        self._client = client
        self._among = tuple(DeviceId(device) for device in placement.train)
        self._keeps = not placement.train_is_shared
        self._numbers = itertools.count()
        self._held: int | None = None
        self.waited_s = 0.0

    async def take(self) -> bool:
        """Waits for the devices; False when the process was asked to stop meanwhile."""
        if self._held is not None:
            return True
        began = time.monotonic()
        number = next(self._numbers)
        ask = AskDevices(
            pipeline=self._client.pipeline,
            member=self._client.member,
            request=number,
            priority=Priority.TRAINING,
            among=self._among,
            count=len(self._among),
            timeout_s=PATIENCE_S,
            wait_s=ASK_FOR_S,
        )
        while not self._process.stop.requested:
            try:
                reply = await self._client.call(ask)
            except PeerLost:
                if self._process.stop.requested:  # the call was cut short by the shutdown
                    return False
                raise
            match reply:
                case DevicesGranted():
                    self._held = number
                    self.waited_s = time.monotonic() - began
                    return True
                case NotYet():
                    self._process.progress.moved(f"waiting for devices {list(self._among)} to train on")
                    if time.monotonic() - began > PATIENCE_S:
                        raise RunFailed(f"{self._process.name}: no turn on devices {list(self._among)} came")
                case _:
                    raise RemoteProtocolError(f"the controller answered a request for devices with {reply!r}")
        return False

    async def give_back(self) -> None:
        """Lets others have the devices until the next step, if there are others."""
        if self._held is None or self._keeps:
            return
        number, self._held = self._held, None
        await self._client.call(
            ReleaseDevices(pipeline=self._client.pipeline, member=self._client.member, request=number)
        )
