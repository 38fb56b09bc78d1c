"""Many pipelines on one pool, in virtual time: the real pool machine with simulated workers and trainers.

Each pipeline repeats a round: generate `target` samples of uneven length, train on its training devices, then spend
time off the devices (evaluation, environment resets, checkpoints). Waking and sleeping take time, aborted samples keep
their prefix. The same workload runs under four regimes that differ only in these points:

- `shared`    all devices for the generation of all pipelines, our planner, progress read once a second;
- `plain`     the same, with the plain gap-ratio rule (no move cost, no hysteresis, no demand cap), at every report;
- `colocated` every pipeline confined to its own equal part of the devices, where it generates and trains;
- `disjoint`  nothing overlaps: of its own part, a pipeline trains on some devices and generates on the others.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Literal

import msgspec

from penstock.pool import events as ev
from penstock.pool.planner import make_plan
from penstock.pool.pool import Pool
from penstock.pool.settings import PoolSection
from penstock.records.ids import MemberId, PipelineName
from penstock.records.pool import DeviceId, Order, Priority, Topology
from penstock.sim.plain_rule import plain_plan

Regime = Literal["shared", "plain", "colocated", "disjoint"]


class Mix(msgspec.Struct, frozen=True, kw_only=True):
    """A workload. The defaults are the standard alternating mix, on any number of pipelines and devices."""

    pipelines: int
    devices: int
    node: int = 8
    bundle: int = 1
    concurrency: int = 4
    samples_per_device: int = 80
    """Per round and device of the equal part, so that generation time does not depend on the scale."""
    sample_s: float = 6.0
    spread: float = 0.6
    """Sigma of the lognormal sample time: the stragglers."""
    train_s: float = 60.0
    train_part: float = 0.5
    """Fraction of its equal part that a pipeline trains on."""
    apart_s: float = 60.0
    """Time per round that needs no device."""
    stagger_s: float = 60.0
    wake_s: float = 5.0
    sleep_s: float = 1.0
    turn_s: float = 20.0
    warm_up_s: float = 600.0
    """Time before counting begins: all pipelines have started, and the cold start has no effect."""
    horizon_s: float = 2400.0
    """Measured time."""
    workers_factor: int = 4
    """Worker processes per pipeline, as a multiple of its equal part."""
    payback: float = PoolSection().payback
    seed: int = 0

    @property
    def part(self) -> int:
        """Devices per pipeline in an equal division."""
        return self.devices // self.pipelines


class Outcome(msgspec.Struct, frozen=True):
    """Result of a mix under one regime."""

    samples: int
    rounds: int
    step_s: float
    """Mean time of a round."""
    moves: int
    moves_per_round: float
    generating: float
    training: float
    moving: float
    idle: float
    """Fractions of the device time; idle includes workers that are awake with nothing to do."""
    fairness: float
    """Jain's index of the samples per pipeline: 1 is even."""
    longest_wait_s: float
    """Longest time a pipeline had work and no worker."""


