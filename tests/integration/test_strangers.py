"""What a caller without the token can do to a port: a bounded amount, on connections that end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from uvicorn.config import Config

from penstock.runtime import http_guard, listening
from penstock.runtime.http_guard import MAX_HEAD_BYTES, GuardedServer, bearer
from penstock.runtime.listening import MAX_READS, Allowance, Door, Peer, ThreadedPort, bound, watch_link

pytestmark = pytest.mark.timeout(60)

TOKEN = "secret"
LEGIT = b"POST /v1/call HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\nContent-Length: 5\r\n\r\nhello"


# -- HTTP -----------------------------------------------------------------------------------------------------------


class Served:
    """A guarded server whose application repeats the body, and what strangers made it do."""

    def __init__(self, **settings: Any) -> None:
        self.calls: list[tuple[bytes, bytes]] = []
        """Path and body of each request."""
        self.answer = asyncio.Event()
        self.answer.set()
        config = Config(
            self._app,  # type: ignore[arg-type]
            loop="none",
            lifespan="off",
            ws="none",
            interface="asgi3",
            log_config=None,
        )
        self.listener = bound("127.0.0.1", 0)
        self.server = GuardedServer(config, bearer(TOKEN), **settings)

    @property
    def port(self) -> int:
        return self.listener.getsockname()[1]

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", scope["method"] == "POST"
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.calls.append((scope["raw_path"], body))
        if scope["raw_path"] == b"/hangs":
            while (await receive())["type"] != "http.disconnect":
                pass
        await self.answer.wait()
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def served(**settings: Any) -> AsyncIterator[Served]:
    port = Served(**settings)
    async with asyncio.TaskGroup() as group:
        group.create_task(port.server.serve(sockets=[port.listener]))
        while not port.server.started:  # noqa: ASYNC110
            await asyncio.sleep(0)
        try:
            yield port
        finally:
            port.server.should_exit = True
    assert not port.server.door.strangers


class Client:
    """A client of the run, on one connection."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> Client:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        await self._writer.wait_closed()

    async def ask(self) -> None:
        self._writer.write(LEGIT)
        async with asyncio.timeout(30):
            assert b" 200 " in await self._reader.readline()
            await self._reader.readuntil(b"\r\n\r\n")
            assert await self._reader.readexactly(5) == b"hello"


class Grammar:
    """Draws what a stranger sends, in pieces: nearly HTTP, with everything HTTP has."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def script(self) -> list[bytes]:
        draw = self._draw
        sent = b"".join(self._request() for _ in range(draw.choice([1, 1, 2, 3, 40])))[:300_000]
        if draw.random() < 0.3:
            changed = bytearray(sent)
            for _ in range(draw.randrange(1, 20)):
                changed[draw.randrange(min(len(sent), 2000))] = draw.randrange(256)
            sent = bytes(changed)
        if draw.random() < 0.2:
            sent = sent[: draw.randrange(1, len(sent))]
        cut = draw.choice([len(sent), len(sent), 20_000, 700, 11 if len(sent) < 2000 else 1000])
        return [sent[at : at + cut] for at in range(0, len(sent), cut)]

    def _request(self) -> bytes:
        draw = self._draw
        method = draw.choice([*3 * ["GET", "POST"], "HEAD", "PUT", "CONNECT", "PRI", "NONSENSE"])
        path = draw.choice(
            [*5 * ["/healthz"], "/", "/healthz?x=%00", "/v1/call", "*", "http://h/", "/" + "a" * 3000, "/\x7f"]
        )
        line = f"{method} {path} HTTP/{draw.choice([*5 * ['1.1'], '1.0', '2.0', '9'])}"
        chosen = draw.sample(self._headers(), k=draw.randrange(0, 5))
        body, framing = self._body()
        end = draw.choice([*6 * ["\r\n"], "\n"])
        return end.join([line, *chosen, *framing, "", ""]).encode("latin-1") + body

    def _headers(self) -> list[str]:
        return [
            "Host: x",
            "Authorization: Bearer wrong",
            "Authorization:",
            "Connection: keep-alive",
            "Connection: upgrade",
            "Upgrade: websocket",
            "Expect: 100-continue",
            "X: " + "y" * self._draw.choice([10, 5000, 20_000]),
            " folded: line",
            *("A: b" for _ in range(3)),
        ]

    def _body(self) -> tuple[bytes, list[str]]:
        draw = self._draw
        kind = draw.choice(["none", "length", "lie", "chunked", "chunked", "both"])
        data = b"z" * draw.choice([0, 3, 70_000])
        if kind == "none":
            return b"", []
        if kind in ("length", "lie"):
            return data, [f"Content-Length: {len(data) if kind == 'length' else 10**12}"]
        extension = b";" + b"e=v;" * draw.choice([1, 5000])
        trailers = b"".join(b"T%d: v\r\n" % number for number in range(draw.choice([0, 2, 5000])))
        chunk = b"3" + extension + b"\r\nabc\r\n"
        framing = ["Transfer-Encoding: chunked", *(["Content-Length: 3"] if kind == "both" else [])]
        return chunk * draw.choice([1, 20]) + b"0\r\n" + trailers + draw.choice([b"\r\n", b""]), framing


async def say(port: int, pieces: list[bytes]) -> bytes:
    """All that the port answers until it closes the connection."""
    heard = b""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(OSError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
    with contextlib.suppress(OSError):
        while piece := await reader.read(65536):
            heard += piece
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return heard


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of strangers that reached the parser, by call."""
    parsed: list[int] = []
    feed = http_guard.HttpToolsProtocol.data_received

    def counted(protocol: Any, data: bytes) -> None:
        if isinstance(protocol, http_guard.Answered):
            parsed.append(len(data))
        feed(protocol, data)

    monkeypatch.setattr(http_guard.HttpToolsProtocol, "data_received", counted)
    return parsed


