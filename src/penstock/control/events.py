"""Everything that can happen to a pipeline: the requests of its members, and three things that no member asks for.

These structs are the pipeline's whole input: the journal stores them in order with their time, and replaying them
gives the same state bit for bit. Nothing that changes state reaches `PipelineControl` by another way.
"""

from __future__ import annotations

import msgspec

from penstock.control.settings import PipelineSettings
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
    """Sent about once a second: evictions, throttle lines and stall diagnosis happen here."""


class RunResumed(msgspec.Struct, tag="run_resumed", frozen=True):
    """The whole run was started again on its directory: no former process, and none of its payloads, is left."""


class SettingsTaken(msgspec.Struct, tag="settings_taken", frozen=True):
    """A life of the run began, by these settings: what happened before was decided by others."""

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
    | RunResumed
    | SettingsTaken
)
