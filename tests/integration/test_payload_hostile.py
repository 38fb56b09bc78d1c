"""Servers among unknown clients and defects: one bad client costs its own connection, one bad port costs that port."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from running import outside_address

from penstock.errors import LocalProtocolError, RemoteProtocolError, RunFailed, Stale, Transient
from penstock.payload.exchange import REQUEST, STATUS, Code, ExchangeLimits, consume, hello, read
from penstock.payload.io import tcp
from penstock.payload.io.fetch import BatchFetcher
from penstock.payload.io.mapping import Mapping
from penstock.payload.io.reader import Finalisation, Lease, RingReader
from penstock.payload.io.received import Buffers, Cancellation, Received
from penstock.payload.io.shm import Ring
from penstock.payload.io.tcp import RECEIVE_BYTES, TcpServer
from penstock.payload.io.tcp_client import TcpWire
from penstock.payload.io.wire_client import Broken, WireClient
from penstock.payload.retry import Failure, RetryPolicy
from penstock.records.payload import PayloadRef

needs_ucxx = pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="the extra `ucxx` is not installed")
LIMITS = ExchangeLimits(hello_s=0.3, idle_s=0.5, send_s=0.3, send_bytes_per_s=1e9)
PATIENT = ExchangeLimits(hello_s=60, idle_s=60, send_s=60)


class World:
    def __init__(self, directory: Path) -> None:
        self.directory = str(directory)
        self.ring = Ring.create("run-1", capacity_bytes=16 << 20, slots=32, directory=self.directory)
        self.servers: list[TcpServer] = []

    def serve(
        self, limits: ExchangeLimits = LIMITS, ports: tuple[int, ...] = (0,), max_strangers: int = 8
    ) -> TcpServer:
        server = TcpServer(
            self.ring.name,
            "secret",
            ports=ports,
            directory=self.directory,
            limits=limits,
            max_strangers=max_strangers,
        )
        self.servers.append(server)
        return server

    def read(self, server: TcpServer, ref: PayloadRef, timeout_s: float = 30.0) -> Received | Failure:
        client = WireClient(TcpWire(), "secret", Buffers())
        try:
            address = self.ring.address(host_id="elsewhere", tcp_ports=server.ports)
            return client.read(address, ref, time.monotonic() + timeout_s, set(), Cancellation())
        finally:
            client.close()

    def expect_service(self, server: TcpServer) -> None:
        """The run's own clients are still served."""
        answer = self.read(server, self.ring.write([b"fine"], timeout_s=5))
        assert isinstance(answer, Received), answer
        assert bytes(answer.view) == b"fine"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    for server in world.servers:
        server.close()
    world.ring.check()
    world.ring.close()
    eventually(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("payload")])


@contextlib.contextmanager
def connected(server: TcpServer, say: bytes = b"") -> Iterator[socket.socket]:
    with socket.socket() as connection:
        # Otherwise the system may take in megabytes for a client that reads nothing.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        connection.settimeout(10)
        connection.connect(("127.0.0.1", server.ports[0]))
        connection.sendall(say)
        yield connection


def eventually(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.005)


def receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            break
        data += piece
    return data


def is_ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


# Lies, stalls and floods


@pytest.mark.parametrize(
    "greeting",
    [hello("guess"), b"GET / HTTP/1.1\r\nHost: here.example.org\r\n\r\n\r\n", b"\0" * 40],
    ids=["token", "http", "zeros"],
)
def test_clients_without_the_token_are_refused(world: World, greeting: bytes) -> None:
    server = world.serve()
    with connected(server, greeting) as connection:
        status = receive(connection, STATUS.size)
        assert STATUS.unpack(status)[0] == Code.REFUSED
        receive(connection, STATUS.unpack(status)[1])
        assert is_ended(connection)
    world.expect_service(server)


@pytest.mark.parametrize(
    "said", [b"", b"P", hello("secret"), hello("secret") + b"\x01"], ids=["nothing", "one", "hello", "some"]
)
def test_a_client_that_stalls_is_cut_off(world: World, said: bytes) -> None:
    server = world.serve()
    with connected(server, said) as connection:
        world.expect_service(server)
        assert is_ended(connection)
    eventually(lambda: server.statistics().connections == 0)


