"""One vLLM server process, owned by the worker that starts it.

The server listens on a socket in a private directory of the run. Its calls for weights and pauses know no key, so only
the file system can guard them; and a socket file always leads to the newest server, never to one left from before.
It starts with made-up numbers: nothing may be generated before a published version is loaded and verified.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import httpx
import msgspec
import psutil

from penstock.engines.vllm.backend import Proof
from penstock.engines.vllm.settings import VllmEngineSection
from penstock.errors import ConfigError, LocalProtocolError, PeerLost
from penstock.runtime.process import how_ended, kill_tree
from penstock.wire.messages import LOADING

logger = logging.getLogger(__name__)

SOCKET = "socket"
"""In the server's working directory."""
MAIN = "penstock.engines.vllm.main"
USAGE = 2
"""Exit code of a command line that the server refuses."""
SOCKET_PATH_BYTES = 100
"""The kernel takes no longer path of a socket (108, with room for the ending)."""
LOOK_EVERY_S = 0.2
ASK_S = 5.0
LAST_LINES = 12
LAST_CHARACTERS = 1500

PROBE = """
import importlib.metadata as metadata, importlib.util as util, json
def version(name):
    try: return metadata.version(name)
    except metadata.PackageNotFoundError: return None
print(json.dumps({"vllm": util.find_spec("vllm") is not None, "penstock": version("penstock")}))
"""


class ServerSettings(msgspec.Struct, frozen=True):
    """What a server is started with."""

    model: Path
    """A directory with the model's `config.json`; weights are not read from it."""
    home: Path
    """Where its socket is made; for this user only."""
    log: Path
    engine: VllmEngineSection
    python: str
    """The interpreter of an environment with vLLM and this package."""
    dtype: str
    max_length: int
    threads: int
    accelerator: bool = False
    memory_share: float = 1.0
    """Of a GPU's memory; 1: what the server takes by itself."""
    lora_rank: int = 0
    """Of adapters that are loaded beside the model, whose weights are then read from its directory; 0: none."""
    seed: int = 0


ADAPTERS = 4
"""In one batch: completions in flight may have begun with that many versions."""


def command(settings: ServerSettings, parent_pid: int) -> list[str]:
    flags = ["--model", str(settings.model), "--skip-tokenizer-init"]
    if settings.lora_rank:
        flags += ["--enable-lora", "--max-lora-rank", str(settings.lora_rank)]
        flags += ["--max-loras", str(ADAPTERS), "--max-cpu-loras", str(2 * ADAPTERS)]
    else:
        flags += ["--load-format", "dummy"]
    flags += ["--dtype", settings.dtype, "--max-model-len", str(settings.max_length)]
    flags += ["--max-num-seqs", str(settings.engine.max_requests), "--seed", str(settings.seed)]
    flags += ["--uds", SOCKET, "--disable-uvicorn-access-log"]
    # Token ids with the versions of their weights are told only by this interface.
    flags += ["--enable-scale-out", "--weight-transfer-config", '{"backend": "penstock"}']
    flags += ["--worker-extension-cls", f"{Proof.__module__}.{Proof.__qualname__}"]
    # After the temperature and the cuts, as drawn; and no cut that a file beside the model asks for.
    flags += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    if settings.engine.tensor_parallel > 1:
        flags += ["--tensor-parallel-size", str(settings.engine.tensor_parallel)]
    if settings.engine.data_parallel > 1:
        flags += ["--data-parallel-size", str(settings.engine.data_parallel)]
    if settings.engine.eager:
        flags.append("--enforce-eager")
    if settings.accelerator:
        flags.append("--enable-sleep-mode")
        if settings.memory_share < 1:
            flags += ["--gpu-memory-utilization", f"{settings.memory_share:.3f}"]
    return [settings.python, "-m", MAIN, str(parent_pid), *flags, *settings.engine.options]


