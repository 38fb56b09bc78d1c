"""The replica and trainer processes of the weight fault tests.

Run as a script it imports everything once and then forks one process per line of its standard input, so that a test
with a dozen real processes costs a second. Each replica generates all the time and writes down what it generated
with which weights; the fault it was told to suffer strikes at one step of an update, and leaves a witness first.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.engines.policy import PolicyEngine
from penstock.engines.requests import Sampling
from penstock.engines.torch.engine import TorchEngine
from penstock.errors import PeerLost, Transient
from penstock.records.ids import Version
from penstock.records.weights import Held, Manifest
from penstock.runtime.tensors import module_tensors
from penstock.weights.io import files
from penstock.weights.io.files import FileTransport, Publisher
from penstock.weights.io.pull import PullTransport
from penstock.weights.io.updater import ReplicaReport, ReplicaUpdater

OBSERVATION = np.linspace(-1.0, 1.0, 4, dtype=np.float32)[None]
PROMPT = [3, 1, 4]
TOKEN = b"of the test"


class Case(msgspec.Struct):
    """What one replica process is told."""

    member: str
    run_dir: str
    socket: str
    engine: str = "policy"
    way: str = "staged"
    transport: str = "files"
    step: str = ""
    """Where the fault strikes; empty: nowhere."""
    kind: str = "raise"
    times: int = 1
    from_version: int = 1
    """Updates to earlier versions are left alone."""

    @property
    def samples_path(self) -> Path:
        return Path(self.run_dir) / f"samples-{self.member}"

    @property
    def witness_path(self) -> Path:
        return Path(self.run_dir) / f"witness-{self.member}"


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))

    def act(self, observations: Tensor, generator: torch.Generator, greedy: bool = False) -> tuple[Tensor, Tensor]:
        logprobs = torch.log_softmax(self.body(observations), -1)
        actions = logprobs.argmax(-1)
        return actions, logprobs.gather(-1, actions[:, None])[:, 0]


def model(engine: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    if engine == "policy":
        return Policy()
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config)


def build(engine: str, seed: int) -> Any:
    if engine == "policy":
        return PolicyEngine(model(engine, seed))
    return TorchEngine(model(engine, seed), pad_id=0)


def output(engine: Any) -> tuple[int, str, str]:
    """One token or action: the version and digest it claims, and what was generated."""
    if isinstance(engine, PolicyEngine):
        actions, logprobs, version, digest = engine.act(OBSERVATION, greedy=True)
        return version, digest, f"{actions[0]}:{logprobs.tobytes().hex()}"
    (completion,) = engine.generate([PROMPT], Sampling(max_new_tokens=1, greedy=True))
    return completion.version, completion.digest, f"{completion.token_ids[0]}:{completion.logprobs.tobytes().hex()}"


def append(path: Path, line: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


class Fault:
    """Strikes `times` times at one step, and says so before it does."""

    def __init__(self, case: Case) -> None:
        self.case, self.left, self.version = case, case.times, -1

    def due(self, step: str) -> bool:
        if step != self.case.step or self.left <= 0 or self.version < self.case.from_version:
            return False
        self.left -= 1
        append(self.case.witness_path, f"{step} {self.case.kind} {self.version}")
        return True

    def strike(self, step: str) -> None:
        if self.due(step):
            self.happen(step)

    def happen(self, step: str) -> None:
        match self.case.kind:
            case "raise":
                raise RuntimeError(f"injected at {step}")
            case "transient":
                raise Transient(f"injected at {step}")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                time.sleep(60.0)


class Breaking(Mapping[str, Tensor]):
    """Tensors of which the last can be looked at, but strikes when it is copied: the ones before it are written."""

    def __init__(self, tensors: Mapping[str, Tensor], fault: Fault) -> None:
        self.tensors, self.fault, self.read = tensors, fault, 0

    def __getitem__(self, name: str) -> Tensor:
        self.read += 1
        if self.read == 2 * len(self.tensors):  # once each for the check of the shapes, then once each for the copy
            self.fault.happen("write")
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


class FaultyEngine:
    """A real engine, with a fault between the updater and it."""

    def __init__(self, engine: Any, fault: Fault) -> None:
        self.engine, self.fault = engine, fault

    @property
    def version(self) -> int:
        return self.engine.version

    @property
    def digest(self) -> str:
        return self.engine.digest

    def served_tensors(self) -> Mapping[str, Tensor]:
        return self.engine.served_tensors()

    def staged_tensors(self) -> Mapping[str, Tensor]:
        self.fault.strike("verify")
        return self.engine.staged_tensors()

    def stage(self, tensors: Mapping[str, Tensor]) -> None:
        if self.fault.case.kind != "damage":
            self.fault.strike("stage")
        self.engine.stage(tensors)
        if self.fault.case.kind == "damage" and self.fault.due("stage"):
            next(iter(self.engine.staged_tensors().values())).view(-1)[0] += 1.0

    def swap(self, version: int, digest: str, timeout_s: float) -> float:
        self.fault.strike("swap")
        return self.engine.swap(version, digest, timeout_s)

    def load_in_place(self, tensors: Mapping[str, Tensor], version: int, digest: str, timeout_s: float) -> float:
        if self.fault.case.kind == "damage":
            pause_s = self.engine.load_in_place(tensors, version, digest, timeout_s)
            if self.fault.due("write"):
                next(iter(self.engine.served_tensors().values())).view(-1)[0] += 1.0
            return pause_s
        given = Breaking(tensors, self.fault) if self.fault.due("write") else tensors
        pause_s = self.engine.load_in_place(given, version, digest, timeout_s)
        self.fault.strike("finalize")
        return pause_s

    def relabel(self, version: int, timeout_s: float) -> None:
        self.engine.relabel(version, timeout_s)

    def sleep(self, timeout_s: float) -> None:
        self.fault.strike("pause")
        self.engine.sleep(timeout_s)
        self.fault.strike("paused")

    def wake(self, timeout_s: float) -> None:
        self.fault.strike("resume")
        self.engine.wake(timeout_s)


class FaultyTransport:
    def __init__(self, case: Case, fault: Fault) -> None:
        self.inner: Any = PullTransport(TOKEN) if case.transport == "pull" else FileTransport(Path(case.run_dir))
        self.fault = fault

    def fetch(self, manifest: Manifest, timeout_s: float, *, verify: bool = True) -> Mapping[str, Tensor]:
        self.fault.version = manifest.version
        if self.fault.case.kind != "damage":
            self.fault.strike("fetch")
        tensors = self.inner.fetch(manifest, timeout_s, verify=verify)
        if self.fault.case.kind == "damage" and self.fault.due("fetch"):
            tensors[next(iter(tensors))].view(-1)[0] += 1.0  # a private mapping: the file stays as it is
        return tensors


class Controller:
    """The test's controller, called over a socket; one connection per call."""

    def __init__(self, case: Case, fault: Fault) -> None:
        self.case, self.fault = case, fault

    async def call(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_unix_connection(self.case.socket)
                try:
                    writer.write(json.dumps({"member": self.case.member, **request}).encode() + b"\n")
                    return json.loads(await reader.readline())
                finally:
                    writer.close()
        except (OSError, ValueError, TimeoutError) as error:
            raise Transient(f"the controller does not answer: {error!r}") from error

    async def next_manifest(self, held: Held, wait_s: float) -> Manifest | None:
        self.fault.strike("poll")
        reply = await self.call({"call": "ask", "held": msgspec.to_builtins(held), "wait_s": wait_s}, wait_s + 2.0)
        return msgspec.convert(reply["manifest"], Manifest) if reply.get("manifest") else None

    async def report(self, report: ReplicaReport) -> None:
        self.fault.strike("report")
        await self.call({"call": "report", "report": msgspec.to_builtins(report)}, 2.0)


def generate_for_ever(engine: Any, case: Case) -> None:
    while True:
        version, digest, made = output(engine)
        append(case.samples_path, f"{version} {digest} {made}")
        time.sleep(0.001)


def replica(case: Case) -> int:
    fault = Fault(case)
    engine = build(case.engine, seed=999)
    controller = Controller(case, fault)
    updater = ReplicaUpdater(
        FaultyEngine(engine, fault),
        controller,
        controller.report,
        FaultyTransport(case, fault),
        way=case.way,  # type: ignore[arg-type]
        poll_s=0.5,
        fetch_timeout_s=0.5,
        change_timeout_s=0.5,
        report_timeout_s=1.0,
        grace_s=0.5 if case.kind == "hang" else 2.0,  # what does not hang may be slow
        retry_first_s=0.02,
        retry_cap_s=0.1,
    )

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            updating = group.create_task(updater.run())
            while not updater.replica.may_serve and not updating.done():  # noqa: ASYNC110 - changed by machines
                await asyncio.sleep(0.002)
            threading.Thread(target=generate_for_ever, args=(engine, case), daemon=True).start()

    try:
        asyncio.run(main())
    except ExceptionGroup as group:
        if group.subgroup(PeerLost) is None:
            raise
        append(Path(case.run_dir) / f"gave-up-{case.member}", str(group.exceptions[0]))
        return 3
    return 0


class Trainer(msgspec.Struct):
    """What one trainer process is told: publish one version, and perhaps die in the middle of it."""

    run_dir: str
    lineage: str
    version: int
    seed: int
    engine: str = "policy"
    die_after_writes: int = -1


def trainer(case: Trainer) -> int:
    publisher = Publisher(Path(case.run_dir), case.lineage, keep=2, bucket_bytes=256)
    if case.die_after_writes >= 0:
        write_all, left = files._write_all, case.die_after_writes

        def dying(descriptor: int, data: memoryview) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                append(Path(case.run_dir) / "witness-trainer", f"died publishing version {case.version}")
                os.kill(os.getpid(), signal.SIGKILL)
            write_all(descriptor, data)

        files._write_all = dying
    publisher.publish(Version(case.version), module_tensors(model(case.engine, case.seed)))
    return 0


def say(**message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def nursery() -> None:
    """Forks a process for each line of standard input; writes its pid, and later its exit, to standard output."""
    torch.set_num_threads(1)
    model("torch", 0)
    say(ready=True)
    tags: dict[int, str] = {}
    pending = b""
    while True:
        if select.select([0], [], [], 0.01)[0]:
            received = os.read(0, 1 << 16)
            if not received:
                return
            *lines, pending = (pending + received).split(b"\n")
            for line in lines:
                request = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    _become(request)
                tags[pid] = request["tag"]
                say(started=request["tag"], pid=pid)
        while tags:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            say(ended=tags.pop(pid), code=os.waitstatus_to_exitcode(status))


def _become(request: dict[str, Any]) -> NoReturn:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # dies with the nursery, and so with the test
    code = 99
    try:
        os.close(0)
        if request["kind"] == "replica":
            code = replica(msgspec.convert(request["case"], Case))
        else:
            code = trainer(msgspec.convert(request["case"], Trainer))
    except BaseException:  # noqa: BLE001 - this process ends here, whatever happened
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    nursery()
