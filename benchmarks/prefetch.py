"""Overlapped rollout generation against a plain loop and against the slowest stage alone.

Stage mixes are prepare : generate : postprocess. "limit" is the slowest stage run by itself in the same process; "plain
loop" is what one would write by hand: lease, prepare, generate, postprocess, deliver, one after the other, at the same
controller and with no runner at all. Rates are taken between the first and the last delivery: filling is not counted,
nor is the trial in which a worker with prefetch on finds out whether overlapping pays.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import inspect
import json
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
TRIAL_BATCHES = 36
"""With prefetch on a worker tries both ways first; rates are taken after that."""
ROUND_TRIP_S = 0.002
"""Real workloads: what a lease and a delivery cost over loopback."""

Stage = Callable[[float], None]


@functools.cache
def steps_per_s() -> float:
    return 100_000 / min(timeit.repeat("x = x * 3 % 1000003", setup="x = 7", number=100_000, repeat=5))


def compute(seconds: float) -> None:
    """Pure Python that keeps the interpreter to itself for about so long."""
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
    """Grants a fixed number of samples; notes when deliveries came."""

    def __init__(self, prompts: int, group: int = GROUP, round_trip_s: float = 0.0) -> None:
        self.prompts, self.group, self.round_trip_s = prompts, group, round_trip_s
        self.issued = 0
        self.deliveries: list[tuple[float, int]] = []
        self.runner: Runner | None = None
        self.settled_from = 0
        """The delivery at which the runner had found out whether to overlap."""

    async def lease(self, samples: int, wait_s: float) -> Leased:
        if self.round_trip_s:
            await asyncio.sleep(self.round_trip_s)
        leases: list[PromptLease] = []
        while samples >= self.group and self.issued < self.prompts:
            leases.append(one_lease(self.issued, self.group))
            self.issued += 1
            samples -= self.group
        return Leased(tuple(leases), "granted" if leases else "exhausted", "running")

    async def deliver(
        self, rollouts: Sequence[Any], failures: Sequence[Any], returned: Sequence[Any], scores: Sequence[Any] = ()
    ) -> Delivered:
        if self.round_trip_s:
            await asyncio.sleep(self.round_trip_s)
        assert not failures, failures[0].error
        self.deliveries.append((time.perf_counter(), len(rollouts)))
        if self.runner is not None and not self.runner.machine.overlap.settled:
            self.settled_from = len(self.deliveries) + 1
        return Delivered()

    def rate(self) -> float:
        """Samples per second between the first delivery, or the first after a trial that ended, and the last."""
        taken = (
            self.deliveries[self.settled_from :] if self.settled_from < len(self.deliveries) - 4 else self.deliveries
        )
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
        controller.runner = runner if settings.prefetch else None
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

    def compute_in_process(seconds: float) -> None:
        pool.run(timeit.timeit, "x = x * 3 % 1000003", "x = 7", time.perf_counter, int(seconds * steps_per_s()))

    kinds: tuple[tuple[str, Stage, Stage, Sequence[Mix]], ...] = (
        ("sleeping", time.sleep, time.sleep, MIXES),
        ("computing prepare", compute, time.sleep, MIXES),
        ("computing both", compute, compute, COMPUTING_MIXES),
        ("computing both, process", compute_in_process, compute, COMPUTING_MIXES),
    )
    try:
        for kind, prepare, generate, chosen in kinds:
            for mix in chosen:
                name = f"{':'.join(f'{part:g}' for part in mix)} {kind}"
                measure(table, results, name, StageWorkload(mix, prepare, generate), mix, batches, rounds)
    finally:
        pool.close()


def measure(
    table: Table,
    results: list[dict[str, Any]],
    name: str,
    workload: StageWorkload,
    mix: Mix,
    batches: int,
    rounds: int,
) -> None:
    """Rounds of all four, one after the other; the median of the ratios within a round, so that drift cancels."""
    taken = [
        (
            limit_rate(workload, mix, batches),
            runner_rate(workload, TRIAL_BATCHES + batches, prefetch=True),
            plain_rate(workload, CountingController(batches * LEASES_PER_BATCH), LEASES_PER_BATCH * GROUP),
            runner_rate(workload, batches, prefetch=False),
        )
        for _ in range(rounds)
    ]
    limit, on, plain, off = (statistics.median(column) for column in zip(*taken, strict=True))
    of_limit = statistics.median(one[1] / one[0] for one in taken)
    of_plain = statistics.median(one[3] / one[2] for one in taken)
    on_off = [one[1] / one[3] for one in taken]
    ratio = f"{statistics.median(on_off):.2f} ({min(on_off):.2f} to {max(on_off):.2f})"
    row = [name, f"{limit:.0f}", f"{on:.0f}", f"{of_limit:.1%}", f"{plain:.0f}", f"{off:.0f}", f"{of_plain:.1%}", ratio]
    table.add_row(*row)
    results.append(entry(f"prefetch on / off {name}", on, off, "prefetch off", statistics.median(on_off)))
    results.append(entry(f"overlap {name}", on, limit, "slowest stage alone", of_limit))
    results.append(entry(f"prefetch off {name}", off, plain, "plain loop", of_plain))


def entry(name: str, ours: float, peer: float, peer_name: str, ratio: float) -> dict[str, Any]:
    return {
        "name": name,
        "unit": "samples/s",
        "ours": ours,
        "peer": peer,
        "peer_name": peer_name,
        "ratio": ratio,
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
    """Rounds of all three, one after the other; the median of the ratios within a round, so that drift cancels."""
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
        taken: list[tuple[float, float, float]] = []
        for _ in range(rounds):
            rates = [plain_rate(workload, CountingController(batches * size // group, group, ROUND_TRIP_S), size)]
            for prefetch in (False, True):
                controller = CountingController(
                    (TRIAL_BATCHES * prefetch + batches) * size // group, group, ROUND_TRIP_S
                )
                settings = RunnerSettings(
                    drain_s=10.0, bounds=Bounds(batch_samples=size, queue_samples=2 * size), prefetch=prefetch
                )
                rates.append(running_rate(workload, controller, settings))
            taken.append((rates[0], rates[1], rates[2]))
        plain, off, on = (statistics.median(column) for column in zip(*taken, strict=True))
        off_plain, on_plain, on_off = (
            statistics.median(one[ours] / one[peer] for one in taken) for ours, peer in ((1, 0), (2, 0), (2, 1))
        )
        table.add_row(
            name, f"{plain:.0f}", f"{off:.0f}", f"{off_plain:.1%}", f"{on:.0f}", f"{on_plain:.1%}", f"{on_off:.1%}"
        )
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
        title="Stage mixes, samples/s: medians; on / off with its least and most",
    )
    mixes(table, results, batches=8 if arguments.quick else 16, rounds=1 if arguments.quick else 3)
    console = Console(width=120)
    console.print(table)
    console.print(real_workloads(results, batches=10 if arguments.quick else 20, rounds=3 if arguments.quick else 7))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    import sys

    raise SystemExit(main(sys.argv[1:]))
