"""Ports that are served by threads: accept loops that go on whatever happens, and strangers that keep no client out."""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections.abc import Callable, Collection
from typing import Protocol, TypeVar

logger = logging.getLogger(__name__)

ACCEPT_PAUSE_S = 0.05
"""Before accepting again after the system refused (out of file descriptors, say)."""
LOG_EVERY_S = 10.0
LISTENER_GONE = (errno.EINVAL, errno.EBADF, errno.ENOTSOCK)
"""To accept again would be refused for ever."""


class Guest(Protocol):
    @property
    def is_stranger(self) -> bool: ...


G = TypeVar("G", bound=Guest)


def turned_away(guests: Collection[G], newcomer: G, limit: int) -> G | None:
    """Which connection is closed when `newcomer` comes: none, the oldest unauthenticated one, or the newcomer itself.

    So strangers cannot keep the run's own clients out.
    """
    if len(guests) < limit:
        return None
    return next((guest for guest in guests if guest.is_stranger), newcomer)


def accept_until(
    closing: Callable[[], bool], listener: socket.socket, admit: Callable[[socket.socket], None], port: str
) -> None:
    """Hands every connection to `admit`. Returns when `closing`; raises only if the listener itself is gone."""
    logged_at = -LOG_EVERY_S
    while not closing():
        try:
            peer, _ = listener.accept()
        except OSError as error:
            if closing():
                return
            if error.errno in LISTENER_GONE:
                raise
            if time.monotonic() - logged_at > LOG_EVERY_S:
                logged_at = time.monotonic()
                logger.warning("%s: accept failed: %s; it goes on", port, error)
            time.sleep(ACCEPT_PAUSE_S)
            continue
        admit(peer)
