"""Pipelines of real processes on four slots: a device is a file lock, so using one twice cannot go unnoticed.

Every process is this file, run as a script: one host with the pool (journalled, so it can be killed; it counts each
pipeline's demand from its files, as the controller does from its ledger), and per pipeline a driver (lays out work,
trains) and workers (the real order executor with a stand-in engine). A sample is a file that is claimed by renaming it;
what an aborted sample has done so far is kept in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from penstock.errors import PenstockError
from penstock.pool import events as ev
from penstock.pool.io.executor import OrderExecutor
from penstock.pool.pool import Pool
from penstock.pool.settings import PoolSection
from penstock.records.ids import MemberId, PipelineName, Version
from penstock.records.pool import DeviceId, Priority, Topology
from penstock.wire import messages as m
from penstock.wire.codec import Codec

DEVICES = 4
TICK_S = 0.05
SAMPLE_TICKS = 6
requests: Codec[m.Request] = Codec(m.Request)
replies: Codec[m.Reply] = Codec(m.Reply)
T = TypeVar("T")
SETTINGS = PoolSection(
    turn_s=0.5, payback=2.0, wake_s=10.0, drain_s=0.5, sleep_s=10.0, report_s=5.0,
    fence_s=1.0, bench_s=0.2,
)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- the host


class Host:
    """Serves the pool on a Unix socket; every event that changed it is on disk before anyone is answered."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pool = Pool(Topology((DEVICES,)), SETTINGS)
        self.changed = asyncio.Condition()
        self.file = (folder / "journal").open("ab+")
        self.longest_wait_s: dict[str, float] = {}

    def recover(self) -> None:
        self.file.seek(0)
        count = 0
        for line in self.file.read().splitlines():
            event, at = msgspec.json.decode(line, type=tuple[ev.Event, float])
            self.pool.handle(event, at)
            count += 1
        if count:
            self.tell(ev.ControllerRestarted())
        (self.folder / f"recovered-{count}").touch()

    def tell(self, event: ev.Event) -> None:
        before, now = self.pool.revision, time.time()
        effects = self.pool.handle(event, now)
        self.pool.check()
        if self.pool.revision != before:
            self.file.write(msgspec.json.encode((event, now)) + b"\n")
            self.file.flush()
            os.fsync(self.file.fileno())
        for effect in effects:
            if isinstance(effect, ev.FenceMember):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(effect.member.split(":")[1]), signal.SIGKILL)

    async def serve(self) -> None:
        self.recover()
        path = self.folder / "socket"
        path.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(self.connection, path)
        async with server:
            while True:
                await asyncio.sleep(0.1)
                self.count_demand()
                self.tell(ev.TimePassed())
                await self.notify()
                for share in self.pool.status(time.time()).shares:
                    longest = max(self.longest_wait_s.get(share.pipeline, 0.0), share.waited_s)
                    self.longest_wait_s[share.pipeline] = longest
                (self.folder / "waits.tmp").write_text(json.dumps(self.longest_wait_s))
                (self.folder / "waits.tmp").rename(self.folder / "waits")

    def count_demand(self) -> None:
        for share in self.pool.status(time.time()).shares:
            work = self.folder / "work" / share.pipeline
            # Finished before remaining: a sample that ends in between is counted in neither, and in both the next time.
            finished = len(list((self.folder / "finished" / share.pipeline).iterdir()))
            remaining = sum(path.suffix != ".done" for path in work.iterdir())
            self.tell(ev.DemandCounted(share.pipeline, remaining, finished))

    async def notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        caller: tuple[PipelineName, MemberId] | None = None
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(4), "big")
                request = requests.decode(await reader.readexactly(size))
                caller = (request.pipeline, request.member)
                try:
                    reply = await self.answer(request)
                except PenstockError as error:
                    reply = m.Refused("LocalProtocolError", str(error))
                await self.notify()
                body = replies.encode(reply)
                writer.write(len(body).to_bytes(4, "big") + body)
        except (asyncio.IncompleteReadError, ConnectionError):
            if caller is not None:  # on one machine a closed connection is a dead process
                self.tell(ev.MemberLost(*caller, "connection closed"))
                await self.notify()
        finally:
            writer.close()

    async def until(self, holds: Callable[[], bool], wait_s: float) -> bool:
        try:
            async with asyncio.timeout(wait_s), self.changed:
                await self.changed.wait_for(holds)
        except TimeoutError:
            return False
        return True

    async def answer(self, request: m.Request) -> m.Reply:
        name, member = request.pipeline, request.member
        match request:
            case m.Register(role="rollout"):
                self.tell(ev.WorkerJoined(name, member))
            case m.AskDevices():
                self.tell(
                    ev.DevicesRequested(
                        name, member, request.request, request.priority, request.among, request.count,
                        request.timeout_s, request.release,
                    )
                )  # fmt: skip
                await self.notify()
                await self.until(lambda: self.pool.granted(member, request.request) is not None, request.wait_s)
                grant = self.pool.granted(member, request.request)
                return m.NotYet("devices", "running") if grant is None else m.DevicesGranted(grant)
            case m.ReleaseDevices():
                self.tell(ev.DevicesReleased(name, member, request.request))
            case m.AskOrders():
                await self.until(
                    lambda: any(o.number != request.seen for o in self.pool.orders(member)), request.wait_s
                )
                return m.Orders(self.pool.orders(member))
            case m.ReportOrder(done=True):
                self.tell(ev.MoveDone(name, member, request.order))
            case m.ReportOrder():
                self.tell(ev.MoveFailed(name, member, request.order, request.released, request.error))
            case m.Unregister():
                self.tell(ev.PipelineClosed(name))
            case _:
                raise AssertionError(request)
        return m.Ok()


