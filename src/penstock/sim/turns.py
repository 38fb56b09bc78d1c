"""The devices of a simulated trainer, taken and given back as the real one does it on shared devices."""

from __future__ import annotations

from penstock.records.ids import MemberId
from penstock.records.pool import GrantedDevices, Priority
from penstock.sim.actors import LONG_POLL_S
from penstock.sim.engine import Body, Call, Owner
from penstock.sim.floor import Floor
from penstock.sim.pool_host import AskDevices, Rejected, ReleaseDevices

PATIENCE_S = 600.0
SCORE_WITHIN_S = 60.0


class SimTurns:
    def __init__(self, owner: Owner, member: MemberId, floor: Floor) -> None:
        self._owner = owner
        self._member = member
        self._floor = floor
        self._requests = 0
        self._held: GrantedDevices | None = None

    def take(self, work: Priority) -> Body:
        """Devices that are held for other work are given back in the same call."""
        self.move_out()
        if self._held is None or self._held.priority is not work:
            release, self._held = self._held, None
            self._held = yield from self._granted(work, release)
        if self._held is not None:
            self._floor.enter(self._owner, self._held.devices)

    def give_back(self) -> Body:
        if self._held is not None:
            self.move_out()
            request, self._held = self._held.request, None
            yield Call(ReleaseDevices(self._member, request))

    def move_out(self) -> None:
        """Also before unregistering: from then on the devices are given to others."""
        self._floor.leave(self._owner)

    def _granted(self, priority: Priority, release: GrantedDevices | None) -> Body:
        """What was granted; None to a trainer that comes up when training is over."""
        while True:
            self._requests += 1
            timeout_s = SCORE_WITHIN_S if priority is Priority.SCORING else PATIENCE_S
            released = None if release is None else release.request
            ask = AskDevices(self._member, self._requests, priority, timeout_s, released)
            answer = None
            while answer is None:
                answer = yield Call(ask, LONG_POLL_S)
            if not isinstance(answer, Rejected):
                return answer
            release = None
            if priority is Priority.INITIALISATION:
                return None
            priority = Priority.TRAINING  # whoever trains without a pause would keep scoring out for ever
