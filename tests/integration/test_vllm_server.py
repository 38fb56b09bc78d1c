"""A real vLLM server as a worker owns it: what it draws, and updates with the faults its interface lets through.

Needs an interpreter with vLLM and this package: `PENSTOCK_VLLM_PYTHON=/path/to/python`, or vLLM in this environment.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import psutil
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from penstock.engines.requests import Completion, Sampling
from penstock.engines.vllm.requests import VllmRequests, label
from penstock.engines.vllm.server import ServerSettings, VllmServer
from penstock.engines.vllm.settings import VllmEngineSection
from penstock.engines.vllm.weights import VllmEngine
from penstock.errors import PeerLost, Transient
from penstock.records.ids import Version
from penstock.records.weights import Held, Manifest
from penstock.runtime.tensors import module_tensors
from penstock.weights.io.files import FileTransport, Publisher, read_manifest
from penstock.weights.io.updater import ReplicaReport, ReplicaUpdater
from penstock.weights.replica import ReplicaState

PYTHON = os.environ.get("PENSTOCK_VLLM_PYTHON") or (sys.executable if importlib.util.find_spec("vllm") else "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON, reason="vLLM is not importable, and PENSTOCK_VLLM_PYTHON names no interpreter"),
]


async def eventually(condition: Callable[[], Awaitable[Any]], what: str, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.01)


PROMPT = [5, 6, 7]
LONG = 4000
"""Tokens that take seconds: whatever is done to such a request, it is done before its end."""
CONFIG = Qwen2Config(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    tie_word_embeddings=True,  # the harder case: the output layer is loaded with the embedding
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
    """A worker's server, asked in the plain way, so that what it serves is seen from outside."""

    def __init__(self, directory: Path, *options: str) -> None:
        (directory / "model").mkdir()
        config = model(0).config
        config.architectures = ["Qwen2ForCausalLM"]
        config.save_pretrained(directory / "model")
        self.owned = VllmServer(
            ServerSettings(
                model=directory / "model",
                home=directory / "home",
                log=directory / "log",
                engine=VllmEngineSection(max_requests=8, eager=True, options=list(options)),
                python=PYTHON,
                dtype="float32",
                max_length=4096,
                threads=1,
            )
        )
        self.owned.launch()
        asyncio.run(self.owned.ready(600.0))
        self.address = self.owned.address()
        transport = httpx.HTTPTransport(uds=self.address)
        self.client = httpx.Client(transport=transport, base_url="http://vllm", timeout=120.0)

    def paused(self) -> bool:
        return self.client.get("/is_paused").json()["is_paused"]

    def metric(self, name: str, of: str = "") -> float:
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{") and of in line)

    def running(self) -> float:
        """Requests that the server works on."""
        return self.metric("num_requests_running")

    def generate(self, tokens: int = 8) -> dict[str, Any]:
        sampling = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, "detokenize": False, "logprobs": 0}
        body = {"token_ids": PROMPT, "sampling_params": sampling}
        reply = self.client.post("/inference/v1/generate", json=body)
        reply.raise_for_status()
        return reply.json()["choices"][0]

    def processes(self) -> list[psutil.Process]:
        assert self.owned.pid is not None
        top = psutil.Process(self.owned.pid)
        return [top, *top.children(recursive=True)]

    def close(self) -> None:
        self.client.close()
        self.owned.stop(20.0)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as directory:
        server = Server(Path(directory))
        yield server
        server.close()


class DamagingEngine(VllmEngine):
    """Lets something happen between the check of the files and the server's reading of them."""

    def __init__(self, server: Server, run_dir: Path) -> None:
        exit_reason = server.owned.exit_reason
        super().__init__(server.address, run_dir, run_dir / "versions", label=label, exit_reason=exit_reason)
        self.before_load: Callable[[Manifest], None] = lambda _: None
        self.after_load: Callable[[], None] = lambda: None
        self.resume_errors = 0

    def load_in_place(self, tensors: Mapping[str, torch.Tensor], version: int, digest: str, timeout_s: float) -> float:
        self.before_load(self._fetched[digest][1])
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
        self.engine = DamagingEngine(server, run_dir)
        self.run_dir = run_dir
        self.newest: Manifest | None = None
        self.reports: list[ReplicaReport] = []
        self.updater = ReplicaUpdater(
            self.engine,
            self,
            self.report,
            self.engine,
            way="in_place",
            verify=self.engine.served_digest,
            poll_s=0.2,
            change_timeout_s=60.0,
            retry_first_s=0.02,
            retry_cap_s=0.1,
        )

    def publish(self, version: int) -> Manifest:
        self.newest = self.publisher.publish(Version(version), module_tensors(model(version)))
        return self.newest

    async def next_manifest(self, held: Held, wait_s: float) -> Manifest | None:
        if self.newest is None or self.newest.held == held:
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
        found = [
            one["logprob"] for one in choice["logprobs"]["content"]
        ]  # the tokens alone may be those of any version
        np.testing.assert_allclose(found, logprobs_of(version, PROMPT, choice["token_ids"]), atol=1e-4)
        assert self.newest is not None
        said = label(version, self.newest.digest)
        assert choice["weight_versions"] == [{"version": said, "start": 0, "end": 8}]
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


