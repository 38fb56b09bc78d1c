"""Events of a pipeline: the requests of its members, and four events that no member sends.

These structs are the only input of `PipelineControl`. The journal stores them in order with their time, and replaying
them gives the same state bit for bit.
"""

from __future__ import annotations

import msgspec

from penstock.control.settings import PipelineSettings
from penstock.records.ids import MemberId
from penstock.wire.messages import (
    AckCheckpoint,
    AckStep,
    AskBatch,
    AskLease,
    Deliver,
    Heartbeat,
    PublishWeights,
    Register,
    Stop,
    Unregister,
)


class TimePassed(msgspec.Struct, tag="time_passed", frozen=True):
    """Sent a few times per second: triggers evictions, throttle lines and the stall diagnosis."""


class ReplicaEvicted(msgspec.Struct, tag="replica_evicted", frozen=True):
    """A worker must be replaced because of its weights, alone or with all others. Its prompts are not the cause."""

    member: MemberId
    reason: str


class RunResumed(msgspec.Struct, tag="run_resumed", frozen=True):
    """The whole run was resumed from its directory: no former process and none of their payloads exist."""


class SettingsTaken(msgspec.Struct, tag="settings_taken", frozen=True):
    """A session of the run began with these settings; earlier events were decided by earlier settings."""

    settings: PipelineSettings


Event = (
    Register
    | Unregister
    | Heartbeat
    | AskLease
    | Deliver
    | AskBatch
    | AckStep
    | AckCheckpoint
    | PublishWeights
    | Stop
    | TimePassed
    | ReplicaEvicted
    | RunResumed
    | SettingsTaken
)
