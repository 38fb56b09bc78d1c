"""The controller's side of the pool: demand counted from the ledgers, kept over a restart, and told in sentences."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.config.load import validate
from penstock.config.run import Config
from penstock.control.settings import ControlSection
from penstock.journal.writer import Journal
from penstock.pool.settings import PoolSection
from penstock.records.ids import MemberId, PipelineName, RunId
from penstock.records.payload import RingAddress
from penstock.records.pool import DeviceId, Priority
from penstock.roles.controller import service_of
from penstock.runtime.clock import ManualClock
from penstock.runtime.lag import LagMonitor
from penstock.runtime.metrics import JsonLines
from penstock.wire.messages import (
    AskDevices,
    AskOrders,
    DevicesGranted,
    Heartbeat,
    Orders,
    Refused,
    Register,
    Reply,
    ReportOrder,
)

LEFT, RIGHT = PipelineName("left"), PipelineName("right")


def configured(devices: int = 2, batch_samples: int = 1, payback: float = 13.5) -> Config:
    table = {
        "steps": 3,
        "env": {"name": "gymnasium"},
        "model": {"kind": "mlp"},
        "rollout": {"group_size": 1, "batch_samples": batch_samples},
    }
    table |= {
        "train": {"groups_per_step": 2, "max_staleness": 2},
        "train_devices": [0],
    }
    table |= {"rollout_devices": list(range(devices))}
    pool = {"devices": devices, "payback": payback}
    return validate({"pool": pool, "pipeline": [table | {"name": LEFT}, table | {"name": RIGHT}]})


CONTROL = ControlSection()


class Room:
    """A service for two pipelines on two devices, in time that is set by hand."""

    def __init__(self, folder: Path, config: Config, new_session: bool) -> None:
        self.clock = ManualClock(100.0)
        self.journal = Journal(folder / "journal.sqlite", RunId("r"))
        self.lines = JsonLines(folder / "metrics.jsonl")
        self.service = service_of(config, self.journal, self.clock, self.lines, LagMonitor("test"))
        self.service.start(new_session=new_session)

    async def join(self, name: PipelineName, *members: str) -> None:
        for member in members:
            ring = RingAddress(member, 1, "host", "127.0.0.1")
            await self.service.call(Register(name, MemberId(member), role="rollout", pid=1, host_id="host", ring=ring))

    async def carry_out(self, name: PipelineName, member: str) -> str:
        """What the worker was ordered and has done, if anything."""
        reply = await self.service.call(AskOrders(name, MemberId(member)))
        assert isinstance(reply, Orders)
        for order in reply.orders:
            await self.service.call(ReportOrder(name, MemberId(member), order.number, done=True))
            return order.action
        return ""

    def pass_time(self, seconds: float) -> None:
        """In the controller's own rhythm."""
        for _ in range(10):
            self.clock.advance(seconds / 10)
            self.service.tick()

    @property
    def settings(self) -> PoolSection:
        pool = self.service.controller.pool
        assert pool is not None
        return pool.settings

    def pool(self) -> dict[str, Any]:
        return self.service.status()["pool"]

    def share(self, name: PipelineName) -> dict[str, Any]:
        return next(share for share in self.pool()["shares"] if share["pipeline"] == name)

    def close(self) -> None:
        self.service.check()
        self.journal.close(5.0)
        self.lines.close(5.0)


@pytest.fixture
def enter(tmp_path: Path) -> Iterator[Callable[..., Room]]:
    rooms: list[Room] = []

    def build(new_session: bool = False, **settings: Any) -> Room:
        if rooms:
            rooms.pop().close()
        rooms.append(Room(tmp_path, configured(**settings), new_session))
        return rooms[-1]

    yield build
    for room in rooms:
        room.close()


async def test_demand_is_there_before_the_first_lease_and_wakes_a_worker(enter: Callable[[], Room]):
    room = enter()
    await room.join(LEFT, "l0")
    room.service.tick()
    assert room.share(LEFT)["remaining"] == 6, "two groups of one for each of three steps"
    assert await room.carry_out(LEFT, "l0") == "wake"
    assert room.share(LEFT)["awake"] == 1


async def test_counting_again_is_free_while_nothing_changes(enter: Callable[[], Room]):
    room = enter()
    await room.join(LEFT, "l0")
    room.service.tick()
    await room.carry_out(LEFT, "l0")
    room.service.tick()
    before = room.journal.last_seq
    for _ in range(10):
        room.service.tick()
    assert room.journal.last_seq == before


async def test_demand_and_holders_survive_the_controller(enter: Callable[[], Room]):
    room = enter()
    await room.join(LEFT, "l0")
    room.service.tick()
    await room.carry_out(LEFT, "l0")
    before = room.pool()
    again = enter()
    after = again.pool()
    assert {**after, "uses": []} == {**before, "uses": []}
    assert [use["devices"] for use in after["uses"]] == [use["devices"] for use in before["uses"]] == [(0,)]


