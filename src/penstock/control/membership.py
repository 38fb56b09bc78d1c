"""Who is in the pipeline, and who is only said to be.

A member is one incarnation of one process. It is live from its registration until it leaves, is replaced, or is
evicted; after that its calls are refused as stale, for ever. Silence makes a member suspected, then evicted; so does a
heartbeat that reports a parent without progress, so a wedged process cannot pass for a live one. A member that has not
been heard since it registered has the startup grace; a gap in the controller's own time (restart, suspended machine)
does not count.
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
"""Departed members remembered by name, so that their late calls differ from those of unknown processes."""


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
    """The weights it last said it serves."""
    request: int = -1
    """The last lease request that was granted, and what it was given: repeated if the request is."""
    granted: tuple[PromptLease, ...] = ()
    more_rings: tuple[str, ...] = ()
    """Rings of the other ranks of a worker that has several."""

    @property
    def rings(self) -> tuple[str, ...]:
        return (self.ring, *self.more_rings) if self.ring else self.more_rings

    @property
    def kept_by(self) -> str:
        """What keeps it from its usual work, of which users are told; empty if nothing does."""
        return _kept_by(self.doing)


def _kept_by(doing: str) -> str:
    return next((kind for kind in (LOADING, REWARD) if doing.startswith(kind)), "")


class MembershipState(msgspec.Struct):
    live: dict[MemberId, Member] = msgspec.field(default_factory=dict)
    former: dict[MemberId, str] = msgspec.field(default_factory=dict)
    rings: dict[str, RingAddress] = msgspec.field(default_factory=dict)
    departed_rings: dict[str, int] = msgspec.field(default_factory=dict)
    """Rings of departed members, with the version at their departure: payloads in them may still be read a while."""
    joined: int = 0
    evicted: int = 0


class Finding(msgspec.Struct, frozen=True):
    """What a look at the clock found out about a member."""

    member: MemberId
    what: Literal["suspected", "recovered", "evicted"]
    reason: str


class Membership:
    def __init__(self, settings: PipelineSettings, state: MembershipState | None = None) -> None:
        self.settings = settings
        self.state = state if state is not None else MembershipState()

    def get(self, member: MemberId) -> Member | None:
        """The live member of that name, if there is one."""
        return self.state.live.get(member)

    def why_unknown(self, member: MemberId) -> str:
        """Why a caller is not live, for the answer that refuses it."""
        reason = self.state.former.get(member)
        return f"{member} is no longer a member: {reason}" if reason else f"{member} is not registered"

    def caller(self, member: MemberId, role: Role) -> Member | Refused:
        """The live member that makes a call of its role, or why it may not."""
        found = self.get(member)
        if found is None:
            return Refused("Stale", self.why_unknown(member))
        if found.role != role:
            return Refused("LocalProtocolError", f"{member} is a {found.role}; this call is for a {role}")
        return found

    def having(self, role: Role) -> list[Member]:
        """The live members of a role, in the order they joined."""
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
        self.hear(event.member, now)
        return member

    def remove(self, member: MemberId, reason: str, version: Version) -> Member | None:
        """Ends a membership for good; None if there was none."""
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
        """Forgets rings whose members departed before version `below`: no sample in them can be trained any more."""
        state = self.state
        for ring in [ring for ring, version in state.departed_rings.items() if version < below]:
            del state.departed_rings[ring]
            state.rings.pop(ring, None)

    def hear(self, member: MemberId, now: float) -> None:
        """Any call that changed something is a sign of life and of progress."""
        caller = self.state.live.get(member)
        if caller is not None:
            caller.heard_at = caller.progressed_at = now
            caller.suspected = False

    def beat(self, event: Heartbeat, now: float) -> bool:
        """Records a heartbeat if it says something new; returns whether it did."""
        member = self.state.live[event.member]
        progressed_at = now - max(0.0, event.progressed_ago_s)
        nothing_new = member.heartbeat_seen and member.kept_by == _kept_by(event.doing)
        if nothing_new and now - member.heard_at < self.settings.resolution_s:
            return False
        member.heartbeat_seen = True
        member.heard_at = now
        member.progressed_at = max(member.progressed_at, progressed_at)
        member.doing = event.doing
        return True

    def excuse_all(self, now: float) -> None:
        """The controller itself was away: silence up to now does not count."""
        for member in self.state.live.values():
            member.heard_at = member.progressed_at = now
            member.suspected = False

    def look(self, now: float) -> list[Finding]:
        """Suspects, clears and condemns members by their silence. The caller removes the condemned."""
        findings: list[Finding] = []
        settings = self.settings
        for member in self.state.live.values():
            silent_s, idle_s = now - member.heard_at, now - member.progressed_at
            guard_s = 0.0 if member.heartbeat_seen else settings.startup_grace_s - (now - member.registered_at)
            if guard_s > 0:
                continue
            if silent_s > settings.evict_after_s:
                findings.append(Finding(member.member, "evicted", f"not heard for {silent_s:.0f} s"))
            elif idle_s > settings.wedged_after_s:
                doing = f" while in {member.doing!r}" if member.doing else ""
                findings.append(Finding(member.member, "evicted", f"no progress for {idle_s:.0f} s{doing}"))
            elif silent_s > settings.suspect_after_s and not member.suspected:
                member.suspected = True
                findings.append(Finding(member.member, "suspected", f"not heard for {silent_s:.0f} s"))
            elif silent_s <= settings.suspect_after_s and member.suspected:
                member.suspected = False
                findings.append(Finding(member.member, "recovered", "heard again"))
        return findings

    def __repr__(self) -> str:
        names = ", ".join(f"{member.member}{'?' if member.suspected else ''}" for member in self.state.live.values())
        return f"<Membership [{names}] joined={self.state.joined} evicted={self.state.evicted}>"
