"""The events of the weight transaction, in the past tense, and its effects, in the imperative."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from penstock.records.ids import MemberId, Version
from penstock.records.weights import Held, Manifest
from penstock.weights.replica import ReplicaState
from penstock.wire.messages import ReportReplica


class VersionPublished(msgspec.Struct, frozen=True):
    """A complete version can be loaded. Published again, it is offered again to replicas that found it damaged."""

    manifest: Manifest
    durable: bool = False


class VersionMadeDurable(msgspec.Struct, frozen=True):
    held: Held


class TrainerLost(msgspec.Struct, frozen=True):
    reason: str
    member: MemberId = MemberId("")


class TrainerLeft(msgspec.Struct, frozen=True):
    """The trainer deregistered; no successor is expected."""


class TrainerReturned(msgspec.Struct, frozen=True):
    """A trainer is registered again."""


class MembershipReconciled(msgspec.Struct, frozen=True):
    """These and no others are members now. A new one counts as STALE until it reports. Idempotent."""

    live: frozenset[MemberId]


class WeightsRequested(msgspec.Struct, frozen=True):
    """A replica waits for another version than the one it holds."""

    member: MemberId
    held: Held


class NewestHeld(msgspec.Struct, frozen=True):
    """A replica waits for weights and holds the newest version: after a restart this may be the first record of it."""

    member: MemberId
    held: Held


class ReplicaReported(msgspec.Struct, frozen=True):
    """The version that a replica found in its own memory, or the error that ended an update."""

    member: MemberId
    state: ReplicaState
    version: Version
    digest: str
    pause_s: float = 0.0
    skipped_versions: int = 0
    error: str = ""
    damaged: Held | None = None
    """The version that it found damaged."""


def reported(report: ReportReplica) -> ReplicaReported:
    return ReplicaReported(
        member=report.member,
        state=ReplicaState(report.state),
        version=report.version,
        digest=report.digest,
        pause_s=report.pause_s,
        skipped_versions=report.skipped_versions,
        error=report.error,
        damaged=report.damaged,
    )


class Ticked(msgspec.Struct, frozen=True):
    """Time passed: deadlines are checked."""

    excused: frozenset[MemberId] = frozenset()
    """Replicas that may serve older weights: they evaluate them, or sleep."""


TransactionEvent: TypeAlias = (
    VersionPublished
    | VersionMadeDurable
    | TrainerLost
    | TrainerLeft
    | TrainerReturned
    | MembershipReconciled
    | WeightsRequested
    | NewestHeld
    | ReplicaReported
    | Ticked
)


class OfferVersion(msgspec.Struct, frozen=True):
    """Answer the replica's request for weights."""

    member: MemberId
    manifest: Manifest


class AdmitReplica(msgspec.Struct, frozen=True):
    """Let it lease prompts and deliver samples generated with these weights."""

    member: MemberId
    version: Version
    digest: str


class FenceReplica(msgspec.Struct, frozen=True):
    """Lease it nothing and accept nothing from it until it is admitted again."""

    member: MemberId
    reason: str


class EvictReplica(msgspec.Struct, frozen=True):
    """Kill the process and start another; its leases are released."""

    member: MemberId
    reason: str


class RestartTrainer(msgspec.Struct, frozen=True):
    """Start the trainer again from its checkpoint, with a new lineage; the replicas continue."""

    reason: str
    member: MemberId = MemberId("")


class StopAdmission(msgspec.Struct, frozen=True):
    """Issue no new prompts: nothing can be generated with current weights."""

    reason: str


class OpenAdmission(msgspec.Struct, frozen=True):
    """Issue prompts: a replica serves again."""


class CheckpointTrainer(msgspec.Struct, frozen=True):
    """Have the trainer save its state and publish it again; requested until a durable version is published."""

    reason: str


class RestartFleet(msgspec.Struct, frozen=True):
    """An eviction of every replica follows; the new ones load this version, the durable one if there is one."""

    manifest: Manifest
    reason: str


class WarnAboutReplica(msgspec.Struct, frozen=True):
    """Log a warning about this replica; no action is taken yet."""

    member: MemberId
    reason: str


class FailRun(msgspec.Struct, frozen=True):
    """Fail the run; the sentence is for the user."""

    sentence: str


TransactionEffect: TypeAlias = (
    OfferVersion
    | AdmitReplica
    | FenceReplica
    | EvictReplica
    | RestartTrainer
    | StopAdmission
    | OpenAdmission
    | CheckpointTrainer
    | RestartFleet
    | WarnAboutReplica
    | FailRun
)
