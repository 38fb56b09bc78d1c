"""Payloads between two processes, by every transport, beside what the machine itself can do.

A producer process writes into its ring and serves it; this process reads. Ours and its peers take turns, payload by
payload and in an order drawn anew each time, so that all meet the same noise and the same caches: what one leaves
behind (threads that tidy up, full caches) would otherwise always meet the same next one. What is timed:

    shm       write into the ring + take + finalise          beside one memcpy of the same bytes by the producer, into
                                                             private memory of huge pages
    tcp       request to complete, digest-checked body,      beside a blocking socket that sends on request, and ZeroMQ
              and the word that it was used
    ucxx      the same                                       beside bare UCX with one request and one tagged message

As a trainer does, this process ends payloads eight at a time (of 128 MB: one), and takes them so from shared memory: an
eighth of what that costs is part of every payload's time. A memcpy has the same eight places to write to. The memory
that the peers read is in no cache; all memory that is written was written before. Sockets have the same options, theirs
and ours, and all peers of a wire are threads of the same two processes.
Ratios are ours to the peer in bytes per second (of the medians): 1 is as fast as the peer.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from penstock.payload.io.reader import Lease, RingReader
from penstock.payload.io.received import Buffers, Cancellation, Received
from penstock.payload.io.shm import Ring
from penstock.payload.io.tcp import TcpServer
from penstock.payload.io.tcp_client import TcpWire
from penstock.payload.io.wire_client import WireClient
from penstock.records.payload import PayloadRef, RingAddress
from penstock.runtime.interpreter import python_command

KB, MB = 1 << 10, 1 << 20
TOKEN = "benchmark"
CONCURRENCY = 8
DEADLINE_S = 120.0
HAS_UCXX = importlib.util.find_spec("ucxx") is not None
HAS_ZMQ = importlib.util.find_spec("zmq") is not None
HAS_RAY = importlib.util.find_spec("ray") is not None

ASK = struct.Struct("<Q")


class Written(NamedTuple):
    """Payloads in the ring, how long writing each took, and how long memcpys of as many bytes took in between."""

    refs: list[PayloadRef]
    seconds: list[float]
    memcpy_s: list[float]


def timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def copy(target: np.ndarray, source: np.ndarray) -> None:
    target[:] = source


# The producer's process


class Source:
    """Bytes to send. Walks through more memory than caches hold, so that none is read from a cache."""

    def __init__(self, largest: int) -> None:
        self._bytes = np.tile(np.frombuffer(os.urandom(16 * MB), np.uint8), max(8, 2 * largest // (16 * MB)))
        self._at = 0

    def next(self, size: int) -> np.ndarray:
        self._at = self._at + size if self._at + 2 * size <= len(self._bytes) else 0
        return self._bytes[self._at : self._at + size]


class Producer:
    """Answers orders on a pipe; whatever it serves, the peers serve as much of."""

    def __init__(self, largest: int) -> None:
        capacity = max(64 * MB, (CONCURRENCY + 1) * min(largest, 16 * MB), 2 * largest)
        self.ring = Ring.create("benchmark", capacity_bytes=capacity, slots=256)
        self.bare_ring = Ring.create("benchmark", capacity_bytes=capacity, slots=256, digests=False)
        self.source = Source(largest)
        self.private = np.ones(capacity, np.uint8)
        self.tcp = TcpServer(self.ring.name, TOKEN, ports=(0, 0))
        self.ucxx_server: Any = None
        if HAS_UCXX:
            from penstock.payload.io.ucxx import UcxxServer

            self.ucxx_server = UcxxServer(self.ring.name, TOKEN)
        self.plain_port = serve_plain(self.source)
        self.zmq_port = serve_zmq(self.source) if HAS_ZMQ else 0
        self.raw_ucxx_port = serve_raw_ucxx(self.source) if HAS_UCXX else 0

    def describe(self) -> dict[str, Any]:
        ucxx_ports = self.ucxx_server.ports if self.ucxx_server else ()
        return {
            "address": self.ring.address(host_id="here", tcp_ports=self.tcp.ports, ucxx_ports=ucxx_ports),
            "bare": self.bare_ring.name,
            "plain": self.plain_port,
            "zmq": self.zmq_port,
            "raw_ucxx": self.raw_ucxx_port,
        }

    def write(self, size: int, count: int, digests: bool) -> Written:
        ring = self.ring if digests else self.bare_ring
        written = Written([], [], [])
        for number in range(count):
            place = slice(number * size, (number + 1) * size)
            turns: list[tuple[list[float], Callable[[np.ndarray], object]]] = [
                (written.seconds, lambda body: written.refs.append(ring.write([body.data], timeout_s=DEADLINE_S))),
                (written.memcpy_s, lambda body, place=place: copy(self.private[place], body)),
            ]
            for seconds, action in random.sample(turns, len(turns)):
                body = self.source.next(size)
                seconds.append(timed(lambda action=action, body=body: action(body)))
        return written

    def close(self) -> None:
        self.tcp.close()
        if self.ucxx_server:
            self.ucxx_server.close()
        self.ring.close()
        self.bare_ring.close()


def produce(pipe: Connection, largest: int) -> None:
    producer = Producer(largest)
    try:
        pipe.send(producer.describe())
        while True:
            order = pipe.recv()
            if order[0] == "write":
                pipe.send(tuple(producer.write(*order[1:])))
            elif order[0] == "cpu":
                pipe.send(time.process_time())
            else:
                break
    finally:
        producer.close()


def serve_plain(source: Source) -> int:
    """The peer of TCP: a blocking socket that sends as many bytes as it is asked for."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection:
            while ask := connection.recv(ASK.size):
                connection.sendall(source.next(ASK.unpack(ask)[0]).data)

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return listener.getsockname()[1]


