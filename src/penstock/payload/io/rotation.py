"""The health of every server's ports, shared by all threads of one client."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection

from penstock.payload.ports import CallFailed, CallSucceeded, Fault, HealPort, Ports
from penstock.runtime.clock import monotonic

log = logging.getLogger(__name__)


class Rotation:
    """One `Ports` machine per server, behind a lock and on the real clock."""

    def __init__(self, first_s: float = 1.0, cap_s: float = 30.0) -> None:
        self._first_s = first_s
        self._cap_s = cap_s
        self._lock = threading.Lock()
        self._ports: dict[tuple[str, tuple[int, ...]], Ports] = {}

    def __repr__(self) -> str:
        return f"<Rotation {self._ports}>"

    def choose(self, host: str, ports: tuple[int, ...], avoid: Collection[int]) -> int:
        with self._lock:
            if (host, ports) not in self._ports:
                self._ports[host, ports] = Ports(ports, first_s=self._first_s, cap_s=self._cap_s)
            return self._ports[host, ports].choose(monotonic(), avoid)

    def succeeded(self, host: str, ports: tuple[int, ...], port: int) -> None:
        self._handle(host, ports, CallSucceeded(port))

    def failed(self, host: str, ports: tuple[int, ...], port: int, fault: Fault) -> None:
        self._handle(host, ports, CallFailed(port, fault))

    def _handle(self, host: str, ports: tuple[int, ...], event: CallSucceeded | CallFailed) -> None:
        with self._lock:
            effects = self._ports[host, ports].handle(event, monotonic())
        for effect in effects:
            if isinstance(effect, HealPort):
                log.info("payload port %s:%d works again", host, effect.port)
            else:
                log.warning("payload port %s:%d is quarantined: %s", host, effect.port, effect.fault)
