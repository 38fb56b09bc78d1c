"""A trainer on shared devices: it moves in for a step, and gives them back only when it has proved that it is out."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.config.devices import Placement
from penstock.errors import PeerLost, RunFailed
from penstock.records.ids import MemberId, PipelineName
from penstock.records.pool import DeviceId, GrantedDevices, Priority
from penstock.roles import turns
from penstock.roles.turns import RESIDUE_BYTES, TrainingTurns
from penstock.wire.messages import AskDevices, CancelDevices, DevicesGranted, NotYet, Ok, ReleaseDevices


@dataclass
class Scene:
    """A controller that answers as it is told, and a resident that leaves so much behind; both write what happened."""

    waits: int = 0
    left_bytes: int = 0
    stop_while_waiting: bool = False
    told: list[str] = field(default_factory=list)
    asked: list[AskDevices] = field(default_factory=list)
    stop: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(requested=False))

    async def call(self, request: Any) -> Any:
        match request:
            case AskDevices():
                self.asked.append(request)
                if self.waits:
                    self.waits -= 1
                    self.stop.requested = self.stop_while_waiting
                    self.told.append("wait")
                    return NotYet("devices", "running")
                self.told.append("granted")
                return DevicesGranted(GrantedDevices(request.request, request.priority, request.among))
            case ReleaseDevices():
                self.told.append("released")
            case CancelDevices():
                self.told.append("cancelled")
        return Ok()

    async def move_in(self) -> None:
        self.told.append("in")

    async def move_out(self) -> int:
        self.told.append("out")
        return self.left_bytes

    def turns(self, *, shared: bool) -> TrainingTurns:
        process: Any = SimpleNamespace(name="p.trainer", stop=self.stop, progress=SimpleNamespace(moved=lambda _: None))
        client: Any = SimpleNamespace(call=self.call, pipeline=PipelineName("p"), member=MemberId("t"))
        return TrainingTurns(process, client, Placement((0, 1), (0, 1, 2, 3), train_is_shared=shared), self)


async def test_on_shared_devices_every_step_moves_in_and_out():
    scene = Scene(waits=1)
    it = scene.turns(shared=True)
    for _ in range(2):
        assert await it.take()
        await it.give_back()
    assert scene.told == ["wait", "granted", "in", "out", "released", "granted", "in", "out", "released"]
    assert [ask.request for ask in scene.asked] == [0, 0, 1], "waiting on is the same request; a new turn is a new one"
    assert {(ask.priority, ask.among) for ask in scene.asked} == {(Priority.TRAINING, (DeviceId(0), DeviceId(1)))}


async def test_devices_of_its_own_are_kept():
    scene = Scene()
    it = scene.turns(shared=False)
    for _ in range(2):
        assert await it.take()
        await it.give_back()
    assert scene.told == ["granted", "in"]


async def test_devices_that_are_not_free_are_not_given_back():
    scene = Scene(left_bytes=RESIDUE_BYTES + (5 << 20))
    it = scene.turns(shared=True)
    await it.take()
    with pytest.raises(PeerLost, match=r"still has 69 MiB .* expected at most 64 MiB"):
        await it.give_back()
    assert scene.told == ["granted", "in", "out"]


async def test_a_wait_is_cancelled_when_the_process_is_asked_to_stop():
    scene = Scene(waits=9, stop_while_waiting=True)
    assert not await scene.turns(shared=True).take()
    assert scene.told == ["wait", "cancelled"]


async def test_a_turn_that_never_comes_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(turns, "PATIENCE_S", 0.0)
    with pytest.raises(RunFailed, match=r"no turn on devices \[0, 1\] came"):
        await Scene(waits=9).turns(shared=True).take()