def serve_zmq(source: Source) -> int:
    import zmq  # pyright: ignore[reportMissingImports]

    replier = zmq.Context.instance().socket(zmq.REP)
    port = replier.bind_to_random_port("tcp://127.0.0.1")

    def serve() -> None:
        while True:
            (size,) = ASK.unpack(replier.recv())
            replier.send(source.next(size).data, copy=False)

    threading.Thread(target=serve, daemon=True).start()
    return port


def serve_raw_ucxx(source: Source) -> int:
    """The peer of our UCX transport: one request on the stream, one tagged message back, no checks of anything."""
    from penstock.runtime.ucx import Transfer, Worker, body_send, core, stream_receive

    ports: list[int] = []
    bound = threading.Event()

    def serve() -> None:
        worker = Worker()
        endpoints: list[Any] = []
        asked: list[tuple[Any, Transfer]] = []
        sending: list[Transfer] = []
        listener = core.UCXListener.create(worker.ucx, 0, endpoints.append, deliver_endpoint=True)
        ports.append(listener.port)
        bound.set()
        while True:
            worker.wait(1.0)
            while endpoints:
                asked.append((endpoints[0], stream_receive(endpoints.pop(0), ASK.size)))
            sending = [transfer for transfer in sending if not transfer.done]
            for number, (endpoint, transfer) in enumerate(asked):
                if transfer.done:
                    ask = transfer.memory[0]
                    assert isinstance(ask, bytearray)
                    sending.append(body_send(endpoint, source.next(ASK.unpack(ask)[0]).data, 1))
                    asked[number] = (endpoint, stream_receive(endpoint, ASK.size))

    threading.Thread(target=serve, daemon=True).start()
    bound.wait(10)
    return ports[0]


# This process: the readers


class PlainSocket:
    def __init__(self, port: int, largest: int) -> None:
        self._connection = socket.create_connection(("127.0.0.1", port))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._into = np.zeros(largest, np.uint8).data

    def read(self, size: int) -> None:
        self._connection.sendall(ASK.pack(size))
        at = 0
        while at < size:
            at += self._connection.recv_into(self._into[at:size])

    def close(self) -> None:
        self._connection.close()


class ZeroMq:
    def __init__(self, port: int) -> None:
        import zmq  # pyright: ignore[reportMissingImports]

        self._socket = zmq.Context.instance().socket(zmq.REQ)
        self._socket.connect(f"tcp://127.0.0.1:{port}")

    def read(self, size: int) -> None:
        self._socket.send(ASK.pack(size))
        frame = self._socket.recv(copy=False)
        assert len(frame.buffer) == size

    def close(self) -> None:
        self._socket.close(linger=0)