def environment(settings: ServerSettings) -> dict[str, str]:
    chosen = {
        "VLLM_SERVER_DEV_MODE": "1",  # the calls for pauses and weights exist only so
        "VLLM_CPU_KVCACHE_SPACE": str(settings.engine.cache_gb),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        # Clients drop an idle connection long before: the server must not, just as a request is sent over it.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(settings.threads),
        "PENSTOCK_OWNS_VLLM": "1",  # for the plugin, which is loaded by every vLLM of that environment
    }
    if settings.lora_rank:
        chosen["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if settings.engine.eager:
        chosen["TORCHDYNAMO_DISABLE"] = "1"  # small helpers of the sampler would still be compiled, for many seconds
    return chosen


def check_interpreter(python: str, timeout_s: float = 60.0) -> None:
    """ConfigError unless that interpreter has vLLM and the same version of this package."""
    try:
        probe = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, timeout=timeout_s, check=True)
        found = json.loads(probe.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(
            f"engine.python = {python!r} cannot be asked what it has: {error}; name the Python of a place with vLLM"
        ) from error
    ours = version("penstock")
    if not found["vllm"]:
        raise ConfigError(
            f"vLLM cannot be imported by {python!r}: install it there, or set engine.python to the Python of an "
            "environment with vLLM and this package"
        )
    if found["penstock"] != ours:
        raise ConfigError(
            f"{python!r} has Penstock {found['penstock'] or 'not installed'}, this is {ours}: install the same there; "
            "the server loads weights with it"
        )


FIGURES = {
    "vllm:num_requests_running": "requests_decoding",
    "vllm:num_requests_waiting": "requests_waiting",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:kv_cache_usage_perc": "cache_used",
}
"""Of the server's metrics, and what they are called here."""
STALE_S = 1.0
"""After a pause, until the metrics are of a time after it."""


class Room:
    """How full a server is, by its metrics: what it decodes, what waits for room, what was thrown out for lack of it.

    A pause for new weights throws out all requests too, and they wait until they are read again. vLLM counts those like
    the others, so nothing is said after a pause until the requests that are decoded no longer become more.
    """

    def __init__(self) -> None:
        self._resumed_at: float | None = None
        self._settled = False
        self._decoding = self._counted = self._thrown_out = 0.0

    def look(self, metrics: str, now: float, resumed_at: float | None) -> dict[str, float]:
        """From metrics in Prometheus' format; empty where they say nothing. A pause without an end is not over."""
        found: dict[str, list[float]] = {name: [] for name in FIGURES.values()}
        for line in metrics.splitlines():
            name = line.partition("{")[0].partition(" ")[0]
            if name in FIGURES:
                found[FIGURES[name]].append(float(line.rsplit(" ", 1)[1]))
        figures = {name: sum(of_each) for name, of_each in found.items()}  # of the processes that decode
        decoding, counted = figures["requests_decoding"], figures["preemptions"]
        if resumed_at is not None and now - resumed_at < STALE_S:
            resumed_at = None
        if resumed_at is None or resumed_at != self._resumed_at:
            self._settled = False
        elif self._settled:
            self._thrown_out += counted - self._counted
        else:
            self._settled = decoding <= self._decoding
        self._resumed_at, self._decoding, self._counted = resumed_at, decoding, counted
        cache_used = max(found["cache_used"], default=0.0)
        return figures | {"preemptions": self._thrown_out, "cache_used": cache_used} if self._settled else {}


class VllmServer:
    """Started and stopped any number of times; at most one process at a time."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.figures: dict[str, float] = {}
        """How full the server is, as it said last (see `Room`)."""
        self._process: subprocess.Popen[bytes] | None = None
        self._home: int | None = None

    def __repr__(self) -> str:
        state = "not started" if self._process is None else f"process {self._process.pid}"
        return f"VllmServer({state}, {self.settings.model})"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def address(self) -> str:
        """The socket's path for clients in this process, short enough for the kernel wherever the run lies."""
        path = self.settings.home / SOCKET
        if len(os.fsencode(path)) < SOCKET_PATH_BYTES:
            return str(path)
        if self._home is None:
            self._home = os.open(self.settings.home, os.O_RDONLY | os.O_DIRECTORY)
        return f"/proc/self/fd/{self._home}/{SOCKET}"

    def launch(self, gpus: tuple[str, ...] = ()) -> None:
        """Starts the process, on these GPUs if any are named. Called on the main thread: the kernel ties the server's
        life to the calling thread."""
        if self._process is not None:
            raise LocalProtocolError(f"this server is started already: {self!r}")
        settings = self.settings
        settings.home.mkdir(parents=True, exist_ok=True)
        settings.home.chmod(0o700)
        (settings.home / SOCKET).unlink(missing_ok=True)
        with settings.log.open("ab") as output:
            self._process = subprocess.Popen(
                command(settings, os.getpid()),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=settings.home,
                env=os.environ | environment(settings) | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}),
                start_new_session=True,
            )
        logger.info("started a vLLM server as process %d; it writes to %s", self._process.pid, settings.log)

    async def ready(self, timeout_s: float, progressed: Callable[[str], None] = lambda doing: None) -> None:
        """Returns when the server answers.

        ConfigError when it refuses its command line, PeerLost when it ends or is not ready in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._answers(self._launched(), progressed)
        except TimeoutError:
            raise PeerLost(f"the vLLM server was not ready within {timeout_s:.0f} s; {self.last_lines()}") from None

    async def _answers(self, process: subprocess.Popen[bytes], progressed: Callable[[str], None]) -> None:
        began = time.monotonic()
        async with self._client(ASK_S) as client:
            while True:
                if (code := process.poll()) is not None:
                    sentence = f"the vLLM server {how_ended(code)} while it started"
                    if code == USAGE:
                        raise ConfigError(f"{sentence}: it refuses its flags (engine.options?); {self.last_lines()}")
                    raise PeerLost(f"{sentence}; {self.last_lines()}")
                progressed(f"{LOADING} the vLLM server for {time.monotonic() - began:.0f} s")
                try:
                    if (await client.get("/health")).status_code == httpx.codes.OK:
                        return
                except httpx.TransportError:  # it does not listen yet
                    logger.debug("no vLLM server answers yet")
                await asyncio.sleep(LOOK_EVERY_S)

    async def watch(self) -> None:
        """Raises PeerLost as soon as the server ends by itself; returns when it was stopped."""
        process = self._launched()
        while self._process is process:
            if (code := process.poll()) is not None:
                raise PeerLost(f"the vLLM server {how_ended(code)}; {self.last_lines()}")
            await asyncio.sleep(LOOK_EVERY_S)

    def fate(self) -> str:
        """How the server ended, for the error of a lost connection; empty while it runs, or was stopped."""
        code = None if self._process is None else self._process.poll()
        return "" if code is None else f"{how_ended(code)}; {self.last_lines()}"

    async def probe(
        self, *, stall_s: float, resumed: Callable[[], float | None] = lambda: 0.0, every_s: float = 1.0
    ) -> None:
        """Raises PeerLost when the server does not answer for `stall_s`; returns when it was stopped or has ended.

        The question goes through to the process that decodes: one that listens but does not work is lost too. Also
        asks how full the server is; `resumed` says when its last pause ended, None in one.
        """
        process, room = self._launched(), Room()
        async with self._client(stall_s) as client:
            while self._process is process and process.poll() is None:
                try:
                    answer = await client.get("/is_paused")
                    problem = f"says {answer.status_code}: {answer.text[:300]}" if answer.is_error else ""
                    if not problem:
                        resumed_at, metrics = resumed(), (await client.get("/metrics")).text
                        self.figures = room.look(metrics, time.monotonic(), resumed_at)
                except httpx.TimeoutException:
                    problem = f"did not answer for {stall_s:.0f} s"
                except httpx.TransportError as error:
                    problem = f"cannot be reached: {error!r}"
                if not problem:
                    await asyncio.sleep(every_s)
                elif self._process is process and process.poll() is None:
                    raise PeerLost(f"the vLLM server {problem}; {self.last_lines()}")

    def _launched(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise LocalProtocolError(f"this server was not started: {self!r}")
        return self._process

    def _client(self, timeout_s: float) -> httpx.AsyncClient:
        transport = httpx.AsyncHTTPTransport(uds=self.address())
        return httpx.AsyncClient(transport=transport, base_url="http://vllm", timeout=timeout_s)

    def stop(self, timeout_s: float) -> None:
        """Ends the server and all processes below it. Blocks; harmless when none runs."""
        process, self._process = self._process, None
        if process is not None:
            below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.terminate()
            try:
                process.wait(timeout_s / 2)
            except subprocess.TimeoutExpired:
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):  # nothing stronger is left to do
                    process.wait(timeout_s / 2)
            # The others end with it by themselves; the last is the one that removes their shared memory.
            _, left = psutil.wait_procs(below, timeout_s / 2)
            for one in left:
                logger.error(
                    "process %d of a vLLM server did not end within %.1f s: killing it", one.pid, timeout_s / 2
                )
                kill_tree(one.pid, timeout_s / 2)

    def close(self, timeout_s: float) -> None:
        """Stops it for good: clients can no longer use its address."""
        self.stop(timeout_s)
        if self._home is not None:
            os.close(self._home)
            self._home = None

    def last_lines(self) -> str:
        """What it wrote last, for error messages."""
        try:
            with self.settings.log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - 16384))
                lines = log.read().decode("utf-8", errors="replace").splitlines()
        except OSError as error:
            return f"its log cannot be read: {error}"
        kept = [line for line in lines if line.strip()][-LAST_LINES:]
        return f"the end of {self.settings.log}:\n" + "\n".join(kept)[-LAST_CHARACTERS:]
