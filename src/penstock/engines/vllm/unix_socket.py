"""HTTP calls to a server on a Unix socket, hundreds at once, with a pool of connections.

By hand, because httpx scans all its connections whenever a call ends.
"""

from __future__ import annotations

import asyncio
import re

from penstock.errors import RemoteProtocolError

CONNECT_S = 30.0
LONGEST_ANSWER_BYTES = 1 << 28

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_CLOSE = re.compile(rb"\r\nconnection: *close\r\n", re.IGNORECASE)

Line = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class SocketCalls:
    """POSTs of JSON. A call that fails, times out or is cancelled closes its connection, so the server aborts it."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._idle: list[Line] = []

    def __repr__(self) -> str:
        return f"SocketCalls({self._address}, {len(self._idle)} idle)"

    async def post(self, path: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        """Status and body of the answer. TimeoutError, OSError or EOFError when none came."""
        head = f"POST {path} HTTP/1.1\r\nhost: vllm\r\ncontent-type: application/json\r\n"
        async with asyncio.timeout(timeout_s):
            reader, writer = await self._line()
            try:
                writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
                answered = await reader.readuntil(b"\r\n\r\n")
                content = await reader.readexactly(_length(answered))
            except BaseException:
                writer.transport.abort()
                raise
        if _CLOSE.search(answered):
            writer.close()
        else:
            self._idle.append((reader, writer))
        return int(answered[9:12]), content

    async def _line(self) -> Line:
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof() and not writer.is_closing():
                return reader, writer
            writer.close()
        async with asyncio.timeout(CONNECT_S):
            return await asyncio.open_unix_connection(self._address)

    async def close(self) -> None:
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()


def _length(head: bytes) -> int:
    found = _LENGTH.search(head)
    if found is None or int(found[1]) > LONGEST_ANSWER_BYTES:
        raise RemoteProtocolError(f"the vLLM server's answer has no length, or is too long: {head[:200]!r}")
    return int(found[1])
