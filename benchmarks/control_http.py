"""Lease and deliver over HTTP: pairs per second and loop lag of a controller on one core.

Sixteen workers in one process ask for a lease of one group and deliver it, as fast as they are answered, while a
trainer takes batches and acknowledges steps. The controller is another process, pinned to one core: the real service,
the real machine, the real journal. Beside it, in the same run, the same exchange

* over the usual stack: Starlette routes, JSON bodies, an httpx client, the same machine, no journal at all;
* over Redis streams with its append-only file flushed every second, and the same machine in a process beside it that
  reads deliveries and writes leases (skipped when no `redis-server` is installed).

A pair is one lease and one delivery of a whole group of samples. On a busy machine compare the processor time per pair
(of the server's processes; the clients' is not counted) rather than the rate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import httpx
import msgspec
import psutil
import uvicorn
import uvloop
from rich.console import Console
from rich.table import Table
from starlette.applications import Starlette
from starlette.requests import Request as WebRequest
from starlette.responses import JSONResponse
from starlette.routing import Route

from penstock.control import effects
from penstock.control.controller import Controller
from penstock.control.io.client import ControlClient
from penstock.control.io.http import ControlApp, ControlServer
from penstock.control.io.service import ControlService
from penstock.control.pipeline import PipelineControl
from penstock.control.settings import PipelineSettings
from penstock.journal.writer import Journal
from penstock.records.ids import MemberId, PipelineName, RunId, SampleId, StepIndex, Version
from penstock.records.payload import PayloadRef
from penstock.records.prompt import PromptLease
from penstock.records.rollout import Rollout
from penstock.runtime.clock import SystemClock
from penstock.runtime.interpreter import python_command
from penstock.runtime.lag import LagMonitor
from penstock.runtime.settings import LagSection
from penstock.runtime.tasks import Tasks
from penstock.wire import messages
from penstock.wire.messages import AckCheckpoint, AckStep, AskBatch, AskLease, BatchReady, Deliver, Leased, Register

WORKERS = 16
GROUP = 8
GROUPS_PER_STEP = 64
PIPELINE = PipelineName("bench")
TRAINER = MemberId("trainer")
TOKEN = "benchmark"


def machine() -> PipelineControl:
    return PipelineControl(
        PipelineSettings(name=PIPELINE, groups_per_step=GROUPS_PER_STEP, group_size=GROUP, max_staleness=4)
    )


def rollout(sample: SampleId, version: Version) -> Rollout:
    return Rollout(sample, version, "", 1.0, 128, PayloadRef("ring-of-a-worker", 1, sample % 512, 1, 4096, sample))


class Peer(Protocol):
    """One worker's two calls."""

    async def lease(self) -> int: ...
    async def deliver(self) -> None: ...


# -- ours ---------------------------------------------------------------------------------------------------------


async def serve_ours(folder: Path) -> dict[str, float]:
    journal = Journal(folder / "journal.sqlite", RunId("bench"))
    service = ControlService(Controller({PIPELINE: machine()}), journal, SystemClock())
    service.start()
    server = ControlServer(ControlApp(service, TOKEN))
    port = server.bind()
    lag = LagMonitor("controller", LagSection(period_s=0.005, window=20_000))
    async with Tasks() as tasks:
        tasks.spawn("service", service.run())
        tasks.spawn("http", server.serve())
        tasks.spawn("lag", lag.run())
        announce(folder, port)
        await asyncio.to_thread(sys.stdin.read)
        service.close()
        await server.stop(5)
        tasks.cancel()
    service.check()
    commits = journal.commits
    journal.close(10)
    return lag.report().values("") | {"events": journal.last_seq, "commits": commits}


class OurWorker:
    def __init__(self, port: int, name: str, version: list[int]) -> None:
        self._client = ControlClient(("127.0.0.1", port), TOKEN, PIPELINE, MemberId(name))
        self._version = version
        self._request = 0
        self._held: list[Rollout] = []

    async def start(self) -> None:
        member = self._client.member
        await self._client.call(Register(PIPELINE, member, role="rollout", pid=0, host_id="bench"))

    async def lease(self) -> int:
        self._request += 1
        version = Version(self._version[0])
        ask = AskLease(PIPELINE, self._client.member, self._request, GROUP, version, wait_s=10)
        answer = await self._client.call(ask)
        assert isinstance(answer, Leased)
        self._held = [rollout(sample, version) for lease in answer.leases for sample in lease.samples]
        return len(self._held)

    async def deliver(self) -> None:
        await self._client.call(Deliver(PIPELINE, self._client.member, rollouts=tuple(self._held)))

    async def close(self) -> None:
        await self._client.close()


