"""A real vLLM server under our transfer backend, with the faults its interface lets through.

Needs an interpreter with vLLM and this package: `PENSTOCK_VLLM_PYTHON=/path/to/python`, or vLLM in this environment.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from penstock.errors import PeerLost
from penstock.records.ids import Version
from penstock.records.weights import Manifest
from penstock.runtime.tensors import module_tensors
from penstock.weights.io.files import Publisher
from penstock.weights.io.updater import ReplicaReport, ReplicaUpdater
from penstock.weights.io.vllm import VllmEngine
from penstock.weights.replica import ReplicaState

PYTHON = os.environ.get("PENSTOCK_VLLM_PYTHON") or (sys.executable if importlib.util.find_spec("vllm") else "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON, reason="vLLM is not importable, and PENSTOCK_VLLM_PYTHON names no interpreter"),
]

PROMPT = [5, 6, 7]
CONFIG = Qwen2Config(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=512,
    tie_word_embeddings=False,
)


def model(seed: int) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(CONFIG).float().eval()


def expected(seed: int, tokens: int = 8) -> list[int]:
    policy: Any = model(seed)
    made = policy.generate(
        torch.tensor([PROMPT]), max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return made[0, len(PROMPT) :].tolist()


class Server:
    def __init__(self, directory: Path) -> None:
        model(0).save_pretrained(directory / "model")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(directory / "model")]
        command += ["--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager", "--max-model-len", "256"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--enable-scale-out", "--max-num-seqs", "8"]
        command += ["--weight-transfer-config", '{"backend": "penstock"}']
        settings = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        self.log = (directory / "log").open("wb")
        self.process = subprocess.Popen(
            command, env=os.environ | settings, stdout=self.log, stderr=self.log, start_new_session=True
        )
        deadline = time.monotonic() + 300.0
        while not self.healthy():
            assert self.process.poll() is None, (directory / "log").read_text()[-2000:]
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.5)

    def healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5.0).status_code == 200
        except httpx.TransportError:
            return False

    def paused(self) -> bool:
        return httpx.get(f"{self.url}/is_paused", timeout=10.0).json()["is_paused"]

    def generate(self, tokens: int = 8) -> dict[str, Any]:
        sampling = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
        body = {"token_ids": PROMPT, "sampling_params": sampling}
        reply = httpx.post(f"{self.url}/inference/v1/generate", json=body, timeout=120.0)
        reply.raise_for_status()
        return reply.json()["choices"][0]

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30.0)
        self.log.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as directory:
        server = Server(Path(directory))
        yield server
        server.kill()


class DamagingEngine(VllmEngine):
    """Lets something happen between the check of the files and the server's reading of them."""

    def __init__(self, url: str, run_dir: Path) -> None:
        super().__init__(url, run_dir)
        self.before_load: Callable[[Manifest], None] = lambda _: None
        self.after_load: Callable[[], None] = lambda: None
        self.resume_errors = 0

    def load_in_place(self, tensors: Mapping[str, torch.Tensor], version: int, digest: str, timeout_s: float) -> float:
        self.before_load(self._manifests[digest])
        try:
            return super().load_in_place(tensors, version, digest, timeout_s)
        finally:
            self.after_load()

    def wake(self, timeout_s: float) -> None:
        if self.resume_errors > 0:
            self.resume_errors -= 1
            raise RuntimeError("injected at resume")
        super().wake(timeout_s)


