"""A thousand replicas and the controller's side, joined by an unreliable network, with faults at every step.

Both machines are the real ones; only time, memory and messages are simulated. A failing run prints its seed:
`simulate(seed)` replays it exactly.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from penstock.records.ids import MemberId, Version
from penstock.records.weights import Manifest
from penstock.weights.events import (
    EvictReplica,
    FailRun,
    MembershipReconciled,
    OfferVersion,
    ReplicaReported,
    RestartTrainer,
    Ticked,
    TrainerLost,
    TransactionEvent,
    VersionPublished,
    WeightsRequested,
)
from penstock.weights.published import HISTORY, PublishedVersions
from penstock.weights.replica import (
    AbandonReplica,
    Mismatched,
    Paused,
    Replica,
    ReplicaEffect,
    ReplicaEvent,
    ReplicaState,
    ReportReplicaState,
    Resumed,
    ResumeEngine,
    Swapped,
    UpdateFailed,
    Verified,
    WriteBegan,
)
from penstock.weights.settings import WeightsSection
from penstock.weights.transaction import WeightTransaction

BUCKETS = 4
POLL_S = 5.0


@dataclass
class Process:
    """One incarnation of one replica: its machine, and its memory as the digest in each bucket."""

    member: MemberId
    way: str
    slow: float
    replica: Replica = field(default_factory=Replica)
    memory: list[str] = field(default_factory=lambda: [""] * BUCKETS)
    generating: bool = False
    alive: bool = True
    question: int = 0
    backoff_s: float = 0.05


class World:
    def __init__(
        self, seed: int, replicas: int, fault_rate: float, faults_until: float, train_until: float, only: str = ""
    ) -> None:
        self.random = random.Random(seed)
        self.only = only
        self.now = 0.0
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.fault_rate = fault_rate
        self.faults_until = faults_until
        self.train_until = train_until
        self.settings = WeightsSection(
            on_fault="restore",
            min_healthy=replicas // 4,
            deadline_s=60.0,
            unloaded_timeout_s=60.0,
            unhealthy_timeout_s=120.0,
        )
        self.versions = PublishedVersions()
        self.controller = WeightTransaction(self.settings, lambda: self.versions)
        self.fired: Counter[str] = Counter()
        self.lineage = 0
        self.version = 0
        self.durable = 0
        self.trainer_alive = True
        self.newest: Manifest | None = None
        self.ever_published: set[tuple[int, str]] = set()
        self.failed = ""
        self.samples = 0
        self.processes: dict[MemberId, Process] = {}
        for number in range(replicas):
            self.start(number)
        self.after(0.1, self.publish)
        self.after(1.0, self.tick)
        self.after(20.0, self.controller_fault)
        self.after(15.0, self.trainer_fault)

    # Machinery

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.heap, (self.now + delay_s, self.count, action))

    def run(self, until: float) -> None:
        while self.heap and self.heap[0][0] <= until and not self.failed:
            self.now, _, action = heapq.heappop(self.heap)
            action()

    def strikes(self, fault: str) -> bool:
        wanted = not self.only or fault == self.only
        if wanted and self.now < self.faults_until and self.random.random() < self.fault_rate:
            self.fired[fault] += 1
            return True
        return False

    # Trainer

    def publish(self) -> None:
        if self.now < self.train_until:
            self.after(self.random.uniform(0.5, 1.5), self.publish)
        if not self.trainer_alive:
            return
        digest = f"{self.lineage}.{self.version}"
        manifest = Manifest(Version(self.version), f"l{self.lineage}", digest, (), "weights")
        durable = self.version % 5 == 0
        self.durable = self.version if durable else self.durable
        self.version += 1
        self.newest = manifest
        self.ever_published.add((manifest.version, digest))
        self.tell(VersionPublished(manifest, durable))

    def trainer_fault(self) -> None:
        self.after(15.0, self.trainer_fault)
        if self.now < self.faults_until and self.trainer_alive and not self.only:
            self.fired["trainer died"] += 1
            self.trainer_alive = False
            self.tell(TrainerLost("killed"))

    def trainer_returns(self) -> None:
        self.trainer_alive = True
        self.lineage += 1
        self.version = self.durable

    # Controller

    def tell(self, event: TransactionEvent) -> None:
        if isinstance(event, VersionPublished):
            self.versions.add(event.manifest)
        for effect in self.controller.handle(event, self.now):
            match effect:
                case OfferVersion(member, manifest):
                    process = self.processes[member]  # a dead one would be a KeyError
                    if not self.strikes("offer lost"):
                        self.after(self.random.uniform(0.001, 0.05), lambda p=process, m=manifest: self.offered(p, m))
                case EvictReplica(member):
                    self.after(1.0, lambda m=member: self.kill(m, "evicted"))
                case RestartTrainer():
                    self.after(3.0, self.trainer_returns)
                case FailRun(sentence):
                    self.failed = sentence

    def tick(self) -> None:
        self.after(1.0, self.tick)
        self.tell(Ticked())
        self.controller.check()

    def controller_fault(self) -> None:
        """A new controller knows what its journal says and hears the rest from the replicas."""
        self.after(20.0, self.controller_fault)
        if self.now >= self.faults_until or self.only:
            return
        self.fired["controller died"] += 1
        self.controller = self.rebuilt()
        self.tell(MembershipReconciled(frozenset(self.processes)))
        for process in self.processes.values():
            self.after(self.random.uniform(0.0, 2.0), lambda p=process: self.report_again(p))

    def rebuilt(self) -> WeightTransaction:
        controller = WeightTransaction(self.settings, lambda: self.versions)
        ordered = sorted(self.ever_published, key=lambda item: (int(item[1].split(".")[0]), item[0]))
        for version, digest in ordered:
            lineage = f"l{digest.split('.')[0]}"
            controller.handle(VersionPublished(Manifest(Version(version), lineage, digest, (), "weights")), self.now)
        if not self.trainer_alive:
            controller.handle(TrainerLost("known from the journal"), self.now)
        return controller

    def report_again(self, process: Process) -> None:
        if process.alive:
            replica = process.replica
            digest = replica.held.digest
            self.deliver(process, ReplicaReported(process.member, replica.state, replica.version, digest))

    # Replicas

    def start(self, number: int) -> None:
        self.count += 1
        member = MemberId(f"{number}-{self.count}")
        slow = 10.0 if number % 50 == 0 else self.random.uniform(0.5, 2.0)
        process = Process(member, "in_place" if number % 3 == 0 else "staged", slow)
        self.processes[member] = process
        self.tell(MembershipReconciled(frozenset(self.processes)))
        self.after(self.random.uniform(0.0, 1.0), lambda: self.ask(process))

    def kill(self, member: MemberId, why: str) -> None:
        process = self.processes.pop(member, None)
        if process is None:
            return
        process.alive = process.generating = False
        self.tell(MembershipReconciled(frozenset(self.processes)))
        self.after(self.random.uniform(1.0, 3.0), lambda: self.start(int(member.split("-")[0])))

    def event(self, process: Process, event: ReplicaEvent) -> None:
        """Tells the replica's machine and carries out its effects; then the invariant is looked at."""
        self.carry_out(process, process.replica.handle(event, self.now))
        self.assert_serves_what_it_reports(process)

    def carry_out(self, process: Process, effects: list[ReplicaEffect]) -> None:
        for effect in effects:
            match effect:
                case ResumeEngine():
                    if self.strikes("resume failed"):
                        self.event(process, UpdateFailed("resume", "refused"))
                    else:
                        process.generating = True
                        self.event(process, Resumed())
                case ReportReplicaState(state, version, digest, error):
                    report = ReplicaReported(process.member, state, version, digest, error=error)
                    if not self.strikes("report lost"):
                        self.after(0.01, lambda r=report: self.deliver(process, r))
                case AbandonReplica(reason):
                    self.after(0.0, lambda r=reason: self.kill(process.member, r))

    def deliver(self, process: Process, report: ReplicaReported) -> None:
        if process.alive:
            self.tell(report)

    def assert_serves_what_it_reports(self, process: Process) -> None:
        replica = process.replica
        replica.check()
        assert process.generating == replica.may_serve or not process.alive, process
        if process.generating:
            assert len(set(process.memory)) == 1, f"a mixture serves: {process}"
            assert process.memory[0] == replica.digest
            assert (replica.version, replica.digest) in self.ever_published
            self.samples += 1
            assert self.controller.expects(replica.version, replica.digest) or self.controller_forgot(replica.version)

    def controller_forgot(self, version: Version) -> bool:
        return self.newest is not None and version < self.newest.version - HISTORY + 8

    def ask(self, process: Process) -> None:
        if not process.alive:
            return
        process.question += 1
        question = process.question
        self.tell(WeightsRequested(process.member, process.replica.held))

        def poll_again() -> None:
            if process.question == question:
                self.ask(process)

        self.after(POLL_S, poll_again)

    def offered(self, process: Process, manifest: Manifest) -> None:
        if not process.alive or manifest.digest == process.replica.held:
            return
        process.question += 1  # the poll is answered
        if self.strikes("killed while fetching"):
            self.kill(process.member, "killed")
        elif self.strikes("fetch failed"):
            self.after(0.1, lambda: self.fail(process, "fetch"))
        else:
            steps = self.staged if process.way == "staged" else self.pause
            self.after(process.slow, lambda: steps(process, manifest))

    def staged(self, process: Process, manifest: Manifest) -> None:
        if not process.alive:
            return
        if self.strikes("stage failed"):
            self.fail(process, "stage")
            return
        damaged = self.strikes("damaged in memory")
        process.memory = [manifest.digest] * BUCKETS
        if process.replica.state is ReplicaState.SERVING and not damaged:
            self.event(process, Swapped(manifest.version, manifest.digest))
            self.done(process)
            return
        process.generating = False
        process.replica.handle(Paused(), self.now)
        if damaged:
            process.memory[1] = "damaged"
        self.prove(process, manifest)

    def pause(self, process: Process, manifest: Manifest) -> None:
        if not process.alive:
            return
        process.generating = False
        self.event(process, Paused())
        if self.strikes("paused, then failed"):
            self.fail(process, "pause")
            return
        self.event(process, WriteBegan())
        self.after(0.05, lambda: self.write(process, manifest, 0))

    def write(self, process: Process, manifest: Manifest, bucket: int) -> None:
        if not process.alive:
            return
        if self.strikes("write failed"):
            self.fail(process, "write")
        elif self.strikes("killed while writing"):
            self.kill(process.member, "killed")
        else:
            process.memory[bucket] = manifest.digest if not self.strikes("bucket damaged") else "damaged"
            following = self.write if bucket + 1 < BUCKETS else lambda p, m, _: self.prove(p, m)
            self.after(0.05, lambda: following(process, manifest, bucket + 1))

    def prove(self, process: Process, manifest: Manifest) -> None:
        if not process.alive:
            return
        if process.memory == [manifest.digest] * BUCKETS:
            if process.replica.state is ReplicaState.PAUSED:  # a staged swap while paused replaces everything
                self.event(process, WriteBegan())
            self.event(process, Verified(manifest.version, manifest.digest))
            self.carry_out(process, [ResumeEngine()])
            self.done(process)
        else:
            self.event(process, Mismatched(manifest.digest, "damaged"))
            self.fail(process, "verify")

    def done(self, process: Process) -> None:
        process.backoff_s = 0.05
        self.after(0.01, lambda: self.ask(process))

    def fail(self, process: Process, step: str) -> None:
        if process.alive:
            self.event(process, UpdateFailed(step, "injected"))
            process.backoff_s = min(2.0, process.backoff_s * 2)
            self.after(process.backoff_s, lambda: self.ask(process))


