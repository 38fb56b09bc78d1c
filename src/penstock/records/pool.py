"""Devices, requests for them, and the orders that move a worker onto devices or off them."""

from __future__ import annotations

import enum
from typing import Literal, NewType

import msgspec

from penstock.records.ids import MemberId, PipelineName

DeviceId = NewType("DeviceId", int)
"""Position in the pool, from 0: a GPU, or a CPU slot where there are no GPUs."""

SeatId = NewType("SeatId", int)
"""One stay of one generation worker on one bundle of devices. A counter, never reused."""

OrderNumber = NewType("OrderNumber", int)
"""A counter over the whole pool, so that a reply to an older order is never taken for a reply to a newer one."""


class Priority(enum.IntEnum):
    """Strict priority between classes. Only generation is elastic, and only generation is preempted."""

    INITIALISATION = 0
    TRAINING = 1
    SCORING = 2
    """Log-probabilities, reference and value models."""
    GENERATION = 3


class Topology(msgspec.Struct, frozen=True):
    """Number of devices of each node, in order. Device ids are consecutive across nodes."""

    nodes: tuple[int, ...]

    @property
    def device_count(self) -> int:
        return sum(self.nodes)


class Order(msgspec.Struct, frozen=True):
    """An instruction to one generation worker. An order number that arrives twice is executed once."""

    number: OrderNumber
    seat: SeatId
    action: Literal["wake", "sleep"]
    devices: tuple[DeviceId, ...]
    abort: bool = False
    """Sleep at once and keep the tokens generated so far; otherwise running samples may finish first."""
    drain_s: float = 0.0
    """How long running samples may continue before they are aborted."""
    within_s: float = 60.0
    """Deadline, counted from when the worker read the order; after it the worker rolls the order back."""
    reason: str = ""


class GrantedDevices(msgspec.Struct, frozen=True):
    """Devices that one member holds until it releases them, closes, or is evicted."""

    request: int
    priority: Priority
    devices: tuple[DeviceId, ...]


class DeviceUse(msgspec.Struct, frozen=True):
    """The member that uses some devices, and its activity."""

    devices: tuple[DeviceId, ...]
    pipeline: PipelineName
    member: MemberId
    doing: str
    """`initialising`, `training`, `scoring`; of a worker: `waking`, `generating`, `leaving`; `fenced`."""
    since_s: float


class PipelineShare(msgspec.Struct, frozen=True):
    """The current share of one pipeline in the pool."""

    pipeline: PipelineName
    remaining: int
    awake: int
    moving: int
    useful: int
    """The largest number of bundles that its remaining work can use."""
    waited_s: float
    """How long it has had work but no worker; 0 while it is served."""
    trouble: str = ""
    """Why it is not served, in one sentence: which member blocks it, or what failed. Empty without trouble."""


class PoolStatus(msgspec.Struct, frozen=True):
    """Status of the whole pool, for the live view, the metrics and the diagnosis."""

    devices: int
    idle: int
    generating: int
    held: int
    """Devices held by initialisation, training and scoring."""
    moving: int
    shares: tuple[PipelineShare, ...]
    uses: tuple[DeviceUse, ...]
    """In the order of devices."""
    waiting: tuple[str, ...]
    """One sentence per pending request: its member, the devices, since when, and which member blocks it."""
    moves: int
    """Wakes and sleeps ordered since the pool opened."""
    failed_moves: int
    refused_plans: int


class Placement(msgspec.Struct, frozen=True):
    """The devices of one pipeline."""

    train: tuple[int, ...]
    rollout: tuple[int, ...]
    train_is_shared: bool
    """Other pipelines may request the training devices: hold them only while training."""
