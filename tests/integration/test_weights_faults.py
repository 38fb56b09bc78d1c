"""A fault at every step of both ways in, in real processes.

Each case: two replicas serve version 0 and generate all the time. Version 1 is published, and one of them (or the
trainer, or the controller, or the artifact itself) suffers the fault. Afterwards both replicas, or their
replacements, must serve the newest version, generate again, and everything that was ever generated must be exactly
what the weights it claims produce. A witness proves that the fault really struck.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from penstock.records.ids import MemberId, Version
from penstock.records.weights import Held, Manifest
from penstock.weights.events import (
    CheckpointTrainer,
    EvictReplica,
    FailRun,
    MembershipReconciled,
    OfferVersion,
    ReplicaReported,
    RestartFleet,
    Ticked,
    TrainerLost,
    TransactionEvent,
    VersionPublished,
    WeightsRequested,
)
from penstock.weights.io.files import Publisher, read_manifest
from penstock.weights.io.pull import ArtifactServer
from penstock.weights.published import PublishedVersions
from penstock.weights.replica import ReplicaState
from penstock.weights.settings import WeightsSection
from penstock.weights.transaction import WeightTransaction

SCRIPT = Path(__file__).with_name("weights_replica.py")
ENGINES = ["policy", "torch"]
WAYS = ["staged", "in_place"]


@pytest.fixture(scope="module")
def processes() -> ModuleType:
    spec = importlib.util.spec_from_file_location("weights_replica", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["weights_replica"] = module
    spec.loader.exec_module(module)
    return module


class Nursery:
    """The forking process; its news are read by a thread."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.pids: dict[str, int] = {}
        self.codes: dict[str, int] = {}
        self.ready = threading.Event()
        self.thread = threading.Thread(target=self._listen, daemon=True)
        self.thread.start()
        assert self.ready.wait(100), "the nursery did not start"

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            news = json.loads(line)
            if "started" in news:
                self.pids[news["started"]] = news["pid"]
            elif "ended" in news:
                self.codes[news["ended"]] = news["code"]
            else:
                self.ready.set()

    def start(self, tag: str, kind: str, case: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"tag": tag, "kind": kind, "case": msgspec.to_builtins(case)}) + "\n")
        self.process.stdin.flush()

    def kill(self, tag: str) -> None:
        if tag in self.pids and tag not in self.codes:
            os.kill(self.pids[tag], signal.SIGKILL)

    def close(self) -> None:
        for tag in list(self.pids):
            self.kill(tag)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(20)
        self.thread.join(20)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


async def until(condition: Callable[[], bool], what: str, timeout_s: float = 40.0) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110 - other processes change it
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"not within {timeout_s:.0f} s: {what}") from None


