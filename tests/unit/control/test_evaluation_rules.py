"""Evaluation as a pipeline sees it: when evaluations are due, who makes them, what they do not touch, how they end."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.control import effects, events
from penstock.control.evaluation import MAX_FAILURES
from penstock.control.evaluation_state import EvaluationResult
from penstock.control.settings import EvaluationSection
from penstock.records.ids import FIRST_EVALUATION_SAMPLE, MemberId, PipelineName, SampleId, Version
from penstock.records.prompt import PromptLease
from penstock.records.rollout import FailedRollout, Score
from penstock.records.weights import Held
from penstock.wire import messages

P = PipelineName("p")

SETTINGS = EvaluationSection(every_steps=2, prompts=3, timeout_s=100.0)


@pytest.fixture
def ready(drive):
    """Two workers, a trainer, and version 0 published."""

    def make(settings: EvaluationSection = SETTINGS, **more):
        driver = drive(evaluation=settings, **more)
        driver.join("w", "v")
        driver.publish(0)
        return driver

    return make


def evaluate(driver, leases: tuple[PromptLease, ...], member: str = "w", reward: float = 1.0, **changed) -> Any:
    scores = []
    for lease in leases:
        assert lease.evaluation is not None
        for sample in lease.samples:
            made: dict[str, Any] = {"version": lease.evaluation, "newest": lease.evaluation}
            made |= {"weights_digest": f"digest{lease.evaluation}"}
            scores.append(Score(sample=sample, reward=reward, length=4, **(made | changed)))
    return driver.send(messages.Deliver(P, MemberId(member), scores=tuple(scores)))


def ended(driver) -> list[EvaluationResult]:
    return [note.result for note in driver.instructed(effects.NoteEvaluation)]


def pinned(driver, member: str) -> bool:
    return driver.control.keeps_weights(MemberId(member), Held(Version(-1), "none of those that are known"))


def step(driver, number: int) -> None:
    driver.fill()
    driver.train(number)
    driver.publish(number + 1)


def test_the_first_version_is_evaluated_before_anything_else(ready):
    driver = ready()
    leases = driver.lease(8)
    assert [(lease.prompt, lease.members, lease.evaluation) for lease in leases] == [(p, (0,), 0) for p in range(3)]
    assert min(lease.samples[0] for lease in leases) == FIRST_EVALUATION_SAMPLE
    evaluate(driver, leases, reward=0.25)
    [result] = ended(driver)
    assert (result.version, result.samples, result.reward_mean, result.length_mean) == (0, 3, 0.25, 4)
    assert driver.control.status(driver.now)["eval_reward"] == 0.25


def test_training_does_not_see_it(ready, drive):
    """Neither the counts nor the throttle nor the staleness bound know of samples that are never trained."""
    driver, other = ready(), drive()
    other.join("w", "v")
    other.publish(0)
    evaluate(driver, driver.lease(8))
    assert driver.counts == other.counts == {}
    assert driver.control.admission.capacity() == other.control.admission.capacity()
    assert driver.lease(2)[0].samples == other.lease(2)[0].samples
    assert driver.books.next_sample == other.books.next_sample


def test_only_one_worker_evaluates_and_is_pinned_meanwhile(ready):
    driver = ready()
    leases = driver.lease(2, "w")
    assert pinned(driver, "w")
    assert driver.lease(2, "v")[0].evaluation is None
    assert not pinned(driver, "v")
    leases += driver.lease(2, "w")
    evaluate(driver, leases)
    assert not pinned(driver, "w")
    assert "weights" in driver.announced()


def test_an_unsteady_worker_or_one_that_lags_behind_is_not_asked(ready):
    driver = ready()
    answer = driver.send(messages.AskLease(P, MemberId("w"), 0, 2, Version(0), 0, steady=False))
    assert answer.leases[0].evaluation is None
    evaluate(driver, driver.lease(8, "v"), "v")
    step(driver, 0)
    step(driver, 1)
    assert driver.control.evaluation.state.running.due == 2
    assert driver.ask(2, "v", version=1).leases[0].evaluation is None


def test_workers_keep_what_they_serve_until_one_of_them_begins(ready):
    """Or where weights change as fast as they can be loaded no worker would ever be steady."""
    driver = ready()
    evaluate(driver, driver.lease(8))
    step(driver, 0)
    assert not driver.control.keeps_weights(MemberId("w"), Held(Version(1), "digest1")), "no evaluation is due"
    step(driver, 1)
    assert driver.control.keeps_weights(MemberId("w"), Held(Version(2), "digest2"))
    assert driver.control.keeps_weights(MemberId("v"), Held(Version(2), "digest2"))
    assert not driver.control.keeps_weights(MemberId("v"), Held(Version(1), "digest1")), "too old for it"
    assert not driver.control.keeps_weights(MemberId("v"), Held(Version(2), "of a lost lineage"))
    driver.lease(8, "v")
    assert "weights" in driver.announced()
    assert not driver.control.keeps_weights(MemberId("w"), Held(Version(2), "digest2"))


def test_the_point_is_of_the_version_that_its_worker_serves(ready):
    """Versions in between may never be published, or never be loaded."""
    driver = ready(max_staleness=5)
    evaluate(driver, driver.lease(8))
    driver.fill(6)
    for number in range(3):
        driver.train(number)
    driver.publish(3)
    assert driver.lease(8)[0].evaluation == 3
    assert driver.control.evaluation.state.running.due == 2


@pytest.mark.parametrize(
    "changed",
    [{"newest": Version(1)}, {"version": Version(1), "newest": Version(1)}, {"weights_digest": "torn"}],
)
def test_a_sample_of_other_weights_does_not_count_and_is_made_again(ready, changed):
    driver = ready()
    answer = evaluate(driver, driver.lease(1), **changed)
    assert len(answer.refused) == 1
    assert "version 0 is evaluated" in answer.reason
    assert not pinned(driver, "w"), "it does not serve what it said"
    again = driver.lease(8)
    assert [lease.prompt for lease in again] == [0, 1, 2]
    evaluate(driver, again)
    assert ended(driver)[0].samples == 3


def test_what_a_dead_worker_held_is_issued_again(ready):
    driver = ready()
    first, *others = driver.lease(8)
    evaluate(driver, (first,), reward=0.0)
    driver.send(messages.Unregister(P, MemberId("w"), died=True))
    assert "leases" in driver.announced()
    again = driver.lease(8, "v")
    assert [lease.prompt for lease in again] == [lease.prompt for lease in others]
    assert evaluate(driver, tuple(others)).kind == "Stale", "a dead worker's scores count for nothing"
    evaluate(driver, again, "v", reward=1.0)
    assert (ended(driver)[0].samples, ended(driver)[0].reward_mean) == (3, pytest.approx(2 / 3))


def test_when_no_worker_serves_the_version_any_more_the_evaluation_begins_again(ready):
    driver = ready()
    evaluate(driver, driver.lease(1), reward=0.0)
    driver.fill(member="v")
    driver.train(0)
    driver.publish(1)
    assert driver.ask(8, "v", version=1).leases[0].evaluation is None, "w still serves it"
    driver.send(messages.Unregister(P, MemberId("w"), died=True))
    leases = driver.lease(8, "v", version=1)
    assert [(lease.prompt, lease.evaluation) for lease in leases] == [(0, 1), (1, 1), (2, 1)]
    evaluate(driver, leases, "v", reward=1.0)
    assert (ended(driver)[0].version, ended(driver)[0].reward_mean) == (1, 1.0)


def test_a_delivery_that_is_repeated_counts_once(ready):
    driver = ready()
    leases = driver.lease(2)
    evaluate(driver, leases)
    revision = driver.control.revision
    evaluate(driver, leases)
    assert driver.control.revision == revision
    assert len(driver.control.evaluation.state.running.scores) == 2


def test_failures_are_tried_again_and_then_left_out(ready):
    driver = ready()
    good, bad, poisoned = driver.lease(8)
    evaluate(driver, (good,))
    driver.fail(*poisoned.samples, poison=True)
    driver.fail(*bad.samples)
    for _ in range(MAX_FAILURES - 1):
        [bad] = driver.lease(8)
        driver.fail(*bad.samples)
    [result] = ended(driver)
    assert (result.samples, result.failed, result.skipped) == (1, 2, "")
    assert driver.control.state.set_aside_in_a_row == 0, "no prompt of training failed"


def test_a_point_of_failures_alone_is_skipped_with_the_error(ready):
    driver = ready()
    driver.fail(*(sample for lease in driver.lease(8) for sample in lease.samples), poison=True)
    assert ended(driver)[0].skipped == "every sample failed, the last with generate: boom"


def test_a_point_that_takes_too_long_is_skipped_with_the_reason(ready):
    driver = ready()
    evaluate(driver, driver.lease(1))
    sent = driver.tick(SETTINGS.timeout_s + 1)
    [note] = [effect for effect in sent if isinstance(effect, effects.NoteEvaluation)]
    assert note.result.skipped == "only 1 of 3 samples of version 0 were scored within 100 s"
    assert driver.control.status(driver.now)["eval_skipped"] == 1


def test_the_time_a_controller_was_away_does_not_count(ready):
    driver = ready()
    leases = driver.lease(8)
    driver.now += 10 * SETTINGS.timeout_s
    driver.tick()
    evaluate(driver, leases)
    assert ended(driver)[0].samples == 3


def test_the_running_point_ends_and_of_those_that_wait_the_newest_wins(ready):
    driver = ready(max_staleness=9)
    leases = driver.lease(8)
    driver.fill(10, member="v", version=0)
    for number in range(5):
        driver.train(number)
        driver.publish(number + 1)
    assert driver.control.evaluation.state.waiting == 4
    assert [result.due for result in driver.control.evaluation.state.results] == [2]
    assert "superseded by version 4" in driver.control.evaluation.state.results[0].skipped
    evaluate(driver, leases)
    assert ended(driver)[0].version == 0
    assert driver.control.evaluation.state.running.due == 4


def test_the_last_version_is_evaluated_before_the_run_is_complete(ready):
    driver = ready(steps=1)
    evaluate(driver, driver.lease(8))
    driver.fill()
    driver.train(0)
    asked = messages.AskBatch(P, MemberId("t"), 1)  # type: ignore[arg-type]
    assert driver.send(asked).waiting_for == "the evaluation of the last version"
    driver.checkpoint(1)
    assert driver.control.phase == "draining"
    assert "its last evaluation is missing" in driver.control.diagnose(driver.now)
    assert driver.control.demand() == (3, 4)
    assert driver.ask(8, version=0).verdict == "throttled", "its weights are not published yet"
    driver.publish(1)
    assert driver.ask(8, version=0).verdict == "version_too_old"
    leases = driver.lease(8)
    evaluate(driver, leases)
    assert ended(driver)[0].version == 1
    assert driver.control.phase == "complete"
    assert isinstance(driver.send(asked), messages.Complete)


def test_the_end_does_not_wait_for_ever(ready):
    driver = ready(steps=1)
    evaluate(driver, driver.lease(8))
    driver.fill()
    driver.train(0)
    driver.checkpoint(1)
    driver.tick(SETTINGS.timeout_s + 1)
    assert driver.control.phase == "complete"
    assert "no worker served version 1" in driver.control.evaluation.state.results[-1].skipped


def test_a_stop_says_what_was_not_evaluated(ready):
    driver = ready()
    driver.lease(2)
    driver.send(messages.Stop(P, MemberId(""), "enough"))
    assert ended(driver)[0].skipped == "the run was stopped"


@pytest.mark.parametrize("failed", [False, True])
def test_what_a_stop_interrupted_is_evaluated_when_the_run_is_resumed(ready, failed):
    """The last version of a run that failed during its last evaluation was never evaluated."""
    driver = ready(steps=2)
    evaluate(driver, driver.lease(8))
    step(driver, 0)
    step(driver, 1)
    driver.checkpoint(2)
    driver.lease(1)
    driver.send(messages.Stop(P, MemberId(""), "no replica serves", failed=failed))
    assert ended(driver)[0].skipped == "the run was stopped"
    assert driver.control.phase == "stopped"
    driver.send(events.RunResumed())
    assert driver.control.phase == "draining"
    driver.join("w2", trainer="t2", step=2)
    driver.publish(2, member="t2")
    evaluate(driver, driver.lease(8, "w2"), "w2", reward=0.5)
    assert driver.control.phase == "complete"
    results = driver.control.evaluation.state.results
    assert [(result.version, result.skipped) for result in results] == [(0, ""), (2, "")]


def test_what_a_stop_interrupted_in_the_middle_of_a_run_is_evaluated_too(ready):
    driver = ready()
    evaluate(driver, driver.lease(8))
    step(driver, 0)
    step(driver, 1)
    driver.lease(1)
    driver.fill(member="v")
    driver.train(2)
    driver.publish(3)
    driver.checkpoint(3)
    driver.send(messages.Stop(P, MemberId(""), "enough"))
    driver.publish(3, "another")
    assert not ended(driver), "it was told once"
    driver.send(events.RunResumed())
    driver.join("w2", trainer="t2", step=3)
    driver.publish(3, member="t2")
    evaluate(driver, driver.lease(8, "w2"), "w2")
    assert (ended(driver)[0].due, ended(driver)[0].version) == (2, 3)
    assert driver.control.evaluation.idle


def test_a_rollback_undoes_what_was_measured_of_versions_that_never_were(ready):
    driver = ready()
    evaluate(driver, driver.lease(8), reward=0.0)
    step(driver, 0)
    step(driver, 1)
    evaluate(driver, driver.lease(8), reward=0.5)
    driver.join(trainer="t2", step=0)
    assert [result.version for result in driver.control.evaluation.state.results] == [0]
    driver.publish(0, "digest0", member="t2")
    driver.fill()
    driver.train(0, "t2")
    driver.publish(1, "other1", member="t2")
    driver.fill()
    driver.train(1, "t2")
    driver.publish(2, "other2", member="t2")
    evaluate(driver, driver.lease(8), reward=1.0, weights_digest="other2")
    assert [result.reward_mean for result in driver.control.evaluation.state.results] == [0.0, 1.0]


def test_a_resumed_run_makes_the_running_point_again_and_no_other(ready):
    driver = ready()
    evaluate(driver, driver.lease(8), reward=0.5)
    step(driver, 0)
    step(driver, 1)
    evaluate(driver, driver.lease(1), reward=0.0)
    driver.checkpoint(2)
    driver.send(events.RunResumed())
    driver.join("w2", trainer="t2", step=2)
    driver.publish(2, member="t2")
    leases = driver.lease(8, "w2")
    assert [lease.prompt for lease in leases] == [0, 1, 2]
    evaluate(driver, leases, "w2", reward=1.0)
    results = driver.control.evaluation.state.results
    assert [(result.version, result.reward_mean) for result in results] == [(0, 0.5), (2, 1.0)]


def test_the_standard_error_is_that_of_the_prompts(ready):
    driver = ready(EvaluationSection(every_steps=2, prompts=2, samples=2, temperature=1.0))
    good, bad = driver.lease(8)
    assert good.members == (0, 1)
    evaluate(driver, (good,), reward=1.0)
    evaluate(driver, (bad,), reward=0.0)
    assert ended(driver)[0].reward_stderr == pytest.approx(0.5), "four samples, but only two prompts"


def test_scores_that_are_no_numbers_are_failures(ready):
    driver = ready(EvaluationSection(every_steps=2, prompts=1))
    for _ in range(MAX_FAILURES):
        evaluate(driver, driver.lease(8), reward=float("nan"))
    assert ended(driver)[0].skipped == "every sample failed, the last with its reward is nan"


def test_unknown_members_cannot_fail_or_give_back(ready):
    driver = ready()
    [sample] = driver.lease(1)[0].samples
    failure = FailedRollout(SampleId(sample), "generate", "boom")
    for delivery in (
        messages.Deliver(P, MemberId("v"), failures=(failure,)),
        messages.Deliver(P, MemberId("v"), returned=(sample,)),
    ):
        assert driver.send(delivery).refused == (sample,)
    driver.send(messages.Deliver(P, MemberId("w"), returned=(sample,)))
    assert not pinned(driver, "w")
