"""A run may be resumed with other settings: what was decided by the former ones stands, and is replayed by them."""

# pyright: reportArgumentType=false
# Ids are written plainly here.

from __future__ import annotations

import pytest

from penstock.control import events
from penstock.control.settings import EvaluationSection
from penstock.records.ids import PipelineName
from penstock.wire import messages

P = PipelineName("p")


def take(d, **changes):
    """Another life of the run, with other settings."""
    d.send(events.RunResumed())
    return d.send(events.SettingsTaken(d.control.settings.model_copy(update=changes)))


def trained(drive, steps: int, of: int = 6, **settings):
    d = drive(steps=of, max_staleness=2, **settings)
    d.send(events.SettingsTaken(d.settings))
    d.join("w")
    d.publish(0)
    for step in range(steps):
        d.fill()
        d.train(step)
        d.publish(step + 1)
    d.checkpoint(steps)
    return d


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 9},
        {"steps": 4},
        {"max_staleness": 0},
        {"max_staleness": 5},
        {"groups_per_step": 1},
        {"groups_per_step": 5},
        {"max_failures": 1},
        {"evaluation": EvaluationSection(every_steps=1, prompts=2)},
    ],
    ids=str,
)
def test_it_goes_on_by_other_settings_and_nothing_of_its_past_changes(drive, changes):
    """Replayed by the new settings, the past would be another: batches of another size, leases that were refused."""
    d = trained(drive, 4)
    d.lease(1000)
    assert isinstance(take(d, **changes), messages.Ok)
    assert (d.books.version, d.books.durable, d.counts["trained"]) == (4, 4, 16)
    if changes != {"steps": 4}:
        d.join("w2", trainer="t2", step=4)
        d.publish(4, member="t2")
        while d.books.version < 5:
            if getattr(answer := d.ask(2, "w2"), "verdict", "") != "granted":
                d.train(4, "t2")
            elif answer.leases[0].evaluation is None:
                d.deliver(answer.leases, "w2")
        assert len(d.books.steps[4].prompts) == d.control.settings.groups_per_step
    d.settings = d.control.settings  # a replay begins with the settings of today


def test_a_run_that_was_complete_goes_on_when_it_is_given_more_steps(drive):
    d = trained(drive, 2, of=2)
    d.send(messages.Unregister(P, "t", "finished"))
    assert d.control.phase == "complete"
    take(d)
    assert d.control.phase == "complete"
    take(d, steps=3)
    assert d.control.phase == "running"


def test_the_same_settings_are_no_event(drive):
    d = trained(drive, 1)
    revision = d.control.revision
    assert isinstance(d.send(events.SettingsTaken(d.settings)), messages.Ok)
    assert d.control.revision == revision


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"steps": 3}, "steps must be at least 4"),
        ({"group_size": 8}, "rollout.group_size must stay 2"),
        ({"filters": ["zero_signal"]}, r"train.filters must stay \[\]"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_and_changes_nothing(drive, changes, why):
    d = trained(drive, 4)
    refusal = take(d, **changes)
    assert isinstance(refusal, messages.Refused)
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(refusal.message)
    assert d.control.settings == d.settings


def test_an_evaluation_that_is_switched_on_and_off(drive):
    d = trained(drive, 1, of=2)
    take(d, evaluation=EvaluationSection(every_steps=1, prompts=2))
    d.join("w2", trainer="t2", step=1)
    d.publish(1, member="t2")
    assert not d.control.evaluation.idle
    take(d, evaluation=EvaluationSection())
    assert d.control.evaluation.idle
    assert "switched off" in d.control.state.evaluation.results[-1].skipped


def test_a_complete_run_is_not_evaluated_afterwards(drive):
    """Its workers are told that nothing is left to do."""
    d = trained(drive, 2, of=2)
    take(d, evaluation=EvaluationSection(every_steps=1, prompts=2))
    d.join(trainer="t2", step=2)
    d.publish(2, member="t2")
    assert d.control.phase == "complete"


def test_another_number_of_epochs_is_counted_anew(drive):
    d = drive(steps=None, epochs=1)
    d.send(messages.Register(P, "w", "rollout", prompt_count=3))
    assert d.books.prompt_limit == 3
    take(d, epochs=2)
    d.send(messages.Register(P, "w2", "rollout", prompt_count=3))
    assert d.books.prompt_limit == 6


def test_every_life_has_the_startup_grace(drive):
    """Processes take as long to start again as they took at first."""
    d = trained(drive, 1)
    take(d)
    d.tick(d.settings.startup_grace_s)
    assert d.control.status(d.now)["stalled_s"] == 0.0
    d.tick(5.0)
    assert d.control.status(d.now)["stalled_s"] > 0.0
