"""The whole world itself: a calm run is clean, and machines that break their promises are caught."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import InvalidTransition, RunFailed
from penstock.payload import slot as slots
from penstock.payload.slot import STATE_MASK
from penstock.sim.faults import WholeFaults
from penstock.sim.rings import SimRing
from penstock.sim.whole import WholeSettings, simulate_whole
from penstock.weights import replica
from penstock.weights.replica import Replica, ReplicaState, Resumed, ResumeEngine
from penstock.weights.transaction import WeightTransaction

SMALL: dict[str, Any] = {
    "steps": 12,
    "workers": 3,
    "groups_per_step": 4,
    "group_size": 2,
    "concurrency": 8,
    "check_every": 1,
}


def test_a_calm_run_of_everything_trains_what_it_was_asked_for() -> None:
    report = simulate_whole(WholeSettings(**SMALL, pipelines=2))
    assert report.steps == 2 * 12
    assert report.samples_trained == report.payloads_read == 2 * 12 * 8
    assert report.faults == {}
    assert report.dropped["failed"] == report.dropped["lost"] == 0
    assert max(report.staleness) <= 2
    assert report.weight_updates >= 2 * 12
    assert report.payload_calls > 0
    assert report.decode_looks > 2 * 12 * 8 / 8 * 3


def test_a_replica_that_resumes_a_mixture_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Replica._failed

    def careless(self: Replica, event: replica.UpdateFailed) -> list[replica.ReplicaEffect]:
        effects = honest(self, event)
        return [ResumeEngine()] if self.state is ReplicaState.TORN else effects

    monkeypatch.setattr(Replica, "_failed", careless)
    monkeypatch.setitem(replica.TRANSITIONS, (ReplicaState.TORN, Resumed), ReplicaState.SERVING)
    monkeypatch.setattr(Replica, "check", lambda self: None)
    with pytest.raises(InvalidTransition, match="generates"):
        simulate_whole(WholeSettings(**SMALL, in_place=1.0, faults=WholeFaults(write_fails=0.3)))


def test_a_slot_that_is_free_while_it_is_read_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = slots.take
    monkeypatch.setattr(slots, "take", lambda *args: honest(*args) & ~STATE_MASK)
    with pytest.raises(InvalidTransition, match="payload"):
        simulate_whole(WholeSettings(**SMALL, remote=0.0, ring_slots=40))


def test_a_slot_that_nobody_frees_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimRing, "discard", lambda self, refs: len(list(refs)))
    with pytest.raises(InvalidTransition, match="is leaked"):
        simulate_whole(WholeSettings(steps=100, workers=2, groups_per_step=4, group_size=2, concurrency=32))


def test_a_controller_that_offers_no_weights_ends_the_run_with_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeightTransaction, "_offer", lambda self, member, now, held=None: [])
    with pytest.raises(RunFailed, match="replicas served"):
        simulate_whole(WholeSettings(steps=5, workers=1, max_virtual_s=10_000.0))