def test_dribbling_extends_no_deadline(world: World) -> None:
    server = world.serve()
    with connected(server) as connection:
        deadline = time.monotonic() + 10
        with contextlib.suppress(ConnectionError):
            for byte in hello("secret")[:-1]:
                assert time.monotonic() < deadline
                connection.sendall(bytes([byte]))
                time.sleep(0.03)  # 40 bytes take longer than the hello may
        assert is_ended(connection)


def test_a_client_that_does_not_read_is_cut_off_and_the_payload_stays(world: World) -> None:
    server = world.serve()
    ref = world.ring.write([bytes(12 << 20)], timeout_s=5)
    with connected(server, hello("secret") + read(ref)):
        eventually(lambda: world.ring.statistics().reading == 1)
        eventually(lambda: world.ring.statistics().ready == 1)
        assert server.statistics().broken_off == 1
    assert isinstance(world.read(world.serve(PATIENT), ref), Received)


def test_sent_is_not_consumed_and_saying_so_twice_does_no_harm(world: World) -> None:
    server = world.serve()
    ref = world.ring.write([b"unacknowledged"], timeout_s=5)
    for _ in range(2):
        with connected(server, hello("secret") + read(ref)) as connection:
            assert receive(connection, STATUS.size + 14).endswith(b"unacknowledged")
        eventually(lambda: world.ring.statistics().ready == 1)
    with connected(server, hello("secret") + consume([ref, ref]) + consume([ref])) as connection:
        assert receive(connection, 2 * STATUS.size) == 2 * STATUS.pack(Code.OK, 0)
    assert world.ring.statistics().free == 32
    assert server.statistics().consumed == 1


def test_a_consumption_that_cannot_be_done_is_not_confirmed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.payload.io.mapping.SLOT_LOCK_TIMEOUT_S", 0.01)
    server = world.serve(PATIENT)
    ref = world.ring.write([b"x"], timeout_s=5)
    stopped = Mapping.open(world.ring.name, world.directory)
    stopped.lock(ref.slot)
    with connected(server, hello("secret") + consume([ref])) as connection:
        assert is_ended(connection)
    stopped.unlock(ref.slot)
    stopped.close()
    assert world.ring.statistics().ready == 1


def test_a_slot_that_is_locked_when_its_body_was_sent_is_released_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [Transient("slot 0 has been locked"), Transient("slot 0 has been locked")]
    finalise = RingReader.finalise

    def locked(reader: RingReader, leases: list[Lease], action: Finalisation) -> int:
        if failures:
            raise failures.pop()
        return finalise(reader, leases, action)

    monkeypatch.setattr(RingReader, "finalise", locked)
    server = world.serve(PATIENT)
    ref = world.ring.write([b"body"], timeout_s=5)
    with connected(server, hello("secret") + read(ref)) as connection:
        assert receive(connection, STATUS.size + 4).endswith(b"body")
        eventually(lambda: world.ring.statistics().ready == 1)
        connection.sendall(read(ref))
        assert receive(connection, STATUS.size + 4).endswith(b"body")
    assert not failures


def test_a_fresh_connection_is_served_while_the_first_is_still_sending(world: World) -> None:
    server = world.serve(PATIENT)
    ref = world.ring.write([os.urandom(12 << 20)], timeout_s=5)
    with connected(server, hello("secret") + read(ref)):
        eventually(lambda: world.ring.statistics().reading == 1)
        assert isinstance(world.read(server, ref), Received)
        eventually(lambda: world.ring.statistics().ready == 1)  # the second one's release
        with connected(server, hello("secret") + consume([ref])) as other:
            assert receive(other, STATUS.size) == STATUS.pack(Code.OK, 0)
        assert world.ring.statistics().free == 32
        successor = world.ring.write([b"next"], timeout_s=5)
    eventually(lambda: server.statistics().orphans == 1)  # the first one's release came too late
    assert world.ring.statistics().ready == 1
    answer = world.read(server, successor)
    assert isinstance(answer, Received)
    assert bytes(answer.view) == b"next"