async def train(port: int, version: list[int]) -> None:
    client = ControlClient(("127.0.0.1", port), TOKEN, PIPELINE, TRAINER)
    await client.call(Register(PIPELINE, TRAINER, role="trainer", pid=0, host_id="bench", step=StepIndex(0)))
    try:
        while True:
            step = StepIndex(version[0])
            answer = await client.call(AskBatch(PIPELINE, TRAINER, step, wait_s=10))
            if isinstance(answer, BatchReady):
                await client.call(AckStep(PIPELINE, TRAINER, step))
                await client.call(AckCheckpoint(PIPELINE, TRAINER, StepIndex(step + 1)))
                version[0] = step + 1
    finally:
        await client.close()


@asynccontextmanager
async def our_workers(port: int) -> AsyncIterator[list[Peer]]:
    version = [0]
    workers = [OurWorker(port, f"worker-{number}", version) for number in range(WORKERS)]
    for worker in workers:
        await worker.start()
    async with Tasks() as tasks:
        tasks.spawn("trainer", train(port, version))
        yield list(workers)
        tasks.cancel()
    for worker in workers:
        await worker.close()


# -- the usual stack ----------------------------------------------------------------------------------------------


async def serve_usual(folder: Path) -> dict[str, float]:
    control, clock = machine(), SystemClock()

    def handle(event: Any) -> list[effects.Effect]:
        return control.handle(event, clock.now())

    async def register(request: WebRequest) -> JSONResponse:
        body = await request.json()
        handle(msgspec.convert(body, messages.Register))
        return JSONResponse({"phase": control.phase})

    async def lease(request: WebRequest) -> JSONResponse:
        body = await request.json()
        answer = handle(msgspec.convert(body, messages.AskLease))[0]
        leases = answer.leases if isinstance(answer, messages.Leased) else ()
        return JSONResponse({"leases": msgspec.to_builtins(leases), "version": control.newest})

    async def deliver(request: WebRequest) -> JSONResponse:
        body = await request.json()
        answer = handle(msgspec.convert(body, messages.Deliver))[0]
        step = StepIndex(control.newest)  # the trainer's part, without its calls
        if isinstance(handle(messages.AskBatch(PIPELINE, TRAINER, step))[0], messages.BatchReady):
            handle(messages.AckStep(PIPELINE, TRAINER, step))
            handle(messages.AckCheckpoint(PIPELINE, TRAINER, StepIndex(step + 1)))
        return JSONResponse(msgspec.to_builtins(answer))

    handle(messages.Register(PIPELINE, TRAINER, "trainer", step=StepIndex(0)))
    routes = [Route(f"/{call.__name__}", call, methods=["POST"]) for call in (register, lease, deliver)]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        config = uvicorn.Config(
            Starlette(routes=routes), log_config=None, access_log=False, lifespan="off", loop="none"
        )
        server = uvicorn.Server(config)
        lag = LagMonitor("usual", LagSection(period_s=0.005, window=20_000))
        async with Tasks() as tasks:
            serving = tasks.spawn("http", server._serve([listener]))
            tasks.spawn("lag", lag.run())
            announce(folder, listener.getsockname()[1])
            await asyncio.to_thread(sys.stdin.read)
            server.should_exit = server.force_exit = True
            await serving
            tasks.cancel()
    return lag.report().values("")


