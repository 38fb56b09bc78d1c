"""A blocking socket whose every call ends by a deadline, at the price of one system call per transfer.

The time limit is the kernel's (SO_RCVTIMEO, SO_SNDTIMEO) and is set again only when it would overrun the deadline by
more than `SLACK_S`; a limit that is too short costs a second try.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time

from penstock.runtime.listening import watch_link

SLACK_S = 0.01
_TIMEVAL = struct.Struct("ll")


class TimedSocket:
    """Times out with `TimeoutError`; other failures are the socket's own `OSError`s."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        watch_link(connection)
        self._connection = connection
        self._limits_s = {socket.SO_RCVTIMEO: float("inf"), socket.SO_SNDTIMEO: float("inf")}

    def send(self, deadline: float, *parts: bytes | memoryview) -> None:
        """Send all of `parts`, one after the other."""
        left = list(parts)
        while left:
            self._limit(socket.SO_SNDTIMEO, deadline)
            try:
                sent = self._connection.sendmsg(left)
            except BlockingIOError:
                self._limits_s[socket.SO_SNDTIMEO] = float("inf")
                continue
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if left:
                left[0] = memoryview(left[0])[sent:]

    def receive(self, deadline: float, at_most: int) -> bytes:
        """Returns received bytes, at least one; empty when the peer has closed."""
        while True:
            self._limit(socket.SO_RCVTIMEO, deadline)
            try:
                return self._connection.recv(at_most)
            except BlockingIOError:
                self._limits_s[socket.SO_RCVTIMEO] = float("inf")

    def receive_into(self, deadline: float, *views: bytearray | memoryview) -> int:
        """Fills `views` in order with received bytes, at least one, and returns their number.

        0 when the peer has closed.
        """
        while True:
            self._limit(socket.SO_RCVTIMEO, deadline)
            try:
                return self._connection.recvmsg_into(views)[0]
            except BlockingIOError:
                self._limits_s[socket.SO_RCVTIMEO] = float("inf")

    def break_off(self) -> None:
        """Ends any call of another thread on this socket."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()

    def _limit(self, option: int, deadline: float) -> None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the deadline has passed")
        if self._limits_s[option] > left_s + SLACK_S:
            self._limits_s[option] = left_s
            # The kernel takes zero for "no limit".
            microseconds = max(1, int(left_s * 1e6))
            value = _TIMEVAL.pack(*divmod(microseconds, 1_000_000))
            self._connection.setsockopt(socket.SOL_SOCKET, option, value)
