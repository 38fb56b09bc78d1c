"""The members of a pipeline and their liveness.

A member is one incarnation of one process. It is live from its registration until it leaves, is replaced, or is
evicted; after that all its calls are refused as stale. A member without messages is suspected, then evicted. A member
whose heartbeats report no progress is evicted too, so a hung process is detected. A member that has sent no heartbeat
since it registered has the startup grace. Time in which the controller did not run (restart, suspended machine) is not
counted.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.control.settings import PipelineSettings
from penstock.records.ids import MemberId, Version
from penstock.records.payload import RingAddress
from penstock.records.prompt import PromptLease
from penstock.wire.messages import LOADING, REWARD, Heartbeat, Refused, Register, Role

FORMER_KEPT = 256
"""Number of former members kept by name, to distinguish their late calls from those of unregistered processes."""


class Member(msgspec.Struct):
    member: MemberId
    role: Role
    pid: int
    host_id: str
    ring: str
    registered_at: float
    heard_at: float
    progressed_at: float
    heartbeat_seen: bool = False
    suspected: bool = False
    doing: str = ""
    version: Version = Version(0)
    """The version with which it was last granted a lease."""
    request: int = -1
    """The last granted lease request; if it is repeated, `granted` is returned again."""
    granted: tuple[PromptLease, ...] = ()
    more_rings: tuple[str, ...] = ()
    """Rings of the other ranks of a worker that has several."""

    @property
    def rings(self) -> tuple[str, ...]:
        return (self.ring, *self.more_rings) if self.ring else self.more_rings

    @property
    def blocked_by(self) -> str:
        """The activity that blocks its usual work, `LOADING` or `REWARD`; empty if none. Shown to users."""
        return _blocked_by(self.doing)


def _blocked_by(doing: str) -> str:
    return next((kind for kind in (LOADING, REWARD) if doing.startswith(kind)), "")


class MembershipState(msgspec.Struct):
    live: dict[MemberId, Member] = msgspec.field(default_factory=dict)
    former: dict[MemberId, str] = msgspec.field(default_factory=dict)
    rings: dict[str, RingAddress] = msgspec.field(default_factory=dict)
    departed_rings: dict[str, int] = msgspec.field(default_factory=dict)
    """Rings of former members, with the version when they left: their payloads may still be read."""
    joined: int = 0
    evicted: int = 0


class Finding(msgspec.Struct, frozen=True):
    """A change in the liveness of a member."""

    member: MemberId
    what: Literal["suspected", "recovered", "evicted"]
    reason: str


class Membership:
    def __init__(self, settings: PipelineSettings, state: MembershipState | None = None) -> None:
        self.settings = settings
        self.state = state if state is not None else MembershipState()

    def get(self, member: MemberId) -> Member | None:
        """The live member with this id, if there is one."""
        return self.state.live.get(member)

    def why_unknown(self, member: MemberId) -> str:
        """Why a caller is not live, for the reply that refuses it."""
        reason = self.state.former.get(member)
        return f"{member} is no longer a member: {reason}" if reason else f"{member} is not registered"

    def caller(self, member: MemberId, role: Role) -> Member | Refused:
        """The live member that calls, or a refusal if it is not live or has another role."""
        found = self.get(member)
        if found is None:
            return Refused("Stale", self.why_unknown(member))
        if found.role != role:
            return Refused("LocalProtocolError", f"{member} is a {found.role}; this call is for a {role}")
        return found

    def having(self, role: Role) -> list[Member]:
        """The live members of a role, in the order of registration."""
        return [member for member in self.state.live.values() if member.role == role]

    def trainer(self) -> Member | None:
        """The live trainer, if there is one."""
        return next(iter(self.having("trainer")), None)

    def register(self, event: Register, now: float) -> Member:
        """Admits a member, or refreshes one that is live. The caller refuses former members beforehand."""
        state = self.state
        member = state.live.get(event.member)
        if member is None:
            ring = event.ring.ring if event.ring is not None else ""
            member = Member(event.member, event.role, event.pid, event.host_id, ring, now, now, now)
            state.live[event.member] = member
            state.joined += 1
        if event.ring is not None:
            member.ring = event.ring.ring
            member.more_rings = tuple(address.ring for address in event.more_rings)
            for address in (event.ring, *event.more_rings):
                state.rings[address.ring] = address
                state.departed_rings.pop(address.ring, None)
        self.record_call(event.member, now)
        return member

    def remove(self, member: MemberId, reason: str, version: Version) -> Member | None:
        """Removes a member permanently; None if it is not live."""
        state = self.state
        gone = state.live.pop(member, None)
        if gone is None:
            return None
        state.former[member] = reason
        while len(state.former) > FORMER_KEPT:
            del state.former[next(iter(state.former))]
        state.departed_rings.update(dict.fromkeys(gone.rings, version))
        return gone

    def forget_rings(self, below: int) -> None:
        """Drops rings whose members left before version `below`: no sample in them can be trained any more."""
        state = self.state
        for ring in [ring for ring, version in state.departed_rings.items() if version < below]:
            del state.departed_rings[ring]
            state.rings.pop(ring, None)

    def record_call(self, member: MemberId, now: float) -> None:
        """Records a call that changed the state: the member is alive and makes progress."""
        caller = self.state.live.get(member)
        if caller is not None:
            caller.heard_at = caller.progressed_at = now
            caller.suspected = False

    def record_heartbeat(self, event: Heartbeat, now: float) -> bool:
        """Records a heartbeat if it reports a change or `resolution_s` has passed; returns whether it was recorded."""
        member = self.state.live[event.member]
        progressed_at = now - max(0.0, event.progressed_ago_s)
        unchanged = member.heartbeat_seen and member.blocked_by == _blocked_by(event.doing)
        if unchanged and now - member.heard_at < self.settings.resolution_s:
            return False
        member.heartbeat_seen = True
        member.heard_at = now
        member.progressed_at = max(member.progressed_at, progressed_at)
        member.doing = event.doing
        return True

    def restart_timers(self, now: float) -> None:
        """Restarts the timers of all members, after a time in which the controller did not run."""
        for member in self.state.live.values():
            member.heard_at = member.progressed_at = now
            member.suspected = False

    def find_changes(self, now: float) -> list[Finding]:
        """Finds members to suspect, clear or evict by their silence. The caller removes the evicted ones."""
        findings: list[Finding] = []
        settings = self.settings
        for member in self.state.live.values():
            silent_s, idle_s = now - member.heard_at, now - member.progressed_at
            guard_s = 0.0 if member.heartbeat_seen else settings.startup_grace_s - (now - member.registered_at)
            if guard_s > 0:
                continue
            if silent_s > settings.evict_after_s:
                findings.append(Finding(member.member, "evicted", f"no message for {silent_s:.0f} s"))
            elif idle_s > settings.wedged_after_s:
                doing = f" while in {member.doing!r}" if member.doing else ""
                findings.append(Finding(member.member, "evicted", f"no progress for {idle_s:.0f} s{doing}"))
            elif silent_s > settings.suspect_after_s and not member.suspected:
                member.suspected = True
                findings.append(Finding(member.member, "suspected", f"no message for {silent_s:.0f} s"))
            elif silent_s <= settings.suspect_after_s and member.suspected:
                member.suspected = False
                findings.append(Finding(member.member, "recovered", "messages arrive again"))
        return findings

    def __repr__(self) -> str:
        names = ", ".join(f"{member.member}{'?' if member.suspected else ''}" for member in self.state.live.values())
        return f"<Membership [{names}] joined={self.state.joined} evicted={self.state.evicted}>"
