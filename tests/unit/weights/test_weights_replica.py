"""The replica machine: the whole table, and what follows a failure in each state."""

from __future__ import annotations

from itertools import product

import pytest

from penstock.errors import InvalidTransition
from penstock.records.ids import Version
from penstock.records.weights import Held
from penstock.weights.replica import (
    MAX_INTERRUPTIONS,
    RESUME_TRIES,
    TRANSITIONS,
    AbandonReplica,
    Mismatched,
    Paused,
    Replica,
    ReplicaEvent,
    ReplicaState,
    ReportReplicaState,
    Resumed,
    ResumeEngine,
    Swapped,
    UpdateFailed,
    Verified,
    WriteBegan,
)

S = ReplicaState
OLD, NEW = "a" * 32, "b" * 32
EVENTS: list[ReplicaEvent] = [
    Paused(),
    WriteBegan(),
    Verified(Version(2), NEW),
    Swapped(Version(2), NEW),
    Mismatched(NEW, OLD),
    Resumed(),
]
TO_SERVING: list[ReplicaEvent] = [Verified(Version(1), OLD), Resumed()]
PATHS: dict[ReplicaState, list[ReplicaEvent]] = {
    S.STALE: [],
    S.SERVING: TO_SERVING,
    S.PAUSED: [*TO_SERVING, Paused()],
    S.TORN: [*TO_SERVING, Paused(), WriteBegan()],
    S.LOADED: [*TO_SERVING, Paused(), WriteBegan(), Verified(Version(2), NEW)],
}


def replica_in(state: ReplicaState) -> Replica:
    replica = Replica()
    for event in PATHS[state]:
        replica.handle(event, 0.0)
    assert replica.state is state
    return replica


@pytest.mark.parametrize(
    ("state", "event"), list(product(S, EVENTS)), ids=lambda x: getattr(x, "value", type(x).__name__)
)
def test_the_table_and_nothing_else(state: ReplicaState, event: ReplicaEvent) -> None:
    replica = replica_in(state)
    target = TRANSITIONS.get((state, type(event)))
    if target is None:
        before = repr(replica)
        with pytest.raises(InvalidTransition, match=state.value):
            replica.handle(event, 1.0)
        assert repr(replica) == before
    else:
        replica.handle(event, 1.0)
        assert replica.state is target
    replica.check()


def test_torn_is_left_only_through_a_verified_version() -> None:
    ways_out = {
        (event.__name__, target)
        for (state, event), target in TRANSITIONS.items()
        if state is S.TORN and target is not S.TORN
    }
    assert ways_out == {("Verified", S.LOADED)}


def test_serving_is_entered_only_from_complete_versions() -> None:
    sources = {state for (state, _), target in TRANSITIONS.items() if target is S.SERVING}
    assert sources == {S.SERVING, S.PAUSED, S.LOADED}


@pytest.mark.parametrize("state", [S.SERVING, S.TORN, S.STALE])
def test_a_failure_where_nothing_can_be_resumed_is_reported(state: ReplicaState) -> None:
    replica = replica_in(state)
    (report,) = replica.handle(UpdateFailed("fetch", "no route"), 1.0)
    assert isinstance(report, ReportReplicaState)
    assert (report.state, report.error) == (state, "fetch: no route")
    assert bool(report.digest) is (state is S.SERVING)


def test_a_transfer_that_breaks_off_is_begun_again_a_few_times_before_it_counts() -> None:
    replica = replica_in(S.SERVING)
    broken = UpdateFailed("fetch", "reset", transient=True)
    for _ in range(MAX_INTERRUPTIONS):
        assert replica.handle(broken, 1.0) == []
        assert (replica.failures, replica.first_error) == (0, "")
    assert [type(effect) for effect in replica.handle(broken, 1.0)] == [ReportReplicaState]
    replica.handle(Swapped(Version(2), NEW), 2.0)
    assert replica.handle(broken, 3.0) == []
    assert [type(effect) for effect in replica.handle(UpdateFailed("swap", "x", True), 4.0)] == [ReportReplicaState]


@pytest.mark.parametrize(("state", "version", "digest"), [(S.PAUSED, 1, OLD), (S.LOADED, 2, NEW)])
def test_a_failure_with_a_complete_version_resumes_it(state: ReplicaState, version: int, digest: str) -> None:
    replica = replica_in(state)
    assert replica.handle(UpdateFailed("pause", "slow"), 1.0) == [ResumeEngine()]
    (report,) = replica.handle(Resumed(), 1.0)
    assert report == ReportReplicaState(S.SERVING, Version(version), digest, "pause: slow")


def test_resuming_is_tried_a_few_times_and_then_the_replica_is_given_up() -> None:
    replica = replica_in(S.LOADED)
    for _ in range(RESUME_TRIES - 1):
        assert replica.handle(UpdateFailed("resume", "refused"), 1.0) == [ResumeEngine()]
    report, abandon = replica.handle(UpdateFailed("resume", "refused"), 1.0)
    assert isinstance(report, ReportReplicaState)
    assert isinstance(abandon, AbandonReplica)
    assert "refused" in abandon.reason


def test_a_replica_that_cannot_be_refitted_is_given_up_with_its_first_error() -> None:
    replica = replica_in(S.TORN)
    for number in range(2):
        replica.handle(UpdateFailed("write", f"error {number}"), 1.0)
    *_, abandon = replica.handle(UpdateFailed("write", "error 2"), 1.0)
    assert isinstance(abandon, AbandonReplica)
    assert "error 0" in abandon.reason
    assert replica.later_errors == ["write: error 1", "write: error 2"]


@pytest.mark.parametrize("state", [S.STALE, S.TORN, S.SERVING])
def test_a_damaged_version_is_reported_and_never_costs_the_process(state: ReplicaState) -> None:
    replica, damaged = replica_in(state), Held(Version(2), NEW)
    for _ in range(20):
        (report,) = replica.handle(UpdateFailed("fetch", "damaged", damaged=damaged), 1.0)
        assert isinstance(report, ReportReplicaState)
        assert report.damaged == damaged
    (report,) = replica.handle(UpdateFailed("stage", "x"), 2.0)
    assert isinstance(report, ReportReplicaState)
    assert report.damaged is None


def test_a_serving_replica_is_never_given_up_for_failed_updates() -> None:
    replica = replica_in(S.SERVING)
    for _ in range(20):
        assert [type(e) for e in replica.handle(UpdateFailed("fetch", "x"), 1.0)] == [ReportReplicaState]
    assert len(replica.later_errors) <= 8
    replica.handle(Swapped(Version(2), NEW), 2.0)
    assert (replica.failures, replica.first_error) == (0, "")


@pytest.mark.parametrize("state", list(S))
def test_what_is_held_is_claimed_only_when_complete(state: ReplicaState) -> None:
    complete = state in (S.SERVING, S.PAUSED, S.LOADED)
    assert bool(replica_in(state).held.digest) is complete
    assert replica_in(state).may_serve is (state is S.SERVING)
