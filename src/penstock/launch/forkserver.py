"""The supervisor's side of the fork server: processes that need torch are forked from one that has imported it.

Each forked process saves the seconds of the import and shares the memory of the imported modules. Where forking is not
possible (not Linux, a GPU, a thread started by an import) processes start without it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.config.run import Config
from penstock.engines.settings import MlpModel, PathModel, TinyModel
from penstock.launch import preload
from penstock.launch.processes import ProcessSpec
from penstock.launch.restarts import Ended
from penstock.runtime.process import kill_tree

log = logging.getLogger(__name__)

IMPORT_S = 120.0
FORK_S = 20.0
MAX_BYTES = 1 << 20
ROLES = ("trainer", "rollout_worker")
"""The roles that import torch."""


def modules_of(config: Config) -> list[str]:
    """Modules to preload: those that every process of the run imports, besides torch and its role."""
    models = [pipeline.model for pipeline in config.pipeline]
    modules = ["penstock.roles.models"]
    for model in models:
        if isinstance(model, TinyModel):
            modules.append("transformers.models.llama.modeling_llama")
        elif isinstance(model, PathModel):
            modules += ["transformers.modeling_utils", *_architecture(model.path)]
        elif not isinstance(model, MlpModel):
            modules.append("transformers.modeling_utils")
    return list(dict.fromkeys(modules))


def _architecture(directory: Path) -> list[str]:
    """The transformers module that defines the model in this directory."""
    try:
        kind = json.loads((directory / "config.json").read_text(encoding="utf-8"))["model_type"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    importable = isinstance(kind, str) and kind.isidentifier()
    return [f"transformers.models.{kind}.modeling_{kind}"] if importable else []


class ForkedProcess:
    """A process that the fork server forked and this process adopted."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._descriptor = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._descriptor, self._reap)

    def _reap(self) -> None:
        """The descriptor becomes readable when the process ends."""
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        _, status = os.waitpid(self.pid, 0)
        self._ended.set_result(Ended(os.waitstatus_to_exitcode(status)))

    @property
    def where(self) -> str:
        return f"process {self.pid}"

    @property
    def running(self) -> bool:
        return not self._ended.done()

    async def wait(self) -> Ended:
        return await asyncio.shield(self._ended)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.running:
            os.kill(self.pid, number)

    async def kill_tree(self, timeout_s: float) -> None:
        await asyncio.to_thread(kill_tree, self.pid, timeout_s)


class ForkServer:
    """Started with the run. When `fork` returns None, the caller starts the process without it.

    This process must adopt orphans: a forked process is one until it is returned.
    """

    def __init__(self, config: Config, output: Path, preloading: preload.Preloading | None = None) -> None:
        self._config = config
        self._output = output
        self._preloading = preloading
        self._socket: socket.socket | None = None
        self._one_at_a_time = asyncio.Lock()
        self._ready = False

    async def start(self) -> None:
        """Returns at once: the imports take seconds."""
        if not self._config.launch.preload or not preload.possible():
            self._disable()
            return
        if self._preloading is None:
            self._preloading = preload.start()
        order = {"modules": modules_of(self._config), "log": str(self._output)}
        try:
            await asyncio.get_running_loop().sock_sendall(self._preloading.requests, json.dumps(order).encode())
        except OSError as error:
            self._fall_back(error)
            return
        self._socket = self._preloading.requests

    async def fork(
        self, spec: ProcessSpec, arguments: Sequence[str], environment: Mapping[str, str], output: Path, token: str
    ) -> ForkedProcess | None:
        if spec.role not in ROLES:
            return None
        async with self._one_at_a_time:
            if self._socket is None:
                return None
            request = {
                "modules": [f"penstock.roles.{spec.role}"],
                "arguments": list(arguments),
                "environment": dict(environment),
                "path": [str(path) for path in self._config.run.extra_path],
                "log": str(output),
                "token": token,
            }
            try:
                if not self._ready:
                    await self._wait_until_ready(self._socket)
                answer = await self._call(self._socket, request)
                return ForkedProcess(answer["pid"])
            except (OSError, TimeoutError, ValueError, KeyError) as error:
                self._fall_back(error)
                return None

    async def _wait_until_ready(self, requests: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(IMPORT_S):
            threads = json.loads(await loop.sock_recv(requests, MAX_BYTES))["threads"]
        if threads != 1:
            raise ValueError(f"the preloaded imports have started {threads - 1} threads, which a fork would lose")
        self._ready = True

    async def _call(self, requests: socket.socket, request: dict[str, Any]) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(FORK_S):
            await loop.sock_sendall(requests, json.dumps(request).encode())
            return json.loads(await loop.sock_recv(requests, MAX_BYTES))

    def _fall_back(self, error: Exception) -> None:
        log.warning("new processes start without preloaded imports: %r", error)
        self._disable()

    def _disable(self) -> None:
        self._socket = None
        if self._preloading is not None:
            self._preloading.close()
            self._preloading = None

    @property
    def pid(self) -> int | None:
        return None if self._preloading is None else self._preloading.process.pid

    async def close(self) -> None:
        async with self._one_at_a_time:
            self._disable()
