"""The controller's view of the replicas, as the requests of the workers change it."""

from __future__ import annotations

from penstock.records.ids import MemberId, Version
from penstock.records.weights import NOTHING_HELD, Manifest
from penstock.weights.coordination import Coordination
from penstock.weights.events import ReplicaReported, Ticked, VersionPublished
from penstock.weights.published import PublishedVersions
from penstock.weights.replica import Replica, ReplicaState, ReportReplicaState, Resumed, UpdateFailed, Verified
from penstock.weights.settings import WeightsSection

A, B, C = MemberId("a"), MemberId("b"), MemberId("c")
NEWEST = Manifest(Version(5), "l1", f"{5:032x}", (), "weights/main/l1/00000005")


class Controller:
    """A coordination that has just started, with one version in its journal."""

    def __init__(self, *members: MemberId, settings: WeightsSection = WeightsSection()) -> None:
        self.now = 0.0
        published = PublishedVersions()
        published.add(NEWEST)
        self.weights = Coordination(settings, lambda: published, lambda topic: None, lambda level, line: None)
        self.weights.handle(VersionPublished(NEWEST, durable=True), self.now)
        self.members(*members)

    def members(self, *members: MemberId) -> None:
        self.weights.evicted.clear()
        self.weights.reconcile(frozenset(members), MemberId("t"), {}, self.now)

    def fail(self, member: MemberId, times: int) -> None:
        for _ in range(times):
            self.now += 1.0
            self.weights.offer(member, NOTHING_HELD, self.now)
            failed = ReplicaReported(member, ReplicaState.STALE, Version(-1), "", error="stage: device-side assert")
            self.weights.handle(failed, self.now)
            self.weights.check()


def test_replicas_that_hold_the_newest_version_are_recorded_after_a_restart() -> None:
    """Otherwise a single bad worker would look like the whole fleet."""
    controller = Controller(A, B, C)
    for member in (B, C):
        assert controller.weights.offer(member, NEWEST.held, 1.0) is None
    assert controller.weights.transaction.healthy == 2
    controller.fail(A, times=3)
    assert set(controller.weights.evicted) == {A}
    assert controller.weights.admission_stopped == ""
    controller.members(MemberId("a2"), B, C)
    controller.fail(MemberId("a2"), times=2)
    assert controller.weights.failure == ""


def test_replicas_that_hold_the_newest_version_count_as_healthy_after_a_restart() -> None:
    controller = Controller(A, B, settings=WeightsSection(min_healthy=2, unhealthy_timeout_s=600.0))
    assert controller.weights.offer(A, NOTHING_HELD, 1.0) == NEWEST
    controller.weights.handle(ReplicaReported(A, ReplicaState.SERVING, NEWEST.version, NEWEST.digest), 2.0)
    for now in range(3, 700, 10):
        for member in (A, B):
            assert controller.weights.offer(member, NEWEST.held, now) is None
        controller.weights.handle(Ticked(), now)
    assert controller.weights.failure == ""


def test_admission_opens_for_a_replica_that_was_resumed_at_the_second_attempt() -> None:
    controller = Controller(A)
    controller.fail(A, times=2)
    assert controller.weights.admission_stopped
    controller.members(B)
    assert controller.weights.offer(B, NOTHING_HELD, 12.0) == NEWEST
    replica = Replica()
    replica.handle(Verified(NEWEST.version, NEWEST.digest), 13.0)
    replica.handle(UpdateFailed("resume", "engine busy"), 13.0)
    (report,) = replica.handle(Resumed(), 14.0)
    assert isinstance(report, ReportReplicaState)
    assert report.error, "the report names the error of the first attempt"
    served = ReplicaReported(B, report.state, report.version, report.digest, error=report.error)
    controller.weights.handle(served, 14.0)
    controller.weights.check()
    assert controller.weights.admission_stopped == ""
    assert controller.weights.lease_refusal(B) is None
