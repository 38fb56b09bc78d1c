"""From turn results in a worker to packed micro-batches in the trainer: wall time, loop lag, bytes and memory.

Sixty-four rollouts of fifty turns, 4 to 8 thousand tokens each, routing of 48 layers by 8 experts as uint8 (and then
without routing). Three processes, each with a loop on uvloop and a probe on it:

    worker       joins, encodes and writes each rollout into its payload ring, in background threads
    controller   receives references and scalars, filters, hands out the batch
    trainer      fetches, decodes, computes advantages and packs, in background threads

Beside them, in the same run: a memcpy of the same bytes into warm memory (the physical limit), an idle process whose
loop shows what lag this machine gives to a process that does nothing, and the naive path (arrays joined again at every
turn, JSON with base64, all of it on one loop).
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import multiprocessing
import os
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table

from penstock.batch import advantage, codec, filters
from penstock.batch.assemble import Turn, TurnId, TurnTree
from penstock.batch.pack import PackSettings, TokenMicroBatch, pack_tokens
from penstock.payload.io.fetch import BatchFetcher
from penstock.payload.io.shm import Ring
from penstock.records.batch import Batch, BatchGroup
from penstock.records.ids import PromptIndex, SampleId, StepIndex, Version
from penstock.records.payload import RingAddress
from penstock.records.rollout import Rollout
from penstock.runtime.lag import LagMonitor
from penstock.runtime.offload import Offload
from penstock.runtime.process import host_id
from penstock.wire.codec import Codec

TURNS = 50
LAYERS, EXPERTS = 48, 8
GROUP = 8
PACK = PackSettings(micro_batch_tokens=32_768)
PROBE_S = 0.002
THREADS = max(1, os.cpu_count() or 1)
DEADLINE_S = 120.0


class Workload(msgspec.Struct, frozen=True):
    """What is carried."""

    rollouts: int
    routed: bool


class Delivered(msgspec.Struct, frozen=True, tag=True):
    """The worker's message to the controller."""

    rollouts: tuple[Rollout, ...]


class Assembled(msgspec.Struct, frozen=True, tag=True):
    """The controller's message to the trainer."""

    batch: Batch
    ring: RingAddress


MESSAGES: Codec[Delivered | Assembled] = Codec(Delivered | Assembled)


def turns_of(number: int, routed: bool) -> list[Turn]:
    """The results of one rollout's turns, as an engine would hand them over."""
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
                np.array([[0, 7]], np.int32),
                rng.integers(0, 128, shape, dtype=np.uint8) if routed else None,
                rng.integers(0, 128, (1, *shape[1:]), dtype=np.uint8) if routed and index else None,
            )
        )
    return result


async def send(stream: asyncio.StreamWriter, message: Delivered | Assembled) -> None:
    body = MESSAGES.encode(message)
    stream.write(struct.pack("<I", len(body)) + body)
    await stream.drain()


async def receive(stream: asyncio.StreamReader) -> Delivered | Assembled:
    (size,) = struct.unpack("<I", await stream.readexactly(4))
    return MESSAGES.decode(await stream.readexactly(size))


