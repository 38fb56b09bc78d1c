"""Devices, who asks for them, and the orders that move a worker on to them or off them."""

from __future__ import annotations

import enum
from typing import Literal, NewType

import msgspec

from penstock.records.ids import MemberId, PipelineName

DeviceId = NewType("DeviceId", int)
"""Position in the pool, from 0: a GPU where there are any, a CPU slot elsewhere."""

SeatId = NewType("SeatId", int)
"""One stay of one generation worker on one bundle of devices; counted up, never reused."""

OrderNumber = NewType("OrderNumber", int)
"""Counted up over the whole pool: an answer to an older order can never be taken for an answer to a newer one."""


class Priority(enum.IntEnum):
    """Strict between classes. Only generation is elastic, and only generation is ever preempted."""

    INITIALISATION = 0
    TRAINING = 1
    SCORING = 2
    """Log-probabilities, reference and value models."""
    GENERATION = 3


class Topology(msgspec.Struct, frozen=True):
    """How many devices each node has, in order; device ids run on from node to node."""

    nodes: tuple[int, ...]

    @property
    def device_count(self) -> int:
        return sum(self.nodes)


class Order(msgspec.Struct, frozen=True):
    """What one generation worker must do now. Receiving the same number twice is receiving it once."""

    number: OrderNumber
    seat: SeatId
    action: Literal["wake", "sleep"]
    devices: tuple[DeviceId, ...]
    abort: bool = False
    """Sleep at once, keeping what was generated so far; otherwise running samples may finish first."""
    drain_s: float = 0.0
    """How long running samples may go on before they are aborted."""
    within_s: float = 60.0
    """The worker gives up, and puts back what it did, when this much time has passed since it read the order."""
    reason: str = ""


class GrantedDevices(msgspec.Struct, frozen=True):
    """Devices that one member holds until it gives them back, closes, or is evicted."""

    request: int
    priority: Priority
    devices: tuple[DeviceId, ...]


class DeviceUse(msgspec.Struct, frozen=True):
    """Who is on some devices, and what it does there."""

    devices: tuple[DeviceId, ...]
    pipeline: PipelineName
    member: MemberId
    doing: str
    """`initialising`, `training`, `scoring`; of a worker: `waking`, `generating`, `leaving`; `fenced`."""
    since_s: float


class PipelineShare(msgspec.Struct, frozen=True):
    """How one pipeline fares in the pool at this moment."""

    pipeline: PipelineName
    remaining: int
    awake: int
    moving: int
    useful: int
    """The most bundles its remaining work can use."""
    waited_s: float
    """How long it has had work and no worker; 0 while it is served."""
    trouble: str = ""
    """Why it is not served, in a sentence: who is in its way, what failed. Empty when all is well."""


class PoolStatus(msgspec.Struct, frozen=True):
    """A picture of the whole pool, for the live view, the metrics and the diagnosis."""

    devices: int
    idle: int
    generating: int
    held: int
    """By initialisation, training and scoring."""
    moving: int
    shares: tuple[PipelineShare, ...]
    uses: tuple[DeviceUse, ...]
    """By device."""
    waiting: tuple[str, ...]
    """One sentence per request that waits: who, for what, since when, behind whom."""
    moves: int
    """Wakes and sleeps ordered since the pool opened."""
    failed_moves: int
    refused_plans: int


class Placement(msgspec.Struct, frozen=True):
    """The devices of one pipeline."""

    train: tuple[int, ...]
    rollout: tuple[int, ...]
    train_is_shared: bool
    """Others may want the training devices: hold them only while training."""
