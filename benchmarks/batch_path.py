"""From turn results in a worker to packed micro-batches in the trainer: wall time, loop lag, bytes and memory.

Sixty-four rollouts of fifty turns, 4 to 8 thousand tokens each, routing of 48 layers by 8 experts as uint8 (and then
without routing, and then four times as many). Three processes, each with a loop on uvloop and a probe on it:

    worker       keeps the turns as episodes, lays them out and writes them into its payload ring, in background threads
    controller   the real service and machine behind their HTTP port, with their journal: leases, deliveries, the batch
    trainer      waits for the batch, fetches, decodes, computes advantages and packs, in background threads

Beside them, in the same run: a memcpy of the same bytes (the physical limit: one thread, one large array, into memory
that is warm; one copy before every round, when nothing else runs), an idle process whose loop shows what lag this
machine gives to a process that does nothing. prime-rl's own path is not run here: below the table stand its figures for
the same rollouts, measured once on another machine. On a busy machine compare the processor times.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table

from _models import release, spread
from penstock.batch import advantage, codec, filters
from penstock.batch.pack import PackSettings, TokenMicroBatch, pack_tokens
from penstock.control.controller import Controller
from penstock.control.io.client import ControlClient
from penstock.control.io.http import ControlApp, ControlServer
from penstock.control.io.service import ControlService
from penstock.control.pipeline import PipelineControl
from penstock.control.settings import PipelineSettings
from penstock.journal.writer import Journal
from penstock.payload.io.fetch import BatchFetcher, FetchReport
from penstock.payload.io.received import Buffers
from penstock.payload.io.shm import Ring
from penstock.records.ids import MemberId, PipelineName, RunId, SampleId, StepIndex, Version
from penstock.records.rollout import Rollout
from penstock.rollout.episode import Episode
from penstock.runtime.clock import SystemClock
from penstock.runtime.lag import LagMonitor
from penstock.runtime.offload import Offload
from penstock.runtime.process import host_id
from penstock.runtime.settings import LagSection
from penstock.runtime.tasks import Tasks
from penstock.wire.messages import (
    AckCheckpoint,
    AckStep,
    AskBatch,
    AskLease,
    BatchReady,
    Deliver,
    Leased,
    Register,
)

TURNS = 50
LAYERS, EXPERTS = 48, 8
GROUP = 8
PACK = PackSettings(micro_batch_tokens=32_768, layout="padded")
PROBE_S = 0.002
THREADS = len(os.sched_getaffinity(0))
DEADLINE_S = 120.0
PIPELINE, WORKER, TRAINER, TOKEN = PipelineName("bench"), MemberId("worker"), MemberId("trainer"), "benchmark"
ROLES = ("worker", "controller", "trainer", "idle")

PEER = (
    "prime-rl (HEAD in autumn 2026; two cores, like for like, measured apart): 9 to 11 times our wall time, a "
    "wait-p99 of 415 to 1,089 ms, 45 B/token beyond routing"
)

Round = Callable[[int], Coroutine[Any, Any, dict[str, float]]]


class Workload(msgspec.Struct, frozen=True):
    """What is carried."""

    rollouts: int
    routed: bool


class Turn(msgspec.Struct):
    """The result of one request, as an engine would hand it over."""

    appended_ids: np.ndarray
    sampled_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    routed_experts: np.ndarray | None
    boundary_experts: np.ndarray | None


def turns_of(number: int, routed: bool) -> list[Turn]:
    """The turns of one rollout."""
    rng = np.random.default_rng(number)
    tokens = int(rng.integers(4_000, 8_000))
    cuts = np.linspace(0, tokens, TURNS + 1).astype(int)
    result = []
    for index, count in enumerate(np.diff(cuts).tolist()):
        appended = count // 3
        sampled = count - appended
        shape = (count - 1, LAYERS, EXPERTS)
        result.append(
            Turn(
                rng.integers(0, 50_000, appended, dtype=np.int32),
                rng.integers(0, 50_000, sampled, dtype=np.int32),
                -rng.random(sampled, dtype=np.float32),
                np.array([[0, 0]], np.int32),
                rng.integers(0, 128, shape, dtype=np.uint8) if routed else None,
                rng.integers(0, 128, (1, *shape[1:]), dtype=np.uint8) if routed and index else None,
            )
        )
    return result


def peak_bytes() -> float:
    """The kernel's own mark for this program; the usual call would also count the process that started it."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return float(line.split()[1]) * 1024


