"""Producers, consumers and a lying network in real processes: nothing lost, nothing doubled, nothing corrupt.

The test plays the ledger. It has samples made by producer processes, hands the references to consumer processes (one
reads by shared memory, one by TCP through proxies, one by UCX if it is installed), and counts a sample as trained when
a consumer says so. Only then does the consumer give the payload back; so whatever a killed consumer held must be found
again while its producer lives. Meanwhile processes are killed, servers break their connections off, and the proxies
reset, truncate, delay, corrupt and swallow. Every fault is counted where it happens, and the test fails if one of them
never did.

No proxy stands before UCX: its wire is its own, and what it does between two ports is not ours to imitate.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.payload.exchange import ExchangeLimits
from penstock.payload.io.fetch import BatchFetcher
from penstock.payload.io.leftovers import sweep, sweep_dead
from penstock.payload.io.shm import Ring
from penstock.payload.io.tcp import TcpServer
from penstock.payload.retry import RetryPolicy
from penstock.records.payload import PayloadRef, RingAddress

TOKEN = "chaos"
BATCH = 24
SAY = 1
"""Where a child answers."""
HAS_UCXX = importlib.util.find_spec("ucxx") is not None
WIRES = ("tcp", *["ucxx"] * HAS_UCXX)
CARRIERS = ("shm", *WIRES)


def body(sample: int) -> bytes:
    """What sample number `sample` must look like; any process can tell."""
    source = random.Random(sample)
    size = source.choice((100, 3_000, 20_000)) if sample % 50 else 600_000
    return struct.pack("<Q", sample) + source.randbytes(size)


# The processes


def produce(directory: str) -> None:
    """Makes samples on request; on request it also breaks off connections in the middle of what they do."""
    ring = Ring.create("chaos", capacity_bytes=32 << 20, slots=512, directory=directory)
    limits = ExchangeLimits(idle_s=5)
    tcp = TcpServer(ring.name, TOKEN, ports=(0, 0, 0), directory=directory, limits=limits)
    servers: list[Any] = [tcp]
    ucxx_ports: tuple[int, ...] = ()
    if HAS_UCXX:
        from penstock.payload.io.ucxx import UcxxServer

        ucxx = UcxxServer(ring.name, TOKEN, ports=(0, 0), directory=directory, limits=limits)
        ucxx_ports = ucxx.ports
        servers.append(ucxx)
    address = ring.address(host_id="here", tcp_ports=tcp.ports, ucxx_ports=ucxx_ports)
    say(address=msgspec.to_builtins(address))
    for line in sys.stdin:
        order = json.loads(line)
        if "make" in order:
            made = [(sample, ring.write([body(sample)], timeout_s=20)) for sample in order["make"]]
            say(made=[(sample, msgspec.to_builtins(ref)) for sample, ref in made])
        if "break" in order:
            say(broken=[break_off(server) for server in servers])


def break_off(server: Any) -> int:
    """Break off what there is as soon as there is something, if that is soon."""
    deadline = time.monotonic() + 0.5
    while not server.statistics().connections and time.monotonic() < deadline:
        time.sleep(0.001)
    return server.break_off()


def consume(transport: Any, directory: str) -> None:
    """Fetches what it is told to, compares with what must have been written, and reports."""
    call_s = 2.0 if transport == "ucxx" else 0.5  # to set up UCX takes long
    policy = RetryPolicy(call_s=call_s, slot_s=4, batch_s=8, rounds=2, pause_s=0.02)
    fetcher = BatchFetcher(host_id="here", token=TOKEN, directory=directory, transport=transport, policy=policy)
    say(ready=True)
    for line in sys.stdin:
        order = json.loads(line)
        refs = {msgspec.convert(raw, PayloadRef): sample for sample, raw in order["fetch"]}
        report = fetcher.fetch(refs, [msgspec.convert(raw, RingAddress) for raw in order["rings"]])
        corrupt = [refs[ref] for ref, view in report.views.items() if view != body(refs[ref])]
        say(
            trained=[refs[ref] for ref in report.views],
            corrupt=corrupt,
            missing=[(refs[ref], failure.kind) for ref, failure in report.missing.items()],
        )
        report.consumed()


def say(**message: Any) -> None:
    os.write(SAY, json.dumps(message).encode() + b"\n")


class Process:
    """A child that takes one order at a time and answers each with one line."""

    def __init__(self, *arguments: str) -> None:
        self.child = subprocess.Popen(
            [sys.executable, __file__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.job: list[tuple[int, Any]] = []
        self.answers: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        assert self.child.stdout is not None
        for line in self.child.stdout:
            self.answers.append(json.loads(line))

    def order(self, **message: Any) -> None:
        assert self.child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.child.stdin.write(json.dumps(message) + "\n")
            self.child.stdin.flush()

    def first_answer(self, timeout_s: float = 60.0) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while not self.answers:
            assert time.monotonic() < deadline, "a child did not start in time"
            assert self.child.poll() is None, f"a child ended with {self.child.returncode}"
            time.sleep(0.005)
        return self.answers.pop(0)

    def kill(self) -> None:
        self.child.send_signal(signal.SIGKILL)
        self.child.wait()
        self._thread.join(10)  # what it had said before its death was said
        for pipe in (self.child.stdin, self.child.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class Proxy:
    """A TCP port in front of another, which harms what flows back from the server."""

    def __init__(self, target: int, witness: Counter[str], faults: Iterator[str], seed: int) -> None:
        self._target = target
        self._faults = faults
        self._witness = witness
        self._random = random.Random(seed)
        self.blackholed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            try:
                server = socket.create_connection(("127.0.0.1", self._target), 5)
            except OSError:
                client.close()
                continue
            self._sockets += [client, server]
            fault, at = next(self._faults), self._random.randrange(20, 5_000)
            threading.Thread(target=self._pump, args=(client, server, "none", 0), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, fault, at), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, fault: str, at: int) -> None:
        passed = 0
        try:
            while data := source.recv(65536):
                if self.blackholed:
                    self._witness["swallowed"] += 1
                    continue
                if fault != "none" and passed <= at < passed + len(data):
                    self._witness[fault] += 1
                    cut = at - passed
                    if fault == "delayed":
                        time.sleep(0.1)
                    elif fault == "corrupted":
                        data = data[:cut] + bytes([data[cut] ^ 0x10]) + data[cut + 1 :]
                    else:
                        sink.sendall(data[:cut])
                        if fault == "reset":
                            sink.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        break
                passed += len(data)
                sink.sendall(data)
        except OSError:
            pass  # one of the two ends is gone; so is this connection
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def close(self) -> None:
        self._listener.close()
        for one in self._sockets:
            one.close()


class Ledger:
    """Who has which sample, until each one was trained exactly once."""

    def __init__(self, samples: int, directory: Path, sound: int, seed: int) -> None:
        self.directory = str(directory)
        self.faults = cycle(["reset", "truncated", "delayed", "corrupted", *["none"] * sound])
        self.random = random.Random(seed)
        self.witness: Counter[str] = Counter()
        self.unmade = list(range(samples))
        self.made: list[tuple[int, Any, int]] = []
        """Sample, reference, and which producer made it."""
        self.trained: Counter[int] = Counter()
        self.total = samples
        self.addresses: dict[int, dict[str, Any]] = {}
        self.proxies: dict[int, list[Proxy]] = {}
        self.producers: dict[int, Process] = {}
        self.consumers: dict[str, Process] = {}
        self.next_producer = 0

    def start_producer(self) -> None:
        number = self.next_producer
        self.next_producer += 1
        self.producers[number] = process = Process("produce", self.directory)
        self.addresses[number] = process.first_answer()["address"]
        ports = self.addresses[number]["tcp_ports"]
        self.proxies[number] = [Proxy(port, self.witness, self.faults, port) for port in ports]

    def start_consumer(self, transport: str) -> None:
        self.consumers[transport] = process = Process("consume", transport, self.directory)
        process.first_answer()

    def address(self, number: int, transport: str) -> dict[str, Any]:
        ports = [proxy.port for proxy in self.proxies[number]] if transport == "tcp" else []
        return {**self.addresses[number], "tcp_ports": ports}

    def step(self) -> None:
        """Hand out work, and take in what was done."""
        for number, process in self.producers.items():
            if not process.job and self.unmade and len(self.made) < 400:
                job, self.unmade = self.unmade[:BATCH], self.unmade[BATCH:]
                process.job = [(sample, None) for sample in job]
                process.order(make=job)
            for answer in take_all(process.answers):
                if "made" in answer:
                    self.made += [(sample, ref, number) for sample, ref in answer["made"]]
                    process.job = []
                if "broken" in answer:
                    for wire, count in zip(WIRES, answer["broken"], strict=True):
                        self.witness[f"{wire} broken off"] += count
                    if not all(self.witness[f"{wire} broken off"] for wire in WIRES):
                        process.order(**{"break": 1})  # there was nothing to break off: until there is
        for transport, process in self.consumers.items():
            if not process.job and self.made:
                job, self.made = self.made[:BATCH], self.made[BATCH:]
                process.job = [(sample, (ref, number)) for sample, ref, number in job]
                rings = [self.address(number, transport) for number in {number for _, _, number in job}]
                process.order(fetch=[(sample, ref) for sample, ref, _ in job], rings=rings)
            for answer in take_all(process.answers):
                self.account(process, answer)

    def account(self, process: Process, answer: dict[str, Any]) -> None:
        assert answer["corrupt"] == []
        self.trained.update(answer["trained"])
        origin = dict(process.job)
        for sample, kind in answer["missing"]:
            self.witness[f"missing: {kind}"] += 1
            ref, number = origin[sample]
            assert kind != "stale" or number not in self.producers, f"sample {sample} was lost while its producer lived"
            if kind == "stale" or number not in self.producers:
                self.unmade.append(sample)  # gone for good: to be made again
            else:
                self.made.append((sample, ref, number))
        process.job = []

    def kill_consumer(self, transport: str) -> None:
        process = self.consumers[transport]
        while not process.job and (self.made or self.unmade):
            self.step()
        del self.consumers[transport]
        process.kill()
        for answer in take_all(process.answers):
            self.account(process, answer)
        self.made += [(sample, ref, number) for sample, (ref, number) in process.job]
        self.witness[f"{transport} consumer killed"] += bool(process.job)
        self.start_consumer(transport)

    def kill_producer(self) -> None:
        number = self.random.choice(list(self.producers))
        process = self.producers.pop(number)
        process.kill()
        for answer in take_all(process.answers):
            if "made" in answer:
                self.made += [(sample, ref, number) for sample, ref in answer["made"]]
                process.job = []
        self.unmade += [sample for sample, _ in process.job]
        self.witness["producer killed"] += 1
        self.start_producer()

    def close(self) -> None:
        for process in [*self.producers.values(), *self.consumers.values()]:
            process.kill()
        for proxies in self.proxies.values():
            for proxy in proxies:
                proxy.close()


def take_all(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    taken = []
    while answers:
        taken.append(answers.pop(0))
    return taken


def run_chaos(samples: int, every: int, directory: Path, sound: int, seed: int = 7) -> Counter[str]:
    """Train `samples` samples: a fault after every `every`, and of `sound` + 4 connections through proxies 4 harmed."""
    ledger = Ledger(samples, directory, sound, seed)
    deadline = time.monotonic() + 240 + samples / 20
    faults = ["break", "kill tcp", "blackhole", "kill shm", "heal", "kill producer", *["kill ucxx"] * HAS_UCXX]
    next_fault, injected = every, 0
    try:
        for _ in range(2):
            ledger.start_producer()
        for transport in CARRIERS:
            ledger.start_consumer(transport)
        while len(ledger.trained) < samples:
            assert time.monotonic() < deadline, f"only {len(ledger.trained)} of {samples} trained; {ledger.witness}"
            ledger.step()
            if len(ledger.trained) >= next_fault:
                inject(ledger, faults[injected % len(faults)])
                injected += 1
                next_fault += every
            time.sleep(0.002)
        assert sum(ledger.trained.values()) == samples, "a sample was trained twice"
        assert set(ledger.trained) == set(range(samples))
    finally:
        ledger.close()
    return ledger.witness


def inject(ledger: Ledger, fault: str) -> None:
    if fault.startswith("kill ") and fault != "kill producer":
        ledger.kill_consumer(fault.split()[1])
    elif fault == "kill producer":
        ledger.kill_producer()
    elif fault == "break":
        for process in ledger.producers.values():
            process.order(**{"break": 1})
    else:
        for proxies in ledger.proxies.values():
            proxies[0].blackholed = fault == "blackhole"
        ledger.witness["healed"] += fault == "heal"


EXPECTED = {
    "reset",
    "truncated",
    "delayed",
    "corrupted",
    "swallowed",
    "healed",
    "producer killed",
    *(f"{wire} broken off" for wire in WIRES),
    *(f"{transport} consumer killed" for transport in CARRIERS),
}


def check_leftovers(directory: Path) -> None:
    names = {path.name for path in directory.iterdir()}
    assert names
    assert sweep_dead(str(directory)) == []  # their guardian, this process, is alive
    assert set(sweep("chaos", str(directory))) == names
    assert list(directory.iterdir()) == []


def check_witnesses(witness: Counter[str]) -> None:
    assert {fault for fault, count in witness.items() if count} >= EXPECTED, witness


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_six_thousand_samples_through_chaos(tmp_path: Path) -> None:
    check_witnesses(run_chaos(6_000, 100, tmp_path, sound=8))
    check_leftovers(tmp_path)


if __name__ == "__main__":
    SAY = os.dup(1)  # libraries that print do so elsewhere
    os.dup2(2, 1)
    os.environ["OMP_NUM_THREADS"] = "1"
    {"produce": produce, "consume": consume}[sys.argv[1]](*sys.argv[2:])
