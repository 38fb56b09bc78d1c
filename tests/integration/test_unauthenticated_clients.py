"""Every port of a run under attack: a client without the token keeps no client of the run out, and slows none down.

All ports are attacked the same way, and the same is asked of each. A new port joins with a row of `PORTS`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import control_io_controller
import httpx
import msgspec
import psutil
import pytest
import torch
from running import Running, letters, outside_address, start, trained_steps, wait_for
from test_dashboard_http import Watched

from penstock.control.io.heartbeat import HeartbeatConnection
from penstock.engines.models import LanguagePolicy, TinyLanguageModel, build
from penstock.engines.requests import Sampling
from penstock.engines.torch.engine import TorchEngine
from penstock.journal.reader import history
from penstock.payload.io.received import Buffers, Cancellation, Received
from penstock.payload.io.shm import Ring
from penstock.payload.io.tcp import TcpServer
from penstock.payload.io.tcp_client import TcpWire
from penstock.payload.io.wire_client import WireClient
from penstock.records.ids import MemberId, Version
from penstock.rollout.io.endpoint import Endpoint
from penstock.runtime.rundir import RunDir
from penstock.weights.io.collective import BroadcastSender
from penstock.weights.io.files import Publisher
from penstock.weights.io.pull import ArtifactServer, PullTransport
from penstock.weights.io.store import StoreClient
from penstock.wire.messages import Heartbeat

pytestmark = pytest.mark.timeout(180)

CONNECTIONS = 600
SERVED_WITHIN_S = 5.0
"""What any one exchange may take under attack; without, it takes milliseconds. The machine may be busy."""

Address = tuple[str, int]
Ask = Callable[[], None]


# -- the ports ------------------------------------------------------------------------------------------------------


@contextmanager
def control(folder: Path) -> Iterator[tuple[Address, Ask]]:
    process = subprocess.Popen([sys.executable, control_io_controller.__file__, str(folder)])
    endpoint = folder / "controller.json"
    try:
        wait_for(endpoint.exists, 60, "the controller")
        address = ("127.0.0.1", int(json.loads(endpoint.read_text())["port"]))

        def ask() -> None:
            headers = {"authorization": f"Bearer {control_io_controller.TOKEN}"}
            page = f"http://127.0.0.1:{address[1]}/v1/status"
            httpx.get(page, headers=headers, timeout=SERVED_WITHIN_S, trust_env=False).raise_for_status()

        yield address, ask
    finally:
        process.kill()
        process.wait()


@contextmanager
def dashboard(folder: Path) -> Iterator[tuple[Address, Ask]]:
    run = RunDir.create(folder / "runs", "r", '[[pipeline]]\nname = "p"\nsteps = 3\n', "0.1.0")
    watched = Watched(run.root.parent)
    try:
        port = httpx.URL(watched.origin).port
        assert port is not None

        def ask() -> None:
            page = f"{watched.origin}{watched.token}/"
            httpx.get(page, timeout=SERVED_WITHIN_S, trust_env=False).raise_for_status()

        yield ("127.0.0.1", port), ask
    finally:
        watched.close()


@contextmanager
def weights(folder: Path) -> Iterator[tuple[Address, Ask]]:
    server = ArtifactServer(folder, b"secret")
    try:
        publisher = Publisher(folder, "l1", host_id="there", addresses=(server.address,))
        manifest = publisher.publish(Version(1), {"weight": torch.ones(100)})
        server.offer(manifest)
        host, _, port = server.address.rpartition(":")
        yield (host, int(port)), lambda: _no(PullTransport(b"secret").fetch(manifest, SERVED_WITHIN_S))
    finally:
        server.close(5.0)


@contextmanager
def served_ring(folder: Path, server_of: Any, wire: Any, ports: str) -> Iterator[tuple[Address, Ask]]:
    """A ring whose one payload is read through a port; `ports` is the field of its address that names the port."""
    ring = Ring.create("run-1", capacity_bytes=1 << 20, slots=8, directory=str(folder))
    server = server_of(ring.name, "secret", directory=str(folder), ports=(0,))
    payload = ring.write([b"fine"], timeout_s=5)

    def ask() -> None:
        client = WireClient(wire(), "secret", Buffers())
        try:
            address = ring.address(host_id="elsewhere", **{ports: server.ports})
            answer = client.read(address, payload, time.monotonic() + SERVED_WITHIN_S, set(), Cancellation())
        finally:
            client.close()
        assert isinstance(answer, Received), answer

    try:
        yield ("127.0.0.1", server.ports[0]), ask
        server.check()
    finally:
        server.close()
        ring.close()


def payloads(folder: Path) -> AbstractContextManager[tuple[Address, Ask]]:
    return served_ring(folder, TcpServer, TcpWire, "tcp_ports")


@contextmanager
def broadcast(folder: Path) -> Iterator[tuple[Address, Ask]]:
    sender = BroadcastSender(folder, b"secret")

    def ask() -> None:
        other = StoreClient("127.0.0.1", sender.store.port, b"secret", SERVED_WITHIN_S)
        assert other.add("asked", 1) > 0
        other.close()

    try:
        yield ("127.0.0.1", sender.store.port), ask
    finally:
        sender.store.close(5.0)


def payloads_by_ucx(folder: Path) -> AbstractContextManager[tuple[Address, Ask]]:
    pytest.importorskip("ucxx")
    from penstock.payload.io.ucxx import UcxxServer
    from penstock.payload.io.ucxx_client import UcxxWire

    return served_ring(folder, UcxxServer, UcxxWire, "ucxx_ports")


@contextmanager
def weights_by_ucx(folder: Path) -> Iterator[tuple[Address, Ask]]:
    pytest.importorskip("ucxx")
    from penstock.runtime import ucx
    from penstock.weights.io.pull_ucxx import UcxxArtifactServer, UcxxConnection

    server = UcxxArtifactServer(folder, b"secret", ucx)
    try:
        publisher = Publisher(folder, "l1", host_id="there", ucxx_addresses=(server.address,))
        manifest = publisher.publish(Version(1), {"weight": torch.ones(100)})
        server.offer(manifest)
        host, _, port = server.address.rpartition(":")

        def ask() -> None:
            transport = PullTransport(b"secret", ucxx=UcxxConnection(b"secret", ucx))
            _no(transport.fetch(manifest, SERVED_WITHIN_S))

        yield (host, int(port)), ask
    finally:
        server.close(5.0)


@contextmanager
def agents(folder: Path) -> Iterator[tuple[Address, Ask]]:
    torch.set_num_threads(1)
    policy = build(TinyLanguageModel(alphabet="ab>", hidden_size=16, layers=1, heads=2, max_positions=32))
    assert isinstance(policy, LanguagePolicy)
    engine = TorchEngine(policy.module, pad_id=0)
    endpoint = Endpoint(engine, policy.tokenizer, Sampling(max_new_tokens=2), None)
    serving = threading.Thread(target=asyncio.run, args=(endpoint.run(),))
    serving.start()
    key, _ = endpoint.open()

    def ask() -> None:
        headers, body = {"authorization": f"Bearer {key}"}, {"model": "policy", "prompt": "a>"}
        page = f"{endpoint.base_url}/completions"
        httpx.post(page, json=body, headers=headers, timeout=SERVED_WITHIN_S, trust_env=False).raise_for_status()

    try:
        port = httpx.URL(endpoint.base_url).port
        assert port is not None
        yield ("127.0.0.1", port), ask
    finally:
        endpoint.close()
        serving.join(30)


PORTS: dict[str, Callable[[Path], AbstractContextManager[tuple[Address, Ask]]]] = {
    "control": control,
    "dashboard": dashboard,
    "weights": weights,
    "payloads": payloads,
    "broadcast": broadcast,
    "payloads by UCX": payloads_by_ucx,
    "weights by UCX": weights_by_ucx,
    "agents": agents,
}
"""Each gives an address, and one exchange of a client of the run on a connection of its own."""

# -- the attacks ----------------------------------------------------------------------------------------------------


def connect(address: Address) -> socket.socket:
    return socket.create_connection(address, 10)


def idle_flood(address: Address, stack: ExitStack) -> None:
    """Connections that say nothing, and stay."""
    for _ in range(CONNECTIONS):
        with contextlib.suppress(OSError):  # refusing some is a fine defence
            stack.enter_context(connect(address))


def repeated(address: Address, stack: ExitStack, begin: bytes, more: bytes) -> None:
    """Sends `begin`, then `more` without end and without reading; a connection that is closed is opened again."""
    over = threading.Event()

    def send() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError), connect(address) as connection:
                connection.settimeout(0.5)
                connection.sendall(begin)
                while more and not over.is_set():
                    connection.sendall(more)
            over.wait(0.02 if more else 0.001)

    threads = [threading.Thread(target=send) for _ in range(3)]
    stack.callback(lambda: [thread.join(10) for thread in threads])
    stack.callback(over.set)
    for thread in threads:
        thread.start()


CHUNKED = b"POST /healthz HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


def endless_line(address: Address, stack: ExitStack) -> None:
    """Heads that do not end."""
    repeated(address, stack, b"GET /healthz HTTP/1.1\r\nX-Endless: ", b"a" * 65536)


def endless_trailers(address: Address, stack: ExitStack) -> None:
    repeated(address, stack, CHUNKED + b"0\r\n", b"T: v\r\n" * 10_000)


def endless_extension(address: Address, stack: ExitStack) -> None:
    repeated(address, stack, CHUNKED + b"3;", b"e=v;" * 16_000)


def unread_replies(address: Address, stack: ExitStack) -> None:
    """Requests, one after the other, whose replies are never read."""
    repeated(address, stack, b"", b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 1000)


def churn(address: Address, stack: ExitStack) -> None:
    """Connections that are closed at once."""
    repeated(address, stack, b"", b"")


def garbage(address: Address, stack: ExitStack) -> None:
    """Bytes that mean nothing, on connections that stay."""
    source = random.Random(0)
    for _ in range(50):
        with contextlib.suppress(OSError):
            connection = stack.enter_context(connect(address))
            connection.sendall(source.randbytes(source.randrange(1, 4000)))


def half_open(address: Address, stack: ExitStack) -> None:
    """The beginning of something sensible, and nothing after it; half of them have closed their side."""
    for number in range(200):
        with contextlib.suppress(OSError):
            connection = stack.enter_context(connect(address))
            connection.sendall(b"POST /v1/call HTTP/1.1\r\nContent-Length: 1000000\r\n"[: 5 + number % 40])
            if number % 2:
                connection.shutdown(socket.SHUT_WR)


ATTACKS: tuple[Callable[[Address, ExitStack], None], ...] = (
    idle_flood,
    endless_line,
    endless_trailers,
    endless_extension,
    unread_replies,
    churn,
    garbage,
    half_open,
)


def _no(answer: object) -> None:
    assert answer is not None


def timed_ms(ask: Ask, times: int) -> list[float]:
    taken: list[float] = []
    for _ in range(times):
        began = time.perf_counter()
        ask()
        taken.append(1e3 * (time.perf_counter() - began))
    return taken


@pytest.fixture(autouse=True)
def many_files() -> Iterator[None]:
    """This process holds the attackers' ends too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


