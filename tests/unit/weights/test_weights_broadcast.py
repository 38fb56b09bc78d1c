"""The broadcast machine, as lists of events."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.records.ids import MemberId, Version
from penstock.records.weights import Manifest
from penstock.weights.broadcast import (
    AbortGroup,
    AttemptFailed,
    Broadcast,
    BroadcastAsked,
    BroadcastEffect,
    BroadcastEvent,
    BroadcastSettings,
    BroadcastTicked,
    FallBackToPull,
    FinishBroadcast,
    InviteMembers,
    LeaveOut,
    MemberGone,
    MemberJoined,
    MemberReceived,
)
from profiles import examples

A, B, C = MemberId("a"), MemberId("b"), MemberId("c")
KINDS = ["ask", "join", "got", "fail", "gone", "wait"]


def version(number: int) -> Manifest:
    return Manifest(Version(number), "l1", f"{number:032x}", (), "weights")


class Table:
    def __init__(self) -> None:
        self.now = 0.0
        self.broadcast = Broadcast(BroadcastSettings(build_timeout_s=60.0, send_timeout_s=100.0))

    def __call__(self, event: BroadcastEvent) -> list[BroadcastEffect]:
        effects = self.broadcast.handle(event, self.now)
        self.broadcast.check()
        repr(self.broadcast)
        return effects

    def later(self, seconds: float) -> list[BroadcastEffect]:
        self.now += seconds
        return self(BroadcastTicked())

    def invited(self, number: int, *members: MemberId) -> str:
        (invite,) = self(BroadcastAsked(version(number), members))
        assert isinstance(invite, InviteMembers)
        return invite.name

    def join(self, name: str, *members: MemberId | None) -> None:
        for member in members:
            assert self(MemberJoined(name, member)) == []


def test_everyone_joins_and_receives() -> None:
    table = Table()
    name = table.invited(1, A, B)
    table.join(name, None, A, B)
    assert table(MemberReceived(name, A)) == []
    assert table(MemberReceived(name, B)) == [FinishBroadcast(name)]
    assert table.later(1e9) == []


def test_a_group_that_hangs_is_aborted_the_missing_named_and_the_rest_invited_anew() -> None:
    table = Table()
    name = table.invited(1, A, B, C)
    table.join(name, None, A, C)
    assert table.later(60.0) == []
    left_out, abort, invite = table.later(0.1)
    assert isinstance(left_out, LeaveOut)
    assert left_out.member == B
    assert isinstance(abort, AbortGroup)
    assert "b did not join" in abort.reason
    assert isinstance(invite, InviteMembers)
    assert invite.members == (A, C)
    assert invite.name != name


def test_after_two_attempts_the_replicas_pull() -> None:
    table = Table()
    table.invited(1, A, B)
    first, second = table(AttemptFailed(table.broadcast.name, "reset"))
    assert isinstance(first, AbortGroup)
    assert isinstance(second, InviteMembers)
    abort, fallback = table(AttemptFailed(second.name, "reset again"))
    assert isinstance(abort, AbortGroup)
    assert fallback == FallBackToPull(version(1), (A, B), "reset")


def test_a_member_that_dies_is_left_out_and_the_survivors_get_the_version_in_a_new_group() -> None:
    table = Table()
    name = table.invited(1, A, B)
    table.join(name, None, A, B)
    left_out, abort, invite = table(MemberGone(B, "was killed"))
    assert left_out == LeaveOut(B, "was killed")
    assert isinstance(abort, AbortGroup)
    assert isinstance(invite, InviteMembers)
    assert invite.members == (A,)
    table.join(invite.name, None, A)
    assert table(MemberReceived(invite.name, A)) == [FinishBroadcast(invite.name)]


def test_the_last_member_that_dies_ends_the_broadcast() -> None:
    table = Table()
    table.invited(1, A)
    assert [type(effect) for effect in table(MemberGone(A, "was killed"))] == [LeaveOut, AbortGroup]
    assert table.broadcast.phase == "idle"


def test_a_missing_sender_costs_no_replica() -> None:
    table = Table()
    name = table.invited(1, A, B)
    table.join(name, A)
    abort, invite = table.later(61.0)
    assert isinstance(abort, AbortGroup)
    assert "the sender" in abort.reason
    assert isinstance(invite, InviteMembers)
    assert invite.members == (A, B)


def test_sending_has_a_deadline() -> None:
    table = Table()
    name = table.invited(1, A)
    table.join(name, None, A)
    assert table.later(100.0) == []
    assert [type(effect) for effect in table.later(0.1)] == [AbortGroup, InviteMembers]


def test_late_words_from_an_old_group_change_nothing() -> None:
    table = Table()
    old = table.invited(1, A)
    table(AttemptFailed(old, "reset"))
    before = repr(table.broadcast)
    for event in (MemberJoined(old, A), MemberReceived(old, A), AttemptFailed(old, "late")):
        assert table(event) == []
    assert repr(table.broadcast) == before


def test_only_the_newest_version_waits() -> None:
    table = Table()
    name = table.invited(1, A)
    for number in range(2, 6):
        assert table(BroadcastAsked(version(number), (A,))) == []
    table.join(name, None, A)
    finish, invite = table(MemberReceived(name, A))
    assert isinstance(finish, FinishBroadcast)
    assert isinstance(invite, InviteMembers)
    assert invite.manifest == version(5)


def test_a_broken_attempt_makes_way_for_a_newer_version() -> None:
    table = Table()
    name = table.invited(1, A)
    table(BroadcastAsked(version(2), (A,)))
    abort, invite = table(AttemptFailed(name, "reset"))
    assert isinstance(abort, AbortGroup)
    assert isinstance(invite, InviteMembers)
    assert invite.manifest == version(2)


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["ask", "join", "got", "fail", "gone", "wait"]), st.sampled_from([A, B, C, None]))
    )
)
def test_whatever_happens_there_is_an_end(steps: list[tuple[str, MemberId | None]]) -> None:
    """After any events, a few deadlines lead to rest: finished, or handed over to pulling."""
    table = Table()
    number = 0
    for kind, member in steps:
        name = table.broadcast.name
        match kind, member:
            case "ask", _:
                number += 1
                table(BroadcastAsked(version(number), (A, B)))
            case "join", _:
                table(MemberJoined(name, member))
            case "got", str():
                table(MemberReceived(name, member))
            case "fail", _:
                table(AttemptFailed(name, "reset"))
            case "gone", str():
                table(MemberGone(member, "was killed"))
            case _:
                table.later(30.0)
    for _ in range(6):
        table.later(101.0)
    assert table.broadcast.phase == "idle"
