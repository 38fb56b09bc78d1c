"""SIGKILL of the controller while all members are calling it: nothing acknowledged is lost, nothing happens twice."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import control_io_controller as controller_process
import msgspec
import pytest
from control_io_controller import PIPELINE, RUN, SETTINGS, TOKEN

from penstock.control.controller import Controller as Machine
from penstock.control.events import Event
from penstock.control.io.client import ControlClient
from penstock.control.io.service import ControlService
from penstock.control.pipeline import PipelineControl
from penstock.journal.reader import history, replay
from penstock.journal.story import story
from penstock.journal.writer import Journal
from penstock.records.ids import MemberId, SampleId, StepIndex, Version
from penstock.records.payload import PayloadRef
from penstock.records.rollout import Rollout
from penstock.runtime.clock import SystemClock
from penstock.wire import messages
from penstock.wire.codec import decode_section

T = MemberId("trainer")
STEPS = SETTINGS.steps or 0


class Controller:
    """The process under test: killed, and started again on the same folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kills = 0
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, controller_process.__file__, str(self.folder)])

    def kill_and_restart(self) -> None:
        self._process.kill()
        assert self._process.wait(20) == -signal.SIGKILL
        self.kills += 1
        self._process = self._start()

    def stop(self) -> None:
        self._process.terminate()
        assert self._process.wait(20) == 0


@pytest.fixture
def controller(folder: Path) -> Iterator[Controller]:
    controller = Controller(folder)
    yield controller
    if controller._process.poll() is None:
        controller._process.kill()
        controller._process.wait()


