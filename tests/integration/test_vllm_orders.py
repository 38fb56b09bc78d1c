"""A worker's vLLM server comes and goes by order of the pool. A server of a few lines stands in for vLLM here."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from penstock.engines.models import LanguagePolicy, TinyLanguageModel, build
from penstock.engines.protocol import Site
from penstock.engines.vllm import service as vllm_engine
from penstock.engines.vllm.service import VllmService, gpus_at
from penstock.engines.vllm.settings import VllmEngineSection
from penstock.errors import ConfigError
from penstock.records.ids import Version
from penstock.runtime.tasks import Tasks
from penstock.weights.replica import Verified

STAND_IN = """#!{python}
import http.server, json, os, pathlib, socketserver, sys, time

folder = pathlib.Path({folder!r})
if (folder / "refuse").exists():
    sys.exit(2)
life = folder / f"life-{{os.getpid()}}"
life.write_text(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
while (folder / "hang").exists():
    time.sleep(0.01)

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    asleep = False

    def address_string(self):
        return ""

    def log_message(self, *arguments):
        with (folder / "calls").open("a") as calls:
            print(self.command, self.path, file=calls)

    def answer(self):
        self.rfile.read(int(self.headers.get("content-length") or 0))
        while self.path == "/wake_up" and (folder / "slow").exists():
            time.sleep(0.01)
        Handler.asleep = self.path.startswith("/sleep") or (Handler.asleep and self.path != "/wake_up")
        body = json.dumps({{"is_sleeping": Handler.asleep, "is_paused": True}}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = answer

class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True

Server("socket", Handler).serve_forever()
"""


class Bench:
    """A service whose server is the stand-in, and what that has left behind."""

    def __init__(self, folder: Path, service: VllmService) -> None:
        self.folder = folder
        self.service = service
        unused: Any = None
        self.updater = service.updater(unused, unused, lambda: unused, way="in_place", deadline_s=60.0)

    def lives(self) -> dict[int, str]:
        """Every server there ever was, with the GPUs it saw."""
        return {int(path.name.partition("-")[2]): path.read_text() for path in self.folder.glob("life-*")}

    def running(self) -> list[int]:
        return [pid for pid in self.lives() if psutil.pid_exists(pid)]

    def calls(self) -> list[str]:
        """What servers were told to do, without what they were only asked."""
        words = [line.split() for line in (self.folder / "calls").read_text().splitlines()]
        return [path for method, path in words if method == "POST"]


@pytest.fixture
def bench(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    python = folder / "python"
    python.write_text(STAND_IN.format(python=sys.executable, folder=str(folder)))
    python.chmod(0o700)
    monkeypatch.setattr(vllm_engine, "check_interpreter", lambda python: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    section = VllmEngineSection(python=str(python), start_s=60.0)
    process: Any = SimpleNamespace(
        name="letters.rollout.0",
        pipeline_name="letters",
        run=SimpleNamespace(root=folder, log_path=lambda name: folder / f"{name}.log"),
        progress=SimpleNamespace(moved=lambda doing: None),
    )
    policy = build(TinyLanguageModel(hidden_size=64, heads=2))
    assert isinstance(policy, LanguagePolicy)
    cuda = torch.device("cuda")
    site = Site(process=process, seed=0, device="cuda", threads=1, in_pool=True, device_at=lambda devices: cuda)
    return Bench(folder, VllmService(site, section, policy))


@asynccontextmanager
async def serving(bench: Bench) -> AsyncIterator[VllmService]:
    """As in a worker: nothing of the server is left afterwards."""
    service = bench.service
    try:
        async with Tasks() as tasks:
            service.start(tasks)
            try:
                yield service
            finally:
                tasks.cancel()
    finally:
        await service.close()
    assert bench.running() == []


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_server_is_started_by_the_first_order_on_its_devices_and_then_only_woken(bench: Bench) -> None:
    async with serving(bench) as service:
        await service.vacate(10.0)
        await service.check_vacated(10.0)
        service.weights.sleep(10.0)  # what the updater does before anything is served
        assert bench.lives() == {}
        await service.occupy((2, 3), 10.0)
        assert list(bench.lives().values()) == ["2,3"]
        assert bench.calls() == ["/pause?mode=keep"], "it must not generate before it holds a published version"
        await service.vacate(10.0)
        await service.check_vacated(10.0)
        await service.occupy((2, 3), 10.0)
        assert len(bench.lives()) == 1
        assert bench.calls()[1:3] == ["/sleep?level=1&mode=keep", "/wake_up"]


async def test_a_sleep_that_supersedes_a_wake_waits_for_the_thread_of_the_wake(bench: Bench) -> None:
    """The thread went on after the sleep and recorded that the server is awake: the next wake then did nothing."""
    async with serving(bench) as service:
        await service.occupy((0,), 10.0)
        await service.vacate(10.0)
        (bench.folder / "slow").touch()
        wake = asyncio.ensure_future(service.occupy((0,), 10.0))
        await until(lambda: service.weights._moving.locked())
        wake.cancel()
        with pytest.raises(asyncio.CancelledError):
            await wake
        sleep = asyncio.ensure_future(service.vacate(10.0))
        await asyncio.sleep(0)
        (bench.folder / "slow").unlink()
        await sleep
        await service.check_vacated(10.0)
        before = len(bench.calls())
        await service.occupy((0,), 10.0)
        assert bench.calls()[before] == "/wake_up"


async def test_a_server_that_is_recalled_while_it_starts_is_ended_and_started_again(bench: Bench) -> None:
    async with serving(bench) as service:
        (bench.folder / "hang").touch()
        order = asyncio.ensure_future(service.occupy((0,), 10.0))
        await until(bench.lives)
        order.cancel()
        with pytest.raises(asyncio.CancelledError):
            await order
        await service.vacate(10.0)
        await service.check_vacated(10.0)
        assert bench.running() == []
        (bench.folder / "hang").unlink()
        await service.occupy((0,), 10.0)
        assert len(bench.lives()) == 2
        assert len(bench.running()) == 1


async def test_a_server_that_is_wanted_on_other_gpus_is_started_anew_there(bench: Bench) -> None:
    async with serving(bench) as service:
        await service.occupy((0,), 10.0)
        service.weights.version, service.weights.digest = 7, "seven"
        bench.updater.replica.handle(Verified(Version(7), "seven"), 0.0)
        await service.vacate(10.0)
        await service.occupy((1,), 10.0)
        assert sorted(bench.lives().values()) == ["0", "1"]
        assert [bench.lives()[pid] for pid in bench.running()] == ["1"]
        assert service.digest == bench.updater.replica.held.digest == "", "the new one holds nothing"


async def test_a_server_that_refuses_its_flags_ends_the_worker_as_a_mistake_of_the_configuration(bench: Bench) -> None:
    (bench.folder / "refuse").touch()
    with pytest.raises(ConfigError, match="it refuses its flags"):
        async with serving(bench) as service:
            await service.occupy((0,), 10.0)
    assert bench.running() == []


@pytest.mark.parametrize(
    ("devices", "name", "known", "gpus"),
    [
        ((0, 1), "auto", ["0", "1", "2"], ("0", "1")),
        ((3,), "cuda", ["0", "1"], ("1",)),
        ((3,), "cuda", [], ("3",)),
        ((3,), "cuda:1", ["0", "1"], ("1",)),
        ((1,), "cuda", ["GPU-a", "GPU-b"], ("GPU-b",)),
    ],
)
def test_devices_of_the_pool_are_the_gpus_in_their_order(devices, name, known, gpus) -> None:
    assert gpus_at(devices, name, known) == gpus
