"""Overlapped rollout generation against a plain loop and against the slowest stage alone.

Stage mixes are prepare : generate : postprocess. "limit" is the slowest stage run by itself in the same process; "plain
loop" is what one would write by hand: lease, prepare, generate, postprocess, deliver, one after the other, at the same
controller and with no runner at all. Rates are taken between the first and the last delivery: filling is not counted,
nor is the trial in which a worker with prefetch on finds out whether overlapping pays. "prompts" are prepared as a
worker reads prompts: in a process of its own once they are measured to compute for long; the plain loop and the limit
compute them inline.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import inspect
import json
import os
import platform
import statistics
import time
import timeit
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from penstock.records.ids import PromptIndex, SampleId, Version
from penstock.records.payload import PayloadRef
from penstock.records.prompt import PromptLease
from penstock.records.rollout import Rollout
from penstock.roles.preparing import PromptsByCpuTime
from penstock.rollout.hooks import Finished, Outcome
from penstock.rollout.io.preparation_pool import PreparationPool
from penstock.rollout.io.runner import Runner, RunnerSettings
from penstock.rollout.prefetch import Bounds
from penstock.wire.messages import Delivered, Leased

Mix = tuple[float, float, float]
MIXES: tuple[Mix, ...] = ((1.0, 1.0, 1.0), (1.0, 4.0, 1.0), (4.0, 4.0, 1.0), (0.1, 1.0, 0.1))
COMPUTING_MIXES = (MIXES[0], MIXES[2])
LEASES_PER_BATCH = 4
GROUP = 4
UNIT_S = 0.03
NEVER_BELOW = 0.97
"""The median of on / off; what is below is said to be slower."""
ROUND_TRIP_S = 0.002
"""Real workloads: what a lease and a delivery cost over loopback."""

Stage = Callable[[float], None]


@functools.cache
def steps_per_s() -> float:
    return 100_000 / min(timeit.repeat("x = x * 3 % 1000003", setup="x = 7", number=100_000, repeat=5))


def compute(seconds: float) -> None:
    """Pure Python that keeps the interpreter to itself for about this long."""
    timeit.timeit("x = x * 3 % 1000003", setup="x = 7", number=int(seconds * steps_per_s()))


class StageWorkload:
    """Three stages of given lengths per batch."""

    def __init__(self, mix: Mix, prepare: Stage, generate: Stage) -> None:
        self.prepare_s = mix[0] * UNIT_S / LEASES_PER_BATCH
        self.generate_s = mix[1] * UNIT_S
        self.postprocess_s = mix[2] * UNIT_S / LEASES_PER_BATCH
        self.preparing, self.generating = prepare, generate

    def preflight(self) -> None:
        pass

    def prepare(self, lease: PromptLease) -> PromptLease:
        self.preparing(self.prepare_s)
        return lease

    def collate(self, prepared: Sequence[PromptLease]) -> Sequence[PromptLease]:
        return prepared

    def generate(self, batch: Sequence[PromptLease]) -> Sequence[PromptLease]:
        self.generating(self.generate_s * len(batch) / LEASES_PER_BATCH)
        return batch

    def postprocess(self, prepared: PromptLease, generated: PromptLease) -> list[Outcome]:
        time.sleep(self.postprocess_s)
        return [Finished({}, 0.0, Version(0), "", 1) for _ in prepared.samples]


class CountingController:
    """Grants a fixed number of prompts once the worker has settled how to run, and notes when they were delivered."""

    def __init__(self, prompts: int, group: int = GROUP, round_trip_s: float = 0.0) -> None:
        self.prompts, self.group, self.round_trip_s = prompts, group, round_trip_s
        self.issued = 0
        self.deliveries: list[tuple[float, int]] = []
        self.settled: Callable[[], bool] = lambda: True
        """Whether the worker has found out whether to overlap; what it delivers before that is not counted."""

    async def lease(self, samples: int, wait_s: float) -> Leased:
        if self.round_trip_s:
            await asyncio.sleep(self.round_trip_s)
        leases: list[PromptLease] = []
        while samples >= self.group and self.prompts:
            leases.append(one_lease(self.issued, self.group))
            self.issued += 1
            self.prompts -= self.settled()
            samples -= self.group
        return Leased(tuple(leases), "granted" if leases else "exhausted", "running")

    async def deliver(
        self, rollouts: Sequence[Any], failures: Sequence[Any], returned: Sequence[Any], scores: Sequence[Any] = ()
    ) -> Delivered:
        if self.round_trip_s:
            await asyncio.sleep(self.round_trip_s)
        assert not failures, failures[0].error
        if self.settled():
            self.deliveries.append((time.perf_counter(), len(rollouts)))
        return Delivered()

    def rate(self) -> float:
        """Samples per second between the first delivery that counts and the last."""
        taken = self.deliveries
        return sum(count for _, count in taken[1:]) / (taken[-1][0] - taken[0][0])


class NoStore:
    def write(self, arrays: dict[str, np.ndarray]) -> PayloadRef:
        return PayloadRef("none", 0, 0, 0, 0, 0)

    def discard(self, payloads: object) -> None:
        pass


def one_lease(number: int, group: int) -> PromptLease:
    ids = tuple(SampleId(number * group + member) for member in range(group))
    return PromptLease(PromptIndex(number), 0, ids, tuple(range(group)), Version(0))


def runner_rate(workload: Any, batches: int, *, prefetch: bool, preparations: int = 1) -> float:
    controller = CountingController(batches * LEASES_PER_BATCH)
    size = LEASES_PER_BATCH * GROUP
    bounds = Bounds(batch_samples=size, queue_samples=2 * size, preparations=preparations)
    return running_rate(workload, controller, RunnerSettings(drain_s=10.0, bounds=bounds, prefetch=prefetch))


def running_rate(workload: Any, controller: CountingController, settings: RunnerSettings) -> float:
    async def run() -> None:
        runner = Runner(workload, controller, NoStore(), settings)
        if settings.prefetch:
            controller.settled = lambda: runner.machine.overlap.settled
        await runner.run()

    asyncio.run(run())
    return controller.rate()


def plain_rate(workload: Any, controller: CountingController, size: int) -> float:
    """The loop one would write by hand."""
    store = NoStore()

    async def loop() -> None:
        while leases := (await controller.lease(size, 0.0)).leases:
            prepared = [workload.prepare(lease) for lease in leases]
            generated = workload.generate(workload.collate(prepared))
            if inspect.isawaitable(generated):
                generated = await generated
            rollouts: list[Rollout] = []
            for lease, one, result in zip(leases, prepared, generated, strict=True):
                outcomes = workload.postprocess(one, result)
                if isinstance(outcomes, Future):
                    outcomes = await asyncio.wrap_future(outcomes)
                for sample, outcome in zip(lease.samples, outcomes, strict=True):
                    payload = store.write(outcome.arrays)
                    rollouts.append(
                        Rollout(
                            sample, outcome.version, outcome.weights_digest, outcome.reward, outcome.length, payload
                        )
                    )
            await controller.deliver(rollouts, (), ())

    asyncio.run(loop())
    return controller.rate()


def limit_rate(workload: StageWorkload, mix: Mix, batches: int) -> float:
    """The slowest stage by itself."""
    slowest = max(range(3), key=lambda stage: mix[stage])
    begin = time.perf_counter()
    for batch in range(batches):
        taken = [one_lease(batch * LEASES_PER_BATCH + number, GROUP) for number in range(LEASES_PER_BATCH)]
        if slowest == 1:
            workload.generate(taken)
        else:
            for lease in taken:
                workload.prepare(lease) if slowest == 0 else workload.postprocess(lease, lease)
    return batches * LEASES_PER_BATCH * GROUP / (time.perf_counter() - begin)


def mixes(table: Table, results: list[dict[str, Any]], batches: int, rounds: int) -> None:
    pool = PreparationPool(1)
    pool.run(abs, 0)  # the first call starts the process
    prompts: dict[float, Any] = {}

    def compute_in_process(seconds: float) -> None:
        pool.run(timeit.timeit, "x = x * 3 % 1000003", "x = 7", time.perf_counter, int(seconds * steps_per_s()))

    def compute_where_measured(seconds: float) -> None:
        """As a worker reads prompts: here, until they are measured to compute for long."""
        if seconds not in prompts:
            elsewhere: Any = Computing(compute_in_process, seconds)
            prompts[seconds] = PromptsByCpuTime(Computing(compute, seconds), lambda: elsewhere)
        prompts[seconds].prompt(0)

    kinds: tuple[tuple[str, Stage, Stage, Sequence[Mix]], ...] = (
        ("sleeping", time.sleep, time.sleep, MIXES),
        ("computing prepare", compute, time.sleep, MIXES),
        ("computing both", compute, compute, COMPUTING_MIXES),
        ("computing both, prompts", compute_where_measured, compute, COMPUTING_MIXES),
    )
    try:
        for kind, prepare, generate, chosen in kinds:
            for mix in chosen:
                name = f"{':'.join(f'{part:g}' for part in mix)} {kind}"
                by_hand = StageWorkload(mix, compute if prepare is compute_where_measured else prepare, generate)
                measure(table, results, name, StageWorkload(mix, prepare, generate), by_hand, mix, batches, rounds)
    finally:
        pool.close()


class Computing:
    """An environment whose prompts take time."""

    def __init__(self, spend: Stage, seconds: float) -> None:
        self._spend, self._seconds = spend, seconds

    def prompt(self, position: int) -> None:
        self._spend(self._seconds)


def measure(
    table: Table,
    results: list[dict[str, Any]],
    name: str,
    workload: StageWorkload,
    by_hand: StageWorkload,
    mix: Mix,
    batches: int,
    rounds: int,
) -> None:
    taken = interleaved(
        {
            "limit": lambda: limit_rate(by_hand, mix, batches),
            "off": lambda: runner_rate(workload, batches, prefetch=False),
            "on": lambda: runner_rate(workload, batches, prefetch=True),
            "plain": lambda: plain_rate(
                by_hand, CountingController(batches * LEASES_PER_BATCH), LEASES_PER_BATCH * GROUP
            ),
        },
        rounds,
    )
    limit, on, plain, off = (statistics.median(taken[one]) for one in ("limit", "on", "plain", "off"))
    of_limit, of_plain, on_off = ratio(taken, "on", "limit"), ratio(taken, "off", "plain"), ratio(taken, "on", "off")
    table.add_row(
        name, f"{limit:.0f}", f"{on:.0f}", shown(of_limit), f"{plain:.0f}", f"{off:.0f}", shown(of_plain), shown(on_off)
    )
    results.append(entry(f"prefetch on / off {name}", on, off, "prefetch off", on_off))
    results.append(entry(f"overlap {name}", on, limit, "slowest stage alone", of_limit))
    results.append(entry(f"prefetch off {name}", off, plain, "plain loop", of_plain))


def interleaved(ways: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Rounds of all of them, one after the other, every second one in the opposite order: drift hits all alike."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in [*ways] if number % 2 == 0 else [*reversed(ways)]:
            taken[name].append(ways[name]())
    return taken


def ratio(taken: dict[str, list[float]], ours: str, peer: str) -> list[float]:
    """Within each round."""
    return [one / other for one, other in zip(taken[ours], taken[peer], strict=True)]


def shown(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def entry(name: str, ours: float, peer: float, peer_name: str, ratios: list[float]) -> dict[str, Any]:
    return {
        "name": name,
        "unit": "samples/s",
        "ours": ours,
        "peer": peer,
        "peer_name": peer_name,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def language() -> tuple[Any, int, int]:
    from penstock.engines.models import LanguagePolicy, TinyLanguageModel, build
    from penstock.engines.torch.engine import TorchEngine
    from penstock.envs.tasks import Copy
    from penstock.rollout.io.language_workload import LanguageWorkload
    from penstock.rollout.settings import RolloutSection

    policy = build(TinyLanguageModel(alphabet=Copy().alphabet))
    assert isinstance(policy, LanguagePolicy)
    engine = TorchEngine(policy.module, pad_id=policy.tokenizer.pad_id)
    return LanguageWorkload(Copy(), engine, policy.tokenizer, RolloutSection(max_new_tokens=5)), 128, 8


def cartpole() -> tuple[Any, int, int]:
    from penstock.engines.models import GymnasiumPolicy, build
    from penstock.engines.policy import PolicyEngine
    from penstock.envs.io.gymnasium import GymnasiumEnvironment
    from penstock.rollout.io.gymnasium_workload import GymnasiumWorkload

    environment = GymnasiumEnvironment(id="CartPole-v1")
    spaces = environment.spaces
    policy = build(GymnasiumPolicy(spaces.observation_shape, spaces.action_kind, spaces.action_size))
    return GymnasiumWorkload(environment, PolicyEngine(policy.module)), 32, 4


def real_workloads(results: list[dict[str, Any]], batches: int, rounds: int) -> Table:
    import torch

    torch.set_num_threads(1)
    table = Table(
        "workload",
        "plain loop",
        "prefetch off",
        "of the plain loop",
        "prefetch on",
        "of the plain loop",
        "on / off",
        title=f"Real workloads, samples/s, {ROUND_TRIP_S * 1e3:g} ms to the controller and back",
    )
    for name, build in (("language model, 0.3M", language), ("CartPole-v1", cartpole)):
        workload, size, group = build()

        def run(prefetch: bool, workload: Any = workload, size: int = size, group: int = group) -> float:
            bounds = Bounds(batch_samples=size, queue_samples=2 * size)
            controller = CountingController(batches * size // group, group, ROUND_TRIP_S)
            return running_rate(workload, controller, RunnerSettings(drain_s=10.0, bounds=bounds, prefetch=prefetch))

        def by_hand(workload: Any = workload, size: int = size, group: int = group) -> float:
            return plain_rate(workload, CountingController(batches * size // group, group, ROUND_TRIP_S), size)

        ways = {"off": functools.partial(run, False), "on": functools.partial(run, True), "plain": by_hand}
        taken = interleaved(ways, rounds)
        plain, off, on = (statistics.median(taken[one]) for one in ("plain", "off", "on"))
        off_plain, on_plain, on_off = (
            ratio(taken, ours, peer) for ours, peer in (("off", "plain"), ("on", "plain"), ("on", "off"))
        )
        table.add_row(name, f"{plain:.0f}", f"{off:.0f}", shown(off_plain), f"{on:.0f}", shown(on_plain), shown(on_off))
        results.append(entry(f"{name}, prefetch off", off, plain, "plain loop", off_plain))
        results.append(entry(f"{name}, prefetch on", on, plain, "plain loop", on_plain))
        results.append(entry(f"{name}, prefetch on / off", on, off, "prefetch off", on_off))
    return table


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="penstock bench prefetch", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--quick", action="store_true", help="fewer batches")
    arguments = parser.parse_args(argv)
    results: list[dict[str, Any]] = []
    table = Table(
        "prepare:generate:post",
        "limit",
        "prefetch on",
        "of the limit",
        "plain loop",
        "prefetch off",
        "of the plain loop",
        "on / off",
        title="Stage mixes, samples/s: medians; ratios within a round, their median (least to most)",
    )
    load = [os.getloadavg()[0]]
    mixes(table, results, batches=8 if arguments.quick else 16, rounds=3 if arguments.quick else 5)
    console = Console(width=140)
    console.print(table)
    console.print(real_workloads(results, batches=10 if arguments.quick else 20, rounds=5 if arguments.quick else 9))
    load.append(os.getloadavg()[0])
    console.print(
        f"Python {platform.python_version()}, {os.cpu_count()} cores, load {load[0]:.1f} before, {load[1]:.1f} after"
    )
    slower = [one for one in results if one["peer_name"] == "prefetch off" and one["ratio"] < NEVER_BELOW]
    for one in slower:
        console.print(f"[red]slower with prefetch on: {one['name']}: {one['ratio']:.2f}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    import sys

    raise SystemExit(main(sys.argv[1:]))
