"""The client against a controller that is late, gone, elsewhere, or not a controller at all."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.control.io.client import MSGPACK, ControlClient, _Unreachable
from penstock.errors import LocalProtocolError, PeerLost, RemoteProtocolError, RunFailed, Stale, Transient
from penstock.records.ids import MemberId, PipelineName, StepIndex
from penstock.wire.messages import AskBatch, Complete, Ok, Refused, Reply, ReportMetrics

A = PipelineName("a")
W = MemberId("worker")
REPORT = ReportMetrics(A, W, values={})


def answer(reply: Reply, status: int = 200) -> bytes:
    body = msgspec.msgpack.encode(reply)
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/msgpack\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def text(status: int, body: str) -> bytes:
    return f"HTTP/1.1 {status} X\r\ncontent-type: text/plain\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()


class Script:
    """Answers each request with the next of the prepared answers; the last one again and again. None hangs up."""

    def __init__(self, *answers: bytes | None) -> None:
        self._answers = list(answers)
        self.connections = 0
        self.requests = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
                self.requests += 1
                said = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
                if said is None:
                    break
                writer.write(said)
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # the client hung up


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def served(script: Handler, endpoint: Path) -> AsyncIterator[int]:
    handlers: set[asyncio.Task[Any]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        try:
            await script(reader, writer)
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    announce(endpoint, json.dumps({"host": "127.0.0.1", "port": port, "pid": 0}))
    try:
        yield port
    finally:
        server.close()
        for handler in handlers:
            handler.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)


def announce(endpoint: Path, body: str) -> None:
    endpoint.write_text(body)


@asynccontextmanager
async def client_of(
    endpoint: Path, unreachable_timeout_s: float = 20.0, attempt_s: float = 10.0
) -> AsyncIterator[ControlClient]:
    client = ControlClient(
        endpoint, "token", A, W, unreachable_timeout_s=unreachable_timeout_s, attempt_timeout_s=attempt_s
    )
    try:
        yield client
    finally:
        await client.close()


@pytest.fixture
def endpoint(tmp_path: Path) -> Path:
    return tmp_path / "controller.json"


async def test_connections_are_kept(endpoint: Path) -> None:
    script = Script(answer(Ok()))
    async with served(script, endpoint), client_of(endpoint) as client:
        for _ in range(20):
            assert await client.call(REPORT) == Ok()
        assert (script.connections, script.requests) == (1, 20)
        await asyncio.gather(*(client.call(REPORT) for _ in range(5)))
        assert script.connections <= 5


@pytest.mark.parametrize(
    ("kind", "raised"),
    [
        ("Stale", Stale),
        ("Transient", Transient),
        ("PeerLost", PeerLost),
        ("LocalProtocolError", LocalProtocolError),
        ("RunFailed", RunFailed),
    ],
)
async def test_a_refusal_is_raised_as_what_it_names(endpoint: Path, kind: str, raised: type[Exception]) -> None:
    refused = msgspec.convert({"type": "refused", "kind": kind, "message": "because"}, Refused)
    async with served(Script(answer(refused, 410)), endpoint), client_of(endpoint) as client:
        with pytest.raises(raised, match="because"):
            await client.call(REPORT)


async def test_it_waits_for_a_controller_that_is_not_there_yet(endpoint: Path) -> None:
    async with client_of(endpoint) as client, asyncio.TaskGroup() as group:
        calling = group.create_task(client.call(REPORT))
        await asyncio.sleep(0)
        async with served(Script(answer(Ok())), endpoint):
            assert await calling == Ok()
        assert client.reconnects >= 1


async def test_it_follows_the_controller_to_another_port(endpoint: Path) -> None:
    async with client_of(endpoint) as client:
        async with served(Script(answer(Ok()), None), endpoint) as first:
            await client.call(REPORT)
        async with served(Script(answer(Complete(StepIndex(7)))), endpoint) as second:
            assert first != second
            assert await client.call(REPORT) == Complete(StepIndex(7))


async def test_a_connection_lost_before_the_answer_is_tried_again(endpoint: Path) -> None:
    script = Script(None, None, answer(Ok()))
    async with served(script, endpoint), client_of(endpoint) as client:
        assert await client.call(REPORT) == Ok()
        assert script.requests == 3


async def test_a_silent_controller_is_given_up_after_the_attempt_and_then_the_bound(endpoint: Path) -> None:
    async with served(Script(b""), endpoint), client_of(endpoint, unreachable_timeout_s=0.3, attempt_s=0.1) as client:
        with pytest.raises(PeerLost, match=r"could not be reached in .*no answer within 0.1 s"):
            await client.call(REPORT)


async def test_a_controller_that_is_not_there_is_lost_after_the_bound(endpoint: Path) -> None:
    async with client_of(endpoint, unreachable_timeout_s=0.2) as client:
        with pytest.raises(PeerLost, match="no controller has written its address"):
            await client.call(REPORT)
        announce(endpoint, '{"host": "127.0.0.1", "port": 9}')
        with pytest.raises(PeerLost, match="cannot connect"):
            await client.call(REPORT)
        announce(endpoint, "half a fi")
        with pytest.raises(PeerLost, match="cannot be read"):
            await client.call(REPORT)


async def test_time_in_which_this_process_stood_still_is_not_the_controllers_fault(
    endpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that slept for an hour must not find all its processes giving each other up."""
    attempts: list[float] = []

    async def attempt(self: ControlClient, body: bytes, timeout_s: float) -> tuple[int, bytes, bytes]:
        attempts.append(timeout_s)
        if len(attempts) == 1:
            time.sleep(timeout_s + 1.0)  # noqa: ASYNC251 - the whole process stands still
            raise _Unreachable("timed out")
        return 200, MSGPACK, msgspec.msgpack.encode(Ok())

    monkeypatch.setattr(ControlClient, "_attempt", attempt)
    async with client_of(endpoint, unreachable_timeout_s=1.0, attempt_s=0.1) as client:
        assert await client.call(REPORT) == Ok()
    assert len(attempts) == 2