class Stage:
    """Trainer, controller and supervisor of one case, in this process; the replicas are real ones."""

    def __init__(
        self, run_dir: Path, nursery: Nursery, processes: ModuleType, engine: str, way: str, transport: str
    ) -> None:
        self.run_dir, self.nursery, self.processes = run_dir, nursery, processes
        self.engine, self.way, self.transport = engine, way, transport
        self.settings = WeightsSection(
            min_healthy=1, deadline_s=10.0, unloaded_timeout_s=15.0, unhealthy_timeout_s=40.0
        )
        self.pulled = ArtifactServer(run_dir, processes.TOKEN) if transport == "pull" else None
        addresses = (self.pulled.address,) if self.pulled is not None else ()
        self.publisher = Publisher(run_dir, "lineage1", keep=2, bucket_bytes=256, addresses=addresses)
        self.published: list[Manifest] = []
        self.seeds: dict[str, int] = {}
        self.cases: dict[MemberId, Any] = {}
        self.failed = ""
        self.evictions: list[str] = []
        self.reports: list[ReplicaReported] = []
        self.checkpoints = 0
        self.incarnation = 0
        self.socket = f"{run_dir}/c"
        self.answers: dict[MemberId, asyncio.Future[Manifest]] = {}
        self.server: asyncio.Server | None = None
        self.tag = run_dir.name
        self.new_controller()

    # The controller

    def new_controller(self) -> None:
        """Knows what a journal would say: what was published, and who was a member."""
        self.versions = PublishedVersions()
        self.transaction = WeightTransaction(self.settings, lambda: self.versions)
        for manifest in self.published:
            self.tell(VersionPublished(manifest))
        self.tell(MembershipReconciled(frozenset(self.alive())))

    def tell(self, event: TransactionEvent) -> None:
        now = asyncio.get_running_loop().time()
        if isinstance(event, VersionPublished):
            self.versions.add(event.manifest)
        for effect in self.transaction.handle(event, now):
            match effect:
                case OfferVersion(member, manifest):
                    future = self.answers.pop(member, None)
                    if future is not None and not future.done():
                        future.set_result(manifest)
                case EvictReplica(member, reason):
                    self.evictions.append(reason)
                    self.nursery.kill(self.tag_of(member))
                case FailRun(sentence):
                    self.failed = sentence
                case CheckpointTrainer():
                    self.checkpoints += 1
                case RestartFleet():
                    assert self.transaction.admission_stopped
        self.transaction.check()

    async def listen(self) -> None:
        self.server = await asyncio.start_unix_server(self.answer, self.socket)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = json.loads(await reader.readline() or b"{}")
            if request:
                writer.write(json.dumps(await self.reply(request)).encode() + b"\n")
                await writer.drain()
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def reply(self, request: dict[str, Any]) -> dict[str, Any]:
        member = MemberId(request["member"])
        if request["call"] == "report":
            report = request["report"]
            event = ReplicaReported(
                member,
                ReplicaState(report["state"]),
                Version(report["version"]),
                report["digest"],
                report["pause_s"],
                report["skipped_versions"],
                report["error"],
            )
            self.reports.append(event)
            if member in self.alive():
                self.tell(event)
            return {}
        future: asyncio.Future[Manifest] = asyncio.get_running_loop().create_future()
        self.answers[member] = future
        if member in self.alive():
            self.tell(WeightsRequested(member, msgspec.convert(request["held"], Held)))
        try:
            manifest = await asyncio.wait_for(future, request["wait_s"])
        except TimeoutError:
            return {}
        return {"manifest": msgspec.to_builtins(manifest)}

    async def controller_dies(self) -> None:
        assert self.server is not None
        self.server.close()
        for future in self.answers.values():
            future.cancel()
        os.unlink(self.socket)
        self.answers.clear()

    # The supervisor

    def tag_of(self, member: MemberId) -> str:
        return f"{self.tag}/{member}"

    def alive(self) -> list[MemberId]:
        return [member for member in self.cases if self.tag_of(member) not in self.nursery.codes]

    def start(self, place: str, **fault: Any) -> MemberId:
        self.incarnation += 1
        member = MemberId(f"{place}{self.incarnation}")
        case = self.processes.Case(
            member=member,
            run_dir=str(self.run_dir),
            socket=self.socket,
            engine=self.engine,
            way=self.way,
            transport=self.transport,
            **fault,
        )
        self.cases[member] = case
        self.nursery.start(self.tag_of(member), "replica", case)
        self.tell(MembershipReconciled(frozenset(self.alive())))
        return member

    async def supervise(self) -> None:
        """Restarts what died, without a fault the second time, and lets time pass for the controller."""
        gone: set[MemberId] = set()
        while True:
            await asyncio.sleep(0.05)
            for member in list(self.cases):
                if self.tag_of(member) in self.nursery.codes and member not in gone:
                    gone.add(member)
                    code = self.nursery.codes[self.tag_of(member)]
                    assert code in (3, -signal.SIGKILL), f"{member} ended with {code}"
                    self.tell(MembershipReconciled(frozenset(self.alive())))
                    if not self.failed:
                        self.start(member[0])
            self.tell(Ticked())

    # The trainer

    def publish(self, seed: int) -> Manifest:
        version = Version(self.published[-1].version + 1 if self.published else 0)
        tensors = self.processes.module_tensors(self.processes.model(self.engine, seed))
        return self.announce(self.publisher.publish(version, tensors, durable=version == 0), seed)

    def announce(self, manifest: Manifest, seed: int) -> Manifest:
        if self.pulled is not None:
            self.pulled.offer(manifest)
        self.seeds[manifest.digest] = seed
        self.published.append(manifest)
        self.tell(VersionPublished(manifest, durable=manifest.version == 0))
        return manifest

    # What must hold

    def samples(self, member: MemberId) -> list[tuple[int, str, str]]:
        path = self.cases[member].samples_path
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(line.split()[0]), line.split()[1], line.split()[2]) for line in lines if line.count(" ") == 2]

    def everyone_serves(self, manifest: Manifest) -> bool:
        """Admitted with it, and seen generating with it."""
        alive = self.alive()
        records = [self.transaction.replicas.get(member) for member in alive]
        return (
            len(alive) == 2
            and all(r is not None and r.admitted and r.digest == manifest.digest for r in records)
            and all(any(digest == manifest.digest for _, digest, _ in self.samples(member)) for member in alive)
        )

    def assert_nothing_torn_was_served(self) -> int:
        """Everything generated is exactly what the weights it claims produce."""
        truth = {
            digest: self.processes.output(self.processes.build(self.engine, seed))[2]
            for digest, seed in self.seeds.items()
        }
        versions = {manifest.digest: manifest.version for manifest in self.published}
        count = 0
        for member in self.cases:
            for version, digest, made in self.samples(member):
                count += 1
                assert digest in truth, f"{member} served weights that were never published: {digest}"
                assert made == truth[digest], f"{member} served a mixture as version {version}"
                assert version == versions[digest]
        assert len(set(truth.values())) == len(truth), "the models must differ for this to mean anything"
        return count