class Bench:
    def __init__(self, run_dir: Path, server: Server) -> None:
        self.server = server
        self.publisher = Publisher(run_dir, f"l{time.monotonic_ns()}", keep=3, bucket_bytes=60_000)
        self.engine = DamagingEngine(server.url, run_dir)
        self.run_dir = run_dir
        self.newest: Manifest | None = None
        self.reports: list[ReplicaReport] = []
        self.updater = ReplicaUpdater(
            self.engine,
            self,
            self.report,
            self.engine,
            way="in_place",
            prove=self.engine.served_digest,
            poll_s=0.2,
            change_timeout_s=60.0,
            retry_first_s=0.02,
            retry_cap_s=0.1,
        )

    def publish(self, version: int) -> Manifest:
        self.newest = self.publisher.publish(Version(version), module_tensors(model(version)))
        return self.newest

    async def next_manifest(self, held_digest: str, wait_s: float) -> Manifest | None:
        if self.newest is None or self.newest.digest == held_digest:
            await asyncio.sleep(0.05)
            return None
        return self.newest

    async def report(self, report: ReplicaReport) -> None:
        self.reports.append(report)

    async def serves(self, version: int) -> None:
        async with asyncio.timeout(120):
            while not (self.reports and self.reports[-1].version == version and self.updater.replica.may_serve):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        choice = await asyncio.to_thread(self.server.generate)
        assert choice["token_ids"] == expected(version)
        assert choice["weight_versions"] == [{"version": str(version), "start": 0, "end": 8}]
        assert not self.server.paused()

    async def drive(self, story: Awaitable[None]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                task = group.create_task(self.updater.run())
                await story
                task.cancel()
        finally:
            self.engine.close()
        self.updater.replica.check()


async def test_versions_are_served_one_after_the_other(tmp_path: Path, server: Server) -> None:
    bench = Bench(tmp_path, server)

    async def story() -> None:
        for version in (1, 2):
            bench.publish(version)
            await bench.serves(version)

    await bench.drive(story())


async def test_requests_in_flight_are_kept_and_their_tokens_carry_their_versions(
    tmp_path: Path, server: Server
) -> None:
    bench = Bench(tmp_path, server)
    made: list[dict[str, Any]] = []

    async def story() -> None:
        bench.publish(3)
        await bench.serves(3)
        thread = threading.Thread(target=lambda: made.append(server.generate(240)))
        thread.start()
        await asyncio.sleep(0.1)
        bench.publish(4)
        await bench.serves(4)
        await asyncio.to_thread(thread.join, 120.0)

    await bench.drive(story())
    spans = made[0]["weight_versions"]
    assert [span["version"] for span in spans] == ["3", "4"]
    assert spans[0]["end"] == spans[1]["start"]
    assert spans[1]["end"] == len(made[0]["token_ids"]) == 240
    assert made[0]["token_ids"][: spans[0]["end"]] == expected(3, 240)[: spans[0]["end"]]


async def test_an_update_that_breaks_inside_the_server_serves_nothing_until_it_is_complete(
    tmp_path: Path, server: Server
) -> None:
    bench = Bench(tmp_path, server)
    struck: list[bool] = []

    def damage(manifest: Manifest) -> None:
        if manifest.version == 6 and len(struck) < 2:
            path = tmp_path / manifest.directory / manifest.buckets[5].file
            good = path.read_bytes()
            path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))

            def heal() -> None:
                struck.append(server.paused())
                path.write_bytes(good)
                bench.engine.after_load = lambda: None

            bench.engine.after_load = heal

    bench.engine.before_load = damage

    async def story() -> None:
        bench.publish(5)
        await bench.serves(5)
        bench.publish(6)
        await bench.serves(6)

    await bench.drive(story())
    assert struck == [True, True]  # the fault struck twice, and each time the server stayed paused
    torn = [report for report in bench.reports if report.state is ReplicaState.TORN]
    assert len(torn) == 2
    assert "not what was published" in torn[0].error


async def test_an_update_that_was_begun_and_lost_is_completed(tmp_path: Path, server: Server) -> None:
    bench = Bench(tmp_path, server)

    def begin(manifest: Manifest) -> None:
        if manifest.version == 8:
            httpx.post(f"{server.url}/start_weight_update", timeout=30.0).raise_for_status()

    bench.engine.before_load = begin

    async def story() -> None:
        bench.publish(7)
        await bench.serves(7)
        bench.publish(8)
        await bench.serves(8)

    await bench.drive(story())


async def test_resuming_is_tried_again(tmp_path: Path, server: Server) -> None:
    bench = Bench(tmp_path, server)

    async def story() -> None:
        bench.publish(9)
        await bench.serves(9)
        bench.engine.resume_errors = 2
        bench.publish(10)
        await bench.serves(10)

    await bench.drive(story())
    assert bench.engine.resume_errors == 0


async def test_a_killed_server_is_given_up_to_be_replaced(tmp_path: Path, server: Server) -> None:
    """The last test: what this interface cannot survive is handled by a new server."""
    bench = Bench(tmp_path, server)
    killed: list[int] = []

    def kill(manifest: Manifest) -> None:
        if manifest.version == 12 and not killed:
            killed.append(server.process.pid)
            server.kill()

    bench.engine.before_load = kill

    async def story() -> None:
        bench.publish(11)
        await bench.serves(11)
        bench.publish(12)
        await asyncio.sleep(60.0)  # cancelled when the updater gives up

    with pytest.raises(ExceptionGroup) as caught:
        await bench.drive(story())
    assert killed
    assert caught.value.subgroup(PeerLost) is not None
    assert bench.reports[-1].state is ReplicaState.TORN