async def test_whatever_a_stranger_says_is_bounded_and_ends(
    parsed: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    seeds, asked = range(90), 0
    scripts = [Grammar(seed).script() for seed in seeds]
    async with served(hello_s=0.5) as port, Client(port.port) as client:
        await client.ask()
        async with asyncio.timeout(50), asyncio.TaskGroup() as group:
            attacks = [group.create_task(say(port.port, script)) for script in scripts]
            while not all(attack.done() for attack in attacks):
                await client.ask()
                asked += 1
        answers = [attack.result() for attack in attacks]
        strange = [call for call in port.calls if call != (b"/v1/call", b"hello")]
        for seed, answer in zip(seeds, answers, strict=True):
            assert answer.count(b"HTTP/1.1 ") <= 1, f"seed {seed}: {answer[:300]!r}"
        assert {body for _, body in strange} == {b""}, "no body of a stranger reaches the application"
        assert len(strange) == len(parsed) <= len(seeds)
        assert max(parsed) <= MAX_HEAD_BYTES + 100
        assert len(strange) >= 15, "the grammar draws requests that are answered"
        assert asked > 0
        assert port.server.door.accepted == len(seeds) + 1
        assert len(port.server.server_state.connections) == 1
        assert not caplog.records, "a stranger fills no log"


async def test_a_stranger_whose_head_or_reply_does_not_come_is_closed_at_the_deadline() -> None:
    async with served(hello_s=0.3) as port:
        for said in (b"GET /hangs HTTP/1.1\r\n", b"GET /hangs HTTP/1.1\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
            writer.write(said)
            async with asyncio.timeout(20):
                with contextlib.suppress(ConnectionResetError):
                    assert not await reader.read()
            writer.close()
        assert port.calls == [(b"/hangs", b"")]


async def test_a_request_in_many_pieces_with_the_token_is_admitted_and_the_connection_kept() -> None:
    async with served() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
        for at in range(0, len(LEGIT), 9):
            writer.write(LEGIT[at : at + 9])
            await writer.drain()
            await asyncio.sleep(0.001)
        writer.write(LEGIT[:-2] + b"lo" + LEGIT)
        for _ in range(3):
            await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(5) == b"hello"
        writer.close()
        await writer.wait_closed()


async def test_strangers_are_limited_in_number_and_the_oldest_leave_first() -> None:
    async with served(max_strangers=8, hello_s=60.0) as port, Client(port.port) as client:
        await client.ask()
        idle = [await asyncio.open_connection("127.0.0.1", port.port) for _ in range(30)]
        async with asyncio.timeout(20):
            assert [await reader.read() for reader, _ in idle[:22]] == [b""] * 22
        assert len(port.server.door.strangers) == 8
        assert port.server.door.turned_away == 22
        await client.ask()
        async with Client(port.port) as another:
            await another.ask()
        for _, writer in idle:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def test_what_comes_before_the_answer_is_ready_is_dropped_unread(parsed: list[int]) -> None:
    async with served() as port, Client(port.port) as client:
        port.answer.clear()
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
        writer.write(b"GET /slow HTTP/1.1\r\n\r\n" + b"GET /more HTTP/1.1\r\n\r\n" * 500_000)
        await writer.drain()  # most of it was read, for no buffer holds it
        port.answer.set()
        with contextlib.suppress(OSError):
            await reader.read()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        await client.ask()
        assert port.calls == [(b"/slow", b""), (b"/v1/call", b"hello")]
        assert sum(parsed) < 100


async def test_strangers_get_a_bounded_number_of_answers_and_clients_all_of_theirs() -> None:
    async with served() as port, Client(port.port) as client:
        port.server._answers = Allowance(per_s=1e-6, burst=3)
        answers = [await say(port.port, [b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"]) for _ in range(6)]
        assert [b" 200 " in answer for answer in answers] == [True] * 3 + [False] * 3
        for _ in range(5):
            await client.ask()


# -- ports with threads ---------------------------------------------------------------------------------------------


@pytest.fixture
def echo() -> Iterator[Callable[..., ThreadedPort]]:
    ports: list[ThreadedPort] = []

    def serve(peer: Peer) -> None:
        data = bytearray(1)
        while peer.receive(memoryview(data), 30.0):
            peer.connection.sendall(data)

    def open_port(**settings: Any) -> ThreadedPort:
        settings = {"hello_bytes": 6, "has_token": lambda hello: hello == b"secret"} | settings
        ports.append(ThreadedPort(serve, "echo", **settings))
        return ports[-1]

    yield open_port
    for port in ports:
        port.close(10.0)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("echo")]


def connect(port: ThreadedPort, hello: bytes = b"") -> socket.socket:
    connection = socket.create_connection((port.host, port.port), 20.0)
    connection.sendall(hello)
    return connection


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def repeats(connection: socket.socket) -> bool:
    connection.sendall(b"x")
    return connection.recv(1) == b"x"


def test_strangers_have_no_thread_and_close_no_client(echo: Callable[..., ThreadedPort]) -> None:
    port = echo(max_strangers=4)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect(port, b"secret")) for _ in range(80)]
        assert all(map(repeats, clients))
        before = threading.active_count()
        idle = [stack.enter_context(connect(port)) for _ in range(10)]
        assert all(map(is_closed, idle[:6]))
        assert len(port.door.strangers) == 4
        assert threading.active_count() == before
        assert all(map(repeats, clients))


def test_a_wrong_hello_is_told_and_a_late_one_is_not_awaited(echo: Callable[..., ThreadedPort]) -> None:
    port = echo(refusal=b"no", hello_s=0.2)
    with connect(port, b"guess!and more") as wrong, connect(port, b"sec") as late:
        assert wrong.recv(10) == b"no"
        assert is_closed(wrong)
        assert is_closed(late)
    assert (port.refused, port.door.turned_away) == (1, 1)


def test_a_stranger_that_dribbles_is_cut_off_by_the_number_of_its_pieces(echo: Callable[..., ThreadedPort]) -> None:
    port = echo(hello_bytes=1000, hello_s=60.0)
    with connect(port) as slow, contextlib.suppress(OSError):
        for _ in range(2000):
            slow.sendall(b"a")
            if port.door.turned_away:
                break
            time.sleep(0.001)
    assert port.door.turned_away == 1


def test_work_for_strangers_is_paced(echo: Callable[..., ThreadedPort], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "STRANGERS_PER_S", 100.0)
    monkeypatch.setattr(listening, "STRANGERS_BURST", 10.0)
    port = echo()
    paused: list[float] = []
    wait = port.door._closing.wait

    def counted(pause_s: float) -> bool:
        paused.append(pause_s)
        return wait(0.0)

    monkeypatch.setattr(port.door._closing, "wait", counted)
    for _ in range(60):
        connect(port).close()
    with connect(port, b"secret") as client:
        assert repeats(client)
    assert sum(paused) > 0.1


def test_clients_of_the_run_are_not_paced(echo: Callable[..., ThreadedPort], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "STRANGERS_PER_S", 1e-3)
    monkeypatch.setattr(listening, "STRANGERS_BURST", 10.0)
    port = echo()
    for _ in range(30):
        with connect(port, b"secret") as client:
            assert repeats(client)


class FailsAtFirst(socket.socket):
    failures: list[OSError]

    def accept(self) -> Any:
        if self.failures:
            raise self.failures.pop()
        return super().accept()


def door_of(failures: list[OSError]) -> tuple[Door, FailsAtFirst, list[bytes]]:
    listener = FailsAtFirst(socket.AF_INET, socket.SOCK_STREAM)
    listener.failures = failures
    listener.bind(("127.0.0.1", 0))
    admitted: list[bytes] = []

    def admit(connection: socket.socket, hello: bytes) -> None:
        admitted.append(hello)
        connection.close()

    door = Door(listener, "failing", lambda data: True, admit, admit, limit_bytes=10, hello_s=10.0)
    return door, listener, admitted


def test_a_failed_accept_is_repeated(caplog: pytest.LogCaptureFixture) -> None:
    door, listener, admitted = door_of([OSError(errno.EMFILE, "too many open files")])
    door.start()
    with socket.create_connection(listener.getsockname(), 20.0) as connection:
        connection.sendall(b"hello")
        assert is_closed(connection)
    assert admitted == [b"hello"]
    assert "too many open files" in caplog.text
    door.close(10.0)
    assert door.failure is None


def test_a_listener_that_is_gone_ends_the_door_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    door, listener, _ = door_of([OSError(errno.EBADF, "bad file descriptor")])
    address = listener.getsockname()
    door.start()
    with contextlib.suppress(OSError), socket.create_connection(address, 20.0) as connection:
        is_closed(connection)
    door._thread.join(20.0)
    assert "bad file descriptor" in str(door.failure)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    door.close(10.0)


def test_a_port_that_is_full_of_strangers_reads_the_ones_it_keeps(echo: Callable[..., ThreadedPort]) -> None:
    port = echo(max_strangers=2)
    with contextlib.ExitStack() as stack:
        kept = [stack.enter_context(connect(port, b"sec")) for _ in range(2)]
        kept[1].sendall(b"ret")
        assert repeats(kept[1])
        assert MAX_READS > 2


def test_links_are_watched_by_the_kernel() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as connection:
        watch_link(connection)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1e3 * listening.LINK_TIMEOUT_S
    ours, theirs = socket.socketpair()
    with ours, theirs:
        watch_link(ours)