@pytest.fixture
def stage_for(tmp_path: Path, nursery: Nursery, processes: ModuleType) -> Callable[..., Any]:
    @asynccontextmanager
    async def opened(engine: str, way: str, transport: str = "files", **fault: Any) -> AsyncIterator[Stage]:
        stage = Stage(tmp_path, nursery, processes, engine, way, transport)
        await stage.listen()
        try:
            async with asyncio.TaskGroup() as group:
                supervising = group.create_task(stage.supervise())
                zero = stage.publish(seed=10)
                stage.start("a", **fault)
                stage.start("b")
                if fault.get("from_version", 1) > 0:
                    await until(lambda: stage.everyone_serves(zero), f"version 0 is served: {stage.transaction}")
                yield stage
                supervising.cancel()
        finally:
            for member in stage.cases:
                nursery.kill(stage.tag_of(member))
            await until(lambda: not stage.alive(), "all replicas are gone")
            if stage.server is not None:
                stage.server.close()
            if stage.pulled is not None:
                stage.pulled.close(5.0)

    return opened


def witness(stage: Stage) -> list[str]:
    return [line for path in stage.run_dir.glob("witness-*") for line in path.read_text().splitlines()]


STAGED = [
    ("poll", "transient"),
    ("poll", "kill"),
    ("fetch", "raise"),
    ("fetch", "transient"),
    ("fetch", "damage"),
    ("fetch", "kill"),
    ("fetch", "hang"),
    ("stage", "raise"),
    ("stage", "damage"),
    ("stage", "kill"),
    ("stage", "hang"),
    ("verify", "raise"),
    ("verify", "kill"),
    ("swap", "raise"),
    ("swap", "kill"),
    ("swap", "hang"),
    ("report", "transient"),
    ("report", "kill"),
]
IN_PLACE = [
    ("fetch", "raise"),
    ("fetch", "damage"),
    ("fetch", "kill"),
    ("pause", "raise"),
    ("pause", "kill"),
    ("pause", "hang"),
    ("paused", "raise"),
    ("paused", "kill"),
    ("write", "raise"),
    ("write", "damage"),
    ("write", "kill"),
    ("write", "hang"),
    ("finalize", "raise"),
    ("finalize", "kill"),
    ("resume", "raise"),
    ("resume", "kill"),
    ("resume", "hang"),
    ("report", "transient"),
    ("report", "kill"),
]
STEPS = [("staged", *case) for case in STAGED] + [("in_place", *case) for case in IN_PLACE]