def peak_bytes() -> float:
    """The kernel's own mark for this program; the usual call would also count the process that started it."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return float(line.split()[1]) * 1024


async def probed(pipe: Connection, rounds: int, one_round: Callable[[], Coroutine[Any, Any, dict[str, float]]]) -> None:
    """Wait for the signal, run a round under a probe, report; the probe sees nothing but the round."""
    for _ in range(rounds):
        await asyncio.to_thread(pipe.recv)
        monitor = LagMonitor(period_s=PROBE_S, window=1_000_000, stall_s=5.0)
        probe = asyncio.create_task(monitor.run())
        await asyncio.sleep(0.02)
        pipe.send("ready")
        await asyncio.to_thread(pipe.recv)
        figures = await asyncio.wait_for(one_round(), DEADLINE_S)
        report = monitor.report()
        probe.cancel()
        await asyncio.gather(probe, return_exceptions=True)
        lag = {"p99_s": report.p99_s, "max_s": report.max_s, "wait_p99_s": report.wait_p99_s}
        pipe.send(figures | lag | {"peak_bytes": peak_bytes()})


async def worker(pipe: Connection, socket: str, workload: Workload, rounds: int) -> None:
    turns = [turns_of(number, workload.routed) for number in range(workload.rollouts)]
    offload = Offload(THREADS, "join")
    ring = Ring.create("benchmark", capacity_bytes=workload.rollouts * 3_400_000 + 2**20, slots=workload.rollouts + 8)
    pipe.send(ring.address(host_id=host_id()))
    pipe.recv()  # until the controller listens
    _, stream = await asyncio.open_unix_connection(socket)

    def write(number: int) -> Rollout:
        tree = TurnTree()
        tip: TurnId | None = None
        for turn in turns[number]:
            tip = tree.add(turn, tip)
        (sample,) = tree.chunks()
        reference = ring.fill(codec.encode(sample), timeout_s=10.0)
        length = sum(len(turn.sampled_ids) for turn in turns[number])
        return Rollout(SampleId(number), Version(7), "", float(number % 3), length, reference)

    async def one_round() -> dict[str, float]:
        began = time.monotonic()

        async def deliver(number: int) -> None:
            await send(stream, Delivered((await offload.run(write, number),)))

        async with asyncio.TaskGroup() as group:
            for number in range(workload.rollouts):
                group.create_task(deliver(number))
        return {"began": began}

    pipe.send("set up")
    await probed(pipe, rounds, one_round)
    offload.close(5.0)
    ring.close()


async def controller(pipe: Connection, socket: str, workload: Workload, rounds: int) -> None:
    ring: RingAddress = pipe.recv()
    streams: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    connected = asyncio.Event()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        streams.append((reader, writer))
        connected.set()

    keep = filters.build(filters.FilterSettings(zero_signal=True))
    async with await asyncio.start_unix_server(accept, socket):
        pipe.send("set up")
        for _ in range(2):
            await asyncio.wait_for(connected.wait(), DEADLINE_S)
            connected.clear()
        (from_worker, _), (_, to_trainer) = streams

        async def one_round() -> dict[str, float]:
            arrived: dict[int, Rollout] = {}
            while len(arrived) < workload.rollouts:
                message = await receive(from_worker)
                assert isinstance(message, Delivered)
                arrived |= {rollout.sample: rollout for rollout in message.rollouts}
            groups = []
            for prompt in range(workload.rollouts // GROUP):
                members = [arrived[prompt * GROUP + member] for member in range(GROUP)]
                if keep([m.reward for m in members], [m.length for m in members]) is None:
                    groups.append(
                        BatchGroup(
                            PromptIndex(prompt),
                            0,
                            tuple(m.sample for m in members),
                            tuple(m.reward for m in members),
                            tuple(m.version for m in members),
                            tuple(m.length for m in members),
                            tuple(m.payload for m in members),
                        )
                    )
            await send(to_trainer, Assembled(Batch(StepIndex(8), tuple(groups)), ring))
            return {}

        await probed(pipe, rounds, one_round)


async def trainer(pipe: Connection, socket: str, workload: Workload, rounds: int) -> None:
    offload = Offload(1, "fetch")
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="pack")
    fetcher = BatchFetcher(host_id=host_id())
    compute = advantage.resolve("grpo")
    from_controller, _ = await asyncio.open_unix_connection(socket)

    def fetch_and_pack(message: Assembled) -> tuple[list[TokenMicroBatch], int]:
        groups = message.batch.groups
        references = [reference for group in groups for reference in group.payloads]
        report = fetcher.fetch(references, [message.ring])
        assert not report.missing, report.missing
        samples = [codec.decode(report.views[reference]) for reference in references]
        rewards = [reward for group in groups for reward in group.rewards]
        advantages = advantage.compute(compute, rewards, [len(group.samples) for group in groups])
        batches = pack_tokens(samples, advantages, PACK, spread=pool.map)
        tokens = sum(len(sample["token_ids"]) for sample in samples)
        del samples
        report.consumed()
        return batches, tokens

    async def one_round() -> dict[str, float]:
        message = await receive(from_controller)
        assert isinstance(message, Assembled)
        batches, tokens = await offload.run(fetch_and_pack, message)
        ended = time.monotonic()
        routing = sum(b.routed_experts_RTLK.nbytes for b in batches if b.routed_experts_RTLK is not None)
        payload = sum(reference.size_bytes for group in message.batch.groups for reference in group.payloads)
        return {
            "ended": ended,
            "tokens": float(tokens),
            "payload_bytes": float(payload),
            "micro_batch_bytes": float(sum(batch.size_bytes for batch in batches) - routing),
        }

    pipe.send("set up")
    await probed(pipe, rounds, one_round)
    offload.close(5.0)
    pool.shutdown(cancel_futures=True)
    fetcher.close()


async def idle(pipe: Connection, socket: str, workload: Workload, rounds: int) -> None:
    async def one_round() -> dict[str, float]:
        await asyncio.to_thread(pipe.recv)
        return {}

    pipe.send("set up")
    await probed(pipe, rounds, one_round)


def process(role: str, pipe: Connection, socket: str, workload: Workload, rounds: int) -> None:
    roles = {"worker": worker, "controller": controller, "trainer": trainer, "idle": idle}
    uvloop.run(roles[role](pipe, socket, workload, rounds))


def run_ours(workload: Workload, rounds: int) -> dict[str, Any]:
    """Medians over the rounds after the first, which finds all memory cold; of the lags also the worst."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        socket = str(Path(directory) / "controller")
        pipes: dict[str, Connection] = {}
        processes = []
        for role in ("worker", "controller", "trainer", "idle"):
            pipes[role], far = context.Pipe()
            processes.append(
                context.Process(target=process, args=(role, far, socket, workload, rounds + 1), daemon=True)
            )
        workers, controllers, trainers, idles = processes
        try:
            workers_address = _start(workers, pipes["worker"])
            controllers.start()
            pipes["controller"].send(workers_address)
            _expect(pipes["controller"])
            pipes["worker"].send("the controller listens")
            _expect(pipes["worker"])
            trainers.start()
            _expect(pipes["trainer"])
            _start(idles, pipes["idle"])
            collected: list[dict[str, dict[str, float]]] = []
            for _ in range(rounds + 1):
                for signal in ("prepare", "go"):
                    # The worker goes last: the others must be listening, and under their probes, when work appears.
                    for role in ("idle", "trainer", "controller", "worker"):
                        pipes[role].send(signal)
                    if signal == "prepare":
                        for role in pipes:
                            _expect(pipes[role])
                figures = {role: _expect(pipes[role]) for role in ("worker", "controller", "trainer")}
                pipes["idle"].send("stop")
                collected.append(figures | {"idle": _expect(pipes["idle"])})
            for one in processes:
                one.join(10.0)
        finally:
            for one in processes:
                if one.is_alive():
                    one.kill()
    warm = collected[1:]
    result: dict[str, Any] = {
        "wall_s": statistics.median(r["trainer"]["ended"] - r["worker"]["began"] for r in warm),
        "tokens": warm[0]["trainer"]["tokens"],
        "payload_bytes": warm[0]["trainer"]["payload_bytes"],
        "micro_batch_bytes": warm[0]["trainer"]["micro_batch_bytes"],
        "peak_bytes": sum(warm[-1][role]["peak_bytes"] for role in ("worker", "controller", "trainer")),
    }
    for role in ("worker", "controller", "trainer", "idle"):
        for figure in ("p99_s", "wait_p99_s"):
            result[f"{role}_{figure}"] = statistics.median(r[role][figure] for r in warm)
        result[f"{role}_max_s"] = max(r[role]["max_s"] for r in warm)
    return result