class UsualWorker:
    def __init__(self, client: httpx.AsyncClient, name: str) -> None:
        self._client = client
        self._name = name
        self._request = 0
        self._held: list[dict[str, Any]] = []

    async def start(self) -> None:
        await self._client.post("/register", json=self._call("register") | {"role": "rollout"})

    async def lease(self) -> int:
        self._request += 1
        ask = self._call("ask_lease") | {"request": self._request, "samples": GROUP, "version": 0}
        answer = (await self._client.post("/lease", json=ask | {"version": UsualWorker.version})).json()
        UsualWorker.version = answer["version"]
        version = Version(UsualWorker.version)
        samples = [sample for lease in answer["leases"] for sample in lease[2]]
        self._held = [msgspec.to_builtins(rollout(sample, version)) for sample in samples]
        return len(samples)

    async def deliver(self) -> None:
        await self._client.post("/deliver", json=self._call("deliver") | {"rollouts": self._held})

    def _call(self, kind: str) -> dict[str, Any]:
        return {"type": kind, "pipeline": PIPELINE, "member": self._name}

    version = 0


@asynccontextmanager
async def usual_workers(port: int) -> AsyncIterator[list[Peer]]:
    limits = httpx.Limits(max_connections=WORKERS, max_keepalive_connections=WORKERS)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", limits=limits, trust_env=False) as client:
        workers = [UsualWorker(client, f"worker-{number}") for number in range(WORKERS)]
        for worker in workers:
            await worker.start()
        yield list(workers)


# -- Redis streams ------------------------------------------------------------------------------------------------


class Redis:
    """Just enough of the protocol; pipelining included, so that the peer is as fast as it can be."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def run(self, *commands: tuple[bytes, ...]) -> list[Any]:
        for command in commands:
            parts = b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in command)
            self._writer.write(b"*%d\r\n%s" % (len(command), parts))
        return [await self._read() for _ in commands]

    async def _read(self) -> Any:
        line = (await self._reader.readline())[:-2]
        kind, rest = line[:1], line[1:]
        if kind == b"$":
            return (await self._reader.readexactly(int(rest) + 2))[:-2] if int(rest) >= 0 else None
        if kind == b"*":
            return [await self._read() for _ in range(int(rest))] if int(rest) >= 0 else None
        if kind == b"-":
            raise RuntimeError(rest.decode())
        return int(rest) if kind == b":" else rest

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


async def serve_redis(folder: Path) -> dict[str, float]:
    """The accounting beside Redis: reads deliveries from one stream, writes leases to another."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ["--appendonly", "yes", "--appendfsync", "everysec", "--save", "", "--dir", str(folder)]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", *flags]
    lag = LagMonitor("redis", LagSection(period_s=0.005, window=20_000))
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:  # noqa: ASYNC220 - before there is any load
        try:
            await asyncio.to_thread(wait_for, lambda: answers(port))
            async with Tasks() as tasks:
                accounting = tasks.spawn(
                    "accounting", account(Redis(*await asyncio.open_connection("127.0.0.1", port)))
                )
                tasks.spawn("lag", lag.run())
                announce(folder, port)
                await asyncio.to_thread(sys.stdin.read)
                accounting.cancel()
                tasks.cancel()
        finally:
            server.terminate()
    return lag.report().values("")


async def account(redis: Redis) -> None:
    control, clock = machine(), SystemClock()
    decode = msgspec.msgpack.Decoder(tuple[Rollout, ...]).decode
    encode = msgspec.msgpack.Encoder().encode
    requests = 0

    def handle(event: Any) -> effects.Effect:
        return control.handle(event, clock.now())[0]

    def lease(worker: str) -> list[tuple[bytes, ...]]:
        nonlocal requests
        requests += 1
        answer = handle(messages.AskLease(PIPELINE, MemberId(worker), requests, GROUP, control.newest))
        leases = answer.leases if isinstance(answer, messages.Leased) else ()
        body = encode((control.newest, leases))
        return [(b"XADD", b"leases-" + worker.encode(), b"MAXLEN", b"~", b"1000", b"*", b"l", body)] if leases else []

    handle(messages.Register(PIPELINE, TRAINER, "trainer", step=StepIndex(0)))
    names = [f"worker-{number}" for number in range(WORKERS)]
    for name in names:
        handle(messages.Register(PIPELINE, MemberId(name), "rollout"))
    await redis.run(*(command for name in names for command in lease(name)))
    seen = b"0"
    while True:
        found = (await redis.run((b"XREAD", b"COUNT", b"64", b"BLOCK", b"1000", b"STREAMS", b"results", seen)))[0]
        commands: list[tuple[bytes, ...]] = []
        for entry, (_, worker, _, body) in found[0][1] if found else ():
            seen = entry
            handle(messages.Deliver(PIPELINE, MemberId(worker.decode()), decode(body)))
            step = StepIndex(control.newest)  # the trainer's part, without its calls
            if isinstance(handle(messages.AskBatch(PIPELINE, TRAINER, step)), messages.BatchReady):
                handle(messages.AckStep(PIPELINE, TRAINER, step))
                handle(messages.AckCheckpoint(PIPELINE, TRAINER, StepIndex(step + 1)))
            commands += lease(worker.decode())
        if commands:
            await redis.run(*commands)