class PoolWorld:
    """The heap of timed events, the pool and the pipelines."""

    def __init__(self, mix: Mix, regime: Regime) -> None:
        self.mix = mix
        self.regime: Regime = regime
        nodes = (mix.node,) * (mix.devices // mix.node) if mix.devices >= mix.node else (mix.devices,)
        settings = PoolSection(
            turn_s=mix.turn_s,
            payback=mix.payback,
            drain_s=mix.sample_s,
            demand_lease_s=math.inf,
        )
        self.pool = Pool(Topology(nodes), settings, plain_plan if regime == "plain" else make_plan)
        self.replans_at_reports = regime == "plain" and mix.pipelines <= 64  # beyond it would take hours
        self.now = 0.0
        self.samples = 0
        self.busy_device_s = self.trained_device_s = self.moved_device_s = 0.0
        self.longest_wait_s = 0.0
        self._moves_before = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self.pipelines = [_Pipeline(self, number) for number in range(mix.pipelines)]
        self._by_name = {pipeline.name: pipeline for pipeline in self.pipelines}

    def run(self) -> Outcome:
        self.at(0.0, self._tick)
        for pipeline in self.pipelines:
            self.at(pipeline.number * self.mix.stagger_s % (4 * self.mix.stagger_s), pipeline.begin_round)
        self.at(self.mix.warm_up_s, self._begin_to_count)
        while self._heap and self._heap[0][0] <= self.mix.warm_up_s + self.mix.horizon_s:
            self.now, _, act = heapq.heappop(self._heap)
            act()
        for worker in (worker for pipeline in self.pipelines for worker in pipeline.workers.values()):
            if worker.running:
                worker.account()
        self.pool.check()
        return self._outcome()

    def at(self, delay_s: float, act: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._sequence, act))

    def handle(self, event: ev.Event) -> None:
        for effect in self.pool.handle(event, self.now):
            match effect:
                case ev.WakeWorker() | ev.SleepWorker():
                    self._by_name[effect.pipeline].workers[effect.member].carry_out(effect.order)
                case ev.GrantDevices():
                    self._by_name[effect.pipeline].train(len(effect.devices))
                case ev.RejectRequest() | ev.FenceMember():
                    raise AssertionError(f"no worker fails in this simulation, yet: {effect}")

    def _tick(self) -> None:
        self.handle(ev.TimePassed())
        waits = (share.waited_s for share in self.pool.status(self.now).shares)
        self.longest_wait_s = max(self.longest_wait_s, *waits)
        self.at(1.0, self._tick)

    def _begin_to_count(self) -> None:
        self.samples, self.longest_wait_s = 0, 0.0
        self.busy_device_s = self.trained_device_s = self.moved_device_s = 0.0
        self._moves_before = self.pool.status(self.now).moves
        for pipeline in self.pipelines:
            pipeline.rounds, pipeline.round_time_s, pipeline.finished_before = 0, 0.0, pipeline.finished
            for worker in pipeline.workers.values():
                worker.busy_since = self.now

    def _outcome(self) -> Outcome:
        total_s = self.mix.devices * self.mix.horizon_s
        finished = [pipeline.finished - pipeline.finished_before for pipeline in self.pipelines]
        rounds = sum(pipeline.rounds for pipeline in self.pipelines)
        moves = self.pool.status(self.now).moves - self._moves_before
        used = (self.busy_device_s, self.trained_device_s, self.moved_device_s)
        generating, training, moving = (device_s / total_s for device_s in used)
        return Outcome(
            samples=self.samples,
            rounds=rounds,
            step_s=sum(pipeline.round_time_s for pipeline in self.pipelines) / max(1, rounds),
            moves=moves,
            moves_per_round=moves / max(1, rounds),
            generating=generating,
            training=training,
            moving=moving,
            idle=1.0 - generating - training - moving,
            fairness=sum(finished) ** 2 / max(1.0, len(finished) * sum(count**2 for count in finished)),
            longest_wait_s=self.longest_wait_s,
        )


class _Pipeline:
    """Generates a round, trains it, spends time off the devices, and repeats."""

    def __init__(self, world: PoolWorld, number: int) -> None:
        mix = world.mix
        self.world = world
        self.number = number
        self.name = PipelineName(f"p{number:03d}")
        self.random = Random(mix.seed * 100_003 + number)
        own = tuple(DeviceId(number * mix.part + offset) for offset in range(mix.part))
        everywhere = tuple(DeviceId(device) for device in range(mix.devices))
        self.training = own[: max(1, round(mix.part * mix.train_part))]
        regimes = {"disjoint": own[len(self.training) :], "colocated": own}
        inference = regimes.get(world.regime, everywhere)
        self.target = mix.samples_per_device * mix.part
        self.round = -1
        self.rounds = 0
        self.round_time_s = 0.0
        self.finished = self.finished_before = 0
        self.completed = 0
        self.began = 0.0
        self.queue: deque[float] = deque()
        """Seconds of work left in each sample that no worker is generating."""
        # The plain rule has no demand caps and costs.
        frugal = world.regime != "plain"
        world.handle(
            ev.PipelineOpened(
                self.name,
                inference,
                bundle=mix.bundle,
                concurrency=mix.concurrency if frugal else 1,
            )
        )
        self.workers: dict[MemberId, _Worker] = {}
        most = min(len(inference), mix.part * mix.workers_factor) // mix.bundle
        for index in range(most):
            member = MemberId(f"{self.name}-{index}")
            self.workers[member] = _Worker(world, self, member)
            world.handle(ev.WorkerJoined(self.name, member))

    def begin_round(self) -> None:
        mix = self.world.mix
        self.round += 1
        self.completed = 0
        self.began = self.world.now
        scale = mix.sample_s / math.exp(mix.spread**2 / 2)
        self.queue.extend(scale * self.random.lognormvariate(0.0, mix.spread) for _ in range(self.target))
        self.world.handle(ev.DemandCounted(self.name, self.target, self.finished))
        for worker in self.workers.values():
            worker.fill()

    def sample_done(self) -> None:
        self.completed += 1
        self.finished += 1
        self.world.samples += 1
        revision = self.world.pool.revision
        self.world.handle(ev.DemandCounted(self.name, self.target - self.completed, self.finished))
        if self.world.replans_at_reports and self.world.pool.revision != revision:
            self.world.handle(ev.TimePassed())
        if self.completed < self.target:
            return
        if not self.world.mix.train_s:
            self.rounds += 1
            self.world.at(self.world.mix.apart_s, self._again)
        else:
            member = MemberId(f"{self.name}-trainer")
            self.world.handle(
                ev.DevicesRequested(
                    self.name, member, self.round, Priority.TRAINING, self.training, len(self.training), math.inf
                )
            )

    def train(self, devices: int) -> None:
        self.world.at(self.world.mix.train_s, lambda: self._trained(devices))

    def _trained(self, devices: int) -> None:
        self.world.trained_device_s += devices * self.world.mix.train_s
        self.rounds += 1
        self.world.handle(ev.DevicesReleased(self.name, MemberId(f"{self.name}-trainer"), self.round))
        self.world.at(self.world.mix.apart_s, self._again)

    def _again(self) -> None:
        self.round_time_s += self.world.now - self.began
        self.begin_round()


