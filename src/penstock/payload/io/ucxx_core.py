"""The few things of UCX that the carrier needs: a worker that sleeps, transfers that keep their memory, an end.

Uses UCXX's core interface and blocks in the kernel on the worker's event descriptor: the asyncio interface spins while
it waits, and here an idle server must use no CPU.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")  # it warns of variables that it sets itself

import ucxx  # pyright: ignore[reportMissingImports]
from ucxx._lib.arr import Array  # pyright: ignore[reportMissingImports]

core = ucxx.libucxx
UCXError = ucxx.exceptions.UCXError
TAG = struct.Struct("<Q")
CLOSE_PERIOD_NS = 500_000_000
LONGEST_WAIT_S = 60.0

_unfinished: list[object] = []
"""Transfers that outlived their endpoint, with their memory: UCX may still write to it, so it is never used again."""


class Worker:
    """A UCX worker used by one thread at a time."""

    def __init__(self) -> None:
        self.ucx = core.UCXWorker(core.UCXContext({}))
        self.ucx.init_blocking_progress_mode()
        self._poll = select.poll()
        self._poll.register(self.ucx.epoll_file_descriptor, select.POLLIN)

    def also_wake_on(self, fd: int) -> None:
        self._poll.register(fd, select.POLLIN)

    def wait(self, timeout_s: float) -> None:
        """Sleep until there is something to do, at most `timeout_s`, and do it.

        What completed before must have been looked at: arming sees what is still to come only.
        """
        if self.ucx.arm():
            self._poll.poll(max(0.0, min(timeout_s, LONGEST_WAIT_S)) * 1000)
        self.ucx.progress()


class Transfer:
    """One UCX request and the memory it needs for as long as it lasts."""

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


def body_send(endpoint: Any, view: memoryview, tag: int) -> Transfer:
    array = Array(view)
    return Transfer(endpoint.tag_send(array, core.UCXXTag(tag)), view, array)


def body_receive(endpoint: Any, view: memoryview, tag: int) -> Transfer:
    array = Array(view)
    return Transfer(endpoint.tag_recv(array, core.UCXXTag(tag)), view, array)


def close(endpoint: Any, transfers: Sequence[Transfer]) -> bool:
    """End a connection and everything in flight on it. False when UCX would not let go of some memory."""
    with contextlib.suppress(UCXError):
        endpoint.close_blocking(CLOSE_PERIOD_NS, 1)
    left = [transfer for transfer in transfers if not transfer.done]
    _unfinished.extend(left)
    return not left