async def test_the_token_of_another_run_means_look_again(endpoint: Path) -> None:
    script = Script(text(401, "no"), text(401, "no"), answer(Ok()))
    async with served(script, endpoint), client_of(endpoint) as client:
        assert await client.call(REPORT) == Ok()
    async with served(Script(text(401, "wrong")), endpoint), client_of(endpoint, unreachable_timeout_s=0.2) as client:
        with pytest.raises(PeerLost, match="token was refused"):
            await client.call(REPORT)


async def test_what_is_our_own_mistake_is_not_repeated(endpoint: Path) -> None:
    script = Script(text(413, "too large"))
    async with served(script, endpoint), client_of(endpoint) as client:
        with pytest.raises(LocalProtocolError, match="413: too large"):
            await client.call(REPORT)
        assert script.requests == 1


async def test_an_answer_that_is_no_answer(endpoint: Path) -> None:
    async with client_of(endpoint) as client:
        async with served(Script(text(200, "hello")), endpoint):
            with pytest.raises(RemoteProtocolError, match="status 200"):
                await client.call(REPORT)
        async with served(Script(answer(Ok()).replace(b"ok", b"ko")), endpoint):
            with pytest.raises(RemoteProtocolError, match="malformed"):
                await client.call(REPORT)
    script = Script(b"\x00\x01\x02 not HTTP at all\r\n\r\n")  # as from a proxy whose controller is gone: tried again
    async with client_of(endpoint, unreachable_timeout_s=0.5) as client, served(script, endpoint):
        with pytest.raises(PeerLost, match="not HTTP"):
            await client.call(REPORT)


