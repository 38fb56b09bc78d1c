"""Calls over a socket file: connections are used again, and a call that ends badly takes its connection with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.engines.vllm.unix_socket import SocketCalls
from penstock.errors import RemoteProtocolError


class Echo:
    """Answers with the body it got, unless the path says otherwise."""

    def __init__(self) -> None:
        self.connections = 0
        self.lost = asyncio.Event()
        self.asked = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                body = await reader.readexactly(length)
                self.asked.set()
                path = head.split()[1]
                if path == b"/gone":
                    return
                if path == b"/never":
                    await reader.read()
                    return
                said = b"" if path == b"/nolength" else f"Content-Length: {len(body)}\r\n".encode()
                status = b"400 Bad Request" if path == b"/bad" else b"200 OK"
                writer.write(b"HTTP/1.1 " + status + b"\r\n" + said + b"\r\n" + body)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.lost.set()
        finally:
            self.lost.set()
            writer.close()


@asynccontextmanager
async def echo(folder: Path) -> AsyncIterator[tuple[Echo, SocketCalls]]:
    served = Echo()
    server = await asyncio.start_unix_server(served.serve, folder / "socket")
    calls = SocketCalls(str(folder / "socket"))
    try:
        yield served, calls
    finally:
        await calls.close()
        server.close()
        async with asyncio.timeout(10):
            await server.wait_closed()


async def test_connections_are_used_again(tmp_path: Path) -> None:
    async with echo(tmp_path) as (served, calls):
        for number in range(10):
            body = b"%d" % number * 100_000
            assert await calls.post("/x", body, 10.0) == (200, body)
        assert served.connections == 1
        many = await asyncio.gather(*(calls.post("/bad", b"%d" % number, 10.0) for number in range(50)))
        assert many == [(400, b"%d" % number) for number in range(50)]
        assert 1 < served.connections <= 50


async def test_a_call_that_is_cancelled_or_late_closes_its_connection(tmp_path: Path) -> None:
    async with echo(tmp_path) as (served, calls):
        with pytest.raises(TimeoutError):
            await calls.post("/never", b"x", 0.05)
        async with asyncio.timeout(10):
            await served.lost.wait()
        served.lost.clear()
        served.asked.clear()
        async with asyncio.timeout(10), asyncio.TaskGroup() as group:
            call = group.create_task(calls.post("/never", b"x", 60.0))
            await served.asked.wait()
            call.cancel()
        async with asyncio.timeout(10):
            await served.lost.wait()
        assert await calls.post("/x", b"again", 10.0) == (200, b"again")


async def test_an_answer_that_does_not_come_or_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    async with echo(tmp_path) as (_, calls):
        with pytest.raises(EOFError):
            await calls.post("/gone", b"x", 10.0)
        with pytest.raises(RemoteProtocolError, match="length"):
            await calls.post("/nolength", b"x", 10.0)
    with pytest.raises(OSError, match="No such file"):
        await SocketCalls(str(tmp_path / "absent")).post("/x", b"", 10.0)
