"""The whole service: payloads handed back, replicas held back, steps written down."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import pytest

from penstock.config.load import validate
from penstock.control.effects import ReleasePayloads
from penstock.errors import ConfigError
from penstock.journal.writer import Journal
from penstock.records.ids import MemberId, PipelineName, RunId, SampleId, StepIndex, Version
from penstock.records.payload import PayloadRef, RingAddress
from penstock.records.rollout import Rollout, StageTimes
from penstock.records.weights import Manifest
from penstock.roles.controller import service_of
from penstock.runtime.clock import ManualClock
from penstock.runtime.lag import LagMonitor
from penstock.runtime.metrics import JsonLines
from penstock.wire import messages
from penstock.wire.messages import AckStep, AskBatch, AskLease, Deliver, Leased, PublishWeights, Register, ReportReplica

P, W, T = PipelineName("p"), MemberId("w"), MemberId("t")
MANIFEST = Manifest(Version(0), "lineage", "d0", (), "weights/p/lineage/0")


class Room:
    """A service with a worker and a trainer."""

    def __init__(
        self,
        folder: Path,
        lines_on_file: Sequence[bytes] = (),
        *,
        group_size: int = 1,
        max_staleness: int = 2,
        max_losses: int | None = None,
        new_session: bool = True,
        snapshot_every: int = 20_000,
    ) -> None:
        table = {"name": "p", "steps": 3, "env": {"name": "gymnasium"}, "model": {"kind": "mlp"}}
        table |= {"rollout": {"group_size": group_size, "max_losses": max_losses}}
        table |= {"train": {"groups_per_step": 2, "max_staleness": max_staleness}}
        config = validate({"pipeline": [table], "journal": {"snapshot_every_events": snapshot_every}})
        self.metrics = folder / "metrics.jsonl"
        self.journal = Journal(folder / "journal.sqlite", RunId("r"))
        self.lines = JsonLines(self.metrics)
        self.service = service_of(config, self.journal, ManualClock(100.0), self.lines, LagMonitor("test"))
        try:
            self.service.start(new_session=new_session, lines_on_file=lines_on_file)
        except BaseException:
            self.close()
            raise
        self.request = 0

    def close(self) -> None:
        self.journal.close(5.0)
        self.lines.close(5.0)

    async def seat(self) -> None:
        ring, of_rank_1 = (RingAddress(name, 1, "host", "127.0.0.1") for name in ("ring", "ring of rank 1"))
        register = Register(P, W, role="rollout", pid=1, host_id="host", ring=ring, more_rings=(of_rank_1,))
        await self.service.call(register)
        await self.service.call(Register(P, T, role="trainer", pid=2, host_id="host", step=StepIndex(0)))
        await self.service.call(PublishWeights(P, T, manifest=MANIFEST))
        await self.service.call(ReportReplica(P, W, state="serving", version=Version(0), digest="d0"))

    async def lease(self, samples: int, *, again: bool = False) -> Leased:
        self.request += not again
        reply = await self.service.call(AskLease(P, W, request=self.request, samples=samples, version=Version(0)))
        assert isinstance(reply, Leased), reply
        return reply

    def carry_out(self) -> None:
        """What the service does after a commit, without its loop."""
        while not self.service._instructions.empty():
            _, name, effect = self.service._instructions.get_nowait()
            self.service._execute(name, effect)

    async def deliver(self, leased: Leased) -> messages.Reply:
        samples = [sample for lease in leased.leases for sample in lease.samples]
        return await self.service.call(Deliver(P, W, rollouts=tuple(rollout(sample) for sample in samples)))


def rollout(sample: SampleId) -> Rollout:
    payload = PayloadRef("ring", 1, sample, 0, 10, 0)
    return Rollout(sample, Version(0), "d0", 0.5, 4, payload)


@pytest.fixture
async def room(tmp_path: Path) -> AsyncIterator[Room]:
    room = Room(tmp_path)
    await room.seat()
    yield room
    room.service.check()
    room.close()


async def test_a_trained_step_becomes_one_line_however_often_it_is_acknowledged(room: Room):
    await room.deliver(await room.lease(2))
    await room.service.call(AskBatch(P, T, step=StepIndex(0)))
    for _ in range(2):
        assert await room.service.call(AckStep(P, T, step=StepIndex(0), metrics={"loss": 1.5})) == messages.Ok()
    room.lines.close(5.0)
    (line,) = [json.loads(line) for line in room.metrics.read_text().splitlines()]
    assert (line["step"], line["reward"], line["loss"], line["samples"]) == (0, 0.5, 1.5, 2)


async def test_every_line_of_a_step_has_the_time_of_each_stage(room: Room):
    leased = await room.lease(4)
    first, second = StageTimes(0.1, 2.0, 0.5, 0.3, 0.2, 0.01), StageTimes(0.3, 4.0, 0.5, 0.5, 0.4, 0.03)
    rollouts = [rollout(sample) for lease in leased.leases for sample in lease.samples]
    times = [first, second, first, second]
    delivered = [msgspec.structs.replace(one, times=time) for one, time in zip(rollouts, times, strict=True)]
    await room.service.call(Deliver(P, W, rollouts=tuple(delivered)))
    for step in (0, 1):
        await room.service.call(AskBatch(P, T, step=StepIndex(step)))
        await room.service.call(AckStep(P, T, step=StepIndex(step), metrics={"wait_s": 7.0, "step_s": 1.0}))
    room.lines.close(5.0)
    stages = {"lease_s": 0.3, "prepare_s": 0.2, "queue_s": 0.4, "generate_s": 3.0, "score_s": 0.5, "deliver_s": 0.02}
    for line in map(json.loads, room.metrics.read_text().splitlines()):  # nothing came before the second: as before
        assert {name: line[name] for name in stages} == pytest.approx(stages)
        assert (line["wait_s"], line["step_s"]) == (7.0, 1.0)
    assert room.service.status()["stages"][P] == pytest.approx(stages | {"wait_s": 7.0, "step_s": 1.0})


async def test_a_line_that_died_with_the_controller_is_written_by_the_next(room: Room, tmp_path: Path):
    await room.deliver(await room.lease(2))
    await room.service.call(AskBatch(P, T, step=StepIndex(0)))
    await room.service.call(AckStep(P, T, step=StepIndex(0)))
    room.close()
    whole = room.metrics.read_bytes()
    room.metrics.write_bytes(whole[:20])
    for on_file in (room.metrics.read_bytes(), whole):
        again = Room(tmp_path, on_file.splitlines())
        again.close()
    torn, line = room.metrics.read_text().splitlines()
    assert torn == whole[:20].decode()
    assert json.loads(line)["step"] == 0, "written once for the torn file, and not at all for the whole one"


async def test_a_resumed_run_goes_on_by_other_settings_but_its_past_is_replayed_by_those_it_had(
    room: Room, tmp_path: Path
):
    await room.deliver(await room.lease(6))
    for step in (0, 1):
        await room.service.call(AskBatch(P, T, step=StepIndex(step)))
        assert await room.service.call(AckStep(P, T, step=StepIndex(step))) == messages.Ok()
    room.close()
    for max_staleness in (0, 1):  # with no staleness two samples could never have been leased, let alone six
        again = Room(tmp_path, max_staleness=max_staleness)
        again.close()
        status = again.service.status()["pipelines"][P]
        assert (status["step"], status["samples_trained"], status["dropped_lost"]) == (2, 4, 2)
        assert again.service.controller.pipelines[P].oldest_trainable == 2 - max_staleness  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"pipeline 'p' .* rollout.group_size must stay 1"):
        Room(tmp_path, group_size=4)


async def test_every_lease_brings_the_live_setting_of_prefetch(room: Room):
    assert (await room.lease(1)).prefetch is None
    room.service.prefetch = {P: False}
    assert (await room.lease(1)).prefetch is False


async def test_a_torn_replica_is_given_nothing_until_it_serves_again(room: Room):
    torn = ReportReplica(P, W, state="torn", version=Version(0), digest="", error="half written")
    await room.service.call(torn)
    refused = await room.lease(2)
    assert (refused.leases, refused.verdict) == ((), "version_too_old")
    await room.service.call(ReportReplica(P, W, state="serving", version=Version(0), digest="d0"))
    assert (await room.lease(2)).verdict == "granted"


async def test_payloads_without_a_reader_are_handed_back_until_the_worker_has_moved_on(room: Room):
    await room.deliver(await room.lease(2))
    doomed = tuple(PayloadRef("ring", 1, slot, 0, 10, 0) for slot in (7, 8))
    room.service._execute(P, ReleasePayloads(doomed))
    first = await room.lease(1)
    assert first.discard == doomed
    assert (await room.lease(1, again=True)).discard == doomed, "the first reply may have been lost"
    assert (await room.lease(1)).discard == ()


async def test_a_worker_of_several_ranks_hears_of_the_rings_of_all_of_them(room: Room):
    leased = await room.lease(2)
    here, there = (sample for lease in leased.leases for sample in lease.samples)
    elsewhere = msgspec.structs.replace(rollout(there), payload=PayloadRef("ring of rank 1", 1, 3, 0, 10, 0))
    await room.service.call(Deliver(P, W, rollouts=(rollout(here), elsewhere)))
    doomed = tuple(PayloadRef(ring, 1, 7, 0, 10, 0) for ring in ("ring", "ring of rank 1"))
    room.service._execute(P, ReleasePayloads(doomed))
    assert (await room.lease(1)).discard == doomed
    await room.service.call(messages.Unregister(P, W, reason="killed by SIGKILL", died=True))
    ready = await room.service.call(AskBatch(P, T, step=StepIndex(0)))
    assert isinstance(ready, messages.BatchReady)
    assert [address.ring for address in ready.rings] == ["ring", "ring of rank 1"], "they outlive the worker"


async def test_an_evicted_member_is_named_for_the_supervisor(room: Room):
    await room.service.call(messages.Unregister(P, W, reason="killed by SIGKILL", died=True))
    async with asyncio.timeout(10):
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(room.service.run())
            while W not in room.service.status()["evicted"]:  # noqa: ASYNC110 - said nowhere but in the status
                await asyncio.sleep(0)
            serving.cancel()
    assert "SIGKILL" in room.service.status()["evicted"][W]


async def test_an_eviction_outlives_the_controller(room: Room, tmp_path: Path):
    """Nobody ended a process that hung if the controller died before the supervisor had read of its eviction."""
    await room.service.call(messages.Unregister(P, W, reason="no progress for 601 s", died=True))
    room.close()
    again = Room(tmp_path, new_session=False)
    again.close()
    assert again.service.status()["evicted"] == {W: "no progress for 601 s"}
    resumed = Room(tmp_path)
    resumed.close()
    assert not resumed.service.status()["evicted"], "no process of another session is left"


async def test_the_failure_of_a_run_outlives_the_controller(room: Room, tmp_path: Path):
    """The supervisor took the run for complete if the controller died before it had read of the failure."""
    await room.service.call(messages.Stop(P, MemberId(""), "no replica can load the weights", failed=True))
    room.close()
    again = Room(tmp_path, new_session=False)
    again.close()
    assert again.service.status()["failure"] == "p: no replica can load the weights"
    assert again.service.failed.is_set()
    resumed = Room(tmp_path)
    resumed.close()
    assert not resumed.service.status()["failure"]