async def test_once_shutdown_began_nothing_is_waited_for(endpoint: Path) -> None:
    async with client_of(endpoint, unreachable_timeout_s=3600) as client:
        async with asyncio.TaskGroup() as group:  # one call waits for a controller, backing off
            waiting = group.create_task(_outcome(client.call(REPORT)))
            await asyncio.sleep(0)
            client.begin_shutdown(0.05)
        assert "during shutdown" in waiting.result()
        assert "during shutdown" in await _outcome(client.call(REPORT))


async def test_shutdown_shortens_a_call_that_is_being_held(endpoint: Path) -> None:
    script = Script(b"")
    async with served(script, endpoint), client_of(endpoint, unreachable_timeout_s=3600) as client:
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            held = group.create_task(_outcome(client.call(AskBatch(A, W, StepIndex(0), wait_s=3600))))
            while not script.requests:  # noqa: ASYNC110 - the script is no party to the test's loop
                await asyncio.sleep(0.001)
            client.begin_shutdown(0.05)
        assert "during shutdown" in held.result()


async def test_closing_ends_calls_under_way(endpoint: Path) -> None:
    script = Script(b"")
    async with served(script, endpoint), client_of(endpoint, unreachable_timeout_s=3600) as client:
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            held = group.create_task(_outcome(client.call(AskBatch(A, W, StepIndex(0), wait_s=3600))))
            while not script.requests:  # noqa: ASYNC110 - the script is no party to the test's loop
                await asyncio.sleep(0.001)
            await client.close()
        assert "client was closed" in held.result()


@pytest.mark.parametrize("how", ["hurry", "close"])
async def test_shutdown_shortens_a_call_that_is_connecting(
    endpoint: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """As to a machine that has vanished: nothing refuses the connection."""
    connecting = asyncio.Event()

    async def vanished(*_: Any) -> None:
        connecting.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", vanished)
    announce(endpoint, '{"host": "127.0.0.1", "port": 9}')
    async with client_of(endpoint, unreachable_timeout_s=3600) as client:
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            held = group.create_task(_outcome(client.call(AskBatch(A, W, StepIndex(0), wait_s=3600))))
            await connecting.wait()
            if how == "hurry":
                client.begin_shutdown(0.05)
            else:
                await client.close()
        assert held.result() == "the controller did not answer during shutdown: cannot connect: timed out"


async def test_shutdown_shortens_a_call_whose_connection_comes_later(
    endpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connecting, gate = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    connect = loop.create_connection

    async def late(*where: Any) -> Any:
        connecting.set()
        await gate.wait()
        return await connect(*where)

    monkeypatch.setattr(loop, "create_connection", late)
    async with served(Script(b""), endpoint), client_of(endpoint, unreachable_timeout_s=3600) as client:
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            held = group.create_task(_outcome(client.call(AskBatch(A, W, StepIndex(0), wait_s=3600))))
            await connecting.wait()
            client.begin_shutdown(1.0)
            gate.set()
        assert held.result() == "the controller did not answer during shutdown: no answer within 1.0 s"


async def test_a_cancelled_call_does_not_spoil_the_next(endpoint: Path) -> None:
    """Its answer arrives late: it must not be taken for the answer to the next call."""
    gate = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        if not gate.is_set():
            await gate.wait()
            writer.write(answer(Complete(StepIndex(1))))
        else:
            writer.write(answer(Ok()))
        assert request
        await reader.read()

    async with served(slow, endpoint), client_of(endpoint) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await client.call(REPORT)
        gate.set()
        assert await client.call(REPORT) == Ok()


async def test_the_whole_call_is_bounded_by_its_own_timeout(endpoint: Path) -> None:
    async with client_of(endpoint, unreachable_timeout_s=3600) as client:
        async with asyncio.timeout(60):
            with pytest.raises(PeerLost):
                await client.call(REPORT, timeout_s=0.1)


async def _outcome(call: Awaitable[Reply]) -> str:
    try:
        return repr(await call)
    except PeerLost as error:
        return error.message
