"""Who counts as alive, and what becomes of those who do not."""

# pyright: reportArgumentType=false
# Ids are written plainly here.

from __future__ import annotations

import pytest

from penstock.control import effects
from penstock.control.membership import FORMER_KEPT
from penstock.control.settings import ControlSection
from penstock.records.ids import PipelineName
from penstock.wire import messages

P = PipelineName("p")


def beat(d, member: str = "w", ago_s: float = 0.0, doing: str = ""):
    return d.send(messages.Heartbeat(P, member, ago_s, doing))


def live(d, seconds: float, *members: str) -> list[effects.Effect]:
    """Time passes while these members' heartbeats arrive."""
    seen = []
    for _ in range(int(seconds)):
        d.now += 1.0
        for member in members:
            beat(d, member)
        seen += d.tick()
    return seen


def test_silence_makes_suspected_then_reaped_and_the_leases_return_at_once(drive):
    d = drive(suspect_after_s=4, evict_after_s=10)
    d.join("w", "x")
    beat(d, "w")
    beat(d, "x")
    (lease,) = d.lease(2)
    live(d, 5, "x", "t")
    assert d.control.status(d.now)["workers_suspected"] == 1
    assert d.counts == {"leased": 2}
    seen = live(d, 6, "x", "t")
    assert effects.EvictMember("w", "no message for 11 s") in seen
    assert effects.Announce("leases") in seen
    assert d.counts == {"dropped": 2}
    assert d.books.dropped["lost"] == 2
    again = d.lease(2, member="x")
    assert again[0].prompt == lease.prompt


def test_late_calls_of_the_reaped_are_refused_as_stale_for_ever(drive):
    d = drive(suspect_after_s=4, evict_after_s=10)
    d.join("w", "x")
    beat(d, "w")
    leases = d.lease(2)
    live(d, 12, "x", "t")
    revision = d.control.revision
    refused = messages.Refused("Stale", "w is no longer a member: no message for 11 s")
    assert d.deliver(leases) == refused
    assert d.ask(2) == refused
    assert d.send(messages.Register(P, "w", "rollout")) == refused
    assert beat(d, "w") == messages.HeartbeatSeen(False, "running")
    assert d.control.revision == revision


def test_a_suspected_member_that_is_heard_again_is_cleared(drive):
    d = drive(suspect_after_s=4, evict_after_s=10)
    d.join("w", trainer=None)
    beat(d)
    d.tick(6)
    beat(d)
    d.tick()
    assert "recovered" in d.lines[-1]
    assert d.control.status(d.now)["workers_alive"] == 1


def test_a_member_not_heard_yet_has_the_startup_grace(drive):
    d = drive(suspect_after_s=4, evict_after_s=10, startup_grace_s=60)
    d.join("w", trainer=None)
    d.tick(59)
    assert d.control.members.get("w") is not None
    d.tick(3)
    assert d.control.members.get("w") is None


def test_a_wedged_member_cannot_hide_behind_its_heartbeat(drive):
    d = drive(suspect_after_s=4, evict_after_s=10, wedged_after_s=30)
    d.join("w", trainer=None)
    seen = []
    for second in range(40):
        d.now += 1.0
        beat(d, "w", float(second), "generate")
        seen += d.tick()
    (evicted,) = [effect for effect in seen if isinstance(effect, effects.EvictMember)]
    assert evicted.reason.startswith("no progress for 3")
    assert "'generate'" in evicted.reason


def test_a_gap_in_the_controllers_own_time_evicts_no_member(drive):
    d = drive(suspect_after_s=4, evict_after_s=10)
    d.join("w")
    beat(d)
    d.now += 500.0
    d.tick()
    assert "the controller did not run for 500 s" in d.lines[-1]
    assert d.control.members.get("w") is not None
    seen = live(d, 20, "t")
    assert [effect.member for effect in seen if isinstance(effect, effects.EvictMember)] == ["w"]


def test_the_first_call_after_the_controllers_absence_evicts_no_other_member(drive):
    """The first event after a restart is as likely a delivery as a tick."""
    d = drive(suspect_after_s=4, evict_after_s=10)
    d.join("quick", "slow")
    beat(d, "quick")
    beat(d, "slow")
    d.now += 60.0
    beat(d, "quick")
    assert "did not run for 60 s" in d.lines[-1]
    d.tick(5)
    assert d.control.members.get("slow") is not None


def test_close_heartbeats_are_not_recorded(drive):
    d = drive(suspect_after_s=8)
    d.join("w")
    beat(d)
    revision = d.control.revision
    d.now += 1.0
    beat(d)
    assert d.control.revision == revision
    d.now += 1.0
    beat(d)
    assert d.control.revision == revision + 1


def test_a_death_seen_by_the_supervisor_needs_no_timeout(drive):
    d = drive()
    d.join("w", "x")
    d.lease(2)
    d.send(messages.Unregister(P, "w", "exit code -9", died=True))
    assert effects.EvictMember("w", "exit code -9") in d.sent
    assert d.lease(2, member="x")[0].prompt == 0


def test_leaving_twice_is_harmless(drive):
    d = drive()
    d.join("w")
    assert d.send(messages.Unregister(P, "w")) == messages.Ok()
    assert d.send(messages.Unregister(P, "w")) == messages.Ok()


def test_workers_may_join_and_leave_while_running(drive):
    d = drive(max_staleness=3, steps=4)
    d.join("a")
    for step, worker in enumerate("bcd"):
        d.fill(member=chr(ord(worker) - 1))
        d.join(worker, trainer=None)
        d.train(step)
        d.send(messages.Unregister(P, chr(ord(worker) - 1)))
    assert d.counts == {"trained": 12}


def test_registering_again_refreshes_and_changes_nothing_else(drive):
    d = drive()
    d.join("w")
    d.lease(2)
    d.join("w", trainer="t")
    assert d.counts == {"leased": 2}
    assert d.control.state.members.joined == 2


def test_calls_of_the_wrong_role_are_refused(drive):
    d = drive()
    d.join("w")
    assert d.send(messages.AskBatch(P, "w", 0)).kind == "LocalProtocolError"
    assert d.send(messages.AskLease(P, "t", 0, 1, 0)).kind == "LocalProtocolError"
    assert d.send(messages.AskLease(P, "unknown", 0, 1, 0)).kind == "Stale"
    assert d.send(messages.AskLease(P, "w", 0, 0, 0)).kind == "LocalProtocolError"


def test_only_so_many_departed_members_are_remembered_by_name(drive):
    d = drive()
    for number in range(FORMER_KEPT + 10):
        d.join(f"w{number}", trainer=None)
        d.send(messages.Unregister(P, f"w{number}"))
    assert len(d.control.state.members.former) == FORMER_KEPT


def test_time_never_runs_backwards_inside(drive):
    d = drive()
    d.now = 100.0
    d.join("w")
    d.now = 40.0
    beat(d)
    assert d.control.members.get("w").heard_at == 100.0


@pytest.mark.parametrize("seconds", [15.0, 60.0])
def test_no_process_is_evicted_before_it_is_suspected(seconds):
    """Heartbeats are recorded per quarter of `suspect_after_s`: above `evict_after_s` healthy members were evicted."""
    with pytest.raises(ValueError, match=r"evict_after_s = 15 .* suspect_after_s = .*: raise evict_after_s"):
        ControlSection(suspect_after_s=seconds)
    assert ControlSection(suspect_after_s=seconds, evict_after_s=seconds + 1)
