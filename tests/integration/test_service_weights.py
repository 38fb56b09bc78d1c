"""What the controller answers about weights: who is believed, who is asked for what, and what is exported."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from test_service_steps import MANIFEST, P, Room, T, W

from penstock.control.io.exposition import StatusCollector
from penstock.records.ids import MemberId, Version
from penstock.records.weights import Manifest
from penstock.wire import messages
from penstock.wire.messages import AskCheckpoint, AskWeights, PublishWeights, Register, ReportReplica

NEXT = Manifest(Version(1), "lineage", "d1", (), "weights/p/lineage/1")


@pytest.fixture
async def room(tmp_path: Path) -> AsyncIterator[Room]:
    room = Room(tmp_path)
    await room.seat()
    yield room
    room.service.check()
    room.journal.close(5.0)
    room.lines.close(5.0)


async def fail_to_load(room: Room, times: int) -> None:
    for _ in range(times):
        failed = ReportReplica(P, W, state="serving", version=Version(0), digest="d0", error="fetch: damaged")
        assert await room.service.call(failed) == messages.Ok()


async def test_weights_are_offered_once_they_differ_and_not_before(room: Room):
    assert isinstance(await room.service.call(AskWeights(P, W, held=MANIFEST.held)), messages.NotYet)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        asking = group.create_task(room.service.call(AskWeights(P, W, held=MANIFEST.held, wait_s=30.0)))
        await asyncio.sleep(0)
        await room.service.call(PublishWeights(P, T, manifest=NEXT))
    assert asking.result() == messages.Weights(NEXT)


async def test_a_fleet_that_cannot_load_has_the_trainer_asked_for_a_checkpoint_until_it_is_there(room: Room):
    await room.service.call(messages.AckCheckpoint(P, T, step=messages.StepIndex(0)))
    await room.service.call(PublishWeights(P, T, manifest=NEXT))
    await fail_to_load(room, 1)
    assert isinstance(await room.service.call(AskCheckpoint(P, T)), messages.NotYet)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        asking = group.create_task(room.service.call(AskCheckpoint(P, T, wait_s=30.0)))
        await asyncio.sleep(0)
        await fail_to_load(room, 1)
    wanted = asking.result()
    assert isinstance(wanted, messages.CheckpointWanted)
    assert "damaged" in wanted.reason
    assert await room.service.call(AskCheckpoint(P, T)) == wanted, "a lost answer is given again"
    assert room.service.status()["pipelines"][P]["weights_checkpoint_wanted"] == 1
    # The replica was given up: whatever it still says is not believed, and its successor gets the durable version.
    for late in (AskWeights(P, W), ReportReplica(P, W, state="serving", version=Version(0), digest="d0")):
        assert isinstance(await room.service.call(late), messages.Refused)
    successor = MemberId("w2")
    await room.service.call(Register(P, successor, role="rollout", pid=3, host_id="host"))
    assert await room.service.call(AskWeights(P, successor)) == messages.Weights(MANIFEST)
    await room.service.call(PublishWeights(P, T, manifest=NEXT, durable=True))
    assert isinstance(await room.service.call(AskCheckpoint(P, T)), messages.NotYet)
    assert await room.service.call(AskWeights(P, successor, held=MANIFEST.held)) == messages.Weights(NEXT)


async def test_prompts_are_not_to_blame_for_weights_that_cannot_be_loaded(tmp_path: Path):
    room = Room(tmp_path, max_losses=1)
    await room.seat()
    await room.lease(2)
    await room.service.call(PublishWeights(P, T, manifest=NEXT))
    await fail_to_load(room, 2)
    room.carry_out()
    room.close()
    assert W in room.service.status()["evicted"]
    status = room.service.status()["pipelines"][P]
    assert (status["dropped_lost"], status["prompts_set_aside"]) == (2, 0)


async def test_a_trainer_that_was_lost_is_named_for_the_supervisor_and_one_that_left_is_not(room: Room):
    room.service.tick()
    await room.service.call(messages.Unregister(P, T, reason="killed by SIGKILL", died=True))
    room.service.tick()
    room.carry_out()
    assert "SIGKILL" in room.service.status()["evicted"][T]
    assert room.service.status()["pipelines"][P]["weights_trainer_lost"] == 1
    other = MemberId("t2")
    await room.service.call(Register(P, other, role="trainer", pid=4, host_id="host", step=messages.StepIndex(0)))
    room.service.tick()
    assert room.service.status()["pipelines"][P]["weights_trainer_lost"] == 0
    await room.service.call(messages.Unregister(P, other, reason="finished"))
    room.service.tick()
    room.carry_out()
    assert other not in room.service.status()["evicted"]


async def test_the_state_of_all_replicas_is_exported(room: Room):
    await room.service.call(PublishWeights(P, T, manifest=NEXT))
    report = ReportReplica(P, W, state="serving", version=Version(1), digest="d1", pause_s=0.25, skipped_versions=3)
    await room.service.call(report)
    await fail_to_load(room, 1)
    await room.service.call(msgspec.structs.replace(report, state="torn", digest=""))
    families = StatusCollector(room.service.status).collect()
    found = {sample.name: sample.value for family in families for sample in family.samples}
    expected = {"updates_total": 2, "update_failures_total": 1, "skipped_versions_total": 3, "pause_s_max": 0.25}
    expected |= {"replicas_torn": 1, "replicas_serving": 0, "offers_open": 0, "versions_behind_max": 0}
    assert expected == {name: found[f"penstock_pipeline_weights_{name}"] for name in expected}
