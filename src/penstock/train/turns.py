"""Devices of a trainer: kept from the start if no other pipeline uses them, else held for one piece of work.

A trainer requests devices for initialisation, for scoring and for training. From one priority to the next it moves out,
releases the devices and requests them again in one call: a request of higher priority goes first, and no other can
come in between. Between two turns the learner is in host memory. Devices are released only after their memory is
verified to be free.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Protocol

import torch

from penstock.control.io.client import ControlClient
from penstock.errors import PeerLost, RemoteProtocolError, RunFailed, Stale, Transient
from penstock.records.pool import DeviceId, Placement, Priority
from penstock.runtime.clock import monotonic
from penstock.runtime.member import RunMember
from penstock.runtime.tensors import RESIDUE_BYTES, device_bytes
from penstock.train.objectives import PARTS
from penstock.train.rank_calls import MovedOut, MoveIn, MoveOut
from penstock.train.ranks import TrainerRanks
from penstock.train.step import Learner
from penstock.wire.messages import AskDevices, CancelDevices, DevicesGranted, NotYet, ReleaseDevices

LONG_POLL_S = 10.0
GRANT_TIMEOUT_S = 600.0
"""Initialisation and training have priority over generation, so a grant that takes longer will not come."""
SCORING_TIMEOUT_S = 60.0
"""Others that train without a pause would block scoring indefinitely: after this it is requested as training."""


class Resident(Protocol):
    """Occupies the devices during a turn."""

    async def move_in(self, work: Priority) -> None:
        """Moves the parts that this work needs to the devices."""
        ...

    async def move_out(self) -> int:
        """Moves everything to the host. Returns the bytes of device memory that are still allocated."""
        ...


class MovableLearner:
    """A learner that moves between the host and its device in the thread that trains it."""

    def __init__(self, learner: Learner, device: torch.device, ranks: TrainerRanks, *, shared: bool) -> None:
        """On a device that is not `shared`, all parts are there at once."""
        self._learner = learner
        self._device = device
        self._ranks = ranks
        self._shared = shared

    async def move_in(self, work: Priority) -> None:
        parts = PARTS
        if self._shared:
            parts = self._learner.scored_by if work is Priority.SCORING else ("policy", "optimizer")
        await self._ranks.together(MoveIn(parts), self._learner.onload, self._device, parts)

    async def move_out(self) -> int:
        _, answers = await self._ranks.together(MoveOut(), self._learner.offload)
        return max(device_bytes(), *(answer.left_bytes for answer in answers if isinstance(answer, MovedOut)), 0)


@dataclass(frozen=True, slots=True)
class Grant:
    request: int
    priority: Priority


class Turns:
    """Acquires and releases the training devices of one pipeline."""

    def __init__(self, process: RunMember, client: ControlClient, placement: Placement, resident: Resident) -> None:
        self._process = process
        self._client = client
        self._among = tuple(DeviceId(device) for device in placement.train)
        self._shared = placement.train_is_shared
        self._resident = resident
        self._numbers = itertools.count()
        self._grant: Grant | None = None
        self.waited_s = 0.0
        """Time spent on acquiring the devices and moving to them, since the start."""

    async def take(self, work: Priority) -> bool:
        """Waits for the devices and moves in what this work needs; False if a stop is requested meanwhile.

        Devices that are held for other work are released in the same call.
        """
        began = monotonic()
        requested = work if self._shared or work is Priority.INITIALISATION else Priority.TRAINING
        if self._grant is not None:
            if self._shared:
                await self._move_out()
            elif self._grant.priority is requested:
                return True
        if self._grant is None or self._grant.priority is not requested:
            self._grant = await self._acquire(requested, self._grant)
            if self._grant is None:
                return False
        self._process.progress.moved(f"moving to devices {list(self._among)} for {work.name.lower()}")
        await self._resident.move_in(work)
        self.waited_s += monotonic() - began
        return True

    async def release(self) -> None:
        """Moves out and releases the devices until the next turn, if they are shared."""
        if self._grant is None or not self._shared:
            return
        await self._move_out()
        number, self._grant = self._grant.request, None
        await self._client.call(
            ReleaseDevices(pipeline=self._client.pipeline, member=self._client.member, request=number)
        )

    async def _move_out(self) -> None:
        self._process.progress.moved(f"moving off devices {list(self._among)}")
        left_bytes = await self._resident.move_out()
        if left_bytes > RESIDUE_BYTES:
            # The next process would run out of memory. Ending this process frees all of it.
            raise PeerLost(
                f"{self._process.name} still has {left_bytes >> 20} MiB of device memory after moving off devices "
                f"{list(self._among)}; expected at most {RESIDUE_BYTES >> 20} MiB: it must be restarted"
            )

    async def _acquire(self, priority: Priority, held: Grant | None) -> Grant | None:
        """A grant in exchange for the one that is held; None if a stop is requested."""
        if priority is Priority.SCORING:
            try:
                return await self._request(priority, SCORING_TIMEOUT_S, held)
            except (Transient, Stale):  # timed out; a restarted controller answers Stale instead
                priority, held = Priority.TRAINING, None
        return await self._request(priority, GRANT_TIMEOUT_S, held)

    async def _request(self, priority: Priority, timeout_s: float, held: Grant | None) -> Grant | None:
        number, began = next(self._numbers), monotonic()
        ask = AskDevices(
            pipeline=self._client.pipeline,
            member=self._client.member,
            request=number,
            priority=priority,
            among=self._among,
            count=len(self._among),
            timeout_s=timeout_s,
            release=None if held is None else held.request,
            wait_s=LONG_POLL_S,
        )
        cancel = CancelDevices(pipeline=self._client.pipeline, member=self._client.member, request=number)
        try:
            while not self._process.stop.requested:
                match await self._client.call(ask):
                    case DevicesGranted():
                        return Grant(number, priority)
                    case NotYet():
                        waited_for = f"devices {list(self._among)} for {priority.name.lower()}"
                        self._process.progress.moved(f"waiting for {waited_for}")
                        if monotonic() - began > GRANT_TIMEOUT_S:
                            raise RunFailed(f"{self._process.name}: timed out waiting for {waited_for}")
                    case reply:
                        raise RemoteProtocolError(f"the controller answered a request for devices with {reply!r}")
            await self._client.call(cancel)
        except PeerLost:
            if not self._process.stop.requested:  # otherwise the shutdown ended the call
                raise
        return None
