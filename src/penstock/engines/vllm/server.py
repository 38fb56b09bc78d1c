"""One vLLM server process, owned by the worker that starts it.

The server listens on a socket in a private directory of the run. Its calls for weights and pauses have no
authentication, so file permissions protect them; a socket file always leads to the newest server. It starts with random
weights: nothing may be generated before a published version is loaded and verified.
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
from pathlib import Path

import httpx
import msgspec
import psutil

from penstock.engines.vllm import probe
from penstock.engines.vllm.backend import MemoryCheck
from penstock.engines.vllm.leftovers import PREFIX_VARIABLE, prefix_of, remove_leftovers
from penstock.engines.vllm.settings import VllmEngineSection
from penstock.errors import ConfigError, LocalProtocolError, PeerLost
from penstock.runtime.interpreter import python_command
from penstock.runtime.process import how_ended, kill_tree
from penstock.wire.messages import LOADING

logger = logging.getLogger(__name__)

SOCKET = "socket"
"""In the server's working directory."""
MAIN = "penstock.engines.vllm.main"
USAGE = 2
"""Exit code of a command line that the server refuses."""
SOCKET_PATH_BYTES = 100
"""The kernel limits the path of a socket to 108 bytes."""
LOOK_EVERY_S = 0.2
ASK_S = 5.0
LAST_LINES = 12
LAST_CHARACTERS = 1500


class ServerSettings(msgspec.Struct, frozen=True):
    """Settings of one server process."""

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
    """Of a GPU's memory; 1: the server's own default."""
    lora_rank: int = 0
    """Of adapters that are loaded beside the model, whose weights are then read from its directory; 0: none."""
    seed: int = 0


ADAPTERS = 4
"""In one batch: completions in flight may have begun with this number of versions."""


def command(settings: ServerSettings, parent_pid: int) -> list[str]:
    flags = ["--disable-uvicorn-access-log"]
    if settings.accelerator and settings.memory_share < 1:
        flags += ["--gpu-memory-utilization", f"{settings.memory_share:.3f}"]
    flags += settings.engine.options  # of a flag that is given twice the server takes the last
    flags += ["--model", str(settings.model), "--skip-tokenizer-init"]
    if settings.lora_rank:
        flags += ["--enable-lora", "--max-lora-rank", str(settings.lora_rank)]
        flags += ["--max-loras", str(ADAPTERS), "--max-cpu-loras", str(2 * ADAPTERS)]
    else:
        flags += ["--load-format", "dummy"]
    flags += ["--dtype", settings.dtype, "--max-model-len", str(settings.max_length)]
    flags += ["--max-num-seqs", str(settings.engine.max_requests), "--seed", str(settings.seed)]
    flags += ["--uds", SOCKET]
    # Only this interface returns token ids with the versions of their weights.
    flags += ["--enable-scale-out", "--weight-transfer-config", '{"backend": "penstock"}']
    flags += ["--worker-extension-cls", f"{MemoryCheck.__module__}.{MemoryCheck.__qualname__}"]
    # Log-probabilities after temperature and truncation, as drawn; no truncation from the model's generation_config.
    flags += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    if settings.engine.tensor_parallel > 1:
        flags += ["--tensor-parallel-size", str(settings.engine.tensor_parallel)]
    if settings.engine.data_parallel > 1:
        flags += ["--data-parallel-size", str(settings.engine.data_parallel)]
    if settings.engine.eager:
        flags.append("--enforce-eager")
    if settings.accelerator:
        flags.append("--enable-sleep-mode")
    return python_command("-m", MAIN, str(parent_pid), *flags, interpreter=settings.python)