def _start(one: Any, pipe: Connection) -> Any:
    one.start()
    return _expect(pipe)


def _expect(pipe: Connection) -> Any:
    if not pipe.poll(DEADLINE_S):
        raise TimeoutError(f"a process of the benchmark said nothing for {DEADLINE_S} s")
    return pipe.recv()


async def run_naive(workload: Workload) -> dict[str, float]:
    """One process, one loop: what the path looks like before anyone has thought about it."""
    turns = [turns_of(number, workload.routed) for number in range(workload.rollouts)]
    monitor = LagMonitor(period_s=PROBE_S, window=1_000_000, stall_s=60.0)
    probe = asyncio.create_task(monitor.run())
    await asyncio.sleep(0.02)
    began = time.monotonic()
    bodies: list[str] = []
    for rollout in turns:
        tokens: list[int] = []
        mask: list[bool] = []
        logprobs: list[float] = []
        routing = np.zeros((0, LAYERS, EXPERTS), np.uint8)
        for turn in rollout:
            tokens += turn.appended_ids.tolist() + turn.sampled_ids.tolist()
            mask += [False] * len(turn.appended_ids) + [True] * len(turn.sampled_ids)
            logprobs += [0.0] * len(turn.appended_ids) + turn.logprobs.tolist()
            if turn.routed_experts is not None:
                boundary = [] if turn.boundary_experts is None else [turn.boundary_experts]
                routing = np.concatenate([routing, *boundary, turn.routed_experts])
        encoded = base64.b64encode(routing.tobytes()).decode()
        bodies.append(json.dumps({"token_ids": tokens, "mask": mask, "logprobs": logprobs, "routing": encoded}))
        await asyncio.sleep(0)
    total = 0
    for body in bodies:
        decoded = json.loads(body)
        rows = [np.array(decoded["token_ids"]), np.array(decoded["mask"]), np.array(decoded["logprobs"])]
        rows.append(np.frombuffer(base64.b64decode(decoded["routing"]), np.uint8))
        total += sum(row.nbytes for row in rows)
        await asyncio.sleep(0)
    wall_s = time.monotonic() - began
    report = monitor.report()
    probe.cancel()
    await asyncio.gather(probe, return_exceptions=True)
    return {
        "wall_s": wall_s,
        "max_s": report.max_s,
        "wait_p99_s": report.wait_p99_s,
        "bytes": float(sum(map(len, bodies))),
    }