class RedisWorker:
    def __init__(self, redis: Redis, name: str) -> None:
        self._redis = redis
        self._name = name.encode()
        self._seen = b"0"
        self._held: list[Rollout] = []
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(tuple[Version, tuple[PromptLease, ...]]).decode

    async def lease(self) -> int:
        command = (b"XREAD", b"COUNT", b"1", b"BLOCK", b"10000", b"STREAMS", b"leases-" + self._name, self._seen)
        ((_, ((self._seen, (_, body)),)),) = (await self._redis.run(command))[0]
        version, leases = self._decode(body)
        self._held = [rollout(sample, version) for lease in leases for sample in lease.samples]
        return len(self._held)

    async def deliver(self) -> None:
        body = self._encode(self._held)
        fields = (b"w", self._name, b"r", body)
        await self._redis.run((b"XADD", b"results", b"MAXLEN", b"~", b"10000", b"*", *fields))


@asynccontextmanager
async def redis_workers(port: int) -> AsyncIterator[list[Peer]]:
    connections = [Redis(*await asyncio.open_connection("127.0.0.1", port)) for _ in range(WORKERS)]
    yield [RedisWorker(redis, f"worker-{number}") for number, redis in enumerate(connections)]
    for connection in connections:
        await connection.close()


# -- the run ------------------------------------------------------------------------------------------------------


def pinned(command: list[str]) -> list[str]:
    """On the first core, with the load on the others."""
    cores = sorted(os.sched_getaffinity(0))
    return ["taskset", "-c", str(cores[0]), *command] if shutil.which("taskset") and len(cores) > 1 else command


def announce(folder: Path, port: int) -> None:
    (folder / "port.part").write_text(str(port))
    (folder / "port.part").rename(folder / "port")


