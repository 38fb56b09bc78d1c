"""The controller's side: each row of the fault table, as lists of events."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import msgspec
import pytest

from penstock.records.ids import MemberId, Version
from penstock.records.weights import NOTHING_HELD, Held, Manifest
from penstock.weights.events import (
    AdmitReplica,
    CheckpointTrainer,
    EvictReplica,
    FailRun,
    FenceReplica,
    MembershipReconciled,
    OfferVersion,
    OpenAdmission,
    ReplicaReported,
    RestartFleet,
    RestartTrainer,
    StopAdmission,
    Ticked,
    TrainerLost,
    TransactionEffect,
    TransactionEvent,
    VersionMadeDurable,
    VersionPublished,
    WarnAboutReplica,
    WeightsRequested,
)
from penstock.weights.faults import TABLE, Action, Fault, decide
from penstock.weights.published import HISTORY, PublishedVersions
from penstock.weights.replica import ReplicaState
from penstock.weights.settings import WeightsSection
from penstock.weights.transaction import WeightTransaction

S = ReplicaState
A, B, C = MemberId("a"), MemberId("b"), MemberId("c")


def version(number: int, lineage: str = "l1") -> Manifest:
    return Manifest(Version(number), lineage, f"{number:031x}{len(lineage) % 16:x}", (), f"weights/{number}")


class Fleet:
    """A transaction with short cuts for the things that happen to it."""

    def __init__(self, **settings: object) -> None:
        self.now = 0.0
        self.versions = PublishedVersions()
        self.transaction = WeightTransaction(WeightsSection(**settings), lambda: self.versions)  # type: ignore[arg-type]

    def __call__(self, event: TransactionEvent) -> list[TransactionEffect]:
        if isinstance(event, VersionPublished):
            self.versions.add(event.manifest)
        effects = self.transaction.handle(event, self.now)
        self.transaction.check()
        repr(self.transaction)
        return effects

    def later(self, seconds: float) -> list[TransactionEffect]:
        self.now += seconds
        return self(Ticked())

    def join(self, member: MemberId) -> list[TransactionEffect]:
        return self(MembershipReconciled(frozenset({*self.transaction.replicas, member})))

    def lose(self, member: MemberId) -> list[TransactionEffect]:
        return self(MembershipReconciled(frozenset(self.transaction.replicas.keys() - {member})))

    def ask(self, member: MemberId, held: Held = NOTHING_HELD) -> list[TransactionEffect]:
        return self(WeightsRequested(member, held))

    def serve(self, member: MemberId, manifest: Manifest, skipped: int = 0) -> list[TransactionEffect]:
        return self(ReplicaReported(member, S.SERVING, manifest.version, manifest.digest, 0.001, skipped))

    def fail(self, member: MemberId, state: ReplicaState, error: str = "boom") -> list[TransactionEffect]:
        record = self.transaction.replicas[member]
        digest = record.digest if state is S.SERVING else ""
        return self(ReplicaReported(member, state, record.version, digest, error=error))

    def started(self, *members: MemberId, durable: bool = True) -> Fleet:
        self(VersionPublished(version(0), durable))
        for member in members:
            self.join(member)
            self.ask(member)
            self.serve(member, version(0))
        return self


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    fleet.transaction.check()


def of(effects: list[TransactionEffect], kind: type) -> list[TransactionEffect]:
    return [effect for effect in effects if isinstance(effect, kind)]


def test_a_replica_is_offered_the_newest_and_admitted_once_it_serves_it(fleet: Fleet) -> None:
    assert fleet.join(A) == []
    assert fleet.ask(A) == []
    assert fleet(VersionPublished(version(0))) == [OfferVersion(A, version(0))]
    assert fleet.serve(A, version(0)) == [AdmitReplica(A, Version(0), version(0).digest)]
    assert fleet.ask(A, version(0).held) == []
    assert fleet(VersionPublished(version(1))) == [OfferVersion(A, version(1))]
    assert fleet.serve(A, version(1)) == []
    assert fleet.transaction.statistics.updates == 2


def test_a_slow_replica_gets_only_the_newest_version(fleet: Fleet) -> None:
    fleet.started(A, B)
    fleet.ask(A, version(0).held)
    assert fleet(VersionPublished(version(1))) == [OfferVersion(A, version(1))]
    for number in range(2, 9):
        assert fleet(VersionPublished(version(number))) == []
        assert fleet.transaction.metrics()["weights_offers_open"] == 1
    assert fleet.transaction.behind() == {A: 8, B: 8}
    fleet.serve(A, version(1))
    assert fleet.ask(A, version(1).held) == [OfferVersion(A, version(8))]
    fleet.serve(A, version(8), skipped=6)
    assert fleet.transaction.behind() == {A: 0, B: 8}
    assert fleet.transaction.metrics()["weights_skipped_versions_total"] == 6


def test_a_late_or_repeated_publication_changes_nothing(fleet: Fleet) -> None:
    fleet.started(A)
    fleet(VersionPublished(version(3)))
    for manifest in (version(2), version(3)):
        fleet(VersionPublished(manifest))
        assert fleet.transaction.newest == version(3)
    assert fleet.transaction.statistics.published == 2  # 0 and 3


def test_weights_that_were_not_published_are_not_served(fleet: Fleet) -> None:
    fleet.started(A, B)
    effects = fleet(ReplicaReported(A, S.SERVING, Version(0), "f" * 32))
    assert [type(e) for e in effects] == [FenceReplica]
    assert fleet.transaction.statistics.mismatches == 1
    assert not fleet.transaction.expects(Version(0), "f" * 32)
    assert fleet.transaction.expects(Version(0), version(0).digest)


def test_a_torn_replica_is_fenced_and_refitted(fleet: Fleet) -> None:
    fleet.started(A, B)
    fleet.ask(A, version(0).held)
    fleet(VersionPublished(version(1)))
    assert fleet.fail(A, S.TORN) == [FenceReplica(A, "is torn")]
    assert fleet.ask(A) == [OfferVersion(A, version(1))]
    assert fleet.serve(A, version(1)) == [AdmitReplica(A, Version(1), version(1).digest)]
    assert fleet.transaction.replicas[A].failures == 0


@pytest.mark.parametrize(("policy", "expected"), [("evict", EvictReplica), ("fail", FailRun)])
def test_policy_decides_about_a_torn_replica(policy: str, expected: type) -> None:
    fleet = Fleet(on_fault=policy).started(A, B)
    effects = fleet.fail(A, S.TORN, "lost the second bucket")
    assert [type(e) for e in effects] == [FenceReplica, expected]
    assert "lost the second bucket" in str(effects[1])


def test_refitting_is_tried_twice_and_then_the_replica_is_evicted(fleet: Fleet) -> None:
    fleet.started(A, B)
    fleet.fail(A, S.TORN, "first")
    assert not of(fleet.fail(A, S.TORN, "second"), EvictReplica)
    assert fleet.fail(A, S.TORN, "third") == [EvictReplica(A, "first")]
    assert fleet.transaction.replicas[A].later_errors == ["second", "third"]
    assert fleet.ask(A) == []  # a replica that goes gets nothing more
    assert fleet.serve(A, version(0)) == []


def test_a_staged_failure_costs_nothing_until_it_repeats(fleet: Fleet) -> None:
    fleet.started(A, B)
    assert fleet.fail(A, S.SERVING) == []
    assert fleet.fail(A, S.SERVING) == []
    assert [type(e) for e in fleet.fail(A, S.SERVING)] == [FenceReplica, EvictReplica]


def test_the_last_healthy_replicas_are_not_evicted_while_they_serve() -> None:
    fleet = Fleet(min_healthy=2).started(A, B)
    for _ in range(9):
        assert not of(fleet.fail(A, S.SERVING), EvictReplica)
    fleet.join(C)
    fleet.serve(C, version(0))
    evicted = [fleet.fail(A, S.SERVING) for _ in range(3)]
    assert of(evicted[-1], EvictReplica)


def test_a_lost_replica_costs_only_itself(fleet: Fleet) -> None:
    fleet.started(A, B)
    fleet.ask(B, version(0).held)
    assert fleet.lose(A) == [FenceReplica(A, "is no longer a member")]
    assert fleet(VersionPublished(version(1))) == [OfferVersion(B, version(1))]
    assert fleet.lose(A) == []


def test_membership_is_reconciled_and_the_dead_are_never_addressed(fleet: Fleet) -> None:
    fleet.started(A, B)
    for member in (A, B):
        fleet.ask(member, version(0).held)
    effects = fleet(MembershipReconciled(frozenset({B, C})))
    assert [type(e) for e in effects] == [FenceReplica]
    assert fleet.transaction.replicas[C].state is S.STALE
    assert fleet(MembershipReconciled(frozenset({B, C}))) == []
    assert fleet(VersionPublished(version(1))) == [OfferVersion(B, version(1))]


def test_when_all_fail_there_is_one_resend_then_a_fresh_fleet_then_the_end() -> None:
    fleet = Fleet(min_healthy=0).started(A, B)
    fleet(VersionPublished(version(1)))
    for member in (A, B):
        assert fleet.fail(member, S.TORN, "shape") == [FenceReplica(member, "is torn")]
    fleet.fail(A, S.TORN, "shape")
    effects = fleet.fail(B, S.TORN, "shape")
    assert [type(e) for e in effects] == [StopAdmission, CheckpointTrainer, RestartFleet, EvictReplica, EvictReplica]
    (restart,) = of(effects, RestartFleet)
    assert restart.manifest == version(0)  # type: ignore[attr-defined]
    for member in (A, B):
        fleet.lose(member)
    again = [MemberId("a2"), MemberId("b2")]
    for member in again:
        fleet.join(member)
        assert fleet.ask(member) == [OfferVersion(member, version(0))]
    for member in again * 2:
        effects = fleet.fail(member, S.STALE, "shape")
    (failure,) = of(effects, FailRun)
    assert "no replica can load weights version 0" in str(failure)
    assert "shape" in str(failure)
    assert fleet.ask(again[0]) == []


def test_a_fresh_fleet_that_works_opens_admission_again() -> None:
    fleet = Fleet(min_healthy=0).started(A)
    fleet(VersionPublished(version(1)))
    for _ in range(2):
        fleet.fail(A, S.TORN)
    fleet.lose(A)
    fleet.join(B)
    fleet.ask(B)
    assert of(fleet.serve(B, version(0)), OpenAdmission)
    assert fleet.transaction.fleet_restarts == 1, "that the durable version can be loaded says nothing of others"
    fleet.ask(B, version(0).held)
    assert fleet.transaction.checkpoint_reason
    assert fleet(VersionPublished(version(1), durable=True)) == [OfferVersion(B, version(1))]
    assert not fleet.transaction.checkpoint_reason
    fleet.serve(B, version(1))
    assert (fleet.transaction.fleet_restarts, fleet.transaction.fleet_failures) == (0, 0)


def test_a_version_that_no_fresh_fleet_can_load_either_ends_the_run() -> None:
    fleet = Fleet(min_healthy=0).started(A)
    fleet(VersionPublished(version(1)))
    for _ in range(2):
        fleet.fail(A, S.SERVING)
    fleet.lose(A)
    fleet.join(B)
    fleet.ask(B)
    fleet.serve(B, version(0))
    fleet(VersionPublished(version(2)))
    fleet.fail(B, S.SERVING)
    (failure,) = of(fleet.fail(B, S.SERVING), FailRun)
    assert "no replica can load weights version 2" in str(failure)


def damaged(fleet: Fleet, member: MemberId, manifest: Manifest, state: ReplicaState = S.STALE) -> list:
    record = fleet.transaction.replicas[member]
    digest = record.digest if state is S.SERVING else ""
    report = ReplicaReported(member, state, record.version, digest, error="damaged", damaged=manifest.held)
    return fleet(report)


def test_a_damaged_version_is_written_afresh_and_costs_no_replica(fleet: Fleet) -> None:
    fleet.started(A)
    fleet(VersionPublished(version(1)))
    fleet.serve(A, version(1))
    fleet.join(B)
    assert fleet.ask(B) == [OfferVersion(B, version(1))]
    assert damaged(fleet, B, version(1)) == [CheckpointTrainer("damaged")]
    for _ in range(20):
        assert fleet.ask(B) == [], "it is not offered again as it is"
        assert damaged(fleet, B, version(1)) == []
    assert fleet(VersionPublished(version(1), durable=True)) == [OfferVersion(B, version(1))]
    assert fleet.transaction.checkpoint_reason == ""
    assert fleet.serve(B, version(1)) == [AdmitReplica(B, Version(1), version(1).digest)]
    assert fleet.transaction.metrics()["weights_versions_damaged_total"] == 1


def test_a_damaged_version_is_overtaken_by_a_newer_one(fleet: Fleet) -> None:
    fleet.started(A)
    fleet.ask(A, version(0).held)
    fleet(VersionPublished(version(1)))
    assert damaged(fleet, A, version(1), S.SERVING) == [CheckpointTrainer("damaged")]
    assert fleet.ask(A, version(0).held) == []
    assert fleet(VersionPublished(version(2))) == [OfferVersion(A, version(2))]
    assert damaged(fleet, A, version(1), S.SERVING) == [], "of an older version"
    assert fleet.transaction.replicas[A].failures == 0


def test_a_replica_that_finds_damage_where_others_serve_is_replaced_in_the_end(fleet: Fleet) -> None:
    fleet.started(A)
    fleet.join(B)
    effects: list[TransactionEffect] = []
    for number in range(1, 9):
        fleet(VersionPublished(version(number), durable=True))
        fleet.serve(A, version(number))
        fleet.ask(B)
        effects += damaged(fleet, B, version(number))
    assert len(of(effects, EvictReplica)) == 1
    assert fleet.transaction.replicas[A].admitted


def test_a_lost_trainer_is_restarted_once_and_the_replicas_go_on(fleet: Fleet) -> None:
    fleet.started(A)
    assert fleet(TrainerLost("killed", B)) == [RestartTrainer("killed", B)]
    assert fleet(TrainerLost("killed")) == []
    assert fleet.transaction.healthy == 1
    fleet.ask(A, version(0).held)
    fresh = version(0, "lineage2")
    assert fleet(VersionPublished(fresh)) == [OfferVersion(A, fresh)]
    assert fleet(TrainerLost("killed again")) == [RestartTrainer("killed again")]


def test_a_trainer_that_was_replaced_is_not_listened_to(fleet: Fleet) -> None:
    fleet.started(A)
    fleet(VersionPublished(version(9)))
    fresh = version(5, "lineage2")
    fleet(VersionPublished(fresh))
    assert fleet.transaction.newest == fresh
    fleet(VersionPublished(version(10)))
    assert fleet.transaction.newest == fresh


def test_an_offer_without_an_answer_is_repeated_once_and_then_the_replica_goes() -> None:
    fleet = Fleet(deadline_s=10.0).started(A, B)
    for member in (A, B):
        fleet.ask(member, version(0).held)
    fleet(VersionPublished(version(1)))
    fleet.serve(B, version(1))
    assert fleet.later(10.0) == []
    assert fleet.later(0.1) == []  # noted once, still serving
    assert fleet.ask(A, version(0).held) == [OfferVersion(A, version(1))]
    assert [type(e) for e in fleet.later(10.1)] == [FenceReplica, EvictReplica]
    assert [type(e) for e in fleet.later(1e6)] == [EvictReplica]  # and it is insisted on


def test_a_replica_fenced_for_too_long_is_replaced() -> None:
    fleet = Fleet(unloaded_timeout_s=10.0).started(A, B)
    fleet.fail(A, S.TORN)
    assert fleet.later(10.0) == []
    assert [type(e) for e in fleet.later(0.1)] == [EvictReplica]


def test_too_few_healthy_replicas_for_too_long_end_the_run_with_one_sentence() -> None:
    fleet = Fleet(min_healthy=2, unhealthy_timeout_s=30.0, unloaded_timeout_s=1e9)
    fleet.later(1e6)
    assert not fleet.transaction.failed  # nothing was published: none can serve yet
    fleet.started(A)
    assert fleet.later(1.0) == []
    (failure,) = fleet.later(31.0)
    assert failure == FailRun("only 1 of the required 2 replicas served for 30 s")
    assert fleet.later(100.0) == []


def test_a_new_controller_learns_from_questions_what_is_served_already() -> None:
    fleet = Fleet(unloaded_timeout_s=10.0)
    fleet(VersionPublished(version(1)))
    fleet(MembershipReconciled(frozenset({A, B, C})))
    assert fleet.ask(A, version(1).held) == [AdmitReplica(A, Version(1), version(1).digest)]
    assert fleet.ask(A, version(1).held) == []
    assert fleet.ask(B, Held(Version(9), "f" * 32)) == [
        OfferVersion(B, version(1))
    ]  # unknown here: not admitted, but helped
    fleet.later(10.1)
    assert fleet.transaction.replicas[A].admitted
    assert fleet.transaction.replicas[B].evicting or fleet.transaction.replicas[B].offered
    assert not fleet.transaction.replicas[C].evicting  # it may be asleep by order of the pool


def test_a_replica_that_sleeps_by_order_and_never_asked_is_left_alone() -> None:
    """One woken later, or never, holds no version and is not at fault; nor does the fleet wait for it."""
    fleet = Fleet(unloaded_timeout_s=10.0, unhealthy_timeout_s=30.0)
    fleet(VersionPublished(version(0)))
    fleet.join(A)
    fleet(ReplicaReported(A, S.STALE, Version(-1), ""))
    assert fleet.later(1000.0) == []
    assert not fleet.transaction.failed
    fleet.ask(A)
    fleet.fail(A, S.STALE)
    assert [type(e) for e in fleet.later(10.1)] == [EvictReplica]


def test_a_fleet_that_falls_asleep_in_between_still_runs_out_of_time() -> None:
    fleet = Fleet(min_healthy=1, unhealthy_timeout_s=30.0, unloaded_timeout_s=1e9)
    fleet(VersionPublished(version(0)))
    ended: list[TransactionEffect] = []
    for number in range(4):
        member = MemberId(f"incarnation {number}")
        fleet.join(member)
        assert fleet.later(50.0) == [], "asleep: that time does not count"
        fleet.ask(member)
        ended = fleet.later(10.0)
        fleet.lose(member)
    assert ended == [FailRun("only 0 of the required 1 replicas served for 30 s")]


def test_replicas_that_sleep_do_not_count_among_those_that_fail() -> None:
    fleet = Fleet()
    fleet(VersionPublished(version(0), durable=True))
    for member in (A, B):
        fleet.join(member)
    fleet.ask(A)
    fleet.fail(A, S.STALE)
    fleet.ask(A)
    assert of(fleet.fail(A, S.STALE), CheckpointTrainer), "all that are awake failed twice"


def test_a_replica_that_holds_nothing_complete_is_fenced_even_if_its_report_was_lost(fleet: Fleet) -> None:
    fleet.started(A, B)
    assert fleet.ask(A) == [FenceReplica(A, "is stale"), OfferVersion(A, version(0))]


def test_equal_bytes_under_a_new_version_are_offered(fleet: Fleet) -> None:
    fleet.started(A)
    fleet.serve(A, version(0))
    same = msgspec.structs.replace(version(0), version=Version(1))
    fleet.ask(A, version(0).held)
    assert OfferVersion(A, same) in fleet(VersionPublished(same))
    fleet.serve(A, same)
    assert fleet.transaction.replicas[A].version == 1
    assert fleet.transaction.behind() == {A: 0}
    assert fleet.ask(A, same.held) == []


def test_a_checkpoint_makes_only_its_own_version_durable(fleet: Fleet) -> None:
    fleet.started(A)
    same = msgspec.structs.replace(version(0), version=Version(1))
    fleet(VersionPublished(same))
    fleet(VersionMadeDurable(version(0).held))
    assert fleet.transaction.durable == version(0)


def test_durability_follows_the_newest(fleet: Fleet) -> None:
    fleet.started(A)
    fleet(VersionPublished(version(1)))
    fleet(VersionMadeDurable(Held(Version(1), "e" * 32)))
    assert fleet.transaction.durable == version(0)
    fleet(VersionMadeDurable(version(1).held))
    assert fleet.transaction.durable == version(1)


def test_digests_are_remembered_for_a_bounded_history() -> None:
    versions = PublishedVersions()
    for number in range(HISTORY + 4):
        versions.add(version(number))
        versions.check()
    assert not versions.has(Version(3), version(3).digest)
    assert versions.has(Version(4), version(4).digest)


def test_versions_of_a_trainer_that_is_gone_are_whole_but_not_valid() -> None:
    versions = PublishedVersions()
    for number in range(4):
        versions.add(version(number))
    versions.withdraw_after(1)
    assert list(versions.valid) == [0, 1]
    versions.add(version(2, "another"))
    assert versions.has(Version(2), version(2).digest)
    assert versions.has(Version(2), version(2, "another").digest)
    assert versions.valid[Version(2)] == version(2, "another").digest
    assert Version(3) not in versions.valid


def test_the_table_has_one_row_per_fault_and_state() -> None:
    assert sorted((row.fault, row.state) for row in TABLE) == sorted(product(Fault, S))


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.fault}-{row.state}".replace(" ", "_"))
def test_no_row_lets_a_mixture_serve(row: object) -> None:
    serving = {Action.KEEP_SERVING, Action.RESUME_OLD, Action.COMMIT}
    unsafe = {S.TORN, S.STALE}
    assert row.state not in unsafe or not serving & {*row.first, *row.then}  # type: ignore[attr-defined]
    if row.state in {S.TORN, S.STALE}:  # type: ignore[attr-defined]
        assert Action.FENCE in row.first  # type: ignore[attr-defined]


def test_policy_replaces_every_choice() -> None:
    for row in TABLE:
        for policy in ("restore", "evict", "fail"):
            for times in (1, 10_000_000):
                assert Action.CHOOSE not in decide(row.fault, row.state, policy, times)


def test_a_replica_that_falls_behind_with_nothing_under_way_is_named_once_within_seconds(fleet: Fleet) -> None:
    """It was found out only when the whole run had stood still for a minute."""
    fleet.started(A, B)
    fleet.ask(A, version(0).held)
    fleet(VersionPublished(version(1)))
    fleet.serve(A, version(1))
    assert [of(fleet.later(1.0), WarnAboutReplica) for _ in range(6)] == [[]] * 6
    [named] = of(fleet.later(1.0), WarnAboutReplica)
    reason = "serves version 0, the newest is 1, and no update is under way: it does not request weights"
    assert named == WarnAboutReplica(B, reason)
    assert of(fleet.later(60.0), WarnAboutReplica) == []
    fleet.ask(B, version(0).held)
    assert of(fleet.later(10.0), WarnAboutReplica) == [], "it loads"


def test_a_replica_that_evaluates_older_weights_is_not_named(fleet: Fleet) -> None:
    fleet.started(A)
    fleet(VersionPublished(version(1)))
    for _ in range(10):
        fleet.now += 5.0
        assert fleet(Ticked(frozenset({A}))) == []