# What the torch engine does by itself: a swap or a pause between two steps of its thread.
TORCH = [
    ("staged", "swap", "raise"),
    ("staged", "swap", "hang"),
    ("in_place", "pause", "hang"),
    ("in_place", "write", "raise"),
    ("in_place", "resume", "kill"),
]
OF_THE_ENGINE = ("stage", "swap", "pause", "paused", "write", "finalize", "resume")
FAULTS = [("policy", *case) for case in STEPS] + [
    pytest.param("torch", *case, marks=() if case in TORCH else pytest.mark.slow)
    for case in STEPS
    if case[1] in OF_THE_ENGINE
]


@pytest.mark.parametrize(("engine", "way", "step", "kind"), FAULTS)
async def test_a_fault_at_any_step(stage_for: Callable[..., Any], engine: str, way: str, step: str, kind: str) -> None:
    async with stage_for(engine, way, step=step, kind=kind) as stage:
        one = stage.publish(seed=11)
        await until(lambda: bool(witness(stage)), f"the fault strikes: {stage.transaction}")
        await until(lambda: stage.everyone_serves(one), f"version 1 is served: {stage.transaction}")
        two = stage.publish(seed=12)
        await until(lambda: stage.everyone_serves(two), f"version 2 is served: {stage.transaction}")
        assert not stage.failed
        assert stage.assert_nothing_torn_was_served() > 10
        if kind in ("raise", "transient", "damage"):
            assert len(stage.cases) == 2, "a passing fault must not cost a process"
        if kind in ("raise", "damage") and step != "resume":
            assert any(report.error for report in stage.reports), "the controller was not told"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["transient", "damage", "kill"])
async def test_a_fault_while_a_version_is_pulled(stage_for: Callable[..., Any], way: str, kind: str) -> None:
    async with stage_for("policy", way, transport="pull", step="fetch", kind=kind) as stage:
        one = stage.publish(seed=11)
        await until(lambda: bool(witness(stage)), f"the fault strikes: {stage.transaction}")
        await until(lambda: stage.everyone_serves(one), f"version 1 is served: {stage.transaction}")
        assert stage.pulled.served_bytes > 0
        assert stage.assert_nothing_torn_was_served() > 10


async def test_a_source_that_goes_away_and_comes_back_tears_no_replica(stage_for: Callable[..., Any]) -> None:
    """The trainer is killed with versions that replicas were about to pull; its successor serves them elsewhere."""
    async with stage_for("policy", "staged", transport="pull") as stage:
        stage.pulled.close(5.0)
        stage.pulled = None
        stage.publish(seed=11)
        stage.tell(TrainerLost("killed"))
        failures = stage.transaction.statistics.failures
        await until(lambda: stage.transaction.statistics.failures > failures, "the replicas say that they fail")
        seen = {member: len(stage.samples(member)) for member in stage.alive()}
        await until(lambda: all(len(stage.samples(member)) > seen[member] for member in seen), "they go on meanwhile")
        stage.pulled = ArtifactServer(stage.run_dir, stage.processes.TOKEN)
        stage.publisher = Publisher(stage.run_dir, "lineage2", bucket_bytes=256, addresses=(stage.pulled.address,))
        two = stage.publish(seed=12)
        await until(lambda: stage.everyone_serves(two), f"the successor's version is served: {stage.transaction}")
        assert len(stage.cases) == 2, "no replica was replaced for it"
        assert not stage.checkpoints
        stage.assert_nothing_torn_was_served()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["raise", "kill", "damage"])
