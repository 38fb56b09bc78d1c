"""The part of UCX that the transport needs: a worker that blocks, transfers that keep their memory, a bounded close.

Uses UCXX's core interface and blocks in the kernel on the worker's event descriptor: the asyncio interface spins while
it waits, and an idle server must use no CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")  # UCX warns about variables that it sets itself

import ucxx  # pyright: ignore[reportMissingImports]
from ucxx._lib.arr import Array  # pyright: ignore[reportMissingImports]

from penstock.errors import RunFailed

core = ucxx.libucxx
UCXError = ucxx.exceptions.UCXError
TAG = struct.Struct("<Q")
"""First message of a connection: the tag under which the client receives bodies."""
PIECE_BYTES = 1 << 22
"""A body is sent in messages of this size and a remainder, so that one is hashed while the next is in transit."""
SETTINGS = {"TCP_CM_REUSEADDR": "y"}
"""Allows a server to listen on a port on which connections of a previous server have just ended."""
CLOSE_S = 0.5
"""Timeout for transfers to end after their endpoint has closed; it usually takes microseconds."""
LONGEST_WAIT_S = 60.0

_unfinished: list[object] = []
"""Transfers that outlived their endpoint, with their memory: UCX may still write to it, so it is never reused."""

_count_cancelling = getattr(ctypes.CDLL("libucxx.so"), "_ZNK4ucxx8Endpoint16getCancelingSizeEv", lambda endpoint: 0)
"""`Endpoint::getCancelingSize`, which UCXX exports in C++ only. An endpoint releases transfers that ended during their
cancellation only when this is called; until then they keep each other alive, and also the listener and its port."""


def is_loopback(host: str) -> bool:
    return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback


class Worker:
    """A UCX worker used by one thread at a time."""

    def __init__(self, host: str = "") -> None:
        """With a loopback `host` the worker uses only the loopback device, without connections to other machines."""
        try:
            # A user's choice of devices has precedence.
            confined = host and is_loopback(host) and "UCX_NET_DEVICES" not in os.environ
            self.ucx = core.UCXWorker(core.UCXContext({**SETTINGS, **({"NET_DEVICES": "lo"} if confined else {})}))
            self.ucx.init_blocking_progress_mode()
        except (UCXError, OSError) as error:
            raise RunFailed(f"UCX cannot be set up{f' for host {host!r}' * bool(host)}: {error}") from error
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._wake_lock = threading.Lock()
        self._closed = False
        self._poll = select.poll()
        self._poll.register(self.ucx.epoll_file_descriptor, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)

    def wait(self, timeout_s: float) -> None:
        """Blocks until there is work, at most `timeout_s`, and progresses it.

        Check completed transfers before the call: `arm` reports only later events.
        """
        if self.ucx.arm():
            ready = self._poll.poll(max(0.0, min(timeout_s, LONGEST_WAIT_S)) * 1000)
            if any(fd == self._wake for fd, _ in ready):
                os.eventfd_read(self._wake)
        self.ucx.progress()

    def wake(self) -> None:
        """From any thread: makes the current `wait`, or the next one, return at once."""
        with self._wake_lock:
            if not self._closed:
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        with self._wake_lock:
            self._closed = True
            os.close(self._wake)


class Transfer:
    """One UCX request, and the memory that it needs until it has ended."""

    def __init__(self, request: Any, *memory: object) -> None:
        self._request = request
        self.memory = memory

    @property
    def done(self) -> bool:
        return self._request.completed

    def check(self) -> None:
        self._request.check_error()


def stream_send(endpoint: Any, data: bytes) -> Transfer:
    array = Array(data)
    return Transfer(endpoint.stream_send(array), data, array)


def stream_receive(endpoint: Any, count: int) -> Transfer:
    data = bytearray(count)
    array = Array(data)
    return Transfer(endpoint.stream_recv(array), data, array)


def pieces(body: memoryview) -> list[memoryview]:
    return [body[start : start + PIECE_BYTES] for start in range(0, len(body), PIECE_BYTES)]


def body_send(endpoint: Any, view: memoryview, tag: int) -> Transfer:
    array = Array(view)
    return Transfer(endpoint.tag_send(array, core.UCXXTag(tag)), view, array)


def body_receive(endpoint: Any, view: memoryview | bytearray, tag: int) -> Transfer:
    array = Array(view)
    return Transfer(endpoint.tag_recv(array, core.UCXXTag(tag)), view, array)


def close(worker: Worker, endpoint: Any, transfers: Sequence[Transfer]) -> bool:
    """Ends a connection and all its transfers. Returns False if UCX did not release some memory.

    In that case the endpoint stays in the process, with the port of its listener.
    """
    with contextlib.suppress(UCXError):
        endpoint.close_blocking()
    deadline = time.monotonic() + CLOSE_S
    worker.ucx.progress()  # the peer is notified only by this call
    while not all(transfer.done for transfer in transfers) and time.monotonic() < deadline:
        worker.ucx.progress()
    _count_cancelling(ctypes.c_void_p(endpoint.ucxx_ptr))
    left = [transfer for transfer in transfers if not transfer.done]
    _unfinished.extend(left)
    return not left