class Line:
    """A connection that comes back when the host does. One call at a time."""

    def __init__(self, folder: Path, hello: Callable[[], m.Request] | None = None) -> None:
        self.folder = folder
        self.hello = hello
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def call(self, request: m.Request) -> m.Reply:
        async with asyncio.timeout(60):
            while True:
                try:
                    if self._streams is None:
                        self._streams = await asyncio.open_unix_connection(self.folder / "socket")
                        if self.hello is not None:
                            await self._exchange(self.hello())
                    return await self._exchange(request)
                except (OSError, asyncio.IncompleteReadError):
                    self._streams = None
                    await asyncio.sleep(0.05)

    async def _exchange(self, request: m.Request) -> m.Reply:
        assert self._streams is not None
        reader, writer = self._streams
        body = requests.encode(request)
        writer.write(len(body).to_bytes(4, "big") + body)
        size = int.from_bytes(await reader.readexactly(4), "big")
        return replies.decode(await reader.readexactly(size))


# --------------------------------------------------------------------------------------------- workers and trainers


class Locks:
    """Devices as file locks: the kernel lets go of them with the process, as a driver lets go of memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.held: list[int] = []

    def take(self, devices: tuple[DeviceId, ...]) -> None:
        for device in devices:
            handle = os.open(self.folder / f"device-{device}", os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                (self.folder / f"CONFLICT-{device}-{os.getpid()}").touch()
                raise
            self.held.append(handle)

    def let_go(self) -> None:
        while self.held:
            os.close(self.held.pop())


class StandIn:
    """Generates 'samples' while it may: claims a file, ticks, renames it to done; aborted ones keep their ticks."""

    def __init__(self, folder: Path, name: str) -> None:
        self.locks = Locks(folder)
        self.moving = folder / f"moving-{name}-{os.getpid()}"
        self.work = folder / "work" / name
        self.finished = folder / "finished" / name
        self.open = asyncio.Event()
        self.aborted = False
        self.idle = asyncio.Event()
        self.idle.set()

    async def generate(self) -> None:
        while True:
            await self.open.wait()
            claim = self._claim()
            if claim is None:
                await asyncio.sleep(TICK_S)
                continue
            self.idle.clear()
            ticks = int(claim.read_text() or 0)
            while ticks < SAMPLE_TICKS and not self.aborted:
                await asyncio.sleep(TICK_S)
                ticks += 1
            claim.write_text(str(ticks))
            number = claim.name.split(".")[0]
            if ticks >= SAMPLE_TICKS:
                (self.finished / f"{time.time_ns()}-{os.getpid()}").touch()
            claim.rename(self.work / (f"{number}.done" if ticks >= SAMPLE_TICKS else f"{number}.todo"))
            self.idle.set()

    def _claim(self) -> Path | None:
        for path in sorted(self.work.glob("*.todo")):
            claimed = path.with_name(f"{path.name.split('.')[0]}.claim.{os.getpid()}")
            try:
                path.rename(claimed)
            except FileNotFoundError:
                continue
            return claimed
        return None

    async def wake(self, devices: tuple[DeviceId, ...]) -> None:
        self.moving.touch()
        self.locks.take(devices)

    async def sync_weights(self) -> Version:
        await asyncio.sleep(4 * TICK_S)
        return Version(0)

    async def publish(self, version: Version) -> None:
        pass

    async def route(self) -> None:
        self.moving.unlink(missing_ok=True)
        self.aborted = False
        self.open.set()

    async def close_admission(self) -> None:
        self.open.clear()

    async def drain(self) -> None:
        await self.idle.wait()

    async def abort(self) -> None:
        self.aborted = True
        await self.idle.wait()

    async def release(self) -> None:
        self.moving.unlink(missing_ok=True)
        self.locks.let_go()

    async def verify_released(self) -> None:
        assert not self.locks.held


async def run_worker(folder: Path, name: PipelineName) -> None:
    member = MemberId(f"{name}-worker:{os.getpid()}")
    sleeper = StandIn(folder, name)
    orders = Line(folder, lambda: m.Register(name, member, "rollout", os.getpid(), "here"))
    reports = Line(folder)

    async def call(request: m.Request) -> m.Reply:
        """One connection waits for orders, the other reports."""
        return await (reports if isinstance(request, m.ReportOrder) else orders).call(request)

    executor = OrderExecutor(sleeper, call, name, member, poll_s=2.0)
    async with asyncio.TaskGroup() as group:
        group.create_task(sleeper.generate())
        group.create_task(executor.run())


def give_back_if_orphaned(claim: Path) -> None:
    """A sample whose worker was killed can be claimed again."""
    if not Path(f"/proc/{claim.suffix[1:]}").exists():
        with contextlib.suppress(FileNotFoundError):
            claim.rename(claim.with_name(f"{claim.name.split('.')[0]}.todo"))


async def run_driver(folder: Path, name: PipelineName, rounds: int, samples: int, train: tuple[DeviceId, ...]) -> None:
    member = MemberId(f"{name}-driver:{os.getpid()}")
    line = Line(folder)
    locks = Locks(folder)
    work = folder / "work" / name
    began = max([int(path.name) for path in (folder / "rounds" / name).glob("*")], default=-1) + 1
    for number in range(began, rounds):
        if not list(work.iterdir()):
            for sample in range(samples):
                (work / f"{sample:04d}.todo").write_text("0")
        while len(list(work.glob("*.done"))) < samples:
            for claim in work.glob("*.claim.*"):
                give_back_if_orphaned(claim)
            await asyncio.sleep(TICK_S)
        while True:
            ask = m.AskDevices(name, member, number, Priority.TRAINING, train, len(train), 60.0, wait_s=5.0)
            granted = await line.call(ask)
            if isinstance(granted, m.DevicesGranted):
                break
        locks.take(granted.grant.devices)
        await asyncio.sleep(4 * TICK_S)
        locks.let_go()
        await line.call(m.ReleaseDevices(name, member, number))
        for path in work.glob("*.done"):
            path.unlink()
        (folder / "rounds" / name / str(number)).touch()
    await line.call(m.Unregister(name, member))


async def run_host(folder: Path, names: list[PipelineName]) -> None:
    host = Host(folder)
    everywhere = tuple(DeviceId(device) for device in range(DEVICES))
    host_recover = host.recover

    def recover() -> None:
        host_recover()
        closed = {path.name for path in (folder / "closed").glob("*")}
        for name in names:
            if name not in closed:
                host.tell(ev.PipelineOpened(name, everywhere))

    host.recover = recover
    await host.serve()


# ------------------------------------------------------------------------------------------------------------ the tests


class Town:
    """Starts and ends the processes of one test."""

    def __init__(self, folder: Path, names: list[str]) -> None:
        self.folder = folder
        self.names = names
        self.processes: dict[str, subprocess.Popen] = {}
        for name in names:
            (folder / "work" / name).mkdir(parents=True)
            (folder / "rounds" / name).mkdir(parents=True)
            (folder / "finished" / name).mkdir(parents=True)
        (folder / "closed").mkdir()
        self.start("host", "host", *names)

    def start(self, key: str, *arguments: str) -> None:
        with (self.folder / f"{key}.log").open("ab") as log:
            command = [sys.executable, __file__, str(self.folder), *arguments]
            self.processes[key] = subprocess.Popen(command, stdout=log, stderr=log)

    def pipeline(self, name: str, *, workers: int, rounds: int, samples: int, train: tuple[int, ...]) -> None:
        for number in range(workers):
            self.start(f"{name}-{number}", "worker", name)
        devices = ",".join(map(str, train))
        self.start(f"{name}-driver", "driver", name, str(rounds), str(samples), devices)

    def kill(self, key: str) -> None:
        process = self.processes.pop(key)
        process.send_signal(signal.SIGKILL)
        process.wait(10)

    def rounds(self, name: str) -> int:
        return len(list((self.folder / "rounds" / name).iterdir()))

    def wait(self, holds: Callable[[], T], what: str, within_s: float = 90.0) -> T:
        deadline = time.monotonic() + within_s
        while not (found := holds()):
            assert not list(self.folder.glob("CONFLICT-*")), "two processes were on one device"
            assert time.monotonic() < deadline, f"waited {within_s} s for {what}\n{self.story()}"
            time.sleep(0.02)
        return found

    def finish(self, *names: str, within_s: float = 90.0) -> None:
        """Waits until the drivers have ended by themselves, and no device ever had two processes."""
        for name in names:
            driver = self.processes[f"{name}-driver"]
            self.wait(lambda driver=driver: driver.poll() is not None, f"the driver of {name}", within_s)
            assert driver.returncode == 0, self.story()
        assert not list(self.folder.glob("CONFLICT-*"))

    def waits(self) -> dict[str, float]:
        return json.loads((self.folder / "waits").read_text())

    def story(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(self.folder.glob("*.log")))

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait(10)


@pytest.fixture
def found(tmp_path: Path) -> Iterator[Callable[[list[str]], Town]]:
    towns: list[Town] = []

    def build(names: list[str]) -> Town:
        towns.append(Town(tmp_path, names))
        return towns[-1]

    yield build
    for town in towns:
        town.close()


@pytest.mark.slow
def test_two_pipelines_fully_overlapping_run_ten_rollouts_each(found):
    town = found(["p1", "p2"])
    town.pipeline("p1", workers=4, rounds=10, samples=8, train=(0, 1))
    town.pipeline("p2", workers=4, rounds=10, samples=8, train=(2, 3))
    town.finish("p1", "p2")
    assert (town.rounds("p1"), town.rounds("p2")) == (10, 10)
    assert max(town.waits().values()) < SETTINGS.longest_wait_s(pipelines_ahead=1), town.waits()


@pytest.mark.slow
def test_five_pipelines_on_four_slots(found):
    names = [f"p{number}" for number in range(5)]
    town = found(names)
    for number, name in enumerate(names):
        town.pipeline(name, workers=2, rounds=4, samples=6, train=(number % 4,))
    town.finish(*names)
    assert [town.rounds(name) for name in names] == [4] * 5
    assert max(town.waits().values()) < SETTINGS.longest_wait_s(pipelines_ahead=4), town.waits()


def stopped_in_mid_move(folder: Path, name: str) -> int | None:
    """Halts a worker that is waking; its pid if it was still at it when it came to stand."""
    for marker in folder.glob(f"moving-{name}-*"):
        pid = int(marker.name.rsplit("-", 1)[1])
        os.kill(pid, signal.SIGSTOP)
        if marker.exists():
            return pid
        os.kill(pid, signal.SIGCONT)
    return None


@pytest.mark.slow
def test_a_pipeline_killed_in_mid_resize_costs_only_itself(found):
    town = found(["dies", "lives"])
    town.pipeline("dies", workers=4, rounds=50, samples=8, train=(0, 1))
    town.pipeline("lives", workers=4, rounds=8, samples=8, train=(2, 3))
    town.wait(lambda: town.rounds("lives") >= 2 and town.rounds("dies") >= 1, "both to get going")
    town.wait(lambda: stopped_in_mid_move(town.folder, "dies"), "a worker of it to be in the middle of waking")
    for key in [key for key in town.processes if key.startswith("dies")]:
        town.kill(key)
    before = town.rounds("lives")
    town.finish("lives")
    assert before < 8, "nothing was left to show after the kill"
    assert town.rounds("lives") == 8


@pytest.mark.slow
def test_the_host_is_killed_in_mid_resize_and_comes_back_from_its_journal(found):
    town = found(["p1", "p2"])
    town.pipeline("p1", workers=3, rounds=6, samples=8, train=(0, 1))
    town.pipeline("p2", workers=3, rounds=6, samples=8, train=(2, 3))
    for kills in (1, 2):
        town.wait(lambda kills=kills: min(town.rounds("p1"), town.rounds("p2")) >= kills, "rounds before the kill")
        moving = town.wait(lambda: stopped_in_mid_move(town.folder, "p*"), "a worker in the middle of waking")
        town.kill("host")
        town.start("host", "host", "p1", "p2")
        os.kill(moving, signal.SIGCONT)
    town.finish("p1", "p2")
    assert (town.rounds("p1"), town.rounds("p2")) == (6, 6)
    assert len(list(town.folder.glob("recovered-*"))) == 3, "the host was there three times"


@pytest.mark.slow
def test_a_coordinator_killed_while_the_pool_serves_is_replaced(found):
    town = found(["p1", "p2"])
    town.pipeline("p1", workers=3, rounds=6, samples=8, train=(0, 1))
    town.pipeline("p2", workers=3, rounds=6, samples=8, train=(0, 1))
    town.wait(lambda: town.rounds("p1") >= 2, "two rounds of p1")
    town.kill("p1-driver")
    before = town.rounds("p2")
    town.wait(lambda: town.rounds("p2") > before or town.rounds("p2") == 6, "p2 to go on without p1's coordinator")
    town.start("p1-driver", "driver", "p1", "6", "8", "0,1")
    town.finish("p1", "p2")
    assert (town.rounds("p1"), town.rounds("p2")) == (6, 6)


if __name__ == "__main__":
    where, role, *rest = Path(sys.argv[1]), sys.argv[2], *sys.argv[3:]
    if role == "host":
        asyncio.run(run_host(where, [PipelineName(name) for name in rest]))
    elif role == "worker":
        asyncio.run(run_worker(where, PipelineName(rest[0])))
    else:
        devices = tuple(DeviceId(int(device)) for device in rest[3].split(","))
        asyncio.run(run_driver(where, PipelineName(rest[0]), int(rest[1]), int(rest[2]), devices))