async def test_a_version_on_another_host_is_fetched_and_then_served(tmp_path: Path, server: Server) -> None:
    bench = Bench(tmp_path, server)
    bench.engine._files = FileTransport(tmp_path / "not here")
    bench.engine.elsewhere = FileTransport(tmp_path)  # which stands for a pull

    async def story() -> None:
        for version in (1, 2):
            bench.publish(version)
            await bench.serves(version)

    await bench.drive(story())
    [kept] = (tmp_path / "versions").rglob("[0-9]*/manifest.json")
    assert bench.newest is not None
    assert read_manifest(kept.parent).held == bench.newest.held


async def requests_during(bench: Bench, story: Callable[[VllmRequests], Awaitable[None]]) -> None:
    """Runs a story with an updater and a request engine beside it."""
    engine = bench.engine
    requests = VllmRequests(
        bench.server.address, max_positions=4096, held=lambda: (engine.version, engine.digest), deadline_s=120.0
    )

    async def told() -> None:
        await story(requests)
        interruptions.cancel()

    try:
        async with asyncio.TaskGroup() as group:
            interruptions = group.create_task(requests.run())
            await bench.drive(told())
    finally:
        await requests.close()


def forward_logprobs(version: int, completion: Completion, prompt: list[int], temperature: float) -> np.ndarray:
    return logprobs_of(version, prompt, completion.token_ids.tolist(), temperature)


