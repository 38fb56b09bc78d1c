"""Ledger transitions per second, and how their cost grows with what is in flight.

Every sample makes five moves (leased, delivered, buffered, dispatched, trained) through the real ledger, with steps
dispatched, acknowledged and settled on the way, while a fixed number of other samples stays in flight. Beside it, in
the same run: the same moves as bare dictionary updates (`state[sample] = name`) with no groups, owners, staleness or
queues, which is as cheap as bookkeeping in Python can get; and a ledger that counts what is in flight by looking, as
the simplest correct one would. Groups are delivered in random
order, so that the ledger finds nothing in the processor's caches that a real one would not. Rates are by processor
time: nothing here waits, and a busy machine would only add noise.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random
from time import process_time

from rich.console import Console
from rich.table import Table

from penstock.control.ledger import Ledger
from penstock.control.pipeline import PipelineControl
from penstock.control.settings import PipelineSettings
from penstock.records.ids import MemberId, PipelineName, SampleId, StepIndex, Version
from penstock.records.payload import PayloadRef
from penstock.records.rollout import Rollout
from penstock.wire import messages

PIPELINE = PipelineName("bench")

GROUP_SIZE = 8
GROUPS_PER_STEP = 16
BATCH = GROUP_SIZE * GROUPS_PER_STEP
MOVES_PER_SAMPLE = 5
WORKER = MemberId("worker")
STEPS_PER_ROUND = 4
TARGET_PER_S = 200_000


def rollout_of(sample: SampleId, version: Version) -> Rollout:
    return Rollout(sample, version, "digest", 0.5, 100, PayloadRef("ring", 0, sample, 0, 1000, sample))


class LedgerLoad:
    """A ledger with `in_flight` samples leased, and the steady work of one step on top of it."""

    def __init__(self, in_flight: int) -> None:
        self.ledger = Ledger(
            PipelineSettings(
                name=PipelineName("p"), groups_per_step=GROUPS_PER_STEP, group_size=GROUP_SIZE, max_staleness=10**9
            )
        )
        self.random = Random(0)
        self.leases = [self._lease() for _ in range(in_flight // GROUP_SIZE)]

    def _lease(self) -> tuple[SampleId, ...]:
        return self.ledger.lease_group(WORKER, GROUP_SIZE, self.ledger.state.version, Version(0)).samples

    def prepare(self, steps: int) -> list[list[Rollout]]:
        """Rollouts for the coming steps, of groups drawn at random: workers make them, so nothing here is measured."""
        chosen: list[list[Rollout]] = []
        for _ in range(steps):
            batch: list[Rollout] = []
            for _ in range(GROUPS_PER_STEP):
                at = self.random.randrange(len(self.leases))
                self.leases[at], self.leases[-1] = self.leases[-1], self.leases[at]
                batch += [rollout_of(sample, self.ledger.state.version) for sample in self.leases.pop()]
            chosen.append(batch)
        return chosen

    def step(self, rollouts: list[Rollout]) -> None:
        """One batch of samples through all five moves, replaced by as many new leases."""
        ledger = self.ledger
        newest = ledger.state.version
        for _ in range(GROUPS_PER_STEP):
            self.leases.append(self._lease())
        for rollout in rollouts:
            refused = ledger.deliver(WORKER, rollout, newest)
            if refused:
                raise RuntimeError(refused)
        step = ledger.state.next_step
        ledger.dispatch(final=False, now=0.0)
        ledger.acknowledge(step, ())
        ledger.settle(StepIndex(step + 1))


class DictLoad:
    """The floor: one dictionary write and two counter updates per move, and nothing else."""

    def __init__(self, in_flight: int) -> None:
        self.states: dict[int, str] = dict.fromkeys(range(in_flight), "leased")
        self.counts = {"leased": in_flight, "delivered": 0, "buffered": 0, "dispatched": 0, "trained": 0}
        self.random = Random(0)
        self.leases = [list(range(at, at + GROUP_SIZE)) for at in range(0, in_flight, GROUP_SIZE)]
        self.next = in_flight

    def prepare(self, steps: int) -> list[list[int]]:
        chosen: list[list[int]] = []
        for _ in range(steps):
            batch: list[int] = []
            for _ in range(GROUPS_PER_STEP):
                at = self.random.randrange(len(self.leases))
                self.leases[at], self.leases[-1] = self.leases[-1], self.leases[at]
                batch += self.leases.pop()
            chosen.append(batch)
        return chosen

    def step(self, samples: list[int]) -> None:
        states, counts = self.states, self.counts
        for first in range(self.next, self.next + BATCH, GROUP_SIZE):
            self.leases.append(list(range(first, first + GROUP_SIZE)))
            for sample in range(first, first + GROUP_SIZE):
                states[sample] = "leased"
                counts["leased"] += 1
        self.next += BATCH
        for source, target in (
            ("leased", "delivered"),
            ("delivered", "buffered"),
            ("buffered", "dispatched"),
            ("dispatched", "trained"),
        ):
            for sample in samples:
                states[sample] = target
                counts[source] -= 1
                counts[target] += 1
        for sample in samples:
            del states[sample]


class CountingLoad(DictLoad):
    """The simplest correct ledger: what is in flight is found by counting, once per lease."""

    def step(self, samples: list[int]) -> None:
        for _ in range(GROUPS_PER_STEP):
            sum(state in ("leased", "delivered", "buffered", "dispatched") for state in self.states.values())
        super().step(samples)


def moves_per_s(loads: list[LedgerLoad | DictLoad], rounds: int) -> list[float]:
    """The median rate of each load, by processor time. They take turns, so that noise hits all of them alike."""
    rates: list[list[float]] = [[] for _ in loads]
    for _ in range(rounds):
        for load, seen in zip(loads, rates, strict=True):
            work = load.prepare(STEPS_PER_ROUND)
            at = process_time()
            for samples in work:
                load.step(samples)  # type: ignore[arg-type]
            seen.append(STEPS_PER_ROUND * BATCH * MOVES_PER_SAMPLE / (process_time() - at))
    return [sorted(seen)[len(seen) // 2] for seen in rates]


def pipeline_moves_per_s(seconds: float) -> float:
    """The whole machine: events in, effects out, with admission, phases and throttle after every one."""
    control = PipelineControl(
        PipelineSettings(name=PIPELINE, groups_per_step=GROUPS_PER_STEP, group_size=GROUP_SIZE, max_staleness=3)
    )
    trainer = MemberId("trainer")
    control.handle(messages.Register(PIPELINE, WORKER, "rollout"), 0.0)
    control.handle(messages.Register(PIPELINE, trainer, "trainer"), 0.0)
    step, request, spent = StepIndex(0), 0, 0.0
    while spent < seconds:
        at = process_time()
        granted = control.handle(messages.AskLease(PIPELINE, WORKER, request, BATCH, control.newest), 0.0)[0]
        spent += process_time() - at
        if not isinstance(granted, messages.Leased):
            raise RuntimeError(f"no lease: {granted}")
        request += 1
        samples = [sample for lease in granted.leases for sample in lease.samples]
        deliveries = [
            messages.Deliver(
                PIPELINE, WORKER, tuple(rollout_of(sample, control.newest) for sample in samples[at : at + GROUP_SIZE])
            )
            for at in range(0, BATCH, GROUP_SIZE)
        ]
        at = process_time()
        for delivery in deliveries:
            control.handle(delivery, 0.0)
        control.handle(messages.AskBatch(PIPELINE, trainer, step), 0.0)
        control.handle(messages.AckStep(PIPELINE, trainer, step), 0.0)
        control.handle(messages.AckCheckpoint(PIPELINE, trainer, StepIndex(step + 1)), 0.0)
        spent += process_time() - at
        step = StepIndex(step + 1)
    control.check()
    return step * BATCH * MOVES_PER_SAMPLE / spent


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="penstock bench control", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="shorter, and only up to 10^5 in flight")
    options = parser.parse_args(argv)
    rounds = 5 if options.quick else 25
    sizes = [10**3, 10**4, 10**5] if options.quick else [10**3, 10**4, 10**5, 10**6]
    counted = [size for size in sizes if size <= 10**4]

    ours = moves_per_s([LedgerLoad(size) for size in sizes], rounds)
    floor = moves_per_s([DictLoad(size) for size in sizes], rounds)
    counting = dict(zip(counted, moves_per_s([CountingLoad(size) for size in counted], 3), strict=True))
    table = Table(title=f"sample transitions per second ({BATCH} samples per step, groups of {GROUP_SIZE})")
    for column in ("in flight", "ledger", "ns each", "growth", "bare dict", "growth", "ratio", "counting ledger"):
        table.add_column(column, justify="right")
    figures: list[dict[str, object]] = []
    for size, rate, bare in zip(sizes, ours, floor, strict=True):
        table.add_row(
            f"{size:,}",
            f"{rate:,.0f}",
            f"{1e9 / rate:,.0f}",
            f"{ours[0] / rate:.2f}x",
            f"{bare:,.0f}",
            f"{floor[0] / bare:.2f}x",
            f"{rate / bare:.2f}",
            f"{counting[size]:,.0f}" if size in counting else "-",
        )
        name = f"ledger transitions, {size} in flight"
        figures.append(
            {"name": name, "unit": "1/s", "ours": rate, "peer": bare, "peer_name": "bare dict", "ratio": rate / bare}
        )
    whole = pipeline_moves_per_s(0.3 if options.quick else 2.0)
    figures.append(
        {
            "name": "whole control machine",
            "unit": "transitions/s",
            "ours": whole,
            "peer": float(TARGET_PER_S),
            "peer_name": "target",
            "ratio": whole / TARGET_PER_S,
        }
    )
    console = Console()
    console.print(table)
    console.print(f"whole control machine (events in, effects out): {whole:,.0f} transitions/s")
    console.print(f"target: {TARGET_PER_S:,} transitions/s, growth within 1.20x")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))
    return 0
