"""Calls to a server that closes a connection after it has answered with an error, as uvicorn does."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from penstock.engines.vllm.weights import VllmEngine
from penstock.errors import RemoteProtocolError

ANSWERS = [
    b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 5\r\n\r\ntorn!",
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
]


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory() as name:  # short enough to be a socket's address
        yield Path(name)


def test_a_call_after_an_error_is_not_lost_with_the_connection_of_the_error(folder: Path) -> None:
    address = str(folder / "socket")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen()
    listening.settimeout(5.0)

    def serve() -> None:
        for answer in ANSWERS:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)
                connection.recv(1, socket.MSG_PEEK)  # whatever comes next is not read: it is reset, or has ended

    serving = threading.Thread(target=serve)
    serving.start()
    engine = VllmEngine(address, folder, folder / "versions")
    try:
        with pytest.raises(RemoteProtocolError, match="500: torn!"):
            engine.sleep(5.0)
        engine.sleep(5.0)
    finally:
        engine.close()
        serving.join(5.0)
        listening.close()
    assert not serving.is_alive()
