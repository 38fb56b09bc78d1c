"""Evaluations under seeded faults, in the plain simulation and in the whole one.

The simulation itself compares every result with what its version is worth, and at the end looks for points that nothing
is said of. A failure prints its seed; the same seed fails again in the same way.
"""

from __future__ import annotations

from collections import Counter

import pytest

from penstock.control.settings import EvaluationSection
from penstock.errors import InvalidTransition, PenstockError
from penstock.records.ids import SampleId, Version
from penstock.sim import scoring
from penstock.sim.faults import Faults, WholeFaults
from penstock.sim.whole import WholeSettings, simulate_whole
from penstock.sim.world import SimReport, SimSettings, simulate

EVALUATION = EvaluationSection(every_steps=5, prompts=12, samples=2, temperature=1.0, timeout_s=120.0)


def run(settings: SimSettings) -> SimReport:
    try:
        return simulate(settings)
    except PenstockError as error:
        pytest.fail(f"seed {settings.seed}: {type(error).__name__}: {error}\nreproduce: simulate({settings!r})")


def test_without_faults_every_point_is_made():
    report = run(SimSettings(steps=60, evaluation=EVALUATION, check_every=10))
    assert report.evaluated == 13
    assert report.evaluations_skipped == {}


def test_training_goes_on_beside_evaluation():
    """One of four workers evaluates at a time, so training takes a little longer, but no step waits for a point."""
    without = run(SimSettings(steps=60))
    report = run(SimSettings(steps=60, evaluation=EVALUATION))
    assert report.samples_trained == without.samples_trained
    assert report.virtual_s < 1.5 * without.virtual_s


@pytest.mark.parametrize("workers", [1, 2])
def test_storms(workers: int):
    fired: Counter[str] = Counter()
    evaluated, skipped = 0, Counter[str]()
    evaluation = EvaluationSection(
        every_steps=5, prompts=12, samples=2, temperature=1.0, timeout_s=120.0, workers=workers
    )
    for seed in range(6):
        settings = SimSettings(steps=60, seed=seed, evaluation=evaluation, check_every=40, faults=Faults.everything())
        report = run(settings)
        fired.update(report.faults)
        evaluated += report.evaluated
        skipped.update(report.evaluations_skipped)
    assert evaluated >= 6 * 8
    assert skipped.keys() >= {"superseded by", "training was"}
    assert fired.keys() >= {"worker killed", "controller killed", "run resumed", "trainer killed", "wrong weights"}


def test_storms_over_the_whole():
    fired: Counter[str] = Counter()
    for seed in range(3):
        settings = WholeSettings(
            steps=30, seed=seed, pipelines=1 + seed % 2, evaluation=EVALUATION, faults=WholeFaults.everything()
        )
        try:
            report = simulate_whole(settings)
        except PenstockError as error:
            pytest.fail(f"seed {seed}: {type(error).__name__}: {error}\nreproduce: simulate_whole({settings!r})")
        fired.update(report.faults)
        assert report.evaluated >= 4 * settings.pipelines
    assert fired.keys() >= {"worker killed", "controller killed", "trainer killed", "engine hung"}


def test_a_sample_of_another_version_would_be_noticed(monkeypatch: pytest.MonkeyPatch):
    """The simulation's own check can fail: here the workers lie about the weights they used."""

    def lies(lease, samples, seen):
        asked = Version(lease.evaluation)
        honest = scoring.scores(lease, samples, seen)
        earned = scoring.worth(asked + 1, lease.prompt, 0)
        return [type(score)(SampleId(score.sample), asked, asked, score.weights_digest, earned, 1) for score in honest]

    monkeypatch.setattr("penstock.sim.actors.scores", lies)
    with pytest.raises(InvalidTransition, match="the mean of that version"):
        simulate(SimSettings(steps=20, evaluation=EVALUATION))