async def test_a_fault_at_the_very_first_load(stage_for: Callable[..., Any], way: str, kind: str) -> None:
    async with stage_for("policy", way, step="fetch", kind=kind, from_version=0) as stage:
        await until(lambda: bool(witness(stage)), "the fault strikes")
        await until(lambda: stage.everyone_serves(stage.published[0]), f"version 0 is served: {stage.transaction}")
        assert stage.assert_nothing_torn_was_served() > 0


async def test_an_engine_that_will_not_resume_is_replaced(stage_for: Callable[..., Any]) -> None:
    async with stage_for("policy", "in_place", step="resume", kind="raise", times=99) as stage:
        one = stage.publish(seed=11)
        await until(lambda: len(stage.cases) == 3, "the replica is replaced")
        await until(lambda: stage.everyone_serves(one), f"version 1 is served: {stage.transaction}")
        assert len(witness(stage)) == 3  # tried three times, then given up
        stage.assert_nothing_torn_was_served()


async def test_a_replica_that_can_never_load_is_evicted_and_its_successor_serves(stage_for: Callable[..., Any]) -> None:
    async with stage_for("policy", "staged", step="stage", kind="raise", times=99) as stage:
        one = stage.publish(seed=11)
        await until(lambda: bool(stage.evictions), f"the replica is evicted: {stage.transaction}")
        await until(lambda: stage.everyone_serves(one), f"version 1 is served: {stage.transaction}")
        assert "injected at stage" in stage.evictions[0]
        stage.assert_nothing_torn_was_served()


@pytest.mark.parametrize("way", WAYS)
async def test_the_trainer_dies_while_it_publishes(stage_for: Callable[..., Any], way: str) -> None:
    async with stage_for("policy", way) as stage:
        trainer = stage.processes.Trainer
        for writes in (0, 1, 4):
            tag = f"{stage.tag}/trainer{writes}"
            dying = trainer(str(stage.run_dir), "lineage1", 1, seed=11, die_after_writes=writes)
            stage.nursery.start(tag, "trainer", dying)
            await until(lambda tag=tag: tag in stage.nursery.codes, "the trainer dies")
            assert stage.nursery.codes[tag] == -signal.SIGKILL
        assert len(witness(stage)) == 3
        assert not (stage.run_dir / "weights/main/lineage1/00000001").exists()
        seen = {member: len(stage.samples(member)) for member in stage.alive()}
        await until(
            lambda: all(len(stage.samples(member)) > seen[member] for member in seen), "the replicas go on with 0"
        )
        stage.nursery.start(f"{stage.tag}/t2", "trainer", trainer(str(stage.run_dir), "lineage2", 1, seed=21))
        await until(lambda: stage.nursery.codes.get(f"{stage.tag}/t2") == 0, "a new trainer publishes")
        one = stage.announce(read_manifest(stage.run_dir / "weights/main/lineage2/00000001"), seed=21)
        await until(lambda: stage.everyone_serves(one), f"its version is served: {stage.transaction}")
        assert len(stage.cases) == 2
        stage.assert_nothing_torn_was_served()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("heals", [True, False])
