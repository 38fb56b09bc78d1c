"""One contract, three transports: whatever carries a payload, these promises hold."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import msgspec
import pytest

from penstock.errors import ConfigError, Transient
from penstock.payload.exchange import ExchangeLimits
from penstock.payload.io.fetch import BatchFetcher, FetchReport, Transport
from penstock.payload.io.mapping import Mapping
from penstock.payload.io.reader import RingReader
from penstock.payload.io.received import Cancellation
from penstock.payload.io.serving import ServerStatistics
from penstock.payload.io.shm import Ring
from penstock.payload.io.tcp import TcpServer
from penstock.payload.retry import RetryPolicy
from penstock.records.payload import PayloadRef, RingAddress

QUICK = RetryPolicy(call_s=20, slot_s=40, batch_s=60, pause_s=0.01)
needs_ucxx = pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="the extra `ucxx` is not installed")


class Server(Protocol):
    @property
    def ports(self) -> tuple[int, ...]: ...
    def statistics(self) -> ServerStatistics: ...
    def check(self) -> None: ...
    def close(self, timeout_s: float = 5.0) -> None: ...


class World:
    """A producer with a ring and servers, and consumers that reach it by one transport."""

    def __init__(self, transport: Transport, directory: Path) -> None:
        self.transport: Transport = transport
        self.directory = str(directory)
        self.ring = Ring.create("run-1", capacity_bytes=8 << 20, slots=16, directory=self.directory)
        self.server = self.serve()
        self.fetchers: list[BatchFetcher] = []
        self.fetcher = self.new_fetcher()

    def serve(self, limits: ExchangeLimits | None = None, ports: tuple[int, ...] = (0, 0)) -> Server | None:
        if self.transport == "tcp":
            return TcpServer(self.ring.name, "secret", ports=ports, directory=self.directory, limits=limits)
        if self.transport == "ucxx":
            from penstock.payload.io.ucxx import UcxxServer

            return UcxxServer(self.ring.name, "secret", ports=ports, directory=self.directory, limits=limits)
        return None

    def new_fetcher(self, token: str = "secret", policy: RetryPolicy = QUICK) -> BatchFetcher:
        fetcher = BatchFetcher(
            host_id="here", token=token, directory=self.directory, transport=self.transport, policy=policy
        )
        self.fetchers.append(fetcher)
        return fetcher

    @property
    def address(self) -> RingAddress:
        ports = () if self.server is None else self.server.ports
        return self.ring.address(
            host_id="here",
            tcp_ports=ports if self.transport == "tcp" else (),
            ucxx_ports=ports if self.transport == "ucxx" else (),
        )

    def write(self, body: bytes) -> PayloadRef:
        return self.ring.write([body], timeout_s=0)

    def close(self) -> None:
        for fetcher in self.fetchers:
            fetcher.close()
        if self.server is not None:
            self.server.check()
            self.server.close()
        self.ring.check()
        self.ring.close()


WIRES = ["tcp", pytest.param("ucxx", marks=needs_ucxx)]


@pytest.fixture(params=["shm", *WIRES])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    world = World(request.param, tmp_path)
    yield world
    world.close()
    assert list(tmp_path.iterdir()) == []
    eventually(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("payload")])


def eventually(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.005)


def test_bodies_arrive_as_they_were_written(world: World) -> None:
    bodies = [os.urandom(size) for size in (0, 1, 200, 4096, 65537, (1 << 20) + 3, 3 << 20)]
    refs = [world.write(body) for body in bodies]
    report = world.fetcher.fetch(refs, [world.address])
    assert report.missing == {}
    assert [bytes(report.views[ref]) for ref in refs] == bodies
    assert all(view.readonly for view in report.views.values())
    assert report.consumed() == 0
    eventually(lambda: world.ring.statistics().free == 16)


def test_a_payload_is_had_once(world: World) -> None:
    ref = world.write(b"once")
    world.fetcher.fetch([ref], [world.address]).consumed()
    eventually(lambda: world.ring.statistics().free == 16)
    again = world.fetcher.fetch([ref], [world.address])
    assert again.views == {}
    assert again.missing[ref].kind == "stale"
    again.consumed()


def test_an_old_reference_gets_nothing_and_costs_its_successor_nothing(world: World) -> None:
    old = world.write(b"old")
    world.fetcher.fetch([old], [world.address]).consumed()
    eventually(lambda: world.ring.statistics().free == 16)
    lap = [world.write(bytes([number])) for number in range(16)]
    assert old.slot in {ref.slot for ref in lap}
    report = world.fetcher.fetch([old, *lap], [world.address])
    assert report.missing[old].kind == "stale"
    assert [bytes(report.views[ref]) for ref in lap] == [bytes([number]) for number in range(16)]
    report.consumed()


def test_what_is_missing_is_told_exactly(world: World) -> None:
    good = [world.write(b"a"), world.write(b"b")]
    discarded = world.write(b"c")
    world.ring.discard([discarded])
    unknown = PayloadRef("penstock-" + "0" * 32, 1, 0, 1, 1, 0)
    invented = PayloadRef(world.ring.name, world.ring.epoch, 999, 1, 1, 0)
    report = world.fetcher.fetch([*good, discarded, unknown, invented, good[0]], [world.address])
    assert set(report.views) == set(good)
    assert {ref: failure.kind for ref, failure in report.missing.items()} == {
        discarded: "stale",
        unknown: "unknown_ring",
        invented: "stale",
    }
    report.consumed()


def test_a_reference_that_no_ring_can_have_given_costs_only_itself(world: World) -> None:
    good = world.write(b"good")
    impossible = [
        msgspec.structs.replace(good, **{name: value})
        for name in ("slot", "generation", "size_bytes", "digest")
        for value in (-1, 1 << 64)
    ]
    enormous = msgspec.structs.replace(good, size_bytes=1 << 41)
    report = world.fetcher.fetch([*impossible, enormous, good], [world.address])
    assert bytes(report.views[good]) == b"good"
    assert {report.missing[ref].kind for ref in impossible} == {"stale"}
    assert report.missing[enormous].kind in ("stale", "busy")  # as the machine has memory for it, or not
    report.consumed()
    eventually(lambda: world.ring.statistics().free == 16)


def test_a_fresh_reader_gets_what_another_is_still_reading(world: World) -> None:
    ref = world.write(b"shared")
    slow = RingReader.attach(world.ring.name, directory=world.directory)
    lease = slow.take(ref)
    report = world.fetcher.fetch([ref], [world.address])
    assert bytes(report.views[ref]) == b"shared"
    if world.server is not None:  # or its own attempt, which ends after the body has arrived, may be an orphan too
        eventually(lambda: world.ring.statistics().ready == 1)
    assert report.consumed() == 0
    eventually(lambda: world.ring.statistics().free == 16)
    successor = world.write(b"next")
    assert not lease.consumed()  # the orphan comes late, and changes nothing
    assert world.ring.statistics().orphans == 1
    report = world.fetcher.fetch([successor], [world.address])
    assert bytes(report.views[successor]) == b"next"
    report.consumed()
    slow.close()


def test_one_payload_being_read_delays_no_write(world: World) -> None:
    slow = RingReader.attach(world.ring.name, directory=world.directory)
    lease = slow.take(world.write(b"held"))
    for number in range(40):
        ref = world.ring.write([bytes([number])], timeout_s=5)
        report = world.fetcher.fetch([ref], [world.address])
        assert bytes(report.views[ref]) == bytes([number])
        report.consumed()
    assert bytes(lease.view) == b"held"
    assert lease.consumed()
    slow.close()


def test_a_damaged_body_is_never_delivered(world: World) -> None:
    ref = world.write(b"precious" * 1000)
    path = Path(world.directory) / world.ring.name
    raw = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(raw.index(b"precious"))
        file.write(b"q")
    report = world.fetcher.fetch([ref], [world.address])
    assert report.views == {}
    assert report.missing[ref].kind == ("stale" if world.transport == "shm" else "corrupt")
    report.consumed()


def test_many_threads_may_fetch_at_once(world: World) -> None:
    seen: list[bytes] = []

    def consume(refs: list[PayloadRef]) -> None:
        report = world.fetcher.fetch(refs, [world.address])
        seen.extend(bytes(view) for view in report.views.values())
        report.consumed()

    refs = [world.write(bytes([number]) * 1000) for number in range(16)]
    threads = [threading.Thread(target=consume, args=(refs[start::4],)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == [bytes([number]) * 1000 for number in range(16)]


def test_the_transport_in_use_is_said_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(3):
        world.fetcher.fetch([world.write(b"x")], [world.address]).consumed()
    lines = [record.message for record in caplog.records if "are fetched over" in record.message]
    assert len(lines) == 1
    assert f"are fetched over {world.transport} " in lines[0]


def test_a_trainer_that_dies_holding_a_batch_finds_it_again(world: World) -> None:
    refs = [world.write(bytes([number])) for number in range(4)]
    dead = world.new_fetcher()
    assert len(dead.fetch(refs, [world.address]).views) == 4
    for reader in dead._readers.values():
        reader._mapping.close()  # as SIGKILL would
    report = world.fetcher.fetch(refs, [world.address])
    assert [bytes(report.views[ref]) for ref in refs] == [bytes([number]) for number in range(4)]
    assert report.consumed() == 0
    eventually(lambda: world.ring.statistics().free == 16)


@pytest.mark.parametrize("world", WIRES, indirect=True)
class TestOnAWire:
    def test_the_wrong_token_gets_nothing(self, world: World) -> None:
        ref = world.write(b"secret")
        report = world.new_fetcher(token="guess").fetch([ref], [world.address])
        assert report.views == {}
        assert report.missing[ref].kind in ("protocol", "truncated", "reset")
        assert world.ring.statistics().ready == 1

    def test_an_address_that_cannot_be_is_refused(self, world: World) -> None:
        ref = world.write(b"there")
        for host, port in (("..", 1), ("a" * 300, 1), ("127.0.0.1", 70_000), ("127.0.0.1", -1)):
            address = msgspec.structs.replace(world.address, host=host, **{f"{world.transport}_ports": (port,)})
            assert world.fetcher.fetch([ref], [address]).missing[ref].kind == "refused"
        assert bytes(world.fetcher.fetch([ref], [world.address]).views[ref]) == b"there"

    def test_ports_are_really_bound_and_all_used(self, world: World) -> None:
        assert world.server is not None
        assert len(set(world.server.ports)) == 2
        assert all(port > 0 for port in world.server.ports)
        for _ in range(4):
            world.fetcher.fetch([world.write(b"x")], [world.address]).consumed()
        eventually(lambda: world.server is not None and world.server.statistics().consumed == 4)
        assert world.server.statistics().connections >= 2

    def test_a_closed_server_is_an_exact_reason_and_a_restarted_one_works(self, world: World) -> None:
        assert world.server is not None
        ref = world.write(b"patience")
        world.fetcher.fetch([world.write(b"warm up")], [world.address]).consumed()
        old = world.address
        world.server.close()
        quick = RetryPolicy(call_s=1, slot_s=2, batch_s=3, rounds=1, pause_s=0.01)
        report = world.new_fetcher(policy=quick).fetch([ref], [old])
        assert report.missing[ref].kind in ("refused", "reset", "timed_out", "truncated")
        assert "after 2 calls" in report.missing[ref].detail
        world.server = world.serve()
        report = world.fetcher.fetch([ref], [world.address])
        assert bytes(report.views[ref]) == b"patience"
        report.consumed()

    def test_an_idle_connection_is_evicted_and_replaced_unnoticed(self, world: World) -> None:
        assert world.server is not None
        world.server.close()
        world.server = world.serve(ExchangeLimits(idle_s=0.05))
        world.fetcher.fetch([world.write(b"x")], [world.address]).consumed()
        eventually(lambda: world.server is not None and world.server.statistics().connections == 0)
        ref = world.write(b"y")
        report = world.fetcher.fetch([ref], [world.address])
        assert bytes(report.views[ref]) == b"y"
        report.consumed()

    def test_a_payload_stays_until_its_copy_was_used(self, world: World) -> None:
        assert world.server is not None
        refs = [world.write(bytes([number])) for number in range(3)]
        for _ in range(2):
            report = world.fetcher.fetch(refs, [world.address])
            assert [bytes(report.views[ref]) for ref in refs] == [b"\0", b"\1", b"\2"]
            eventually(lambda: world.ring.statistics().ready == 3)
            report.released()
        assert world.server.statistics().consumed == 0
        world.fetcher.fetch(refs, [world.address]).consumed()
        eventually(lambda: world.ring.statistics().free == 16)
        assert world.server.statistics().consumed == 3

    def test_a_producer_that_could_not_be_told_is_told_later(self, world: World) -> None:
        assert world.server is not None
        refs = [world.write(bytes([number])) for number in range(3)]
        report = world.fetcher.fetch(refs, [world.address])
        ports = world.server.ports
        world.server.close()
        report.consumed()
        eventually(lambda: bool(world.fetcher._consumption._failing), 30)  # it was tried, in vain
        assert world.ring.statistics().free == 13
        world.server = world.serve(ports=ports)
        eventually(lambda: world.ring.statistics().free == 16, 30)

    def test_what_was_used_is_told_before_the_end(self, world: World) -> None:
        refs = [world.write(bytes([number])) for number in range(16)]
        world.fetcher.fetch(refs, [world.address]).consumed()
        world.fetcher.close()
        assert world.ring.statistics().free == 16

    def test_cancelling_breaks_a_call_off(self, world: World) -> None:
        ref = world.write(b"x")
        cancellation = Cancellation()
        cancellation.cancel("enough")
        with pytest.raises(Exception, match="enough"):
            world.fetcher.fetch([ref], [world.address], cancellation)
        assert world.ring.statistics().ready == 1

    def test_cancelling_breaks_off_a_call_that_waits(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("penstock.payload.io.mapping.SLOT_LOCK_TIMEOUT_S", 60.0)
        ref = world.write(b"later")
        stopped = Mapping.open(world.ring.name, world.directory)
        stopped.lock(ref.slot)  # the server cannot answer
        cancellation = Cancellation()
        reports: list[FetchReport] = []
        thread = threading.Thread(
            target=lambda: reports.append(world.fetcher.fetch([ref], [world.address], cancellation))
        )
        thread.start()
        eventually(lambda: "1 registered" in repr(cancellation))
        cancellation.cancel("enough")
        thread.join(15)  # a call alone has longer
        assert [report.missing[ref].kind for report in reports] == ["cancelled"]
        stopped.unlock(ref.slot)
        stopped.close()
        report = world.fetcher.fetch([ref], [world.address])
        assert bytes(report.views[ref]) == b"later"
        report.consumed()


@pytest.mark.parametrize("used", [True, False])
def test_a_locked_slot_delays_only_the_payloads_of_its_ring(
    used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.payload.io.mapping.SLOT_LOCK_TIMEOUT_S", 0.01)
    rings = [Ring.create("run-1", capacity_bytes=1 << 16, slots=4, directory=str(tmp_path)) for _ in range(3)]
    refs = [ring.write([b"x"], timeout_s=0) for ring in rings for _ in range(4)]
    fetcher = BatchFetcher(host_id="here", directory=str(tmp_path))
    report = fetcher.fetch(refs, [ring.address(host_id="here") for ring in rings])
    assert not report.missing
    stopped = Mapping.open(rings[1].name, str(tmp_path))
    stopped.lock(2)
    end = report.consumed if used else report.released
    with pytest.raises(Transient, match="has been locked for"):
        end()
    assert [ring.statistics().reading for ring in rings] == [0, 4, 0]
    stopped.unlock(2)
    stopped.close()
    end()
    assert [ring.statistics().free if used else ring.statistics().ready for ring in rings] == [4, 4, 4]
    fetcher.close()
    for ring in rings:
        ring.close()


def test_the_nearest_transport_is_chosen_with_a_way_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ring = Ring.create("run-1", capacity_bytes=1 << 20, slots=4, directory=str(tmp_path))
    server = TcpServer(ring.name, "secret", directory=str(tmp_path))
    address = ring.address(host_id="here", tcp_ports=server.ports)
    elsewhere = tmp_path / "other"
    elsewhere.mkdir()
    for host_id, directory, expected in (
        ("here", tmp_path, "are fetched over shm"),
        ("there", tmp_path, "not shm: it is on another host"),
        ("here", elsewhere, "does not exist on this host"),  # same machine, but not the same /dev/shm
    ):
        caplog.clear()
        fetcher = BatchFetcher(host_id=host_id, token="secret", directory=str(directory), policy=QUICK)
        ref = ring.write([b"x"], timeout_s=0)
        report = fetcher.fetch([ref], [address])
        assert bytes(report.views[ref]) == b"x"
        report.consumed()
        assert expected in caplog.text
        fetcher.close()
    server.close()
    ring.close()


@needs_ucxx
@pytest.mark.parametrize("installed", [True, False])
def test_ucx_is_preferred_where_it_is_installed(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from penstock.payload.io.ucxx import UcxxServer

    caplog.set_level(logging.INFO)
    if not installed:
        monkeypatch.setitem(sys.modules, "penstock.payload.io.ucxx_client", None)
    ring = Ring.create("run-1", capacity_bytes=1 << 20, slots=4, directory=str(tmp_path))
    tcp = TcpServer(ring.name, "secret", directory=str(tmp_path))
    ucxx = UcxxServer(ring.name, "secret", directory=str(tmp_path))
    address = ring.address(host_id="here", tcp_ports=tcp.ports, ucxx_ports=ucxx.ports)
    fetcher = BatchFetcher(host_id="there", token="secret", directory=str(tmp_path), policy=QUICK)
    ref = ring.write([b"x"], timeout_s=0)
    report = fetcher.fetch([ref], [address])
    assert bytes(report.views[ref]) == b"x"
    report.consumed()
    expected = "are fetched over ucxx (not shm" if installed else "not ucxx: UCXX is not installed here"
    assert expected in caplog.text
    eventually(lambda: (ucxx if installed else tcp).statistics().sent == 1)
    fetcher.close()
    tcp.close()
    ucxx.close()
    ring.close()


def test_a_ring_that_cannot_be_reached_is_a_reason_and_not_an_error(tmp_path: Path) -> None:
    lost = Ring.create("run-1", capacity_bytes=1024, slots=4, directory=str(tmp_path))
    kept = Ring.create("run-1", capacity_bytes=1024, slots=4, directory=str(tmp_path))
    refs = [lost.write([b"lost"], timeout_s=0), kept.write([b"kept"], timeout_s=0)]
    addresses = [lost.address(host_id="here"), kept.address(host_id="here")]
    lost.close()
    fetcher = BatchFetcher(host_id="here", directory=str(tmp_path))
    report = fetcher.fetch(refs, addresses)
    assert report.missing[refs[0]].kind == "unreachable"
    assert "does not exist on this host" in report.missing[refs[0]].detail
    assert bytes(report.views[refs[1]]) == b"kept"
    report.consumed()
    fetcher.close()
    forced = BatchFetcher(host_id="here", directory=str(tmp_path), transport="tcp")
    with pytest.raises(ConfigError, match="transport tcp was requested, but the producer offers no port"):
        forced.fetch(refs, addresses)
    forced.close()
    kept.close()


PRODUCER = """
import sys, msgspec
from penstock.payload.io.shm import Ring
ring = Ring.create("run-1", capacity_bytes=64 << 20, slots=16, directory=sys.argv[1])
if sys.argv[2] == "tcp":
    from penstock.payload.io.tcp import TcpServer as Server
