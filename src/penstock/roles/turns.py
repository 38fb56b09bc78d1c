"""Devices to train on: held for the whole run, or only while training when somebody else wants them too.

Between two turns the learner lives in host memory. A turn is given back only when the device memory is proved free.
"""

from __future__ import annotations

import itertools
import time
from typing import Protocol

import torch

from penstock.config.devices import Placement
from penstock.control.io.client import ControlClient
from penstock.errors import PeerLost, RemoteProtocolError, RunFailed
from penstock.records.pool import DeviceId, Priority
from penstock.roles.process import RoleProcess
from penstock.runtime.offload import Offload
from penstock.train.step import Learner
from penstock.wire.messages import AskDevices, CancelDevices, DevicesGranted, NotYet, ReleaseDevices

ASK_FOR_S = 10.0
PATIENCE_S = 600.0
"""Training goes before generation, so a turn that does not come for so long will not come."""
RESIDUE_BYTES = 64 << 20
"""Device memory that the allocator may keep after a release: caches of libraries, not ours to free."""


class Resident(Protocol):
    """What occupies the devices during a turn."""

    async def move_in(self) -> None: ...

    async def move_out(self) -> int:
        """Returns the bytes of device memory that are still allocated."""
        ...


class LearnerOnTurns:
    """A learner that moves between the host and its device in the thread that trains it."""

    def __init__(self, learner: Learner, device: torch.device, training: Offload) -> None:
        self._learner = learner
        self._device = device
        self._training = training

    async def move_in(self) -> None:
        await self._training.run(self._learner.onload, self._device)

    async def move_out(self) -> int:
        await self._training.run(self._learner.offload)
        return self._learner.device_bytes()


class TrainingTurns:
    """Takes and gives back the training devices of one pipeline."""

    def __init__(self, process: RoleProcess, client: ControlClient, placement: Placement, resident: Resident) -> None:
        self._process = process
        self._client = client
        self._among = tuple(DeviceId(device) for device in placement.train)
        self._keeps = not placement.train_is_shared
        self._resident = resident
        self._numbers = itertools.count()
        self._held: int | None = None
        self.waited_s = 0.0

    async def take(self) -> bool:
        """Waits for the devices and moves in; False when the process was asked to stop meanwhile."""
        if self._held is not None:
            return True
        began = time.monotonic()
        if (number := await self._granted(began)) is None:
            return False
        self._process.progress.moved(f"moving on to devices {list(self._among)}")
        await self._resident.move_in()
        self._held = number
        self.waited_s = time.monotonic() - began
        return True

    async def give_back(self) -> None:
        """Moves out and lets others have the devices until the next step, if there are others."""
        if self._held is None or self._keeps:
            return
        self._process.progress.moved(f"moving off devices {list(self._among)}")
        left_bytes = await self._resident.move_out()
        if left_bytes > RESIDUE_BYTES:
            # Whoever comes next would run out of memory and be blamed: rather end this process, which frees all of it.
            raise PeerLost(
                f"{self._process.name} still has {left_bytes >> 20} MiB of device memory after moving off devices "
                f"{list(self._among)}; expected at most {RESIDUE_BYTES >> 20} MiB: it must be started again"
            )
        number, self._held = self._held, None
        await self._client.call(
            ReleaseDevices(pipeline=self._client.pipeline, member=self._client.member, request=number)
        )

    async def _granted(self, began: float) -> int | None:
        """The number of the request that was granted; None when the process was asked to stop."""
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
        cancel = CancelDevices(pipeline=self._client.pipeline, member=self._client.member, request=number)
        try:
            while not self._process.stop.requested:
                match await self._client.call(ask):
                    case DevicesGranted():
                        return number
                    case NotYet():
                        self._process.progress.moved(f"waiting for devices {list(self._among)} to train on")
                        if time.monotonic() - began > PATIENCE_S:
                            raise RunFailed(f"{self._process.name}: no turn on devices {list(self._among)} came")
                    case reply:
                        raise RemoteProtocolError(f"the controller answered a request for devices with {reply!r}")
            await self._client.call(cancel)
        except PeerLost:
            if not self._process.stop.requested:  # otherwise the call was cut short by the shutdown
                raise
        return None