async def test_all_replicas_fail(stage_for: Callable[..., Any], way: str, heals: bool) -> None:
    """A damaged artifact: one resend, then a fresh fleet from the durable version; again: one clear sentence."""
    async with stage_for("policy", way) as stage:
        await stage.controller_dies()  # so that the damage is done before anyone looks
        one = stage.publish(seed=11)
        path = stage.run_dir / one.directory / one.buckets[1].file
        body = bytearray(path.read_bytes())
        body[-1] ^= 1
        path.write_bytes(body)
        await stage.listen()
        await until(lambda: stage.checkpoints > 0, f"the fleet is restarted: {stage.transaction}")
        if heals:  # the emergency checkpoint publishes the version afresh
            stage.published.pop()
            again = stage.publish(seed=11)
            assert again == one
            await until(lambda: stage.everyone_serves(one), f"version 1 is served: {stage.transaction}")
            assert not stage.failed
        else:
            bad = stage.run_dir / stage.published[0].directory / stage.published[0].buckets[0].file
            bad.write_bytes(b"gone")
            await until(lambda: bool(stage.failed), f"the run fails: {stage.transaction}")
            assert "no replica can load weights version" in stage.failed
            assert "\n" not in stage.failed
        stage.assert_nothing_torn_was_served()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("way", "step"), [("staged", "stage"), ("in_place", "write")])
async def test_the_controller_dies_during_an_update(
    stage_for: Callable[..., Any], engine: str, way: str, step: str
) -> None:
    """Replicas go on; one that was torn meanwhile stays fenced; the new controller brings all to the newest."""
    async with stage_for(engine, way, step=step, kind="raise") as stage:
        one = stage.publish(seed=11)
        await until(lambda: bool(witness(stage)), "the update is under way")
        await stage.controller_dies()
        seen = len(stage.samples(MemberId("b2")))
        await until(lambda: len(stage.samples(MemberId("b2"))) > seen, "a replica without a fault goes on")
        stage.new_controller()
        await stage.listen()
        await until(lambda: stage.everyone_serves(one), f"version 1 is served: {stage.transaction}")
        two = stage.publish(seed=12)
        await until(lambda: stage.everyone_serves(two), f"version 2 is served: {stage.transaction}")
        assert len(stage.cases) == 2, (stage.evictions, stage.nursery.codes, stage.reports)
        stage.assert_nothing_torn_was_served()


@pytest.mark.parametrize("way", WAYS)
async def test_a_trainer_faster_than_the_replicas_builds_no_backlog(stage_for: Callable[..., Any], way: str) -> None:
    async with stage_for("policy", way) as stage:
        newest = stage.published[-1]
        for seed in range(11, 41):
            newest = stage.publish(seed)
            assert stage.transaction.metrics()["weights_offers_open"] <= 2
            await asyncio.sleep(0)
        await until(lambda: stage.everyone_serves(newest), f"the newest is served: {stage.transaction}")
        assert stage.transaction.metrics()["weights_skipped_versions_total"] > 0
        assert set(stage.transaction.behind().values()) == {0}
        stage.assert_nothing_torn_was_served()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(3))
async def test_soak(stage_for: Callable[..., Any], way: str, seed: int) -> None:
    """Random faults in every new process, for a while."""
    draw = random.Random(seed)
    steps = STAGED if way == "staged" else IN_PLACE
    async with stage_for(draw.choice(ENGINES), way) as stage:
        plain = stage.start
        fault = [True]

        def start_with_fault(place: str, **_: Any) -> MemberId:
            step, kind = draw.choice(steps)
            return (
                plain(place, step=step, kind=kind, from_version=stage.published[-1].version + 1)
                if fault[0]
                else plain(place)
            )

        stage.start = start_with_fault  # type: ignore[method-assign]
        for number in range(40):
            stage.publish(seed=100 + number)
            stage.nursery.kill(stage.tag_of(draw.choice(stage.alive() or list(stage.cases))))
            await asyncio.sleep(draw.uniform(0.05, 0.4))
        fault[0] = False
        newest = stage.publish(seed=999_000)
        await until(lambda: stage.everyone_serves(newest), f"the newest is served: {stage.transaction}", 90.0)
        assert witness(stage)
        assert not stage.failed
        stage.assert_nothing_torn_was_served()