else:
    from penstock.payload.io.ucxx import UcxxServer as Server
server = Server(ring.name, "secret", directory=sys.argv[1])
refs = [ring.write([b"first"], timeout_s=0), ring.write([bytes(48 << 20)], timeout_s=0)]
address = ring.address(host_id="here", **{sys.argv[2] + "_ports": server.ports})
print(msgspec.json.encode((address, refs)).decode(), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("transport", WIRES)
def test_a_producer_killed_while_it_sends_is_an_exact_failure_and_its_ring_remains(transport, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PRODUCER, str(tmp_path), transport], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        address, (first, large) = msgspec.json.decode(
            child.stdout.readline(), type=tuple[RingAddress, tuple[PayloadRef, PayloadRef]]
        )
        policy = RetryPolicy(call_s=1, slot_s=3, batch_s=4, rounds=1)
        fetcher = BatchFetcher(host_id="elsewhere", token="secret", directory=str(tmp_path), policy=policy)
        fetcher.fetch([first], [address]).consumed()
        observer = RingReader.attach(address.ring, directory=str(tmp_path))
        os.kill(child.pid, signal.SIGSTOP)  # whatever it was doing, it does not finish
        with ThreadPoolExecutor(1) as thread:
            fetched = thread.submit(fetcher.fetch, [large], [address])
            child.kill()
            report = fetched.result(timeout=30)
    assert report.views == {}
    assert report.missing[large].kind in ("reset", "refused", "timed_out", "truncated")
    fetcher.close()
    assert not observer.writer_alive()
    lease = observer.take(large)  # what a dead producer wrote can still be read on its host
    assert bytes(lease.view) == bytes(48 << 20)
    assert lease.consumed()
    observer.close()
    (tmp_path / address.ring).unlink()
