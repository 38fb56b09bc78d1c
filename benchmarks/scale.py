"""What one controller costs as a run grows: pipelines, devices and workers, with kills, for some simulated time.

The controller machine is the real one, with its pool, as the configuration makes it. The load is drawn: every worker
asks for orders, weights and leases, delivers, beats; a trainer per pipeline takes batches and publishes. One in a
thousand workers a minute dies and comes back. Costs are processor time of the controller alone, without its journal and
its port.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from random import Random
from time import process_time
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.config.run import Config
from penstock.control.events import TimePassed
from penstock.records.ids import MemberId, PipelineName, StepIndex, Version
from penstock.records.payload import PayloadRef
from penstock.records.pool import OrderNumber
from penstock.records.rollout import Rollout
from penstock.records.weights import NOTHING_HELD, Held, Manifest
from penstock.roles.controller import controller_of
from penstock.wire import messages

HEARTBEAT_S, TICK_S, POLL_S, BATCH_S, STEP_S = 1.0, 0.25, 10.0, 60.0, 10.0
"""As configured by default; a batch of samples and a step as on a real run."""
BATCH_SAMPLES, GROUP, GROUPS_PER_STEP = 16, 8, 32
DEATHS_PER_S = 1e-3 / 60


def config_of(pipelines: int, devices: int, workers: int) -> Config:
    tables = [
        {
            "name": f"p{number}",
            "steps": 1_000_000,
            "env": {"name": "copy"},
            "model": {"kind": "tiny"},
            "rollout": {"workers": workers // pipelines, "group_size": GROUP, "batch_samples": BATCH_SAMPLES},
            "train": {"groups_per_step": GROUPS_PER_STEP, "max_staleness": 4},
            "train_devices": [number],
        }
        for number in range(pipelines)
    ]
    return Config.model_validate({"pipeline": tables, "pool": {"devices": devices}})


class Load:
    """Everything that calls the controller, as timed events."""

    def __init__(self, pipelines: int, devices: int, workers: int, *, every: float) -> None:
        """`every` stretches the pace of heartbeats, polls and ticks, for long runs."""
        self.controller = controller_of(config_of(pipelines, devices, workers))
        self.random = Random(0)
        self.now = 0.0
        self.every = every
        self.calls: Counter[str] = Counter()
        self.cost_s: defaultdict[str, float] = defaultdict(float)
        self.steps = self.samples = self.deaths = 0
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._timed("start", lambda: self.controller.start(0.0, resumed=False, new_session=True))
        for number in range(pipelines):
            Trainer(self, PipelineName(f"p{number}"))
        for number in range(workers):
            name = PipelineName(f"p{number % pipelines}")
            self.after(self.random.random() * 5, lambda name=name, number=number: Worker(self, name, number))
        self.after(0.0, self.tick)

    def after(self, delay_s: float, what: Callable[[], object]) -> None:
        heapq.heappush(self._heap, (self.now + delay_s, next(self._numbers), what))

    def run(self, seconds: float) -> None:
        while self._heap and self._heap[0][0] <= seconds:
            self.now, _, what = heapq.heappop(self._heap)
            what()

    def call(self, request: Any) -> Any:
        return self._timed(type(request).__name__, lambda: self.controller.handle(request, self.now)[0][1])

    def tick(self) -> None:
        self._timed("tick", lambda: self.controller.handle(TimePassed(), self.now))
        self.after(TICK_S * self.every, self.tick)

    def _timed(self, what: str, work: Callable[[], Any]) -> Any:
        began = process_time()
        result = work()
        self.cost_s[what] += process_time() - began
        self.calls[what] += 1
        return result


class Trainer:
    def __init__(self, load: Load, name: PipelineName) -> None:
        self.load, self.name, self.member = load, name, MemberId(f"{name}.trainer")
        self.step = 0
        load.call(messages.Register(name, self.member, "trainer", step=StepIndex(0), lineage="a"))
        self.publish()
        self.beat()
        self.ask()

    def beat(self) -> None:
        self.load.call(messages.Heartbeat(self.name, self.member, progressed_ago_s=0.0, doing="training"))
        self.load.after(HEARTBEAT_S * self.load.every, self.beat)

    def publish(self) -> None:
        manifest = Manifest(Version(self.step), "a", f"{self.step:032x}", (), f"weights/{self.step}")
        self.load.call(messages.PublishWeights(self.name, self.member, manifest=manifest))

    def ask(self) -> None:
        reply = self.load.call(messages.AskBatch(self.name, self.member, step=StepIndex(self.step)))
        if isinstance(reply, messages.BatchReady):
            self.load.samples += sum(len(group.samples) for group in reply.batch.groups)
            self.load.after(STEP_S, self.trained)
        else:
            self.load.after(1.0, self.ask)

    def trained(self) -> None:
        self.load.call(messages.AckStep(self.name, self.member, step=StepIndex(self.step)))
        self.step += 1
        self.load.steps += 1
        if self.step % 10 == 0:
            self.load.call(messages.AckCheckpoint(self.name, self.member, step=StepIndex(self.step)))
        self.publish()
        self.ask()


class Worker:
    def __init__(self, load: Load, name: PipelineName, number: int) -> None:
        self.load, self.name, self.number = load, name, number
        self.member = MemberId(f"{name}.rollout.{number}-{load.deaths}")
        self.alive, self.awake, self.busy = True, False, False
        self.held: Held = NOTHING_HELD
        self.seen = OrderNumber(0)
        self.requests = itertools.count()
        load.call(messages.Register(name, self.member, "rollout"))
        load.after(load.random.expovariate(DEATHS_PER_S), self.die)
        self.beat()
        self.orders()

    def die(self) -> None:
        self.alive = False
        self.load.deaths += 1
        self.load.call(messages.Unregister(self.name, self.member, "killed", died=True))
        self.load.after(5.0, lambda: Worker(self.load, self.name, self.number))

    def beat(self) -> None:
        if self.alive:
            self.load.call(messages.Heartbeat(self.name, self.member, progressed_ago_s=0.0, doing="generate"))
            self.load.after(HEARTBEAT_S * self.load.every, self.beat)

    def orders(self) -> None:
        if not self.alive:
            return
        reply = self.load.call(messages.AskOrders(self.name, self.member, self.seen))
        for order in reply.orders if isinstance(reply, messages.Orders) else ():
            if order.number > self.seen:
                self.seen = order.number
                self.load.after(2.0, lambda order=order: self.obey(order))
        self.load.after((POLL_S if self.awake else 2.0) * self.load.every, self.orders)

    def obey(self, order: Any) -> None:
        if not self.alive or order.number != self.seen:
            return
        self.awake = order.action == "wake"
        self.load.call(messages.ReportOrder(self.name, self.member, order.number, done=True))
        if self.awake and not self.busy:
            self.lease()

    def update(self) -> None:
        reply = self.load.call(messages.AskWeights(self.name, self.member, held=self.held))
        if isinstance(reply, messages.Weights):
            self.held = reply.manifest.held
            version, digest = self.held.version, self.held.digest
            self.load.call(messages.ReportReplica(self.name, self.member, "serving", version, digest))

    def lease(self) -> None:
        if not self.alive or not self.awake:
            self.busy = False
            return
        self.busy = True
        self.update()
        ask = messages.AskLease(
            self.name, self.member, request=next(self.requests), samples=BATCH_SAMPLES, version=self.held.version
        )
        leases = self.load.call(ask).leases if self.held.digest else ()
        if leases:
            self.load.after(BATCH_S * (0.5 + self.load.random.random()), lambda: self.deliver(leases))
        else:
            self.load.after(5.0, self.lease)

    def deliver(self, leases: Any) -> None:
        if not self.alive:
            return
        held = self.held
        rollouts = tuple(
            Rollout(sample, held.version, held.digest, self.load.random.random(), 100, PayloadRef("r", 0, 0, 0, 10, 0))
            for lease in leases
            for sample in lease.samples
        )
        self.load.call(messages.Deliver(self.name, self.member, rollouts=rollouts))
        self.lease()


def measured(pipelines: int, devices: int, workers: int, seconds: float, every: float) -> dict[str, Any]:
    load = Load(pipelines, devices, workers, every=every)
    load.run(seconds)
    load.controller.check()
    micros = {name: 1e6 * load.cost_s[name] / count for name, count in load.calls.items()}
    beats = (workers + pipelines) / HEARTBEAT_S * micros["Heartbeat"]
    ticks = micros["tick"] / TICK_S
    rest = sum(cost for name, cost in load.cost_s.items() if name not in ("Heartbeat", "tick", "start", "Register"))
    shares = {"heartbeats": beats / 1e6, "ticks": ticks / 1e6, "calls": rest / seconds}
    return {
        "pipelines": pipelines,
        "devices": devices,
        "workers": workers,
        "simulated_s": seconds,
        "cost_s": sum(load.cost_s.values()),
        "calls": sum(load.calls.values()),
        "steps": load.steps,
        "samples": load.samples,
        "deaths": load.deaths,
        "micros": micros,
        "core_shares": shares,
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--every", type=float, default=1.0, help="stretch heartbeats, polls and ticks")
    parser.add_argument("--hour", action="store_true", help="the largest for a simulated hour, at a tenth of the pace")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    shapes = [(1, 64, 150), (8, 512, 1250), (64, 4096, 10_000)]
    if options.quick:
        shapes, options.seconds = shapes[:2], min(options.seconds, 30.0)
    seconds, every = options.seconds, options.every
    if options.hour:
        shapes, seconds, every = shapes[-1:], 3600.0, 10.0
    rows = [measured(*shape, seconds, every) for shape in shapes]
    table = Table(title=f"one controller, {seconds:g} simulated seconds each", title_justify="left")
    for column in ("pipelines", "devices", "workers", "calls", "steps", "deaths", "cost s"):
        table.add_column(column, justify="right")
    for column in ("heartbeat µs", "lease µs", "deliver µs", "orders µs", "tick ms", "cores: beats", "ticks", "calls"):
        table.add_column(column, justify="right")
    for row in rows:
        micros, shares = row["micros"], row["core_shares"]
        whole = [f"{row[name]:,}" for name in ("pipelines", "devices", "workers", "calls", "steps", "deaths")]
        costs = [f"{micros.get(name, 0):.0f}" for name in ("Heartbeat", "AskLease", "Deliver", "AskOrders")]
        cores = [f"{shares[name]:.2f}" for name in ("heartbeats", "ticks", "calls")]
        table.add_row(*whole, f"{row['cost_s']:.1f}", *costs, f"{micros['tick'] / 1e3:.2f}", *cores)
    Console(width=160).print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