async def nothing(number: int) -> dict[str, float]:
    return {}


async def probed(pipe: Connection, rounds: int, one_round: Round, prepare: Round = nothing) -> None:
    """Prepare, wait for the signal, run a round under a probe, report; the probe sees nothing but the round."""
    pipe.send("set up")
    for number in range(rounds):
        await asyncio.to_thread(pipe.recv)
        await prepare(number)
        monitor = LagMonitor(settings=LagSection(period_s=PROBE_S, window=1_000_000, stall_s=5.0))
        probe = asyncio.create_task(monitor.run())
        await asyncio.sleep(0.02)
        pipe.send("ready")
        await asyncio.to_thread(pipe.recv)
        began = time.process_time()
        figures = await asyncio.wait_for(one_round(number), DEADLINE_S)
        figures["cpu_s"] = time.process_time() - began
        report = monitor.report()
        probe.cancel()
        await asyncio.gather(probe, return_exceptions=True)
        lag = {"p99_s": report.p99_s, "max_s": report.max_s, "wait_p99_s": report.wait_p99_s}
        pipe.send(figures | lag | {"peak_bytes": peak_bytes()})


async def worker(pipe: Connection, folder: Path, workload: Workload, rounds: int) -> None:
    turns = [turns_of(number, workload.routed) for number in range(workload.rollouts)]
    offload = Offload(THREADS, "join")
    ring = Ring.create("benchmark", capacity_bytes=workload.rollouts * 3_400_000 + 2**20, slots=workload.rollouts + 8)
    client = ControlClient(folder / "controller.json", TOKEN, PIPELINE, WORKER)
    address = ring.address(host_id=host_id())
    await client.call(Register(PIPELINE, WORKER, role="rollout", pid=os.getpid(), host_id=host_id(), ring=address))
    requests = itertools.count()
    leased: list[tuple[SampleId, ...]] = []

    def write(sample: SampleId, number: int) -> Rollout:
        mine = turns[sample % workload.rollouts]
        episode = Episode.start(mine[0].appended_ids)
        for index, turn in enumerate(mine):
            if index:
                episode.replied("", turn.appended_ids)
            episode.generated(
                turn.sampled_ids,
                turn.logprobs,
                turn.versions,
                number,
                "",
                routed_experts=turn.routed_experts,
                boundary_experts=turn.boundary_experts,
            )
            episode.finish_turn("")
        payload = ring.fill(codec.encode(episode.arrays()), timeout_s=10.0)
        return Rollout(sample, Version(number), "", float(sample % 3), episode.generated_tokens, payload)

    async def deliver(group: tuple[SampleId, ...], number: int) -> float:
        rollouts = await asyncio.gather(*(offload.run(write, sample, number) for sample in group))
        written = time.monotonic()
        await client.call(Deliver(PIPELINE, WORKER, rollouts=tuple(rollouts)))
        return written

    async def lease(number: int) -> dict[str, float]:
        while (held := sum(map(len, leased))) < workload.rollouts:
            wanted = workload.rollouts - held
            ask = AskLease(PIPELINE, WORKER, next(requests), wanted, Version(number), wait_s=10)
            answer = await client.call(ask)
            assert isinstance(answer, Leased), answer
            leased.extend(lease.samples for lease in answer.leases)
        return {}

    async def one_round(number: int) -> dict[str, float]:
        groups, leased[:] = leased[:], []
        began = time.monotonic()
        async with asyncio.TaskGroup() as delivering:
            tasks = [delivering.create_task(deliver(group, number)) for group in groups]
        return {"began": began, "written": max(task.result() for task in tasks)}

    await probed(pipe, rounds, one_round, lease)
    await client.close()
    offload.close(5.0)
    ring.close()