class RawUcxx:
    def __init__(self, port: int, largest: int) -> None:
        from penstock.runtime.ucx import Worker, core

        self._worker = Worker()
        self._endpoint = core.UCXEndpoint.create(self._worker.ucx, "127.0.0.1", port, True)
        self._into = np.zeros(largest, np.uint8).data

    def read(self, size: int) -> None:
        from penstock.runtime.ucx import body_receive, stream_send

        transfers = [
            stream_send(self._endpoint, ASK.pack(size)),
            body_receive(self._endpoint, self._into[:size], 1),
        ]
        while not all(transfer.done for transfer in transfers):
            self._worker.wait(1.0)
        for transfer in transfers:
            transfer.check()

    def close(self) -> None:
        from penstock.runtime.ucx import close

        close(self._worker, self._endpoint, [])


class Rows:
    """What was measured, as a table and as records."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.table = Table(title="payload transport: ours beside its peer, same run, separate processes")
        for column in ("transport", "size", "p50", "p99", "GB/s", "peer", "peer p50", "peer GB/s", "ratio", "cpu s/GB"):
            self.table.add_column(column, justify="left" if column in ("transport", "peer") else "right")

    def add(self, name: str, size: int, ours: Timing, peer_name: str, peer: Timing, cpu_s: float | None = None) -> None:
        ratio = peer.p50_s / ours.p50_s
        self.table.add_row(
            name,
            size_text(size),
            time_text(ours.p50_s),
            time_text(ours.p99_s),
            f"{ours.bytes / ours.p50_s / 1e9:.2f}",
            peer_name,
            time_text(peer.p50_s),
            f"{peer.bytes / peer.p50_s / 1e9:.2f}",
            f"{ratio:.2f}",
            "" if cpu_s is None else f"{cpu_s:.2f}",
        )
        self.records.append(
            {
                "name": f"{name} {size_text(size)}",
                "unit": "GB/s",
                "ours": ours.bytes / ours.p50_s / 1e9,
                "peer": peer.bytes / peer.p50_s / 1e9,
                "peer_name": peer_name,
                "ratio": ratio,
            }
        )


class Timing(NamedTuple):
    bytes: int
    p50_s: float
    p99_s: float

    @staticmethod
    def of(size: int, seconds: list[float]) -> Timing:
        ordered = sorted(seconds)
        return Timing(size, statistics.median(ordered), ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))])


class Bench:
    def __init__(self, sizes: list[int], budget_s: float) -> None:
        self.sizes = sizes
        self.budget_s = budget_s
        self.rows = Rows()
        ours, theirs = socket.socketpair()
        with theirs:
            self.producer = subprocess.Popen(
                python_command(__file__, "--produce", str(theirs.fileno()), str(max(sizes))),
                pass_fds=[theirs.fileno()],
            )
        self.pipe = Connection(ours.detach())
        described = self.pipe.recv()
        self.address: RingAddress = described["address"]
        self.buffers = Buffers()
        self.cancellation = Cancellation()
        self.tcp = WireClient(TcpWire(), TOKEN, self.buffers)
        self.readers = {
            True: RingReader.attach(self.address.ring, label="benchmark"),
            False: RingReader.attach(described["bare"], label="benchmark", verify=False),
        }
        self.plain = [PlainSocket(described["plain"], max(sizes)) for _ in range(CONCURRENCY)]
        self.zmq = ZeroMq(described["zmq"]) if HAS_ZMQ else None
        self.raw_ucxx = [RawUcxx(described["raw_ucxx"], max(sizes)) for _ in range(CONCURRENCY)] if HAS_UCXX else []
        self.ucxx: Any = None
        if HAS_UCXX:
            from penstock.payload.io.ucxx_client import UcxxWire

            self.ucxx = WireClient(UcxxWire(), TOKEN, self.buffers)

    def close(self) -> None:
        self.pipe.send(("stop",))
        self.producer.wait(20)
        self.pipe.close()
        self.tcp.close()
        if self.ucxx:
            self.ucxx.close()
        for peer in [*self.plain, self.zmq, *self.raw_ucxx]:
            if peer is not None:
                peer.close()
        for reader in self.readers.values():
            reader.close()

    def write(self, size: int, count: int = 1, digests: bool = True) -> Written:
        self.pipe.send(("write", size, count, digests))
        return Written(*self.pipe.recv())

    def cpu_s(self) -> float:
        self.pipe.send(("cpu",))
        return self.pipe.recv() + time.process_time()

    def read(self, client: WireClient, ref: PayloadRef) -> None:
        answer = client.read(self.address, ref, time.monotonic() + DEADLINE_S, set(), self.cancellation)
        assert isinstance(answer, Received), answer
        self.buffers.release(answer.memory)

    def consume(self, client: WireClient, refs: list[PayloadRef]) -> None:
        failure = client.consume(self.address, refs, time.monotonic() + DEADLINE_S, set(), self.cancellation)
        assert failure is None, failure

    def rounds(self, size: int) -> int:
        """As many as the budget allows at one gigabyte per second, within reason."""
        return max(5, min(400, int(self.budget_s / (2 * size / 1e9 + 5e-4))))

    def shared_memory(self, digests: bool) -> None:
        name = f"shm, digests {'on' if digests else 'off'}"
        for size in self.sizes:
            count = at_once(size)
            ours: list[float] = []
            memcpy: list[float] = []
            for number in range(max(6, self.rounds(size) // count) + 1):
                written = self.write(size, count, digests)
                read_s = timed(lambda refs=written.refs: self.take_all(digests, refs))
                if number:  # the first one touches the memory
                    ours += [write_s + read_s / count for write_s in written.seconds]
                    memcpy += written.memcpy_s
            self.rows.add(name, size, Timing.of(size, ours), "memcpy", Timing.of(size, memcpy))

    def take_all(self, digests: bool, refs: list[PayloadRef]) -> None:
        reader = self.readers[digests]
        leases = [lease for lease in reader.take_all(refs) if isinstance(lease, Lease)]
        assert len(leases) == len(refs)
        assert reader.finalise(leases, "consume") == 0

    def wire(self, name: str, client: WireClient, peers: dict[str, Callable[[int], None]]) -> None:
        for size in self.sizes:
            count = at_once(size)
            ours: list[float] = []
            theirs: dict[str, list[float]] = {peer: [] for peer in peers}
            cpu_s: list[float] = []
            for number in range(max(4, self.rounds(size) // count) + 1):
                refs = self.write(size, count).refs
                mine: list[float] = []
                if number % 4 == 1:  # by ourselves, for the sake of the processor's time
                    busy = self.cpu_s()
                    mine += [timed(lambda ref=ref: self.read(client, ref)) for ref in refs]
                    cpu_s.append((self.cpu_s() - busy) / count)
                else:
                    for ref in refs:
                        turns = [(mine, lambda ref=ref: self.read(client, ref))]
                        turns += [
                            (theirs[peer], lambda read=read, size=size: read(size)) for peer, read in peers.items()
                        ]
                        for seconds, action in random.sample(turns, len(turns)):
                            seconds.append(timed(action))
                told_s = timed(lambda refs=refs: self.consume(client, refs))
                if number % 4 != 1:
                    ours += [read_s + told_s / count for read_s in mine]
            for peer, seconds in theirs.items():
                timing = Timing.of(size, ours[count:])
                cpu_per_gb = statistics.median(cpu_s) / (size / 1e9)
                self.rows.add(name, size, timing, peer, Timing.of(size, seconds[count:]), cpu_per_gb)

    def concurrent(self, name: str, client: WireClient, peer_name: str, peers: list[Any]) -> None:
        """Eight payloads at a time over eight connections."""
        with ThreadPoolExecutor(CONCURRENCY) as threads:
            for size in [size for size in self.sizes if size <= 16 * MB]:
                ours: list[float] = []
                theirs: list[float] = []
                for _ in range(max(6, self.rounds(size) // CONCURRENCY) + 1):
                    refs = self.write(size, CONCURRENCY).refs

                    def read_all(refs: list[PayloadRef] = refs) -> None:
                        list(threads.map(lambda ref: self.read(client, ref), refs))
                        self.consume(client, refs)

                    def read_peers(size: int = size) -> None:
                        list(threads.map(lambda one: one.read(size), peers))

                    turns = [(ours, read_all), (theirs, read_peers)]
                    for seconds, action in random.sample(turns, len(turns)):
                        seconds.append(timed(action))
                total = size * CONCURRENCY
                timing, peer = Timing.of(total, ours[1:]), Timing.of(total, theirs[1:])
                self.rows.add(f"{name} x{CONCURRENCY}", size, timing, peer_name, peer)

    def idle_cpu(self, seconds: float) -> float:
        """Share of a core that the producer's idle servers use."""
        self.pipe.send(("cpu",))
        before = self.pipe.recv()
        time.sleep(seconds)
        self.pipe.send(("cpu",))
        return (self.pipe.recv() - before) / seconds

    def ray_store(self) -> None:
        """Put by another process, got by this one."""
        import ray  # pyright: ignore[reportMissingImports]

        def put(size: int) -> tuple[list[Any], float]:
            body = np.ones(size, np.uint8)
            began = time.perf_counter()
            return [ray.put(body)], time.perf_counter() - began

        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
        try:
            putting = ray.remote(put)
            for size in self.sizes:
                ours: list[float] = []
                theirs: list[float] = []
                for _ in range(min(20, self.rounds(size)) + 1):
                    written = self.write(size)
                    ours.append(written.seconds[0] + timed(lambda refs=written.refs: self.take_all(True, refs)))
                    refs, put_s = ray.get(putting.remote(size))
                    theirs.append(put_s + timed(lambda refs=refs: ray.get(refs)))
                timing, peer = Timing.of(size, ours[1:]), Timing.of(size, theirs[1:])
                self.rows.add("shm, digests on", size, timing, "Ray put + get", peer)
        finally:
            ray.shutdown()

    def run(self) -> None:
        self.shared_memory(digests=False)
        self.shared_memory(digests=True)
        peers: dict[str, Callable[[int], None]] = {"plain socket": self.plain[0].read}
        if self.zmq is not None:
            peers["ZeroMQ"] = self.zmq.read
        self.wire("tcp", self.tcp, peers)
        self.concurrent("tcp", self.tcp, "plain sockets", self.plain)
        if self.raw_ucxx:
            self.wire("ucxx", self.ucxx, {"raw UCX": self.raw_ucxx[0].read})
            self.concurrent("ucxx", self.ucxx, "raw UCX", self.raw_ucxx)
        if HAS_RAY:
            self.ray_store()


