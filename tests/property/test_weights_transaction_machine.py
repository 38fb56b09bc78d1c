"""The controller's side against what is really the case in each replica."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.records.ids import MemberId, Version
from penstock.records.weights import NOTHING_HELD, Manifest
from penstock.weights.events import (
    AdmitReplica,
    EvictReplica,
    FailRun,
    FenceReplica,
    MembershipReconciled,
    NewestHeld,
    OfferVersion,
    ReplicaReported,
    Ticked,
    TrainerLost,
    TransactionEvent,
    VersionPublished,
    WeightsRequested,
)
from penstock.weights.faults import Policy
from penstock.weights.published import PublishedVersions
from penstock.weights.replica import ReplicaState
from penstock.weights.settings import WeightsSection
from penstock.weights.transaction import WeightTransaction
from profiles import examples

S = ReplicaState
MEMBERS = [MemberId(name) for name in "abcd"]
member_of = st.sampled_from(MEMBERS)


class TransactionMachine(RuleBasedStateMachine):
    """`admitted` and `offers` are rebuilt from the effects alone, as the controller would."""

    policy: Policy = "restore"
    min_healthy = 1

    def __init__(self) -> None:
        super().__init__()
        self.settings = WeightsSection(
            on_fault=self.policy,
            min_healthy=self.min_healthy,
            deadline_s=10.0,
            unloaded_timeout_s=20.0,
            unhealthy_timeout_s=60.0,
        )
        self.versions = PublishedVersions()
        self.transaction = WeightTransaction(self.settings, lambda: self.versions)
        self.now = 0.0
        self.published: list[Manifest] = []
        self.holds: dict[MemberId, Manifest | None] = {}
        """What each living replica serves; None while it holds nothing complete."""
        self.admitted: set[MemberId] = set()
        self.offers: dict[MemberId, Manifest] = {}
        self.evicted: set[MemberId] = set()
        self.failed = ""

    def tell(self, event: TransactionEvent) -> None:
        healthy = set(self.admitted)
        if isinstance(event, VersionPublished):
            self.versions.add(event.manifest)
        for effect in self.transaction.handle(event, self.now):
            match effect:
                case OfferVersion(member, manifest):
                    assert manifest == self.transaction.newest
                    assert member in self.holds, "a dead replica was addressed"
                    assert member not in self.evicted
                    assert not self.failed
                    self.offers[member] = manifest
                case AdmitReplica(member, version, digest):
                    held = self.holds[member]
                    assert held is not None, "a replica without a complete version was admitted"
                    assert (held.version, held.digest) == (version, digest)
                    self.admitted.add(member)
                case FenceReplica(member):
                    self.admitted.remove(member)
                case EvictReplica(member):
                    was_needed = member in healthy and len(healthy) <= self.min_healthy and self.holds.get(member)
                    fleet = self.transaction.fleet_restarts > 0
                    assert fleet or not was_needed or isinstance(event, ReplicaReported)
                    self.evicted.add(member)
                case FailRun(sentence):
                    assert not self.failed, "the run failed twice"
                    self.failed = sentence

    @rule(lineage=st.sampled_from(["one", "two"]), durable=st.booleans())
    def publish(self, lineage: str, durable: bool) -> None:
        number = len(self.published)
        manifest = Manifest(Version(number), lineage, f"{number:032x}", (), f"weights/{number}")
        self.published.append(manifest)
        self.tell(VersionPublished(manifest, durable))

    @rule(member=member_of)
    def join(self, member: MemberId) -> None:
        if member not in self.holds and member not in self.evicted:
            self.holds[member] = None
            self.tell(MembershipReconciled(frozenset(self.holds)))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        member = data.draw(st.sampled_from(sorted(self.holds)))
        held = self.holds[member]
        self.offers.pop(member, None)
        self.tell(WeightsRequested(member, held.held if held else NOTHING_HELD))

    @precondition(lambda self: any(held and held == self.transaction.newest for held in self.holds.values()))
    @rule(data=st.data())
    def ask_with_the_newest(self, data: st.DataObject) -> None:
        newest = self.transaction.newest
        assert newest is not None
        member = data.draw(st.sampled_from(sorted(member for member, held in self.holds.items() if held == newest)))
        self.tell(NewestHeld(member, newest.held))
        record = self.transaction.replicas[member]
        assert record.requested
        assert record.admitted or record.evicting

    @rule()
    def restart_the_controller(self) -> None:
        """Only the newest manifest is left of what it knew; the supervisor still ends the processes it was told to."""
        newest = self.transaction.newest
        self.transaction = WeightTransaction(self.settings, lambda: self.versions)
        self.admitted.clear()
        self.offers.clear()
        self.failed = ""
        self.evicted -= self.holds.keys()
        if newest is not None:
            self.tell(VersionPublished(newest))
        self.tell(MembershipReconciled(frozenset(self.holds)))

    @precondition(lambda self: self.offers)
    @rule(
        data=st.data(), outcome=st.sampled_from(["serves", "staged failure", "torn", "mismatch", "paused", "silence"])
    )
    def take_an_offer(self, data: st.DataObject, outcome: str) -> None:
        member = data.draw(st.sampled_from(sorted(self.offers)))
        manifest = self.offers.pop(member)
        if member not in self.holds:
            return
        held = self.holds[member]
        match outcome:
            case "serves":
                self.holds[member] = manifest
                self.tell(ReplicaReported(member, S.SERVING, manifest.version, manifest.digest, 0.01, 1))
            case "staged failure":
                state = S.SERVING if held else S.STALE
                version = held.version if held else Version(-1)
                self.tell(ReplicaReported(member, state, version, held.digest if held else "", error="fetch: boom"))
            case "torn":
                self.holds[member] = None
                self.tell(ReplicaReported(member, S.TORN, Version(-1), "", error="write: boom"))
            case "mismatch":
                self.holds[member] = None
                self.tell(ReplicaReported(member, S.SERVING, manifest.version, "f" * 32))
            case "paused":
                self.tell(ReplicaReported(member, S.PAUSED, Version(-1), "", error="resume: boom"))
            case "silence":
                pass

    @rule(member=member_of)
    def lose(self, member: MemberId) -> None:
        if member in self.holds:
            del self.holds[member]
            self.offers.pop(member, None)
            self.tell(MembershipReconciled(frozenset(self.holds)))
            self.evicted.discard(member)

    @rule(live=st.frozensets(member_of))
    def reconcile(self, live: frozenset[MemberId]) -> None:
        live -= self.evicted - self.holds.keys()
        for member in list(self.holds):
            if member not in live:
                del self.holds[member]
                self.offers.pop(member, None)
                self.evicted.discard(member)
        for member in live:
            self.holds.setdefault(member, None)
        self.tell(MembershipReconciled(live))
        assert set(self.transaction.replicas) == live

    @rule()
    def lose_the_trainer(self) -> None:
        self.tell(TrainerLost("killed"))

    @rule(seconds=st.sampled_from([0.1, 5.0, 11.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.tell(Ticked())

    @invariant()
    def holds_together(self) -> None:
        self.transaction.check()
        repr(self.transaction)
        assert self.admitted == {m for m, r in self.transaction.replicas.items() if r.admitted}
        assert self.admitted <= self.holds.keys()
        assert self.transaction.metrics()["weights_offers_open"] <= len(self.holds)

    @invariant()
    def no_wait_is_without_a_deadline(self) -> None:
        """Whatever is waited for, a tick far enough in the future ends it or ends the run."""
        open_since = [r.since for r in self.transaction.replicas.values() if r.offered or r.evicting]
        assert all(since <= self.now for since in open_since)


class EvictingMachine(TransactionMachine):
    policy: Policy = "evict"
    min_healthy = 2


class FailingMachine(TransactionMachine):
    policy: Policy = "fail"
    min_healthy = 0


TestRestore = TransactionMachine.TestCase
TestEvict = EvictingMachine.TestCase
TestFail = FailingMachine.TestCase
for case in (TestRestore, TestEvict, TestFail):
    case.settings = settings(max_examples=examples(40), stateful_step_count=40, deadline=None)