def wait_for(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the server did not start")
        time.sleep(0.01)


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def controller(kind: str, folder: Path, figures: dict[str, float]) -> Iterator[tuple[int, int]]:
    command = python_command(__file__, "--serve", kind, "--folder", str(folder))
    with subprocess.Popen(pinned(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        wait_for(lambda: (folder / "port").exists() or server.poll() is not None)
        yield int((folder / "port").read_text()), server.pid
        output, _ = server.communicate()
        figures.update(json.loads(output.splitlines()[-1]))


async def load(workers: Callable[[int], Any], port: int, pid: int, seconds: float) -> dict[str, float]:
    """Pairs per second, and the processor time of the server per pair, after a short warm-up."""
    server = psutil.Process(pid)
    pairs = 0
    counting = False
    until = time.perf_counter() + seconds + 0.5

    def spent_s() -> float:
        times = [process.cpu_times() for process in (server, *server.children())]
        return sum(spent.user + spent.system for spent in times)

    async def work(peer: Peer) -> None:
        nonlocal pairs
        while time.perf_counter() < until:
            if await peer.lease():
                await peer.deliver()
                pairs += counting

    async def count() -> tuple[float, float]:
        nonlocal counting
        await asyncio.sleep(0.5)
        counting = True
        return time.perf_counter(), spent_s()

    async with workers(port) as peers:
        async with asyncio.TaskGroup() as group:
            started = group.create_task(count())
            for peer in peers:
                group.create_task(work(peer))
        began, before_s = started.result()
        return {"pairs_per_s": pairs / (until - began), "cpu_s_per_pair": (spent_s() - before_s) / pairs}


def measure(kind: str, seconds: float) -> dict[str, float]:
    figures: dict[str, float] = {}
    folder = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    try:
        with controller(kind, folder, figures) as (port, pid):
            found = uvloop.run(load(LOADS[kind], port, pid, seconds))
    finally:
        shutil.rmtree(folder)
    return figures | found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--serve", choices=("ours", "usual", "redis"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.serve:
        figures = uvloop.run(SERVERS[options.serve](options.folder))
        print(json.dumps(figures))
        return 0
    seconds, rounds = (1.5, 3) if options.quick else (4.0, 5)
    kinds = ["ours", "usual"]
    console = Console(width=140)
    if shutil.which("redis-server"):
        kinds.append("redis")
    else:
        console.print("no redis-server is installed: the Redis streams are left out")
    runs = {kind: [] for kind in kinds}
    for _ in range(rounds):  # interleaved, so that a busy moment of the machine hits all of them
        for kind in kinds:
            runs[kind].append(measure(kind, seconds))
    typical = {kind: medians(found) for kind, found in runs.items()}
    console.print(report(typical, runs))
    console.print(f"{rounds} rounds of {seconds:g} s, interleaved; load {os.getloadavg()[0]:.1f} at the end")
    console.print("pairs/s of the usual peer are bound by its client (httpx); CPU per pair compares the servers alone")
    if options.json:
        options.json.write_text(json.dumps(rows(typical, runs), indent=2))
    return 0


SERVERS = {"ours": serve_ours, "usual": serve_usual, "redis": serve_redis}
LOADS = {"ours": our_workers, "usual": usual_workers, "redis": redis_workers}


def redis_release() -> str:
    if not shutil.which("redis-server"):
        return "not installed"
    said = subprocess.run(["redis-server", "--version"], capture_output=True, text=True, check=False).stdout.split()
    return next((word.removeprefix("v=") for word in said if word.startswith("v=")), "of unknown version")


USUAL = f"Starlette {version('starlette')}, JSON, httpx {version('httpx')}; no journal"
REDIS = f"Redis streams, {redis_release()}, append-only file every second"
NAMES = {"ours": "Penstock", "usual": USUAL, "redis": REDIS}


def medians(found: list[dict[str, float]]) -> dict[str, float]:
    """Of each figure over the rounds."""
    return {key: statistics.median(run[key] for run in found) for key in found[0]}


def report(typical: dict[str, dict[str, float]], runs: dict[str, list[dict[str, float]]]) -> Table:
    table = Table(
        title=f"lease + deliver of {GROUP} samples, {WORKERS} workers, controller on one core (medians of rounds)"
    )
    for column in (
        "",
        "pairs/s",
        "lowest to highest",
        "CPU per pair",
        "its CPU / ours",
        "lag p50",
        "p99",
        "max",
        "wait p99",
    ):
        table.add_column(column, justify="right" if column else "left")
    for kind, figures in typical.items():
        ratio = figures["cpu_s_per_pair"] / typical["ours"]["cpu_s_per_pair"]
        rates = [run["pairs_per_s"] for run in runs[kind]]
        lags = (figures.get(key) for key in ("p50_s", "p99_s", "max_s", "wait_p99_s"))
        cells = [f"{lag * 1e3:.1f} ms" if lag is not None else "-" for lag in lags]
        cpu = f"{figures['cpu_s_per_pair'] * 1e6:.0f} us"
        spread = f"{min(rates):,.0f} to {max(rates):,.0f}"
        table.add_row(NAMES[kind], f"{figures['pairs_per_s']:,.0f}", spread, cpu, f"{ratio:.2f}", *cells)
    return table


def rows(typical: dict[str, dict[str, float]], runs: dict[str, list[dict[str, float]]]) -> list[dict[str, object]]:
    measured = [("control_http_pairs", "pairs/s", "pairs_per_s"), ("control_http_cpu", "s/pair", "cpu_s_per_pair")]
    measured.append(("control_http_lag_p99", "s", "p99_s"))
    found: list[dict[str, object]] = []
    for name, unit, key in measured:
        for kind, figures in typical.items():
            if kind == "ours" or key not in figures:
                continue
            ours, peer = typical["ours"][key], figures[key]
            row: dict[str, object] = {"name": name, "unit": unit, "ours": ours, "peer": peer}
            rounds = {f"{who}_rounds": [one[key] for one in runs[of]] for who, of in (("ours", "ours"), ("peer", kind))}
            found.append(row | {"peer_name": NAMES[kind], "ratio": ours / peer if peer else 0.0} | rounds)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
