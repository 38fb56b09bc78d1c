"""A pool with obedient workers, for tests that are about decisions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.pool import events as ev
from penstock.pool.pool import Pool
from penstock.pool.settings import PoolSection
from penstock.records.ids import MemberId, PipelineName
from penstock.records.pool import DeviceId, Priority, Topology


class Town:
    """A pool, its time, and workers that carry out orders at once unless they are named in `deaf`."""

    def __init__(self, nodes: tuple[int, ...] = (4,), **settings) -> None:
        settings = {"turn_s": 10.0, **settings}
        self.topology, self.first_settings = Topology(nodes), PoolSection(**settings)
        self.pool = Pool(self.topology, self.first_settings)
        self.now = 0.0
        self.deaf: set[str] = set()
        self.journal: list[tuple[ev.Event, float]] = []
        self.effects: list[ev.Effect] = []
        self.rounds: dict[str, tuple[int, int]] = {}
        """Per pipeline, the size of its round and what was completed before it."""

    def tell(self, event: ev.Event) -> list[ev.Effect]:
        before = self.pool.revision
        effects = self.pool.handle(event, self.now)
        self.pool.check()
        if self.pool.revision != before:
            self.journal.append((event, self.now))
        self.effects += effects
        for effect in effects:
            if isinstance(effect, ev.WakeWorker | ev.SleepWorker) and effect.member not in self.deaf:
                self.tell(ev.MoveDone(effect.pipeline, effect.member, effect.order.number))
        return effects

    def open(self, name: str, *, inference=None, workers: int | None = None, **shape) -> None:
        inference = tuple(range(self.pool.topology.device_count)) if inference is None else inference
        self.tell(ev.PipelineOpened(PipelineName(name), tuple(map(DeviceId, inference)), **shape))
        for number in range(len(inference) // shape.get("bundle", 1) if workers is None else workers):
            self.tell(ev.WorkerJoined(PipelineName(name), MemberId(f"{name}-{number}")))

    def demand(self, name: str, target: int) -> None:
        """A new round of `target` samples; what the last one lacked is not wanted any more."""
        before = sum(self.rounds.get(name, (0, 0)))
        self.rounds[name] = (target, before)
        self.tell(ev.DemandCounted(PipelineName(name), target, before))

    def progress(self, name: str, completed: int) -> None:
        """This number of the round is complete."""
        target, before = self.rounds[name]
        self.tell(ev.DemandCounted(PipelineName(name), max(0, target - completed), before + completed))

    def ask(
        self,
        name: str,
        request: int,
        among,
        *,
        count: int | None = None,
        priority=Priority.TRAINING,
        timeout_s=1e6,
        release: int | None = None,
    ) -> tuple[int, ...] | None:
        member = MemberId(f"{name}-trainer")
        among = tuple(map(DeviceId, among))
        count = len(among) if count is None else count
        self.tell(ev.DevicesRequested(PipelineName(name), member, request, priority, among, count, timeout_s, release))
        return self.held(name, request)

    def held(self, name: str, request: int) -> tuple[int, ...] | None:
        grant = self.pool.granted(MemberId(f"{name}-trainer"), request)
        return None if grant is None else grant.devices

    def release(self, name: str, request: int) -> None:
        self.tell(ev.DevicesReleased(PipelineName(name), MemberId(f"{name}-trainer"), request))

    def after(self, seconds: float, *, step_s: float = 1.0) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + step_s)
            self.tell(ev.TimePassed())

    def awake(self, name: str) -> int:
        return next(share.awake for share in self.pool.status(self.now).shares if share.pipeline == name)

    def told(self, kind: type) -> list:
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def replayed(self) -> Pool:
        pool = Pool(self.topology, self.first_settings)
        for event, at in self.journal:
            pool.handle(event, at)
        return pool


@pytest.fixture
def town() -> Iterator[Town]:
    """Four devices on one node; checked, and replayed from its journal, at the end."""
    town = Town()
    yield town
    town.pool.check()
    assert town.replayed().snapshot() == town.pool.snapshot()


@pytest.fixture
def make_town() -> Iterator:
    """Towns of other sizes, checked and replayed in the same way."""
    towns: list[Town] = []

    def build(nodes: tuple[int, ...] = (4,), **settings) -> Town:
        towns.append(Town(nodes, **settings))
        return towns[-1]

    yield build
    for town in towns:
        town.pool.check()
        assert town.replayed().snapshot() == town.pool.snapshot()