def logprobs_of(version: int, prompt: list[int], tokens: list[int], temperature: float = 1.0) -> np.ndarray:
    """Of these tokens, by a plain forward pass."""
    with torch.no_grad():
        logits = model(version)(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return logprobs.gather(-1, torch.tensor(tokens)[:, None])[:, 0].numpy()


async def test_many_requests_at_once_record_the_probabilities_they_were_drawn_with(
    tmp_path: Path, server: Server
) -> None:
    bench = Bench(tmp_path, server)
    prompts = [[*PROMPT, 10 + row] for row in range(24)]
    made: list[Completion] = []
    cut: list[Completion] = []

    async def story(requests: VllmRequests) -> None:
        bench.publish(3)
        await bench.serves(3)
        sampling = Sampling(max_new_tokens=24, temperature=0.7)
        made.extend(await asyncio.gather(*(requests.complete(prompt, sampling) for prompt in prompts)))
        few = Sampling(max_new_tokens=24, temperature=0.7, top_k=2)
        cut.extend(await asyncio.gather(*(requests.complete(prompt, few) for prompt in prompts)))

    await requests_during(bench, story)
    assert bench.newest is not None
    for prompt, completion in zip(prompts, made, strict=True):
        assert completion.ending == "length"
        assert len(completion.token_ids) == 24
        np.testing.assert_allclose(completion.logprobs, forward_logprobs(3, completion, prompt, 0.7), atol=1e-4)
        assert completion.versions.tolist() == [[0, 3]]
        assert (completion.version, completion.digest) == (3, bench.newest.digest)
    assert len({tuple(completion.token_ids.tolist()) for completion in made}) > len(made) / 2  # really sampled
    for prompt, completion in zip(prompts, cut, strict=True):
        full = forward_logprobs(3, completion, prompt, 0.7)
        assert (completion.logprobs > full + 1.0).all()  # two of 512 tokens are far more likely than before the cut


async def test_a_completion_ends_at_its_last_token(tmp_path: Path, server: Server) -> None:
    bench = Bench(tmp_path, server)

    async def story(requests: VllmRequests) -> None:
        bench.publish(3)
        await bench.serves(3)
        first = await requests.complete(PROMPT, Sampling(max_new_tokens=8, greedy=True))
        assert first.token_ids.tolist() == expected(3)
        ending = expected(3)[4]
        stopped = await requests.complete(PROMPT, Sampling(max_new_tokens=8, greedy=True, stop_ids=(ending,)))
        assert stopped.ending == "stop"
        assert stopped.token_ids.tolist() == expected(3)[: expected(3).index(ending) + 1]

    await requests_during(bench, story)


async def test_requests_in_flight_are_kept_and_their_tokens_carry_their_versions(
    tmp_path: Path, server: Server
) -> None:
    bench = Bench(tmp_path, server)
    made: list[Completion] = []
    digests: list[str] = []

    async def story(requests: VllmRequests) -> None:
        digests.append(bench.publish(3).digest)
        await bench.serves(3)
        served = asyncio.Event()

        async def draw(tokens: int) -> None:
            while not served.is_set():
                made.append(await requests.complete(PROMPT, Sampling(max_new_tokens=tokens)))

        async with asyncio.TaskGroup() as group:
            for tokens in range(100, 260, 20):  # never all at their end: some are in flight whenever the change comes
                group.create_task(draw(tokens))
            await eventually(lambda: asyncio.to_thread(server.running), "requests in flight")
            digests.append(bench.publish(4).digest)
            await bench.serves(4)
            served.set()

    await requests_during(bench, story)
    changed = [completion for completion in made if len(completion.versions) == 2]
    assert changed, [completion.versions.tolist() for completion in made]
    for completion in changed:
        (_, old), (swapped, new) = completion.versions.tolist()
        assert (old, new) == (3, 4)
        assert (completion.version, completion.digest) == (3, digests[0])  # the oldest is what counts
        before, after = (forward_logprobs(version, completion, PROMPT, 1.0) for version in (3, 4))
        np.testing.assert_allclose(completion.logprobs[:swapped], before[:swapped], atol=1e-4)
        np.testing.assert_allclose(completion.logprobs[swapped:], after[swapped:], atol=1e-4)


async def test_requests_that_new_weights_throw_out_do_not_say_that_the_server_is_too_full(
    tmp_path: Path, server: Server
) -> None:
    bench = Bench(tmp_path, server)
    before = server.metric("num_preemptions_total")

    async def counted() -> bool:
        return await asyncio.to_thread(server.metric, "num_preemptions_total") > before

    async def looked() -> bool:
        return bool(server.owned.figures)

    async def story(requests: VllmRequests) -> None:
        bench.publish(3)
        await bench.serves(3)

        async def draw() -> None:
            while True:
                await requests.complete(PROMPT, Sampling(max_new_tokens=LONG))

        probing = server.owned.probe(stall_s=60.0, resumed=lambda: bench.engine.resumed_at, every_s=0.01)
        tasks = [asyncio.create_task(probing), *(asyncio.create_task(draw()) for _ in range(6))]
        await eventually(looked, "a look at the server")
        await eventually(lambda: asyncio.to_thread(server.running), "requests in flight")
        bench.publish(4)
        await bench.serves(4)
        await eventually(counted, "vLLM to count what it threw out")
        server.owned.figures = {}
        await eventually(looked, "a look at the server after the pause")
        assert server.owned.figures["preemptions"] == 0.0
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    await requests_during(bench, story)


async def test_requests_for_which_there_is_no_cache_are_counted(tmp_path: Path) -> None:
    server = await asyncio.to_thread(Server, tmp_path, "--num-gpu-blocks-override", "40")  # not two of the longest
    requests = VllmRequests(server.address, max_positions=4096, held=lambda: (0, ""), deadline_s=120.0)
    most: dict[str, float] = {}

    async def full() -> bool:
        most.update({name: max(most.get(name, 0.0), value) for name, value in server.owned.figures.items()})
        return bool(most.get("preemptions") and most["requests_waiting"])

    tasks = [asyncio.create_task(server.owned.probe(stall_s=60.0, every_s=0.01))]
    tasks += [asyncio.create_task(requests.complete(PROMPT, Sampling(max_new_tokens=LONG))) for _ in range(8)]
    try:
        await eventually(full, "a server that is too full")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await requests.close()
        await asyncio.to_thread(server.close)


async def test_interrupted_requests_give_what_they_have_and_can_be_gone_on_with(tmp_path: Path, server: Server) -> None:
    bench = Bench(tmp_path, server)

    async def story(requests: VllmRequests) -> None:
        bench.publish(3)
        await bench.serves(3)
        async with asyncio.TaskGroup() as group:
            sampling = Sampling(max_new_tokens=LONG, greedy=True)
            drawing = [group.create_task(requests.complete(PROMPT, sampling)) for _ in range(4)]
            await eventually(lambda: asyncio.to_thread(server.running), "requests in flight")
            requests.interrupt()
        for completion in (task.result() for task in drawing):
            assert completion.ending == "interrupted"
            drawn = completion.token_ids.tolist()
            assert len(drawn) < LONG
            assert drawn == expected(3, len(drawn) + 1)[:-1]
        assert (await requests.complete(PROMPT, sampling)).token_ids.tolist() == []  # also those that come later
        requests.resume()
        kept = drawing[0].result().token_ids.tolist()
        rest = await requests.complete([*PROMPT, *kept], Sampling(max_new_tokens=8, greedy=True))
        assert [*kept, *rest.token_ids.tolist()] == expected(3, len(kept) + 8)

    await requests_during(bench, story)


async def test_a_cancelled_request_is_aborted_in_the_server(tmp_path: Path, server: Server) -> None:
    bench = Bench(tmp_path, server)

    async def story(requests: VllmRequests) -> None:
        bench.publish(3)
        await bench.serves(3)
        ended = server.metric("request_success_total", 'finished_reason="length"')
        drawing: list[asyncio.Task[Completion]] = []
        try:
            async with asyncio.TaskGroup() as group:
                sampling = Sampling(max_new_tokens=LONG)
                drawing += [group.create_task(requests.complete(PROMPT, sampling)) for _ in range(4)]
                await eventually(lambda: asyncio.to_thread(server.running), "requests in flight")
                await asyncio.to_thread(server.client.post, "/pause?mode=keep")
                for task in drawing:
                    task.cancel()
        finally:
            server.client.post("/resume").raise_for_status()
        assert requests.in_flight == 0
        assert all(task.cancelled() for task in drawing)
        await requests.complete(PROMPT, Sampling(max_new_tokens=8))
        await eventually(lambda: asyncio.to_thread(lambda: not server.running()), "an idle server")
        # The cancelled ones were not drawn to their end.
        assert server.metric("request_success_total", 'finished_reason="length"') == ended + 1

    await requests_during(bench, story)


async def test_off_its_devices_a_server_stands_still_and_comes_back_with_its_weights(
    tmp_path: Path, server: Server
) -> None:
    bench = Bench(tmp_path, server)

    async def story() -> None:
        bench.publish(3)
        await bench.serves(3)
        engine = bench.engine
        engine.vacate(60.0)
        engine.check_vacated(60.0)
        assert server.paused()
        engine.occupy(60.0)
        engine.occupy(60.0)
        with pytest.raises(PeerLost, match="awake"):
            engine.check_vacated(60.0)
        await bench.serves(3)

    await bench.drive(story())


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


@pytest.mark.parametrize("lost", ["/start_weight_update", "/update_weights"])
async def test_an_update_whose_reply_was_lost_is_completed(tmp_path: Path, server: Server, lost: str) -> None:
    bench = Bench(tmp_path, server)
    begun: list[str] = []

    def begin(manifest: Manifest) -> None:
        if manifest.version == 8 and not begun:
            begun.append(lost)
            server.client.post("/start_weight_update").raise_for_status()
            if lost == "/update_weights":
                update = {"root": str(tmp_path), "manifest": msgspec.to_builtins(manifest)}
                server.client.post("/update_weights", json={"update_info": update}).raise_for_status()
                raise Transient("the reply was lost")

    bench.engine.before_load = begin

    async def story() -> None:
        bench.publish(7)
        await bench.serves(7)
        bench.publish(8)
        await bench.serves(8)

    await bench.drive(story())
    assert begun == [lost]
    torn = [report for report in bench.reports if report.state is ReplicaState.TORN]
    assert len(torn) == (lost == "/update_weights"), "the next attempt succeeds"


async def test_a_version_of_another_model_is_never_served(tmp_path: Path, server: Server) -> None:
    """Also without the tensors it lacks the rest could be loaded; the server would go on with older ones."""
    bench = Bench(tmp_path, server)

    async def story() -> None:
        bench.publish(5)
        await bench.serves(5)
        tensors = module_tensors(model(6))
        del tensors["model.norm.weight"]
        bench.newest = bench.publisher.publish(Version(6), tensors)
        async with asyncio.timeout(120):
            while not any("model.norm.weight" in report.error for report in bench.reports):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert not bench.updater.replica.may_serve
        assert server.paused()
        bench.publish(7)
        await bench.serves(7)

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


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_killed_server_is_given_up_to_be_replaced(tmp_path: Path, server: Server) -> None:
    """The last test: what this interface cannot survive is handled by a new server."""
    bench = Bench(tmp_path, server)
    killed: list[psutil.Process] = []

    def kill(manifest: Manifest) -> None:
        if manifest.version == 12 and not killed:
            killed.extend(server.processes())
            killed[0].kill()

    bench.engine.before_load = kill

    async def story() -> None:
        bench.publish(11)
        await bench.serves(11)
        bench.publish(12)
        await asyncio.sleep(60.0)  # cancelled when the updater gives up

    with pytest.raises(ExceptionGroup) as caught:
        await bench.drive(story())
    assert killed
    lost = caught.value.subgroup(PeerLost)
    assert lost is not None
    assert "the vLLM server was killed by SIGKILL" in str(lost.exceptions)
    assert bench.reports[-1].state is ReplicaState.TORN
    with pytest.raises(PeerLost, match="killed by SIGKILL"):
        await server.owned.watch()
    assert len(killed) >= 3  # the one that listens, the one that schedules, the one that decodes
    await eventually(lambda: asyncio.to_thread(lambda: not any(alive(one) for one in killed)), "all to be gone")
    del caught, lost
    gc.collect()  # the client library leaves refused sockets to the collector, which warns of them