class Peers:
    """Workers and a trainer that write down everything they were told."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.random = random.Random(seed)
        self.leased: dict[tuple[MemberId, int], messages.Leased] = {}
        self.delivered: Counter[SampleId] = Counter()
        self.batches: dict[int, messages.BatchReady] = {}
        self.acked: list[int] = []
        self.version = Version(0)
        self.complete = asyncio.Event()
        self.moved = asyncio.Condition()
        self.reconnects = 0

    def client(self, member: MemberId) -> ControlClient:
        return ControlClient(self.folder / "controller.json", TOKEN, PIPELINE, member, unreachable_timeout_s=30)

    async def _tell(self) -> None:
        async with self.moved:
            self.moved.notify_all()

    async def work(self, member: MemberId) -> None:
        client = self.client(member)
        await client.call(messages.Register(PIPELINE, member, role="rollout", pid=0, host_id="here"))
        request = 0
        while True:
            request += 1
            ask = messages.AskLease(PIPELINE, member, request, 4, self.version, wait_s=5)
            leased = await client.call(ask)
            assert isinstance(leased, messages.Leased)
            if leased.verdict == "exhausted":
                break
            if leased.verdict != "granted":
                await asyncio.sleep(0.01)
                continue
            self.leased[member, request] = leased
            if self.random.random() < 0.3:  # as if the reply had been lost, perhaps in the controller's former life
                again = await client.call(ask)
                assert isinstance(again, messages.Leased)
                assert again.leases == leased.leases
            deliver = messages.Deliver(PIPELINE, member, rollouts=tuple(self._made(leased)))
            for _ in range(2 if self.random.random() < 0.3 else 1):
                answer = await client.call(deliver)
                assert answer == messages.Delivered()
            self.delivered.update(rollout.sample for rollout in deliver.rollouts)
            await self._tell()
        self.reconnects += client.reconnects
        await client.close()

    def _made(self, leased: messages.Leased) -> Iterator[Rollout]:
        for lease in leased.leases:
            for sample in lease.samples:
                version = Version(max(lease.min_version, self.version))
                yield Rollout(sample, version, "", float(lease.prompt), 5, PayloadRef("ring", 1, 0, 0, 10, sample))

    async def train(self) -> None:
        client = self.client(T)
        await client.call(messages.Register(PIPELINE, T, role="trainer", pid=0, host_id="here", step=StepIndex(0)))
        while True:
            step = StepIndex(self.version)
            answer = await client.call(messages.AskBatch(PIPELINE, T, step, wait_s=5))
            if isinstance(answer, messages.Complete):
                break
            if isinstance(answer, messages.NotYet):
                continue
            assert isinstance(answer, messages.BatchReady)
            again = await client.call(messages.AskBatch(PIPELINE, T, step, wait_s=5))
            assert again == answer
            self.batches[step] = answer
            for _ in range(2):
                assert await client.call(messages.AckStep(PIPELINE, T, step)) == messages.Ok()
            self.acked.append(step)
            await client.call(messages.AckCheckpoint(PIPELINE, T, StepIndex(step + 1)))
            self.version = Version(step + 1)
            await self._tell()
        self.complete.set()
        self.reconnects += client.reconnects
        await client.close()

    async def kill_often(self, controller: Controller, times: int) -> None:
        for _ in range(times):
            wanted = len(self.delivered) + self.random.randrange(8, 40)
            async with self.moved:
                await self.moved.wait_for(
                    lambda wanted=wanted: len(self.delivered) >= wanted or len(self.acked) == STEPS
                )
            if len(self.acked) == STEPS:
                return
            await asyncio.to_thread(controller.kill_and_restart)


@pytest.mark.parametrize(
    ("seed", "kills"), [(1, 2), *(pytest.param(seed, 6, marks=pytest.mark.slow) for seed in (2, 3, 4))]
)
async def test_nothing_acknowledged_is_lost_and_nothing_happens_twice(
    controller: Controller, seed: int, kills: int
) -> None:
    peers = Peers(controller.folder, seed)
    async with asyncio.timeout(110), asyncio.TaskGroup() as group:
        for number in range(4):
            group.create_task(peers.work(MemberId(f"worker-{number}")))
        group.create_task(peers.train())
        await peers.kill_often(controller, times=kills)
        await peers.complete.wait()
    controller.stop()

    assert controller.kills >= min(kills, 4)
    assert peers.reconnects >= controller.kills
    assert peers.acked == list(range(STEPS))
    given = [sample for batch in peers.batches.values() for group in batch.batch.groups for sample in group.samples]
    assert len(given) == len(set(given)) == STEPS * SETTINGS.groups_per_step * SETTINGS.group_size
    prompts = [group.prompt for batch in peers.batches.values() for group in batch.batch.groups]
    assert len(prompts) == len(set(prompts))

    journalled_leases: set[int] = set()
    journalled_deliveries: Counter[int] = Counter()
    journalled_steps: Counter[int] = Counter()
    machine = PipelineControl(SETTINGS)
    for number, entry in enumerate(history(controller.folder / "journal.sqlite"), start=1):
        assert entry.seq == number
        event: dict[str, Any] = msgspec.msgpack.decode(entry.body)
        notes: dict[str, Any] = msgspec.msgpack.decode(entry.decided) if entry.decided else {}
        journalled_leases.update(sample for _, _, samples in notes.get("leases", ()) for sample in samples)
        if event["type"] == "deliver":
            journalled_deliveries.update(rollout["sample"] for rollout in event["rollouts"])
        if event["type"] == "ack_step":
            journalled_steps[event["step"]] += 1
        machine.handle(msgspec.msgpack.decode(entry.body, type=Event, dec_hook=decode_section), entry.at)
    told = {sample for leased in peers.leased.values() for lease in leased.leases for sample in lease.samples}
    assert told <= journalled_leases
    assert set(peers.delivered) <= set(journalled_deliveries)
    assert set(journalled_deliveries.values()) == {1}
    assert set(journalled_steps.values()) == {1}
    assert machine.phase == "complete"

    assert replay(controller.folder / "journal.sqlite").seq > 0, "no snapshot was taken"
    reopened = Journal(controller.folder / "journal.sqlite", RUN)
    from_snapshot = PipelineControl(SETTINGS)
    service = ControlService(Machine({PIPELINE: from_snapshot}), reopened, SystemClock())
    service.start()
    reopened.close(10)
    assert from_snapshot.state.ledger == machine.state.ledger

    lines = [line.text for line in story(controller.folder / "journal.sqlite", PIPELINE, "sample", given[0])]
    assert lines[0].startswith(f"sample {given[0]} of prompt {prompts[0]}, attempt 0, leased to worker-")
    assert any("trained in step 0" in line for line in lines)
    assert any("durable" in line for line in lines)
