"""A trainer on shared devices: it moves in for one piece of work, and gives them back only when it is provably out."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.config.devices import Placement
from penstock.errors import PeerLost, RunFailed, Transient
from penstock.records.ids import MemberId, PipelineName
from penstock.records.pool import DeviceId, GrantedDevices, Priority
from penstock.runtime.tensors import RESIDUE_BYTES
from penstock.train import turns
from penstock.train.turns import Turns
from penstock.wire.messages import AskDevices, CancelDevices, DevicesGranted, NotYet, Ok, ReleaseDevices


@dataclass
class Scene:
    """A controller that answers as it is told, and a resident that leaves so much behind; both write what happened."""

    waits: int = 0
    times_out: bool = False
    """Requests to score are refused."""
    left_bytes: int = 0
    stop_while_waiting: bool = False
    told: list[str] = field(default_factory=list)
    asked: list[AskDevices] = field(default_factory=list)
    stop: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(requested=False))

    async def call(self, request: Any) -> Any:
        match request:
            case AskDevices():
                self.asked.append(request)
                if self.times_out and request.priority is Priority.SCORING:
                    raise Transient("not served within 60.0 s")
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

    async def move_in(self, work: Priority) -> None:
        self.told.append(f"in for {work.name.lower()}")

    async def move_out(self) -> int:
        self.told.append("out")
        return self.left_bytes

    def turns(self, *, shared: bool) -> Turns:
        process: Any = SimpleNamespace(name="p.trainer", stop=self.stop, progress=SimpleNamespace(moved=lambda _: None))
        client: Any = SimpleNamespace(call=self.call, pipeline=PipelineName("p"), member=MemberId("t"))
        return Turns(process, client, Placement((0, 1), (0, 1, 2, 3), train_is_shared=shared), self)


async def test_on_shared_devices_every_step_moves_in_and_out():
    scene = Scene(waits=1)
    it = scene.turns(shared=True)
    for _ in range(2):
        assert await it.take(Priority.TRAINING)
        await it.release()
    turn = ["granted", "in for training", "out", "released"]
    assert scene.told == ["wait", *turn, *turn]
    assert [ask.request for ask in scene.asked] == [0, 0, 1], "waiting on is the same request; a new turn is a new one"
    assert {(ask.priority, ask.among) for ask in scene.asked} == {(Priority.TRAINING, (DeviceId(0), DeviceId(1)))}


async def test_from_class_to_class_it_moves_out_and_gives_back_in_the_call_that_asks():
    scene = Scene()
    it = scene.turns(shared=True)
    for work in (Priority.INITIALISATION, Priority.SCORING, Priority.TRAINING):
        assert await it.take(work)
    await it.release()
    assert scene.told == [
        *("granted", "in for initialisation", "out"),
        *("granted", "in for scoring", "out"),
        *("granted", "in for training", "out", "released"),
    ]
    assert [(ask.priority.name, ask.request, ask.release) for ask in scene.asked] == [
        ("INITIALISATION", 0, None),
        ("SCORING", 1, 0),
        ("TRAINING", 2, 1),
    ]


async def test_scoring_that_others_keep_out_is_done_as_training():
    scene = Scene(times_out=True)
    it = scene.turns(shared=True)
    assert await it.take(Priority.SCORING)
    assert await it.take(Priority.TRAINING)
    assert [(ask.priority.name, ask.request) for ask in scene.asked] == [("SCORING", 0), ("TRAINING", 1)]
    assert scene.told == ["granted", "in for scoring", "out", "in for training"], "one grant serves for both"


async def test_devices_of_its_own_are_kept_with_everything_on_them():
    scene = Scene()
    it = scene.turns(shared=False)
    assert await it.take(Priority.INITIALISATION)
    for _ in range(2):
        assert await it.take(Priority.SCORING)
        assert await it.take(Priority.TRAINING)
        await it.release()
    assert [(ask.priority.name, ask.release) for ask in scene.asked] == [("INITIALISATION", None), ("TRAINING", 0)]
    assert "out" not in scene.told


async def test_devices_that_are_not_free_are_not_given_back():
    scene = Scene(left_bytes=RESIDUE_BYTES + (5 << 20))
    it = scene.turns(shared=True)
    await it.take(Priority.SCORING)
    for leave in (it.release, lambda: it.take(Priority.TRAINING)):
        with pytest.raises(PeerLost, match=r"still has 69 MiB .* expected at most 64 MiB"):
            await leave()
    assert scene.told == ["granted", "in for scoring", "out", "out"]


async def test_a_wait_is_cancelled_when_the_process_is_asked_to_stop():
    scene = Scene(waits=9, stop_while_waiting=True)
    assert not await scene.turns(shared=True).take(Priority.INITIALISATION)
    assert scene.told == ["wait", "cancelled"]


async def test_a_turn_that_never_comes_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(turns, "GRANT_TIMEOUT_S", 0.0)
    with pytest.raises(RunFailed, match=r"timed out waiting for devices \[0, 1\] for training"):
        await Scene(waits=9).turns(shared=True).take(Priority.TRAINING)