def environment(settings: ServerSettings) -> dict[str, str]:
    chosen = {
        "VLLM_SERVER_DEV_MODE": "1",  # enables the calls for pauses and weights
        "VLLM_CPU_KVCACHE_SPACE": str(settings.engine.cache_gb),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        # Longer than clients keep an idle connection: the server must not close one while a request is sent over it.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(settings.threads),
        "PENSTOCK_OWNS_VLLM": "1",  # every vLLM of that environment loads the plugin
        "VLLM_RPC_BASE_PATH": ".",  # its home, which is its working directory: there a socket's path is short enough
        PREFIX_VARIABLE: prefix_of(settings.home),
    }
    if settings.lora_rank:
        chosen["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if settings.engine.eager:
        chosen["TORCHDYNAMO_DISABLE"] = "1"  # small helpers of the sampler would still be compiled, for many seconds
    return chosen


def check_interpreter(python: str, timeout_s: float = 60.0) -> None:
    """ConfigError unless that interpreter has vLLM and the same build of this package."""
    try:
        command = python_command(probe.__file__, interpreter=python)
        ran = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True)
        found = json.loads(ran.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(
            f"engine.python = {python!r} cannot be probed: {error}; name the Python of an environment with vLLM"
        ) from error
    if not found["vllm"]:
        raise ConfigError(
            f"vLLM cannot be imported by {python!r}: install it there, or set engine.python to the Python of an "
            "environment with vLLM and this package"
        )
    ours = Path(probe.__file__).parents[2]
    fix = "install the same wheel or checkout there with pip; the server loads weights with it"
    if found["penstock"] is None:
        raise ConfigError(f"{python!r} has no package penstock: {fix}")
    if found["build"] != probe.build_of(ours):
        raise ConfigError(
            f"{python!r} has another package penstock than this one, in {found['penstock']}: it may be an older build, "
            f"or another project's, since the distribution of this package is named penstock-rl; {fix}"
        )
    if not found["plugin"]:
        raise ConfigError(f"{python!r} finds this package in {found['penstock']}, but it is not installed: {fix}")


FIGURES = {
    "vllm:num_requests_running": "requests_decoding",
    "vllm:num_requests_waiting": "requests_waiting",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:kv_cache_usage_perc": "cache_used",
}
"""The server's metrics, and their names here."""
STALE_S = 1.0
"""The metrics of the first second after a pause may be from before it."""


class ServerLoad:
    """The load of a server, from its metrics: requests it decodes, requests that wait, preemptions for lack of cache.

    A pause for new weights preempts all requests too, and they wait until their prefill is repeated. vLLM counts those
    preemptions like the others. So after a pause no load is reported until the number of decoding requests no longer
    grows.
    """

    def __init__(self) -> None:
        self._resumed_at: float | None = None
        self._settled = False
        self._decoding = self._counted = self._preempted = 0.0

    def read(self, metrics: str, now: float, resumed_at: float | None) -> dict[str, float]:
        """From metrics in Prometheus' format; empty while they are not valid. `resumed_at` is None during a pause."""
        found: dict[str, list[float]] = {name: [] for name in FIGURES.values()}
        for line in metrics.splitlines():
            name = line.partition("{")[0].partition(" ")[0]
            if name in FIGURES:
                found[FIGURES[name]].append(float(line.rsplit(" ", 1)[1]))
        figures = {name: sum(values) for name, values in found.items()}  # over the processes that decode
        decoding, counted = figures["requests_decoding"], figures["preemptions"]
        if resumed_at is not None and now - resumed_at < STALE_S:
            resumed_at = None
        if resumed_at is None or resumed_at != self._resumed_at:
            self._settled = False
        elif self._settled:
            self._preempted += counted - self._counted
        else:
            self._settled = decoding <= self._decoding
        self._resumed_at, self._decoding, self._counted = resumed_at, decoding, counted
        cache_used = max(found["cache_used"], default=0.0)
        return figures | {"preemptions": self._preempted, "cache_used": cache_used} if self._settled else {}


class VllmServer:
    """Started and stopped any number of times; at most one process at a time."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.figures: dict[str, float] = {}
        """The last load that was read (see `ServerLoad`)."""
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
        """Starts the process, on these GPUs if any are named. Called on the main thread: the server dies with the
        thread that started it."""
        if self._process is not None:
            raise LocalProtocolError(f"this server was already started: {self!r}")
        settings = self.settings
        settings.home.mkdir(parents=True, exist_ok=True)
        settings.home.chmod(0o700)
        remove_leftovers([settings.home])  # of a server that was killed together with its worker
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
        """Raises PeerLost when the server exits unexpectedly; returns when it was stopped."""
        process = self._launched()
        while self._process is process:
            if (code := process.poll()) is not None:
                raise PeerLost(f"the vLLM server {how_ended(code)}; {self.last_lines()}")
            await asyncio.sleep(LOOK_EVERY_S)

    def exit_reason(self) -> str:
        """For the error of a lost connection; empty while the server runs, or when it was stopped."""
        code = None if self._process is None else self._process.poll()
        return "" if code is None else f"{how_ended(code)}; {self.last_lines()}"

    async def probe(
        self, *, stall_s: float, resumed: Callable[[], float | None] = lambda: 0.0, every_s: float = 1.0
    ) -> None:
        """Raises PeerLost when the server does not answer for `stall_s`; returns when it was stopped or has ended.

        The probe reaches the process that decodes, so a server that listens but does not decode is lost too. Also reads
        the server's load; `resumed` returns when its last pause ended, None during one.
        """
        process, load = self._launched(), ServerLoad()
        async with self._client(stall_s) as client:
            while self._process is process and process.poll() is None:
                try:
                    answer = await client.get("/is_paused")
                    problem = f"answers {answer.status_code}: {answer.text[:300]}" if answer.is_error else ""
                    if not problem:
                        resumed_at, metrics = resumed(), (await client.get("/metrics")).text
                        self.figures = load.read(metrics, time.monotonic(), resumed_at)
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
        """Ends the server and its child processes. Blocks; idempotent."""
        process, self._process = self._process, None
        if process is not None:
            below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.terminate()
            try:
                process.wait(timeout_s / 2)
            except subprocess.TimeoutExpired:
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):  # no stronger signal exists
                    process.wait(timeout_s / 2)
            # Its children exit with it; the last of them removes their shared memory.
            _, left = psutil.wait_procs(below, timeout_s / 2)
            for one in left:
                logger.error(
                    "process %d of a vLLM server did not end within %.1f s: killing it", one.pid, timeout_s / 2
                )
                kill_tree(one.pid, timeout_s / 2)
            remove_leftovers([self.settings.home])

    def close(self, timeout_s: float) -> None:
        """Stops it permanently: clients can no longer use its address."""
        self.stop(timeout_s)
        if self._home is not None:
            os.close(self._home)
            self._home = None

    def last_lines(self) -> str:
        """The end of its log, for error messages."""
        try:
            with self.settings.log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - 16384))
                lines = log.read().decode("utf-8", errors="replace").splitlines()
        except OSError as error:
            return f"its log cannot be read: {error}"
        kept = [line for line in lines if line.strip()][-LAST_LINES:]
        return f"the end of {self.settings.log}:\n" + "\n".join(kept)[-LAST_CHARACTERS:]
