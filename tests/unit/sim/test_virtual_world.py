"""The simulation itself: deterministic, quick to fail, and able to notice what it is there to notice."""

from __future__ import annotations

import pytest

from penstock.control.ledger import Ledger
from penstock.errors import InvalidTransition, RunFailed
from penstock.sim.capacity import limit_per_s, sweep
from penstock.sim.engine import Engine, Owner, Signal, Sleep, Until
from penstock.sim.faults import Faults
from penstock.sim.world import SimSettings, simulate


def test_a_calm_run_trains_what_it_was_asked_for():
    report = simulate(SimSettings(steps=50, check_every=1))
    assert report.steps == 50
    assert report.samples_trained == 50 * 8 * 4
    assert max(report.staleness) <= 2
    assert sum(report.staleness.values()) == report.samples_trained
    assert report.faults == {}
    assert report.audits > 100


def test_equal_seeds_give_equal_runs_and_others_do_not():
    def storm(seed: int) -> object:
        return simulate(SimSettings(steps=20, seed=seed, faults=Faults.everything(2.0)))

    assert storm(5) == storm(5)
    assert storm(5) != storm(6)


def test_staleness_zero_is_synchronous_training():
    report = simulate(SimSettings(steps=20, max_staleness=0, check_every=1))
    assert report.staleness == {0: 20 * 32}
    assert report.dropped["outdated"] == 0


def test_waiting_for_stragglers_wastes_nothing():
    report = simulate(SimSettings(steps=50, straggler_wait_s=1000.0))
    assert report.dropped["outdated"] == 0


def test_a_run_that_cannot_finish_says_why():
    with pytest.raises(RunFailed, match=r"not finished after 300 virtual seconds: .*No rollout worker is registered"):
        simulate(SimSettings(steps=5, workers=0, max_virtual_s=300))


def test_a_ledger_that_forgets_a_sample_is_caught(monkeypatch):
    honest = Ledger.lose_member

    def forgetful(self, member, *, died):
        honest(self, member, died=died)
        if self.state.dropped["lost"]:
            self.state.counts["dropped"] -= 1

    monkeypatch.setattr(Ledger, "lose_member", forgetful)
    with pytest.raises(InvalidTransition, match="the sample table is broken"):
        simulate(SimSettings(steps=50, faults=Faults(kill_worker_every_s=5.0), check_every=1))


def test_a_ledger_that_skips_a_prompt_is_caught(monkeypatch):
    honest = Ledger.acknowledge

    def lossy(self, step, missing):
        changed = honest(self, step, missing)
        for prompt in missing:
            self.state.redo.pop(prompt, None)
        return changed

    monkeypatch.setattr(Ledger, "acknowledge", lossy)
    with pytest.raises(InvalidTransition, match="prompts"):
        simulate(SimSettings(steps=50, faults=Faults(lose_payload=0.2)))


def test_time_is_virtual_and_ordered():
    engine, seen, signal = Engine(), [], Signal()

    def sleeper(name: str, seconds: float):
        yield Sleep(seconds)
        seen.append((name, engine.now))
        engine.fire(signal)

    def waiter():
        yield Until(signal)
        seen.append(("waiter", engine.now))

    owner, doomed = Owner("a"), Owner("b")
    engine.spawn(owner, waiter())
    engine.spawn(owner, sleeper("late", 3600.0))
    engine.spawn(owner, sleeper("early", 5.0))
    engine.spawn(doomed, sleeper("never", 7.0))
    engine.after(6.0, setattr, doomed, "alive", False)
    engine.run(lambda: False, 1e9, str)
    assert seen == [("early", 5.0), ("waiter", 5.0), ("late", 3600.0)]


def test_capacity_is_swept_against_what_is_possible():
    settings = SimSettings(steps=60)
    points = sweep(settings, [1, 8], [0, 2])
    assert [(point.workers, point.max_staleness) for point in points] == [(1, 0), (1, 2), (8, 0), (8, 2)]
    assert all(0 < point.efficiency <= 1 for point in points)
    by_shape = {(point.workers, point.max_staleness): point for point in points}
    assert by_shape[8, 2].samples_per_s > by_shape[8, 0].samples_per_s > by_shape[1, 0].samples_per_s
    assert limit_per_s(settings) == 4 * 16 / 4.0
