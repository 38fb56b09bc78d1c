"""Everything that can happen to a pipeline, in the past tense.

These structs are the pipeline's whole input: the journal stores them in order with their time, and replaying them
gives the same state bit for bit. Nothing that changes state reaches `PipelineControl` by another way.
"""

from __future__ import annotations

import msgspec

from penstock.control.settings import PipelineSettings
from penstock.records.ids import MemberId, PromptIndex, SampleId, StepIndex, Version
from penstock.records.payload import RingAddress
from penstock.records.rollout import FailedRollout, Rollout, Score
from penstock.records.weights import Manifest
from penstock.wire.messages import Role


class MemberRegistered(msgspec.Struct, tag="member_registered", frozen=True):
    """A process said who it is; said again, it refreshes the registration."""

    member: MemberId
    role: Role
    pid: int = 0
    host_id: str = ""
    ring: RingAddress | None = None
    prompt_count: int | None = None
    step: StepIndex | None = None
    lineage: str = ""
    more_rings: tuple[RingAddress, ...] = ()


class MemberLeft(msgspec.Struct, tag="member_left", frozen=True):
    """A process left in good order, or because of an error (`failed`), or its supervisor saw it exit (`died`)."""

    member: MemberId
    reason: str = ""
    died: bool = False
    failed: bool = False


class HeartbeatHeard(msgspec.Struct, tag="heartbeat_heard", frozen=True):
    member: MemberId
    progressed_ago_s: float
    doing: str = ""


class LeaseAsked(msgspec.Struct, tag="lease_asked", frozen=True):
    member: MemberId
    request: int
    samples: int
    version: Version
    waiting: int = 0
    """How many other members' asks are being held right now: what there is gets shared with them."""
    steady: bool = True
    """Its weights are not being changed right now, so that what it serves it will go on serving."""


class Delivered(msgspec.Struct, tag="delivered", frozen=True):
    member: MemberId
    rollouts: tuple[Rollout, ...] = ()
    failures: tuple[FailedRollout, ...] = ()
    returned: tuple[SampleId, ...] = ()
    scores: tuple[Score, ...] = ()


class BatchAsked(msgspec.Struct, tag="batch_asked", frozen=True):
    member: MemberId
    step: StepIndex


class StepAcked(msgspec.Struct, tag="step_acked", frozen=True):
    member: MemberId
    step: StepIndex
    missing_prompts: tuple[PromptIndex, ...] = ()
    missing_reason: str = ""
    metrics: dict[str, float] = {}


class CheckpointSaved(msgspec.Struct, tag="checkpoint_saved", frozen=True):
    member: MemberId
    step: StepIndex
    last_resort: StepIndex | None = None


class WeightsPublished(msgspec.Struct, tag="weights_published", frozen=True):
    member: MemberId
    manifest: Manifest


class TimePassed(msgspec.Struct, tag="time_passed", frozen=True):
    """Sent about once a second: reaping, throttle lines and stall diagnosis happen here."""


class RunResumed(msgspec.Struct, tag="run_resumed", frozen=True):
    """The whole run was started again on its directory: no former process, and none of its payloads, is left."""


class SettingsTaken(msgspec.Struct, tag="settings_taken", frozen=True):
    """A life of the run began, by these settings: what happened before was decided by others."""

    settings: PipelineSettings


class StopAsked(msgspec.Struct, tag="stop_asked", frozen=True):
    reason: str
    failed: bool = False


Event = (
    MemberRegistered
    | MemberLeft
    | HeartbeatHeard
    | LeaseAsked
    | Delivered
    | BatchAsked
    | StepAcked
    | CheckpointSaved
    | WeightsPublished
    | TimePassed
    | RunResumed
    | SettingsTaken
    | StopAsked
)