async def controller(pipe: Connection, folder: Path, workload: Workload, rounds: int) -> None:
    settings = PipelineSettings(
        name=PIPELINE, groups_per_step=workload.rollouts // GROUP, group_size=GROUP, max_staleness=0
    )
    keep = filters.build(["zero_signal"])
    journal = Journal(folder / "journal.sqlite", RunId("bench"))
    service = ControlService(Controller({PIPELINE: PipelineControl(settings, keep)}), journal, SystemClock())
    service.start()
    server = ControlServer(ControlApp(service, TOKEN))
    body = {"host": "127.0.0.1", "port": server.bind(), "pid": os.getpid()}
    (folder / "controller.json").write_text(json.dumps(body))
    async with Tasks() as tasks:
        tasks.spawn("service", service.run())
        tasks.spawn("http", server.serve())

        async def one_round(number: int) -> dict[str, float]:
            await asyncio.to_thread(pipe.recv)  # until the trainer has packed
            return {}

        await probed(pipe, rounds, one_round)
        await asyncio.to_thread(pipe.recv)  # until the others have left
        service.close()
        await server.stop(5.0)
        tasks.cancel()
    service.check()
    journal.close(10.0)


async def trainer(pipe: Connection, folder: Path, workload: Workload, rounds: int) -> None:
    offload = Offload(1 + THREADS, "fetch")
    fetcher = BatchFetcher(host_id=host_id())
    compute = advantage.resolve("grpo")
    buffers = Buffers()
    memory: list[np.ndarray] = []
    client = ControlClient(folder / "controller.json", TOKEN, PIPELINE, TRAINER)
    await client.call(
        Register(PIPELINE, TRAINER, role="trainer", pid=os.getpid(), host_id=host_id(), step=StepIndex(0))
    )
    asking: list[asyncio.Task[Any]] = []
    reports: list[FetchReport] = []

    def allocate(size_bytes: int) -> np.ndarray:
        memory.append(buffers.take(size_bytes))
        return memory[-1]

    def fetch_and_pack(ready: BatchReady) -> tuple[list[TokenMicroBatch], dict[str, float]]:
        groups = ready.batch.groups
        references = [reference for group in groups for reference in group.payloads]
        report = fetcher.fetch(references, ready.rings)
        reports.append(report)
        assert not report.missing, report.missing
        fetched = time.monotonic()
        samples = [codec.decode(report.views[reference]) for reference in references]
        rewards = [reward for group in groups for reward in group.rewards]
        advantages = advantage.compute(compute, rewards, [len(group.samples) for group in groups])
        batches = pack_tokens(samples, advantages, PACK, spread=offload.map, allocate=allocate)
        return batches, {
            "fetched": fetched,
            "ended": time.monotonic(),
            "tokens": float(sum(len(sample["token_ids"]) for sample in samples)),
            "payload_bytes": float(sum(reference.size_bytes for reference in references)),
        }

    async def train(number: int) -> dict[str, float]:
        """What a trainer does between two batches, without the training; and it asks for the next."""
        while memory:
            buffers.release(memory.pop())
        while reports:
            reports.pop().consumed()
        if number:
            await client.call(AckStep(PIPELINE, TRAINER, StepIndex(number - 1)))
            await client.call(AckCheckpoint(PIPELINE, TRAINER, StepIndex(number)))
        ask = AskBatch(PIPELINE, TRAINER, StepIndex(number), wait_s=DEADLINE_S)
        asking.append(asyncio.create_task(client.call(ask)))
        return {}

    async def one_round(number: int) -> dict[str, float]:
        ready = await asking.pop()
        assert isinstance(ready, BatchReady), ready
        given = time.monotonic()
        batches, figures = await offload.run(fetch_and_pack, ready)
        routing = sum(b.routed_experts_RTLK.nbytes for b in batches if b.routed_experts_RTLK is not None)
        beyond = sum(batch.size_bytes for batch in batches) - routing
        return figures | {"given": given, "micro_batch_bytes": float(beyond)}

    await probed(pipe, rounds, one_round, train)
    await client.close()
    offload.close(5.0)
    fetcher.close()


async def idle(pipe: Connection, folder: Path, workload: Workload, rounds: int) -> None:
    async def one_round(number: int) -> dict[str, float]:
        await asyncio.to_thread(pipe.recv)
        return {}

    await probed(pipe, rounds, one_round)


def process(role: str, pipe: Connection, folder: Path, workload: Workload, rounds: int) -> None:
    roles = {"worker": worker, "controller": controller, "trainer": trainer, "idle": idle}
    uvloop.run(roles[role](pipe, folder, workload, rounds))


class Memcpy:
    """The limit: a plain copy of the same bytes, between arrays that are warm."""

    def __init__(self, size_bytes: int) -> None:
        self._source = np.ones(size_bytes, np.uint8)
        self._target = np.zeros(size_bytes, np.uint8)
        self.times_s: list[float] = []
        self.cpu_s: list[float] = []

    def measure(self) -> None:
        began, cpu_began = time.perf_counter(), time.process_time()
        np.copyto(self._target, self._source)
        self.times_s.append(time.perf_counter() - began)
        self.cpu_s.append(time.process_time() - cpu_began)