def memcpy_s(size_bytes: int) -> float:
    """The best of a few copies into memory that is warm."""
    source = np.ones(size_bytes, np.uint8)
    target = np.zeros(size_bytes, np.uint8)
    times = []
    for _ in range(7):
        began = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


class Report:
    """A table for people and rows for programs."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.table = Table(title="Batch path")
        for column in ("figure", "ours", "peer", "peer is", "ours / peer", "target"):
            self.table.add_column(column, justify="left" if column in ("figure", "peer is") else "right")

    def add(self, name: str, unit: str, ours: float, peer: float, peer_name: str, target: str = "") -> None:
        ratio = ours / peer if peer else 0.0
        self.rows.append(
            {"name": name, "unit": unit, "ours": ours, "peer": peer, "peer_name": peer_name, "ratio": ratio}
        )
        self.table.add_row(name, f"{ours:.4g} {unit}", f"{peer:.4g} {unit}", peer_name, f"{ratio:.3g}", target)


def measure(report: Report, label: str, workload: Workload, rounds: int, naive: bool) -> dict[str, Any]:
    ours = run_ours(workload, rounds)
    copy_s = memcpy_s(int(ours["payload_bytes"]))
    report.add(
        f"{label}: wall",
        "s",
        ours["wall_s"],
        copy_s,
        "memcpy of the same bytes",
        "< 0.35 s, < 8 x" if workload.routed else "",
    )
    if naive:
        slow = uvloop.run(run_naive(workload))
        report.add(f"{label}: wall", "s", ours["wall_s"], slow["wall_s"], "naive path")
        report.add(
            f"{label}: controller wait-p99",
            "ms",
            ours["controller_wait_p99_s"] * 1e3,
            slow["wait_p99_s"] * 1e3,
            "naive path",
        )
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
        f"{label}: peak memory, all three",
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
    parser.add_argument("--quick", action="store_true", help="sixteen rollouts, one round")
    options = parser.parse_args(argv)
    rounds = 1 if options.quick else 5
    standard = 16 if options.quick else 64
    report = Report()
    middle = measure(report, f"{standard} rollouts", Workload(standard, True), rounds, naive=True)
    measure(report, f"{standard} rollouts, tokens only", Workload(standard, False), rounds, naive=False)
    if not options.quick:
        small = run_ours(Workload(16, True), rounds)
        large = measure(report, "256 rollouts", Workload(256, True), 3, naive=False)
        per_token = [figures["wall_s"] / figures["tokens"] * 1e9 for figures in (small, middle, large)]
        report.add("growth: 64 against 16 rollouts", "ns/token", per_token[1], per_token[0], "16 rollouts", "about 1 x")
        report.add(
            "growth: 256 against 16 rollouts", "ns/token", per_token[2], per_token[0], "16 rollouts", "about 1 x"
        )
    Console(width=150).print(report.table)
    if options.json:
        options.json.write_text(json.dumps(report.rows, indent=2))
    return 0


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))