async def test_a_silent_worker_is_fenced_and_its_device_serves_the_other_pipeline(enter: Callable[[], Room]):
    room = enter()
    await room.join(LEFT, "l0", "l1")
    room.service.tick()
    assert [await room.carry_out(LEFT, member) for member in ("l0", "l1")] == ["wake", "wake"]
    for member in ("l0", "l1"):
        await room.service.call(Heartbeat(LEFT, MemberId(member), progressed_ago_s=0.0, doing="generating"))
    room.pass_time(CONTROL.evict_after_s - 1)
    assert not room.service.status()["evicted"]
    await room.join(RIGHT, "r0", "r1")
    room.pass_time(3)
    assert set(room.service.status()["evicted"]) == {"l0", "l1"}, "their supervisor must end them"
    assert [await room.carry_out(RIGHT, member) for member in ("r0", "r1")] == ["", ""], "they may still be there"
    room.pass_time(room.settings.fence_s)
    assert [await room.carry_out(RIGHT, member) for member in ("r0", "r1")] == ["wake", "wake"]
    assert room.share(LEFT)["remaining"] == 6, "its demand is not forgotten"
    assert "no live worker process" in room.service.diagnosis()[LEFT]


async def test_no_member_is_fenced_because_the_controller_itself_was_away(enter: Callable[[], Room]):
    """Stopped, or on a machine that slept: no member could be heard meanwhile."""
    room = enter()
    await room.join(LEFT, "l0")
    room.service.tick()
    await room.carry_out(LEFT, "l0")
    room.clock.advance(3600.0)
    room.service.tick()
    assert not room.service.status()["evicted"]
    assert room.share(LEFT)["awake"] == 1
    room.pass_time(CONTROL.evict_after_s + 3)
    assert set(room.service.status()["evicted"]) == {"l0"}, "it is as silent as before, and now that counts"


async def test_heartbeats_keep_a_worker_on_its_device(enter: Callable[[], Room]):
    room = enter()
    await room.join(LEFT, "l0")
    room.service.tick()
    await room.carry_out(LEFT, "l0")
    for _ in range(20):
        room.clock.advance(5.0)
        await room.service.call(Heartbeat(LEFT, MemberId("l0"), progressed_ago_s=0.0, doing="generating"))
        room.service.tick()
    assert room.share(LEFT)["awake"] == 1
    assert not room.service.status()["evicted"]


async def test_the_stall_sentence_names_who_is_in_the_way(enter: Callable[[], Room]):
    room = enter()
    await room.join(LEFT, "l0", "l1")
    room.service.tick()
    for member in ("l0", "l1"):
        await room.carry_out(LEFT, member)
    await room.join(RIGHT, "r0")
    room.clock.advance(3.0)
    room.service.tick()
    room.clock.advance(4.0)
    sentence = room.service.diagnosis()[RIGHT]
    assert (
        "In the pool: right has 6 samples to generate and has had no worker for 7 s: l0 is generating on [0]"
        in sentence
    )


async def test_a_request_that_times_out_is_told_so_and_its_number_is_used_up(enter: Callable[[], Room]):
    room = enter()

    async def ask(name: PipelineName, number: int, priority: Priority, wait_s: float = 0.0) -> Reply:
        among = (DeviceId(0),)
        return await room.service.call(
            AskDevices(name, MemberId(f"{name}t"), number, priority, among, 1, timeout_s=5.0, wait_s=wait_s)
        )

    assert isinstance(await ask(LEFT, 0, Priority.INITIALISATION), Refused), "it is no member"
    for name in (LEFT, RIGHT):
        await room.service.call(Register(name, MemberId(f"{name}t"), role="trainer"))
    assert isinstance(await ask(LEFT, 0, Priority.INITIALISATION), DevicesGranted)
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(ask(RIGHT, 0, Priority.SCORING, wait_s=30.0))
        await asyncio.sleep(0)  # it has asked, and is held
        sentence = r"rightt \(scoring\) has waited \d+ s for 1 of devices \[0\]"
        assert re.search(sentence, room.pool()["waiting"][0])
        assert re.search(sentence, room.service.diagnosis()[RIGHT])
        assert "leftt is initialising on [0]" in room.service.diagnosis()[RIGHT]
        room.clock.advance(6.0)
        room.service.tick()
    late = waiting.result()
    assert isinstance(late, Refused)
    assert (late.kind, late.message) == ("Transient", "not served within 6.0 s")
    again = await ask(RIGHT, 0, Priority.SCORING)
    assert isinstance(again, Refused)
    assert again.kind == "Stale"
    assert room.pool()["uses"][0]["doing"] == "initialising"


async def test_a_run_resumed_with_other_settings_shares_by_those_and_replays_its_past_by_those_it_had(
    enter: Callable[..., Room],
):
    room = enter(devices=4)
    await room.join(LEFT, "l0", "l1", "l2", "l3")
    await room.join(RIGHT, "r0")
    room.service.tick()
    assert [await room.carry_out(LEFT, f"l{number}") for number in range(4)] == ["wake"] * 4
    trainer = MemberId("t")
    await room.service.call(Register(RIGHT, trainer, role="trainer", pid=1, host_id="host"))
    ask = AskDevices(RIGHT, trainer, 0, Priority.TRAINING, (DeviceId(3),), 1, timeout_s=60.0)
    await room.service.call(ask)
    changed = {"devices": 2, "batch_samples": 5, "payback": 0.0}
    room = enter(new_session=True, **changed)
    pool = room.pool()
    assert (pool["devices"], pool["idle"], pool["waiting"]) == (2, 2, ()), "no member of the former life is left"
    await room.join(LEFT, "new-l0", "new-l1")
    room.service.tick()
    assert sorted([await room.carry_out(LEFT, "new-l0"), await room.carry_out(LEFT, "new-l1")])[-1] == "wake"
    before = room.pool()
    room = enter(**changed)
    assert room.pool()["uses"] == before["uses"], "a mere restart goes on with what it had"
