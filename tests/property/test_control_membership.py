"""Membership against what really happened: when each process was last heard, moved, and was it ever let go.

The machine records heartbeats coarsely and judges by its own clock; the model knows the truth. Between them must hold:
no member is evicted that was heard recently enough, none stays that was silent too long, and none comes back.
"""

# pyright: reportArgumentType=false
# Ids are written plainly here.

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.control import effects, events
from penstock.control.pipeline import PipelineControl
from penstock.control.settings import PipelineSettings
from penstock.wire import messages
from profiles import examples

P = "p"

SETTINGS = PipelineSettings(
    name="p",
    steps=1000,
    groups_per_step=2,
    group_size=2,
    max_staleness=100,
    suspect_after_s=8.0,
    evict_after_s=20.0,
    wedged_after_s=60.0,
    startup_grace_s=40.0,
    stall_fail_after_s=float("inf"),
)
COARSE_S = SETTINGS.resolution_s
TICK_S = 1.0


class MembershipMachine(RuleBasedStateMachine):
    @initialize()
    def start(self):
        self.control = PipelineControl(SETTINGS)
        self.now = 0.0
        self.registered: dict[str, float] = {}
        self.heard: dict[str, float] = {}
        self.moved: dict[str, float] = {}
        self.heartbeat_seen: set[str] = set()
        self.gone: set[str] = set()
        self.suspects: dict[str, float] = {}
        self.requests: dict[str, int] = {}

    def send(self, event: events.Event) -> Any:
        sent = self.control.handle(event, self.now)
        for effect in sent:
            if isinstance(effect, effects.EvictMember):
                self.judge_eviction(effect)
        return sent[0] if sent else None

    def judge_eviction(self, evicted: effects.EvictMember) -> None:
        """No one is let go who was heard, and moved, recently: the recorded times lag by at most the resolution."""
        member = evicted.member
        silent_s, idle_s = self.now - self.heard[member], self.now - self.moved[member]
        too_silent = silent_s > SETTINGS.evict_after_s - COARSE_S
        too_idle = idle_s > SETTINGS.wedged_after_s - COARSE_S
        assert too_silent or too_idle, f"{member} was let go after {silent_s} s of silence: {evicted.reason}"
        self.gone.add(member)

    @property
    def live(self) -> list[str]:
        return [member for member in self.registered if member not in self.gone]

    @precondition(lambda self: len(self.live) < 4)
    @rule()
    def register(self):
        name = f"w{len(self.registered)}"
        assert isinstance(self.send(messages.Register(P, name, "rollout")), messages.Registered)
        self.registered[name] = self.heard[name] = self.moved[name] = self.now

    @precondition(lambda self: self.live)
    @rule(data=st.data(), ago_s=st.sampled_from([0.0, 0.5, 30.0, 100.0]))
    def beat(self, data, ago_s):
        member = data.draw(st.sampled_from(self.live))
        known = isinstance(answer := self.send(messages.Heartbeat(P, member, ago_s)), messages.HeartbeatSeen)
        assert known
        assert answer.known == (member not in self.gone)
        self.heard[member] = self.now
        self.moved[member] = max(self.moved[member], self.now - ago_s)
        self.heartbeat_seen.add(member)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def lease(self, data):
        member = data.draw(st.sampled_from(self.live))
        request = self.requests.get(member, 0)
        answer = self.send(messages.AskLease(P, member, request, 2, 0))
        if getattr(answer, "verdict", "") == "granted":
            self.requests[member] = request + 1
            self.heard[member] = self.moved[member] = self.now

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave(self, data):
        member = data.draw(st.sampled_from(self.live))
        assert self.send(messages.Unregister(P, member)) == messages.Ok()
        self.gone.add(member)

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def call_from_beyond(self, data):
        member = data.draw(st.sampled_from(sorted(self.gone)))
        revision = self.control.revision
        for event in (
            messages.Register(P, member, "rollout"),
            messages.AskLease(P, member, 999, 2, 0),
            messages.Deliver(P, member),
        ):
            answer = self.send(event)
            assert isinstance(answer, messages.Refused)
            assert answer.kind == "Stale"
        assert self.send(messages.Heartbeat(P, member, 0.0)) == messages.HeartbeatSeen(False, "running")
        assert self.control.revision == revision

    @rule(seconds=st.integers(1, 30), beating=st.booleans())
    def time_passes(self, seconds, beating):
        for _ in range(seconds):
            self.now += TICK_S
            for member in self.live if beating else ():
                self.send(messages.Heartbeat(P, member, 0.0))
                self.heard[member] = self.moved[member] = self.now
                self.heartbeat_seen.add(member)
            self.send(events.TimePassed())
        self.nobody_stays_who_is_silent()

    @rule(seconds=st.sampled_from([30.0, 500.0]), tick_first=st.booleans())
    def the_controller_is_away(self, seconds, tick_first):
        """No member can be heard meanwhile, and none may be evicted for it, whichever is heard first afterwards."""
        before = list(self.live)
        self.now += seconds
        for member in before[:1] if not tick_first else ():
            self.send(messages.Heartbeat(P, member, 0.0))
            self.heartbeat_seen.add(member)
        self.send(events.TimePassed())
        assert self.live == before
        for member in before:
            self.heard[member] = self.moved[member] = self.now

    def nobody_stays_who_is_silent(self) -> None:
        for member in self.live:
            grace_s = 0.0 if member in self.heartbeat_seen else SETTINGS.startup_grace_s
            since_s = self.now - max(self.heard[member], self.registered[member] + grace_s - SETTINGS.evict_after_s)
            assert since_s <= SETTINGS.evict_after_s + 2 * COARSE_S, f"{member} has been silent for {since_s} s"

    @invariant()
    def the_machine_agrees_who_is_live(self):
        if not hasattr(self, "control"):
            return
        assert list(self.control.state.members.live) == self.live
        assert set(self.control.ledger.state.leases) <= set(self.live), "leases of the gone were taken back"
        self.control.check()


TestMembership = MembershipMachine.TestCase
TestMembership.settings = settings(
    max_examples=examples(60), stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