HTTP_PORTS = ("control", "dashboard", "agents")
HTTP_ATTACKS = (endless_trailers, endless_extension, unread_replies)
AT_ONCE = (idle_flood, endless_line, garbage, half_open)
"""On every port at once: with more, the attackers would leave the run no processor. `penstock bench strangers` paces
them, and tries each on each port."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("port", "attack"),
    [(port, attack) for port in PORTS for attack in ATTACKS if port in HTTP_PORTS or attack not in HTTP_ATTACKS],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_unauthenticated_clients_keep_no_other_out(
    tmp_path: Path, port: str, attack: Callable[[Address, ExitStack], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with PORTS[port](tmp_path) as (address, ask):
        before = timed_ms(ask, 10)
        with ExitStack() as stack:
            attack(address, stack)
            during = timed_ms(ask, 20)
        after = timed_ms(ask, 3)
    shown = [f"{figure:.1f}" for figure in (*map(statistics.median, (before, during, after)), max(during))]
    with capsys.disabled():
        line = "\n{} {}: ms of one exchange: {} before, {} under attack, {} after; at worst {}"
        sys.stderr.write(line.format(port, attack.__name__, *shown))
    assert max(during) < 1e3 * SERVED_WITHIN_S


GROUP = "group"
"""Of torch: processes that compute or broadcast together listen for each other. It is in no row of `PORTS`, since its
clients are its members; a run is attacked there with all the rest."""


def listening(run: Running) -> dict[Address, str]:
    """Where the processes of a run listen, and what each port is, by the run's own records; else `unknown`."""
    directory = run.directory
    endpoint = RunDir.open(directory).read_endpoint()
    assert endpoint is not None
    named = {endpoint.port: "control"}
    for entry in history(directory / "journal.sqlite"):
        event = msgspec.msgpack.decode(entry.body)
        for ring in [event.get("ring"), *event.get("more_rings", ())] if event["type"] == "register" else ():
            named |= dict.fromkeys(ring.get("tcp_ports", ()) if ring else (), "payloads")
    for path in directory.glob("weights/**/manifest.json"):
        manifest = json.loads(path.read_text())
        for kind, addresses in (("weights", manifest["addresses"]), ("broadcast", [manifest["meeting"]])):
            named |= {int(address.rpartition(":")[2]): kind for address in addresses if address}
    found: dict[Address, str] = {}
    top = psutil.Process(run.process.pid)
    for process in (top, *top.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            lines = [line for line in process.net_connections(kind="tcp") if line.status == psutil.CONN_LISTEN]
            unnamed = [line for line in lines if line.laddr.port not in named]
            may_be_group = len(unnamed) == 1 and ({"rollout_worker", "rollout_rank", "trainer"} & {*process.cmdline()})
            for line in lines:
                kind = named.get(line.laddr.port, GROUP if may_be_group else f"unknown, of {process.cmdline()}")
                found[line.laddr.ip, line.laddr.port] = kind
    return found


RUNS = {
    "broadcast": ("", '[pipeline.weights]\ntransport = "broadcast"\n', {"control", "payloads", "weights", "broadcast"}),
    "ranks": ("ranks = 2", '[pipeline.weights]\ntransport = "pull"\n', {"control", "payloads", "weights", GROUP}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_keeps_its_pace_under_attack(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every attack at once on every port of a run that trains. A port that is new must be given a row of `PORTS`."""
    rollout, extra, expected = RUNS[name]
    extra += '[payload]\ntransport = "tcp"\n'
    run = start(folder, letters(folder, steps=100_000, rollout=rollout, extra=extra))
    run.wait_for_step(5)
    ports = listening(run)
    assert {kind for kind in ports.values() if kind != GROUP} <= PORTS.keys(), ports
    assert expected <= {*ports.values()}, ports
    assert {host for host, _ in ports} == {"127.0.0.1"}, ports
    rates: list[float] = []
    with ExitStack() as stack:
        for attacked in (False, True):
            if attacked:
                for port in ports:
                    for attack in AT_ONCE:
                        attack(port, stack)
            before, began = trained_steps(run.directory), time.monotonic()
            time.sleep(8.0)
            rates.append((trained_steps(run.directory) - before) / (time.monotonic() - began))
    with capsys.disabled():
        line = f"steps/s, {len(ports)} ports: {rates[0]:.1f} before, {rates[1]:.1f} under attack"
        sys.stderr.write(f"\n{name}: {line}; ports: {sorted(ports.values())}\n")
    ended_early = run.process.poll()
    run.interrupt()
    assert run.end()[0] == 130
    assert ended_early is None
    assert rates[1] > 0.25 * rates[0], "the attackers take processor time, too"


@pytest.mark.slow
def test_a_heartbeat_keeps_its_connection_when_the_controller_has_no_descriptor_left(tmp_path: Path) -> None:
    """Unauthenticated clients hold every descriptor there is; the connection that is open already is served on."""
    own = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, own[1]))
    try:
        port = control(tmp_path)
        address, _ = port.__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, own)
    beat = msgspec.msgpack.encode(Heartbeat(control_io_controller.PIPELINE, MemberId("w"), 0.0, "generating"))
    try:
        line = HeartbeatConnection(control_io_controller.TOKEN)
        assert line.post(address, beat) == 200
        with ExitStack() as stack:
            idle_flood(address, stack)
            for _ in range(20):
                assert line.post(address, beat) == 200
        line.close()
    finally:
        port.__exit__(None, None, None)


def test_the_broadcast_store_listens_where_it_is_told(tmp_path: Path) -> None:
    sender = BroadcastSender(tmp_path, b"secret")
    outside = outside_address()
    with pytest.raises(OSError):
        connect((outside, sender.store.port)).close()