def at_once(size: int) -> int:
    return 1 if size > 16 * MB else CONCURRENCY


def size_text(size: int) -> str:
    return f"{size // MB} MB" if size >= MB else f"{size // KB} KB"


def time_text(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="penstock bench payload", description="Payloads between two processes, by every transport."
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repetitions")
    parser.add_argument("--produce", nargs=2, type=int, metavar=("FD", "LARGEST"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.produce:
        fd, largest = arguments.produce
        produce(Connection(fd), largest)
        return 0
    sizes = [4 * KB, MB, 16 * MB] if arguments.quick else [4 * KB, 64 * KB, MB, 16 * MB, 128 * MB]
    bench = Bench(sizes, budget_s=0.3 if arguments.quick else 2.0)
    try:
        bench.run()
        idle = bench.idle_cpu(1.0 if arguments.quick else 5.0)
    finally:
        bench.close()
    console = Console(width=130)
    console.print(bench.rows.table)
    console.print(f"idle servers (tcp{', ucxx' if HAS_UCXX else ''} and the peers'): {idle * 100:.2f} % of a core")
    left_out = [name for name, here in (("UCXX", HAS_UCXX), ("ZeroMQ", HAS_ZMQ), ("Ray", HAS_RAY)) if not here]
    if left_out:
        console.print(f"not installed here, left out: {', '.join(left_out)}")
    if arguments.json:
        idle_record = {
            "name": "idle cpu",
            "unit": "share",
            "ours": idle,
            "peer": 0.0,
            "peer_name": "nothing",
            "ratio": 0.0,
        }
        arguments.json.write_text(json.dumps([*bench.rows.records, idle_record], indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