def simulate(seed: int, replicas: int = 1000, fault_rate: float = 0.01) -> World:
    world = World(seed, replicas, fault_rate, faults_until=40.0, train_until=50.0)
    try:
        world.run(until=200.0)
        assert not world.failed, world.failed
        assert world.newest is not None
        assert len(world.processes) == replicas
        for process in world.processes.values():
            world.assert_serves_what_it_reports(process)
            assert process.replica.state is ReplicaState.SERVING, process
            assert process.replica.digest == world.newest.digest, process
        world.controller.check()
        assert world.controller.healthy == replicas
        assert world.controller.metrics()["weights_offers_open"] == 0
        assert set(world.controller.behind().values()) == {0}
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    return world


def test_a_thousand_replicas_come_through_every_fault() -> None:
    world = simulate(seed=1)
    expected = {
        "fetch failed",
        "stage failed",
        "write failed",
        "bucket damaged",
        "damaged in memory",
        "paused, then failed",
        "resume failed",
        "killed while fetching",
        "killed while writing",
        "offer lost",
        "report lost",
        "trainer died",
        "controller died",
    }
    assert expected <= world.fired.keys(), expected - world.fired.keys()
    assert world.samples > 1000


@pytest.mark.parametrize("seed", range(2, 8))
def test_small_fleets_under_heavy_faults(seed: int) -> None:
    simulate(seed, replicas=12, fault_rate=0.15)


def test_without_faults_no_replica_is_fenced_or_evicted() -> None:
    world = simulate(seed=0, replicas=100, fault_rate=0.0)
    assert world.fired.keys() <= {"trainer died", "controller died"}


@pytest.mark.parametrize("fault", ["fetch failed", "offer lost"])
def test_a_fleet_that_can_load_nothing_fails_with_one_sentence(fault: str) -> None:
    world = World(3, replicas=5, fault_rate=1.0, faults_until=1e9, train_until=1e9, only=fault)
    world.run(until=1000.0)
    assert world.fired[fault] > 0
    assert world.failed
    assert "\n" not in world.failed


def test_if_no_report_ever_arrives_the_questions_say_enough() -> None:
    world = World(3, replicas=5, fault_rate=1.0, faults_until=1e9, train_until=30.0, only="report lost")
    world.run(until=100.0)
    assert world.fired["report lost"] > 0
    assert not world.failed
    assert world.controller.healthy == 5
    assert set(world.controller.behind().values()) == {0}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 130))
def test_soak(seed: int) -> None:
    simulate(seed, replicas=300, fault_rate=0.05)
