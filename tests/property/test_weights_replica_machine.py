"""The replica machine against a model of the engine's memory: whatever happens, only complete versions serve."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.errors import InvalidTransition
from penstock.records.ids import Version
from penstock.weights.replica import (
    Mismatched,
    Paused,
    Replica,
    ReplicaEffect,
    ReplicaEvent,
    ReplicaState,
    Resumed,
    ResumeEngine,
    Swapped,
    UpdateFailed,
    Verified,
    WriteBegan,
)
from profiles import examples

BUCKETS = 3
VERSIONS = st.integers(0, 5)
S = ReplicaState


def digest(version: int) -> str:
    return f"{version:032x}"


class ReplicaMachine(RuleBasedStateMachine):
    """The memory is a list of the version in each bucket; the engine generates unless it was stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.replica = Replica()
        self.memory = [-1] * BUCKETS
        self.generating = False
        self.now = 0.0

    def tell(self, event: ReplicaEvent) -> list[ReplicaEffect]:
        self.now += 1.0
        return self.replica.handle(event, self.now)

    def complete(self) -> bool:
        return self.memory[0] >= 0 and len(set(self.memory)) == 1

    def carry_out(self, effects: list[ReplicaEffect]) -> None:
        for effect in effects:
            if isinstance(effect, ResumeEngine):
                self.generating = True
                self.carry_out(self.tell(Resumed()))

    @rule()
    def pause(self) -> None:
        self.generating = False
        self.tell(Paused())

    @precondition(lambda self: not self.generating)
    @rule(version=VERSIONS, bucket=st.integers(0, BUCKETS - 1))
    def write_one_bucket(self, version: int, bucket: int) -> None:
        self.tell(WriteBegan())
        self.memory[bucket] = version

    @precondition(lambda self: not self.generating)
    @rule(version=VERSIONS)
    def write_all_and_prove(self, version: int) -> None:
        self.tell(WriteBegan())
        self.memory = [version] * BUCKETS
        self.tell(Verified(Version(version), digest(version)))

    @precondition(lambda self: self.replica.state in (S.TORN, S.LOADED, S.STALE))
    @rule(expected=VERSIONS)
    def prove(self, expected: int) -> None:
        if self.complete() and self.memory[0] == expected:
            self.tell(Verified(Version(expected), digest(expected)))
        else:
            self.tell(Mismatched(digest(expected), "?"))

    @precondition(lambda self: self.replica.state is S.SERVING)
    @rule(version=VERSIONS)
    def swap(self, version: int) -> None:
        self.memory = [version] * BUCKETS
        self.tell(Swapped(Version(version), digest(version)))

    @precondition(lambda self: self.replica.state is S.SERVING)
    @rule(bucket=st.integers(0, BUCKETS - 1), version=VERSIONS)
    def damage_and_notice(self, bucket: int, version: int) -> None:
        """A stray write: the proof finds it and the engine is stopped, before anything else happens."""
        self.memory[bucket] = version
        if not self.complete() or self.memory[0] != self.replica.version:
            self.generating = False
            self.tell(Mismatched(self.replica.digest, "?"))

    @precondition(lambda self: self.replica.state in (S.LOADED, S.PAUSED))
    @rule()
    def resume(self) -> None:
        self.generating = True
        self.tell(Resumed())

    @precondition(lambda self: self.replica.state in (S.TORN, S.STALE))
    @rule()
    def resuming_a_mixture_is_refused(self) -> None:
        try:
            self.tell(Resumed())
        except InvalidTransition:
            return
        raise AssertionError(f"a mixture was resumed: {self.replica}")

    @rule(step=st.sampled_from(["fetch", "stage", "swap", "write", "verify"]))
    def fail(self, step: str) -> None:
        self.carry_out(self.tell(UpdateFailed(step, "boom")))

    @rule()
    def restart(self) -> None:
        """A new process, and a new machine with it."""
        self.replica = Replica()
        self.generating = False
        self.memory = [-1] * BUCKETS

    @invariant()
    def only_one_complete_version_generates(self) -> None:
        self.replica.check()
        repr(self.replica)
        assert self.replica.may_serve == self.generating
        if self.generating:
            assert self.complete(), self.memory
            assert self.memory[0] == self.replica.version
            assert self.replica.digest == digest(self.memory[0])

    @invariant()
    def what_is_claimed_is_held(self) -> None:
        if self.replica.held.digest:
            assert self.complete()
            assert self.replica.held.digest == digest(self.memory[0])


TestReplicaMachine = ReplicaMachine.TestCase
TestReplicaMachine.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