class _Worker:
    """A generation worker: takes samples while it serves, drains or aborts on an order to sleep."""

    def __init__(self, world: PoolWorld, pipeline: _Pipeline, member: MemberId) -> None:
        self.world = world
        self.pipeline = pipeline
        self.member = member
        self.serving = False
        self.running: dict[int, float] = {}
        """When each running sample will be finished."""
        self._order: Order | None = None
        self._next, self.busy_since = 0, 0.0

    def carry_out(self, order: Order) -> None:
        mix = self.world.mix
        self._order = order
        if order.action == "wake":
            self.world.moved_device_s += mix.wake_s * mix.bundle
            self.world.at(mix.wake_s, lambda: self._answer(order))
            return
        self.serving = False
        if order.abort or not self.running:
            self._leave(order)
        else:
            self.world.at(self.world.pool.settings.drain_s, lambda: self._leave(order))

    def fill(self) -> None:
        while self.serving and self.pipeline.queue and len(self.running) < self.world.mix.concurrency:
            if not self.running:
                self.busy_since = self.world.now
            left_s = self.pipeline.queue.popleft()
            key, self._next = self._next, self._next + 1
            self.running[key] = self.world.now + left_s
            self.world.at(left_s, lambda key=key: self._done(key))

    def _done(self, key: int) -> None:
        if self.running.pop(key, None) is None:
            return
        if not self.running:
            self.account()
        self.pipeline.sample_done()
        self.fill()
        if not self.running and self._order is not None and self._order.action == "sleep":
            self._leave(self._order)

    def _leave(self, order: Order) -> None:
        if self._order is not order:
            return
        if self.running:
            self.account()
            self.pipeline.queue.extendleft(finish - self.world.now for finish in self.running.values())
            self.running.clear()
            for other in self.pipeline.workers.values():
                other.fill()
        self._order = None
        self.world.moved_device_s += self.world.mix.sleep_s * self.world.mix.bundle
        self.world.at(
            self.world.mix.sleep_s,
            lambda: self.world.handle(ev.MoveDone(self.pipeline.name, self.member, order.number)),
        )

    def _answer(self, order: Order) -> None:
        if self._order is order:
            self._order = None
            self.serving = True
            self.world.handle(ev.MoveDone(self.pipeline.name, self.member, order.number))
            self.fill()

    def account(self) -> None:
        self.world.busy_device_s += (self.world.now - self.busy_since) * self.world.mix.bundle


def simulate(mix: Mix, regime: Regime) -> Outcome:
    """Run one mix under one regime."""
    return PoolWorld(mix, regime).run()


def fewest_moves(mix: Mix, round_s: float) -> float:
    """A lower bound on the moves per round of any schedule of the alternating mix whose rounds take `round_s`.

    Generation must fit into the rest of the round after training and the time apart, which needs a mean number of
    devices. Workers kept over the pause are idle in it. Device time bounds their number, and so does the number of
    devices without training, because on any other the next training evicts them. A worker that is not kept is woken
    once and put to sleep once. Stragglers and waking times are ignored; rounds are even.
    """
    pause_s = mix.train_s + mix.apart_s
    generating_s = mix.samples_per_device * mix.part * mix.sample_s / mix.concurrency
    trained_on = max(1, round(mix.part * mix.train_part))
    needed = generating_s / (round_s - pause_s)
    kept = (mix.part * round_s - generating_s - trained_on * mix.train_s) / pause_s
    return 2.0 * max(0.0, needed - min(kept, mix.part - trained_on)) / mix.bundle