def run_ours(workload: Workload, rounds: int) -> dict[str, Any]:
    """Medians over the rounds after the first, which finds all memory cold; of the lags also the worst."""
    context = multiprocessing.get_context("spawn")
    memcpy: Memcpy | None = None
    with tempfile.TemporaryDirectory() as directory:
        pipes: dict[str, Connection] = {}
        processes: dict[str, Any] = {}
        try:
            for role in ("controller", "worker", "trainer", "idle"):
                pipes[role], far = context.Pipe()
                arguments = (role, far, Path(directory), workload, rounds + 1)
                processes[role] = context.Process(target=process, args=arguments, daemon=True)
                processes[role].start()
                _expect(pipes[role])
            collected: list[dict[str, dict[str, float]]] = []
            for _ in range(rounds + 1):
                # The trainer's acknowledgement makes room for the worker's leases; all must be under their probes,
                # and the trainer listening, when work appears.
                for role in ("idle", "controller", "trainer", "worker"):
                    pipes[role].send("prepare")
                    _expect(pipes[role])
                if memcpy is not None:
                    memcpy.measure()
                for role in ("idle", "controller", "trainer", "worker"):
                    pipes[role].send("go")
                figures = {role: _expect(pipes[role]) for role in ("worker", "trainer")}
                for role in ("controller", "idle"):
                    pipes[role].send("stop")
                    figures[role] = _expect(pipes[role])
                collected.append(figures)
                if memcpy is None:
                    memcpy = Memcpy(int(figures["trainer"]["payload_bytes"]))
                    memcpy.measure()
                    memcpy.times_s.clear()
                    memcpy.cpu_s.clear()
            for role in ("worker", "trainer", "idle", "controller"):
                if role == "controller":
                    pipes[role].send("the others have left")
                processes[role].join(10.0)
        finally:
            for one in processes.values():
                if one.is_alive():
                    one.kill()
    warm = collected[1:]
    assert memcpy is not None

    def between(later: tuple[str, str], earlier: tuple[str, str]) -> list[float]:
        return [r[later[0]][later[1]] - r[earlier[0]][earlier[1]] for r in warm]

    rounds_of: dict[str, list[float]] = {
        "wall_s": between(("trainer", "ended"), ("worker", "began")),
        "write_s": between(("worker", "written"), ("worker", "began")),
        "control_s": between(("trainer", "given"), ("worker", "written")),
        "fetch_s": between(("trainer", "fetched"), ("trainer", "given")),
        "pack_s": between(("trainer", "ended"), ("trainer", "fetched")),
        "memcpy_s": memcpy.times_s,
        "memcpy_cpu_s": memcpy.cpu_s,
        "cpu_s": [sum(r[role]["cpu_s"] for role in ("worker", "controller", "trainer")) for r in warm],
    }
    result: dict[str, Any] = {
        **{name: statistics.median(found) for name, found in rounds_of.items()},
        "rounds": rounds_of,
        "tokens": warm[0]["trainer"]["tokens"],
        "payload_bytes": warm[0]["trainer"]["payload_bytes"],
        "micro_batch_bytes": warm[0]["trainer"]["micro_batch_bytes"],
        "peak_bytes": sum(warm[-1][role]["peak_bytes"] for role in ("worker", "controller", "trainer")),
    }
    for role in ROLES:
        for figure in ("p99_s", "wait_p99_s"):
            result[f"{role}_{figure}"] = statistics.median(r[role][figure] for r in warm)
        result[f"{role}_max_s"] = max(r[role]["max_s"] for r in warm)
    return result


def _expect(pipe: Connection) -> Any:
    if not pipe.poll(DEADLINE_S):
        raise TimeoutError(f"a process of the benchmark said nothing for {DEADLINE_S} s")
    return pipe.recv()


