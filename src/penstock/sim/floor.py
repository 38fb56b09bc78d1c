"""Who really is on which simulated device: what the pool's book must agree with."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.errors import InvalidTransition
from penstock.records.pool import DeviceId
from penstock.sim.engine import Owner


class Floor:
    """A process that is gone stands nowhere."""

    def __init__(self) -> None:
        self._standing: dict[DeviceId, Owner] = {}

    def enter(self, owner: Owner, devices: Iterable[DeviceId]) -> None:
        """Raises if another living process is there: two of them would share its memory."""
        for device in devices:
            other = self._standing.get(device)
            if other is not None and other is not owner and other.alive:
                raise InvalidTransition(f"{owner.name} moves on to device {device}, where {other.name} still is")
            self._standing[device] = owner

    def leave(self, owner: Owner) -> None:
        self._standing = {device: there for device, there in self._standing.items() if there is not owner}
