"""Sending one version to many replicas at once: who is invited to which group, and what follows when one fails.

Every attempt has a group of its own under a name that is never used again, so a late participant of a broken attempt
cannot disturb the next one. Building the group has a deadline like everything else; members that did not come by then
are named and left out. Receivers keep what arrives apart from what they serve, so a broken attempt tears nobody.
After `max_attempts` the replicas pull the version instead. The newest version wins: at most one waits.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from penstock.errors import LocalProtocolError
from penstock.records.ids import MemberId
from penstock.records.weights import Manifest


class BroadcastSettings(msgspec.Struct, frozen=True):
    build_timeout_s: float = 60.0
    send_timeout_s: float = 300.0
    max_attempts: int = 2


class BroadcastAsked(msgspec.Struct, frozen=True):
    """A version should go to these replicas, all of them alive now."""

    manifest: Manifest
    members: tuple[MemberId, ...]


class MemberJoined(msgspec.Struct, frozen=True):
    """The member (or the sender, None) is in the group."""

    name: str
    member: MemberId | None


class MemberReceived(msgspec.Struct, frozen=True):
    """The member holds the complete, verified version."""

    name: str
    member: MemberId


class AttemptFailed(msgspec.Struct, frozen=True):
    """A participant saw the group break."""

    name: str
    error: str


class MemberGone(msgspec.Struct, frozen=True):
    member: MemberId
    reason: str


class BroadcastTicked(msgspec.Struct, frozen=True):
    """Time passed: the deadlines are looked at."""


BroadcastEvent: TypeAlias = (
    BroadcastAsked | MemberJoined | MemberReceived | AttemptFailed | MemberGone | BroadcastTicked
)


class InviteMembers(msgspec.Struct, frozen=True):
    """Have the sender (rank 0) and these members (rank 1 and up, in this order) build the group."""

    name: str
    manifest: Manifest
    members: tuple[MemberId, ...]
    timeout_s: float


class AbortGroup(msgspec.Struct, frozen=True):
    """Whoever is in this group must leave it; it is never used again."""

    name: str
    reason: str


class LeaveOut(msgspec.Struct, frozen=True):
    """This member did not come, or is gone: it gets the version by pulling, or is replaced."""

    member: MemberId
    reason: str


class FallBackToPull(msgspec.Struct, frozen=True):
    """Broadcasting this version is given up."""

    manifest: Manifest
    members: tuple[MemberId, ...]
    reason: str


class FinishBroadcast(msgspec.Struct, frozen=True):
    """Everyone who was invited holds the version; the group can be closed."""

    name: str


BroadcastEffect: TypeAlias = InviteMembers | AbortGroup | LeaveOut | FallBackToPull | FinishBroadcast

Phase = Literal["idle", "building", "sending"]


class Broadcast:
    """One broadcast at a time, from the first invitation to the last receipt."""

    def __init__(self, settings: BroadcastSettings) -> None:
        self.settings = settings
        self.phase: Phase = "idle"
        self.name = ""
        self.attempts = 0
        self.since = 0.0
        self.manifest: Manifest | None = None
        self.members: tuple[MemberId, ...] = ()
        self.joined: set[MemberId | None] = set()
        self.received: set[MemberId] = set()
        self.waiting: BroadcastAsked | None = None
        self.first_error = ""
        self._groups = 0

    def handle(self, event: BroadcastEvent, now: float) -> list[BroadcastEffect]:
        match event:
            case BroadcastAsked():
                self.waiting = event
                return self._next(now) if self.phase == "idle" else []
            case MemberJoined(name, member) if name == self.name and self.phase == "building":
                self.joined.add(member)
                if self.joined >= {None, *self.members}:
                    self.phase, self.since = "sending", now
                return []
            case MemberReceived(name, member) if (
                name == self.name and self.phase == "sending" and member in self.members
            ):
                self.received.add(member)
                return self._finished(now) if self.received >= set(self.members) else []
            case AttemptFailed(name, error) if name == self.name and self.phase != "idle":
                return self._broken(error, now)
            case MemberGone(member, reason) if member in self.members and self.phase != "idle":
                self.members = tuple(other for other in self.members if other != member)
                return [LeaveOut(member, reason), *self._broken(f"{member} {reason}", now)]
            case BroadcastTicked():
                return self._ticked(now)
            case _:  # from an attempt that is over
                return []

    def _next(self, now: float) -> list[BroadcastEffect]:
        asked, self.waiting = self.waiting, None
        if asked is None or not asked.members:
            return []  # at rest
        self.manifest, self.members = asked.manifest, asked.members
        self.attempts, self.first_error = 0, ""
        return self._attempt(now)

    def _attempt(self, now: float) -> list[BroadcastEffect]:
        if self.manifest is None:
            raise LocalProtocolError(f"nothing was asked to be sent: {self!r}")
        self.attempts += 1
        self._groups += 1
        self.name = f"version-{self.manifest.version}-group-{self._groups}"
        self.phase, self.since = "building", now
        self.joined, self.received = set(), set()
        return [InviteMembers(self.name, self.manifest, self.members, self.settings.build_timeout_s)]

    def _ticked(self, now: float) -> list[BroadcastEffect]:
        if self.phase == "building" and now - self.since > self.settings.build_timeout_s:
            missing = [member for member in self.members if member not in self.joined]
            why = f"did not join {self.name} within {self.settings.build_timeout_s:.0f} s"
            if None in self.joined:  # without the sender nobody can be blamed
                self.members = tuple(member for member in self.members if member in self.joined)
                blamed: list[BroadcastEffect] = [LeaveOut(member, why) for member in missing]
            else:
                missing, blamed = [MemberId("the sender")], []
            return [*blamed, *self._broken(f"{', '.join(missing)} {why}", now)]
        if self.phase == "sending" and now - self.since > self.settings.send_timeout_s:
            return self._broken(f"{self.name} did not finish within {self.settings.send_timeout_s:.0f} s", now)
        return []

    def _broken(self, error: str, now: float) -> list[BroadcastEffect]:
        self.first_error = self.first_error or error
        effects: list[BroadcastEffect] = [AbortGroup(self.name, error)]
        overtaken = self.waiting is not None
        if self.members and self.attempts < self.settings.max_attempts and not overtaken:
            return effects + self._attempt(now)
        if self.members and self.manifest is not None and not overtaken:
            effects.append(FallBackToPull(self.manifest, self.members, self.first_error))
        self.phase = "idle"
        return effects + self._next(now)

    def _finished(self, now: float) -> list[BroadcastEffect]:
        self.phase = "idle"
        return [FinishBroadcast(self.name), *self._next(now)]

    def check(self) -> None:
        if self.phase != "idle" and (self.manifest is None or not self.members):
            raise LocalProtocolError(f"a broadcast to nobody: {self!r}")
        if self.attempts > self.settings.max_attempts:
            raise LocalProtocolError(f"more attempts than allowed: {self!r}")
        if self.phase == "idle" and self.waiting is not None:
            raise LocalProtocolError(f"a broadcast waits although nothing is under way: {self!r}")
        if self.phase == "sending" and not self.received <= set(self.members):
            raise LocalProtocolError(f"somebody received who was not invited: {self!r}")

    def __repr__(self) -> str:
        missing = [member for member in self.members if member not in self.joined]
        return (
            f"Broadcast({self.phase} {self.name} since {self.since:.1f}, attempt {self.attempts}, "
            f"{len(self.received)} of {len(self.members)} received, not joined {missing[:3]})"
        )