class Report:
    """A table for people and rows for programs."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.table = Table(title="Batch path")
        for column in ("figure", "ours", "peer", "peer is", "ours / peer", "target"):
            self.table.add_column(column, justify="left" if column in ("figure", "peer is") else "right")

    def add(
        self,
        name: str,
        unit: str,
        ours: float | list[float],
        peer: float | list[float],
        peer_name: str,
        target: str = "",
    ) -> None:
        """A figure, or the figures of all rounds: shown as their median and from the least to the most."""
        mine, theirs = (one if isinstance(one, list) else [one] for one in (ours, peer))
        middle, other = statistics.median(mine), statistics.median(theirs)
        ratio = middle / other if other else 0.0
        row = {"name": name, "unit": unit, "ours": middle, "peer": other, "peer_name": peer_name, "ratio": ratio}
        self.rows.append(row | ({"ours_rounds": mine, "peer_rounds": theirs} if len(mine) > 1 else {}))
        cells = [spread(one, ".4g") if len(one) > 1 else f"{one[0]:.4g}" for one in (mine, theirs)]
        self.table.add_row(name, f"{cells[0]} {unit}", f"{cells[1]} {unit}", peer_name, f"{ratio:.3g}", target)


def measure(report: Report, label: str, workload: Workload, rounds: int) -> dict[str, Any]:
    ours = run_ours(workload, rounds)
    rounds_of = ours["rounds"]
    copy_s = rounds_of["memcpy_s"]
    report.add(
        f"{label}: wall",
        "s",
        rounds_of["wall_s"],
        copy_s,
        "memcpy of the same bytes",
        "< 0.35 s, < 8 x" if workload.routed else "",
    )
    cpu = rounds_of["cpu_s"], rounds_of["memcpy_cpu_s"]
    report.add(f"{label}: processor time, all three", "s", *cpu, "of the memcpy")
    if workload.routed:
        stages = {"write": "join and write", "control": "deliver and get", "fetch": "fetch", "pack": "pack"}
        for stage, name in stages.items():
            report.add(f"{label}: {name}", "s", rounds_of[f"{stage}_s"], copy_s, "memcpy of the same bytes")
    for role, target in (("controller", True), ("worker", False), ("trainer", False)):
        for figure, limit in (("p99_s", ""), ("wait_p99_s", "< 5 ms"), ("max_s", "< 20 ms")):
            name = figure.removesuffix("_s").replace("_", "-")
            report.add(
                f"{label}: {role} lag {name}",
                "ms",
                ours[f"{role}_{figure}"] * 1e3,
                ours[f"idle_{figure}"] * 1e3,
                "idle process",
                limit if target else "",
            )
    tokens = ours["tokens"]
    routing = tokens * LAYERS * EXPERTS if workload.routed else 0.0
    report.add(
        f"{label}: payload beyond routing",
        "B/token",
        (ours["payload_bytes"] - routing) / tokens,
        9.0,
        "the arrays themselves",
        "<= 16",
    )
    report.add(
        f"{label}: micro-batch beyond routing",
        "B/token",
        ours["micro_batch_bytes"] / tokens,
        15.0,
        "the arrays, no padding",
        "<= 16",
    )
    report.add(
        f"{label}: peak memory, all three, the ring in two",
        "MB",
        ours["peak_bytes"] / 1e6,
        ours["payload_bytes"] / 1e6,
        "the payload bytes",
    )
    return ours


def main(argv: list[str]) -> int:
    """Run the benchmark; 0 when it ran, whatever it found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="sixteen rollouts, few rounds")
    options = parser.parse_args(argv)
    rounds = 3 if options.quick else 7
    standard = 16 if options.quick else 64
    report = Report()
    middle = measure(report, f"{standard} rollouts", Workload(standard, True), rounds)
    measure(report, f"{standard} rollouts, tokens only", Workload(standard, False), rounds)
    if not options.quick:
        small = run_ours(Workload(16, True), rounds)
        large = measure(report, "256 rollouts", Workload(256, True), 3)
        per_token = [figures["wall_s"] / figures["tokens"] * 1e9 for figures in (small, middle, large)]
        report.add("growth: 64 against 16 rollouts", "ns/token", per_token[1], per_token[0], "16 rollouts", "about 1 x")
        report.add(
            "growth: 256 against 16 rollouts", "ns/token", per_token[2], per_token[0], "16 rollouts", "about 1 x"
        )
    console = Console(width=150)
    console.print(report.table)
    console.print(f"memcpy: {release('numpy')}, one thread; {rounds} rounds, load {os.getloadavg()[0]:.1f} at the end")
    console.print(PEER)
    if options.json:
        options.json.write_text(json.dumps(report.rows, indent=2))
    return 0


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))