def test_a_flood_of_unknown_clients_keeps_no_client_out(world: World) -> None:
    server = world.serve(PATIENT, max_strangers=4)
    with contextlib.ExitStack() as stack:
        for _ in range(30):
            stack.enter_context(connected(server))
        eventually(lambda: server.statistics().accepted == 30)
        assert server.statistics().turned_away == 26
        world.expect_service(server)
        assert server.statistics().connections <= 4


def test_known_clients_are_not_limited_and_not_closed_for_unknown_ones(world: World) -> None:
    server = world.serve(PATIENT, max_strangers=2)
    with contextlib.ExitStack() as stack:
        known = [stack.enter_context(connected(server, hello("secret"))) for _ in range(100)]
        for _ in range(10):
            stack.enter_context(connected(server))
        eventually(lambda: server.statistics().turned_away == 8)
        ref = world.ring.write([b"x"], timeout_s=5)
        for connection in known:
            connection.sendall(read(ref))
            assert receive(connection, STATUS.size + 1)[-1:] == b"x"
        assert server.statistics().connections == 100 + 2


def test_a_client_that_only_asks_is_held_up_and_cut_off(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    class Seen(tcp._Connection):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            serving.append(self)

    serving: list[Seen] = []
    monkeypatch.setattr(tcp, "_Connection", Seen)
    server = world.serve()
    gone = world.ring.write([b"gone"], timeout_s=5)
    world.ring.discard([gone])
    read_ahead, cut_off = 0, False
    with connected(server, hello("secret")) as connection:
        while not cut_off:  # every answer waits to be received, and the next request for that
            try:
                connection.sendall(read(gone) * 1000)
            except ConnectionError:
                cut_off = True
            read_ahead = max([read_ahead, *(len(one._buffer) for one in serving)])
    assert 0 < read_ahead <= RECEIVE_BYTES + REQUEST.size
    eventually(lambda: server.statistics().connections == 0)
    world.expect_service(server)


@pytest.mark.parametrize("seed", range(3))
def test_nonsense_after_the_hello_costs_its_connection_only(world: World, seed: int) -> None:
    server = world.serve(PATIENT)
    source = random.Random(seed)
    kept = world.ring.write([b"kept"], timeout_s=5)
    for _ in range(60):
        kind = source.choice([0, 1, 1, 2, 255])
        numbers = [source.choice([0, 1, world.ring.epoch, source.getrandbits(64)]) for _ in range(5)]
        with connected(server, hello("secret") + REQUEST.pack(kind, *numbers) + source.randbytes(source.randrange(60))):
            pass
    server.check()
    answer = world.read(server, kept)
    assert isinstance(answer, Received)
    eventually(lambda: server.statistics().connections == 0)
    assert world.ring.statistics().reading == 0


@pytest.mark.parametrize(
    "answer",
    [
        STATUS.pack(Code.OK, 1 << 60),
        STATUS.pack(Code.STALE, 1 << 60),
        STATUS.pack(77, 0),
        STATUS.pack(Code.OK, 5) + b"12345",
        STATUS.pack(Code.OK, 5) + b"12",
        b"\0",
        b"",
    ],
    ids=["huge body", "huge text", "unknown", "wrong bytes", "cut short", "half a status", "nothing"],
)
def test_a_lying_server_is_an_exact_failure(world: World, answer: bytes) -> None:
    ref = world.ring.write([b"truth"], timeout_s=5)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def lie() -> None:
            for _ in range(2):
                peer, _ = listener.accept()
                with peer:
                    peer.settimeout(10)
                    receive(peer, len(hello("x")) + REQUEST.size)
                    peer.sendall(answer)

        threading.Thread(target=lie, daemon=True).start()
        fetcher = BatchFetcher(
            host_id="elsewhere",
            token="secret",
            directory=world.directory,
            policy=RetryPolicy(call_s=2, slot_s=5, batch_s=6, rounds=1),
        )
        address = world.ring.address(host_id="here", tcp_ports=[listener.getsockname()[1]])
        report = fetcher.fetch([ref], [address])
        assert report.views == {}
        assert report.missing[ref].kind in ("protocol", "corrupt", "truncated", "reset")
        fetcher.close()
    assert world.ring.statistics().ready == 1


@needs_ucxx
def test_unknown_ucxx_clients_that_stall_or_send_garbage_cost_their_own_connection_only(world: World) -> None:
    from penstock.payload.io.ucxx import UcxxServer
    from penstock.payload.io.ucxx_client import UcxxWire
    from penstock.runtime.ucx import TAG

    server = UcxxServer(world.ring.name, "secret", directory=world.directory, limits=LIMITS, max_strangers=4)
    wire = UcxxWire()
    host, port = "127.0.0.1", server.ports[0]
    nonsense = [b"P", bytes(TAG.size + 40), hello("guess") + bytes(TAG.size), os.urandom(300)]
    unknowns = []
    for said in nonsense:
        unknown = wire.connect(host, port, b"", time.monotonic() + 10)
        unknown._preamble = said
        with contextlib.suppress(Broken):
            unknown.ask(b"", memoryview(bytearray()), time.monotonic() + 0.2)
        unknowns.append(unknown)
    ref = world.ring.write([b"fine"], timeout_s=5)
    fetcher = BatchFetcher(host_id="elsewhere", token="secret", transport="ucxx", directory=world.directory)
    report = fetcher.fetch([ref], [world.ring.address(host_id="here", ucxx_ports=server.ports)])
    assert bytes(report.views[ref]) == b"fine"
    report.consumed()
    eventually(lambda: world.ring.statistics().free == 32)
    eventually(lambda: server.statistics().connections == 0)
    assert server.statistics().accepted >= len(nonsense)
    server.check()
    for unknown in unknowns:
        unknown.close()
    fetcher.close()
    wire.close()
    server.close()


@needs_ucxx
def test_a_ucxx_server_on_loopback_is_out_of_reach_from_elsewhere(world: World) -> None:
    outside = outside_address()
    from penstock.payload.io.ucxx import UcxxServer

    ref = world.ring.write([b"private"], timeout_s=5)
    server = UcxxServer(world.ring.name, "secret", host="127.0.0.1", directory=world.directory)
    policy = RetryPolicy(call_s=2, slot_s=5, batch_s=6, rounds=1)
    fetcher = BatchFetcher(
        host_id="elsewhere", token="secret", transport="ucxx", directory=world.directory, policy=policy
    )
    report = fetcher.fetch([ref], [world.ring.address(host_id="here", host=outside, ucxx_ports=server.ports)])
    assert report.missing[ref].kind in ("refused", "reset", "timed_out")
    assert server.statistics().accepted == 0
    report = fetcher.fetch([ref], [world.ring.address(host_id="here", host="127.0.0.1", ucxx_ports=server.ports)])
    assert bytes(report.views[ref]) == b"private"
    report.consumed()
    fetcher.close()
    server.close()


# Defects other transports had


def test_port_zero_means_chosen_and_advertised(world: World) -> None:
    server = world.serve(ports=(0, 0, 0, 0))
    assert len(set(server.ports)) == 4
    assert min(server.ports) > 1023
    for port in server.ports:
        with socket.create_connection(("127.0.0.1", port), 10):
            pass


def test_a_port_that_cannot_be_bound_fails_the_start(world: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(RunFailed, match="choose other ports"):
        world.serve(ports=(0, taken.getsockname()[1]))
    reader = RingReader.attach(world.ring.name, directory=world.directory)
    assert "reader" in repr(reader)
    reader.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_acceptor_is_seen_and_its_port_no_longer_advertised(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = world.serve(ports=(0, 0))
    _, second = server.ports

    def die(received: bytearray) -> bool:
        raise MemoryError("witness")

    monkeypatch.setattr(server._served[0].door, "_inspect", die)
    with connected(server, b"P"):
        eventually(lambda: server.ports == (second,))
    with pytest.raises(LocalProtocolError, match="witness"):
        server.check()
    world.expect_service(server)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_port_that_can_never_accept_again_is_told_of(world: World) -> None:
    server = world.serve(PATIENT, ports=(0, 0))
    first, second = server.ports
    server._served[0].door._listener.shutdown(socket.SHUT_RDWR)  # as a process that shares the socket can
    eventually(lambda: server.ports == (second,))
    with pytest.raises(LocalProtocolError, match=f"port {first} stopped accepting"):
        server.check()
    world.expect_service(server)


def test_a_thread_that_cannot_be_started_costs_its_connection_only(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = world.serve(PATIENT)
    start = threading.Thread.start
    refused: list[str] = []

    def start_or_refuse(thread: threading.Thread) -> None:
        if thread.name == "payload-serve" and not refused:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_refuse)
    with connected(server, hello("secret")) as turned_away:
        turned_away.settimeout(30)
        assert turned_away.recv(1) == b""
    assert refused
    world.expect_service(server)
    server.check()
    eventually(lambda: server.statistics().connections == 0)


def test_clients_wait_for_a_thread_when_there_are_no_more(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    server = world.serve(PATIENT)
    start = threading.Thread.start
    refused: list[str] = []

    def start_or_refuse(thread: threading.Thread) -> None:
        serving = [one for one in threading.enumerate() if one.name == "payload-serve"]
        if thread.name == "payload-serve" and serving:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_refuse)
    refs = [world.ring.write([bytes([number])], timeout_s=5) for number in range(2)]
    with connected(server, hello("secret") + read(refs[0])) as first:
        assert receive(first, STATUS.size + 1)[-1] == 0
        with connected(server, hello("secret") + read(refs[1])) as second:
            eventually(lambda: len(refused) == 1)
            assert server.statistics().connections == 2
            first.close()
            assert receive(second, STATUS.size + 1)[-1] == 1


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_what_a_forked_child_closes_stays_open_for_its_parent(world: World) -> None:
    server = world.serve()
    child = os.fork()
    if child == 0:
        try:
            server.close()
            world.ring.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    world.expect_service(server)
    server.check()
    RingReader.attach(world.ring.name, directory=world.directory).close()


def test_a_sick_port_is_left_out_and_comes_back(world: World) -> None:
    server = world.serve(PATIENT)
    with socket.create_server(("127.0.0.1", 0)) as blackhole:  # accepts, never answers
        ports = (blackhole.getsockname()[1], server.ports[0])
        fetcher = BatchFetcher(
            host_id="elsewhere",
            token="secret",
            directory=world.directory,
            policy=RetryPolicy(call_s=0.3, slot_s=5, batch_s=6, concurrency=1),
        )
        address = world.ring.address(host_id="here", tcp_ports=ports)
        refs = [world.ring.write([bytes([number])], timeout_s=5) for number in range(8)]
        report = fetcher.fetch(refs, [address])
        assert report.missing == {}
        report.consumed()
        assert "timed_out x1" in repr(fetcher._clients["tcp"])  # one call paid for all
        fetcher.close()


def test_a_late_answer_is_never_taken_for_the_next(world: World) -> None:
    """Without digests, which would notice."""
    first, second = (world.ring.write([body], timeout_s=5) for body in (b"first ", b"second"))
    late = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer(body: bytes) -> None:
            peer, _ = listener.accept()
            with peer, contextlib.suppress(ConnectionError):
                receive(peer, len(hello("x")) + REQUEST.size)
                if body == b"first ":
                    assert late.wait(30)
                peer.sendall(STATUS.pack(Code.OK, len(body)) + body)
                peer.recv(1)

        threads = [threading.Thread(target=answer, args=(body,)) for body in (b"first ", b"second")]
        threads[0].start()
        client = WireClient(TcpWire(), "secret", Buffers(), verify=False)
        address = world.ring.address(host_id="elsewhere", tcp_ports=[listener.getsockname()[1]])
        failure = client.read(address, first, time.monotonic() + 0.3, set(), Cancellation())
        assert isinstance(failure, Failure)
        assert failure.kind == "timed_out"
        late.set()
        threads[0].join(30)  # it has come, to where nothing listens any more
        threads[1].start()
        received = client.read(address, second, time.monotonic() + 30, set(), Cancellation())
        assert isinstance(received, Received)
        assert bytes(received.view) == b"second"
        client.close()
        threads[1].join(30)


def test_connections_are_used_again_and_retired_before_a_server_evicts_them(world: World) -> None:
    retired_s = inspect.signature(WireClient).parameters["max_age_s"].default
    assert retired_s < ExchangeLimits().idle_s
    server = world.serve(PATIENT)
    address = world.ring.address(host_id="elsewhere", tcp_ports=server.ports)
    for max_age_s, accepted in ((retired_s, 1), (0.0, 4)):
        client = WireClient(TcpWire(), "secret", Buffers(), max_age_s=max_age_s)
        for _ in range(3):
            ref = world.ring.write([b"x"], timeout_s=5)
            assert isinstance(client.read(address, ref, time.monotonic() + 30, set(), Cancellation()), Received)
        client.close()
        assert server.statistics().accepted == accepted
    eventually(lambda: server.statistics().connections == 0)


def test_closing_a_fetcher_breaks_off_what_it_waits_for(world: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as blackhole:
        fetcher = BatchFetcher(
            host_id="elsewhere",
            token="secret",
            directory=world.directory,
            policy=RetryPolicy(call_s=300, slot_s=400, batch_s=500, concurrency=2),
        )
        address = world.ring.address(host_id="here", tcp_ports=[blackhole.getsockname()[1]])
        refs = [world.ring.write([bytes([number])], timeout_s=5) for number in range(6)]
        with ThreadPoolExecutor(1) as thread:
            fetched = thread.submit(fetcher.fetch, refs, [address])
            for _ in range(2):  # both calls wait for an answer that will not come
                blackhole.settimeout(10)
                blackhole.accept()[0].detach()
            fetcher.close()
            report = fetched.result(timeout=10)
        assert {failure.kind for failure in report.missing.values()} == {"cancelled"}
        assert set(report.missing) == set(refs)
    assert world.ring.statistics().ready == 6


def test_a_reference_of_a_former_epoch_is_stale_everywhere(world: World) -> None:
    server = world.serve()
    ref = world.ring.write([b"x"], timeout_s=5)
    old = PayloadRef(ref.ring, ref.epoch ^ 1, ref.slot, ref.generation, ref.size_bytes, ref.digest)
    answer = world.read(server, old)
    assert isinstance(answer, Failure)
    assert answer.kind == "stale"
    reader = RingReader.attach(world.ring.name, directory=world.directory)
    with pytest.raises(Stale):
        reader.take(old)
    reader.close()


# Idle and ending

IDLE = """
import sys, time
from penstock.payload.io.shm import Ring
from penstock.payload.io.tcp import TcpServer
ring = Ring.create("run-1", capacity_bytes=1 << 20, slots=8, directory=sys.argv[1])
servers = [TcpServer(ring.name, "secret", ports=(0, 0, 0, 0), directory=sys.argv[1])]
if sys.argv[2] == "ucxx":
    from penstock.payload.io.ucxx import UcxxServer
    servers.append(UcxxServer(ring.name, "secret", ports=(0, 0), directory=sys.argv[1]))
print(servers[0].ports[0], flush=True)
sys.stdin.read()
began = time.process_time()
for server in servers:
    server.close()
ring.close()
"""


@pytest.mark.parametrize("transport", ["tcp", "ucxx"])
def test_an_idle_server_uses_no_cpu(tmp_path: Path, transport: str) -> None:
    if transport == "ucxx":
        pytest.importorskip("ucxx", reason="the extra `ucxx` is not installed")
    with subprocess.Popen(
        [sys.executable, "-c", IDLE, str(tmp_path), transport], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        port = int(child.stdout.readline())
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(hello("secret"))  # an idle connection too
            process = psutil.Process(child.pid)
            before = process.cpu_times()
            threads = process.num_threads()
            time.sleep(1.0)
            after = process.cpu_times()
            assert threads > 4
            # Ticks of 10 ms: a spinning thread would show a hundred of them in this second.
            assert after.user + after.system - before.user - before.system <= 0.05
        child.stdin.close()
        assert child.wait(30) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_server_closes_in_the_middle_of_everything(world: World) -> None:
    server = world.serve(PATIENT)
    ref = world.ring.write([bytes(12 << 20)], timeout_s=5)
    with connected(server), connected(server, hello("secret")), connected(server, hello("secret") + read(ref)):
        eventually(lambda: world.ring.statistics().reading == 1)
        server.close(timeout_s=10)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("payload")]
    assert world.ring.statistics().ready == 1  # what was being sent can still be had


@needs_ucxx
def test_a_ucxx_server_closes_in_the_middle_of_everything_and_frees_its_port(world: World) -> None:
    from penstock.payload.io.ucxx import UcxxServer
    from penstock.payload.io.ucxx_client import UcxxConnection, UcxxWire

    server = UcxxServer(world.ring.name, "secret", directory=world.directory, limits=PATIENT)
    used, ref = (world.ring.write([body], timeout_s=5) for body in (b"used", bytes(12 << 20)))
    wire = UcxxWire()

    def connect(said: bytes) -> UcxxConnection:
        return wire.connect("127.0.0.1", server.ports[0], said, time.monotonic() + 30)

    unknown, idle, reading = connect(b"P"), connect(hello("secret")), connect(hello("secret"))
    with pytest.raises(Broken, match="no answer in time"):
        unknown.ask(b"", memoryview(b""), time.monotonic() + 0.1)
    idle.ask(consume([used]), memoryview(b""), time.monotonic() + 30)
    eventually(lambda: unknown.reusable and server.statistics().connections == 3)
    reading.ask(read(ref), memoryview(b""), time.monotonic() + 30)  # so that the status comes, and no body
    assert world.ring.statistics().reading == 1
    server.close(timeout_s=10)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("payload")]
    assert world.ring.statistics().ready == 1
    socket.create_server(("", server.ports[0])).close()  # the port is free again
    for client in (unknown, idle, reading):
        client.close()
    wire.close()


# Fuzz


@pytest.mark.parametrize("seed", range(4))
def test_a_ring_file_full_of_noise_is_refused_or_stale_but_never_wrong(world: World, tmp_path: Path, seed: int) -> None:
    source = random.Random(seed)
    ring = Ring.create("run-1", capacity_bytes=8192, slots=16, directory=world.directory)
    bodies = [source.randbytes(300) for _ in range(8)]
    truth = {ring.write([body], timeout_s=5): body for body in bodies}
    pristine = (tmp_path / ring.name).read_bytes()
    victim = tmp_path / ("penstock-" + "f" * 32)
    tables = ring._mapping.layout.arena
    delivered = refused = 0
    for _ in range(100):
        raw = bytearray(pristine)
        for _ in range(source.randrange(1, 30)):
            # The header is small beside the tables: aim at it often enough.
            raw[source.randrange(source.choice([256, tables, len(raw)]))] = source.getrandbits(8)
        victim.write_bytes(raw[: source.choice([len(raw), len(raw), source.randrange(len(raw))])])
        victim.chmod(0o600)
        try:
            reader = RingReader.attach(victim.name, directory=world.directory)
        except (RemoteProtocolError, Stale):
            refused += 1
            continue
        for ref, body in truth.items():
            forged = PayloadRef(victim.name, ref.epoch, ref.slot, ref.generation, ref.size_bytes, ref.digest)
            try:
                lease = reader.take(forged)
            except Stale:
                refused += 1
            else:
                assert bytes(lease.view) == body
                delivered += 1
        reader.close()
    victim.unlink()
    ring.close()
    assert delivered
    assert refused
