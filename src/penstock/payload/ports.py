"""Chooses which of a server's ports to call next: the healthy ports in turn.

A port that failed is quarantined, for longer with every failure in a row. A quarantined port is skipped while a
healthy one remains. When all are quarantined, the one whose quarantine ends first is tried at once: waiting would not
help. A successful call ends the quarantine.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from penstock.errors import InvalidTransition, LocalProtocolError

Fault = Literal["refused", "reset", "truncated", "timed_out", "corrupt", "protocol"]


class CallSucceeded(msgspec.Struct, frozen=True):
    port: int


class CallFailed(msgspec.Struct, frozen=True):
    port: int
    fault: Fault


Event = CallSucceeded | CallFailed


class QuarantinePort(msgspec.Struct, frozen=True):
    port: int
    fault: Fault
    until: float


class HealPort(msgspec.Struct, frozen=True):
    port: int
    failures: int
    """Failed calls in a row before the success."""


Effect = QuarantinePort | HealPort


@dataclass
class _Health:
    quarantined_until: float = float("-inf")
    failures: int = 0
    fault: Fault | None = None


class Ports:
    """The ports of one server, seen from one client."""

    def __init__(self, ports: Sequence[int], *, first_s: float = 1.0, cap_s: float = 30.0) -> None:
        if not ports or len(set(ports)) != len(ports):
            raise LocalProtocolError(f"a server needs one or more distinct ports, found {list(ports)}")
        self._health = {port: _Health() for port in ports}
        self._turn = list(ports)
        """In the order of the next calls."""
        self._first_s = first_s
        self._cap_s = cap_s

    def __repr__(self) -> str:
        failing = {
            port: f"{health.fault} x{health.failures}" for port, health in self._health.items() if health.failures
        }
        return f"<Ports {self._turn}, failing: {failing or 'none'}>"

    def choose(self, now: float, avoid: Collection[int] = ()) -> int:
        """The port for the next call. Ports in `avoid` (already tried for this payload) come last."""
        for chosen in self._turn:
            if self._health[chosen].quarantined_until <= now and chosen not in avoid:
                break
        else:
            others = [port for port in self._turn if port not in avoid] or self._turn
            chosen = min(others, key=lambda port: self._health[port].quarantined_until)
        self._turn.remove(chosen)
        self._turn.append(chosen)
        return chosen

    def handle(self, event: Event, now: float) -> list[Effect]:
        health = self._health.get(event.port)
        if health is None:
            raise InvalidTransition(f"port {event.port} is not one of {sorted(self._health)}")
        if isinstance(event, CallSucceeded):
            if not health.failures:
                return []
            self._health[event.port] = _Health()
            return [HealPort(event.port, health.failures)]
        wait_s = min(self._cap_s, self._first_s * 2 ** min(health.failures, 30))
        self._health[event.port] = _Health(now + wait_s, health.failures + 1, event.fault)
        return [QuarantinePort(event.port, event.fault, now + wait_s)]

    def quarantined(self, now: float) -> dict[int, Fault]:
        """Quarantined ports with their last fault."""
        return {
            port: health.fault
            for port, health in self._health.items()
            if health.fault is not None and health.quarantined_until > now
        }

    def check(self) -> None:
        if sorted(self._turn) != sorted(self._health):
            raise InvalidTransition(f"rotation {self._turn} lost ports of {sorted(self._health)}")
        for port, health in self._health.items():
            if (health.failures > 0) != (health.fault is not None):
                raise InvalidTransition(f"port {port} has {health.failures} failures but fault {health.fault}")
