"""Which of a server's ports to call next: in turn, leaving out the sick, never leaving out all.

A port that failed is in quarantine, for longer with every failure in a row. A quarantined port is skipped while a
healthy one remains. When all are sick the one whose quarantine ends first is tried at once: waiting would not help.
A success heals.
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
    """How many calls had failed in a row."""


Effect = QuarantinePort | HealPort


@dataclass
class _Health:
    sick_until: float = float("-inf")
    failures: int = 0
    fault: Fault | None = None


class Ports:
    """The ports of one server, seen from one client."""

    def __init__(self, ports: Sequence[int], *, first_s: float = 1.0, cap_s: float = 30.0) -> None:
        if not ports or len(set(ports)) != len(ports):
            raise LocalProtocolError(f"a server is reached by one or more different ports, found {list(ports)}")
        self._health = {port: _Health() for port in ports}
        self._turn = list(ports)
        """Next to be called first."""
        self._first_s = first_s
        self._cap_s = cap_s

    def __repr__(self) -> str:
        sick = {port: f"{health.fault} x{health.failures}" for port, health in self._health.items() if health.failures}
        return f"<Ports {self._turn}, sick: {sick or 'none'}>"

    def choose(self, now: float, avoid: Collection[int] = ()) -> int:
        """The port for the next call. Those in `avoid` (already tried for this payload) count as sick."""
        for chosen in self._turn:
            if self._health[chosen].sick_until <= now and chosen not in avoid:
                break
        else:
            rest = [port for port in self._turn if port not in avoid] or self._turn
            chosen = min(rest, key=lambda port: self._health[port].sick_until)
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
        """Sick ports and why."""
        return {
            port: health.fault
            for port, health in self._health.items()
            if health.fault is not None and health.sick_until > now
        }

    def check(self) -> None:
        if sorted(self._turn) != sorted(self._health):
            raise InvalidTransition(f"rotation {self._turn} lost ports of {sorted(self._health)}")
        for port, health in self._health.items():
            if (health.failures > 0) != (health.fault is not None):
                raise InvalidTransition(f"port {port} has {health.failures} failures but fault {health.fault}")
