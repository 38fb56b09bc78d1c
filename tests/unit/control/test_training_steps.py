"""Batches, acknowledgements, checkpoints, and trainers that come back."""

# pyright: reportArgumentType=false
# Ids are written plainly here.

from __future__ import annotations

import pytest

from penstock.control import effects, events
from penstock.records.ids import MemberId, PipelineName
from penstock.weights.published import HISTORY
from penstock.wire import messages

P = PipelineName("p")


def prompts_of(batch) -> list[int]:
    return [group.prompt for group in batch.groups]


def test_asking_again_for_a_batch_gives_the_same_batch(drive):
    d = drive()
    d.join("w")
    assert d.send(messages.AskBatch(P, "t", 0)) == messages.NotYet(
        "2 more of 2 groups for step 0 (0 samples leased, 0 delivered in incomplete groups, 0 awaiting a worker)",
        "running",
    )
    d.fill()
    assert "batches" in d.announced()
    batch, revision = d.batch(0), d.control.revision
    assert d.batch(0) == batch
    assert d.control.revision == revision


def test_a_batch_says_where_its_payloads_are_even_when_their_worker_left(drive):
    d = drive()
    d.join("w", "x")
    d.fill(1, member="w")
    d.fill(1, member="x")
    d.send(messages.Unregister(P, "x"))
    answer = d.send(messages.AskBatch(P, "t", 0))
    assert [ring.ring for ring in answer.rings] == ["w", "x"]


def test_the_next_batch_may_be_fetched_ahead_but_not_the_one_after(drive):
    d = drive(max_staleness=3)
    d.join("w")
    d.fill(6)
    d.batch(0)
    assert prompts_of(d.batch(1)) == [2, 3]
    answer = d.send(messages.AskBatch(P, "t", 2))
    assert isinstance(answer, messages.Refused)
    assert answer.kind == "LocalProtocolError"
    d.ack(0)
    d.ack(1)
    assert prompts_of(d.batch(2)) == [4, 5]


def test_an_acknowledgement_may_be_repeated_and_must_come_in_order(drive):
    d = drive()
    d.join("w")
    d.fill()
    d.batch(0)
    assert d.ack(1).kind == "LocalProtocolError"
    assert d.ack(0) == messages.Ok()
    revision = d.control.revision
    assert d.ack(0) == messages.Ok()
    assert d.control.revision == revision
    assert d.send(messages.AskBatch(P, "t", 0)).kind == "LocalProtocolError"
    assert d.counts == {"trained": 4}


def test_groups_the_trainer_could_not_fetch_are_issued_again(drive):
    d = drive()
    d.join("w")
    d.fill()
    d.batch(0)
    assert d.ack(0, missing=(1, 99)).kind == "LocalProtocolError", "99 was not in the batch"
    assert d.counts == {"dispatched": 4}
    d.ack(0, missing=(1,))
    assert d.counts == {"trained": 2, "dropped": 2}
    assert d.books.dropped["lost"] == 2
    (again,) = d.lease(2)
    assert (again.prompt, again.attempt) == (1, 1)


def test_a_trainer_restarted_at_the_same_step_keeps_its_batch(drive):
    d = drive()
    d.join("w")
    d.fill()
    batch = d.batch(0)
    d.join(trainer="t2", step=0)
    assert effects.EvictMember("t", "replaced by t2") in d.sent
    assert d.batch(0, "t2") == batch
    late = d.ack(0, "t")
    assert late == messages.Refused("Stale", "t is no longer a member: replaced by t2")


def test_steps_after_the_checkpoint_are_undone_and_their_prompts_come_first(drive):
    d = drive(max_staleness=2)
    d.join("w")
    for step in range(3):
        d.fill()
        d.train(step)
        if step == 0:
            d.checkpoint(1)
    assert d.control.newest == 3
    d.join(trainer="t2", step=1)
    assert "rolled back from step 3 to 1; 4 prompts" in d.lines[-2]
    assert d.counts == {"trained": 4, "dropped": 8}
    assert d.control.newest == 1
    leases = d.lease(100)
    assert [(lease.prompt, lease.attempt) for lease in leases[:5]] == [(2, 1), (3, 1), (4, 1), (5, 1), (6, 0)]
    assert d.send(messages.AskBatch(P, "t2", 1)).phase == "running"


def test_samples_of_the_dead_lineage_are_refused_and_buffered_ones_dropped(drive):
    d = drive(max_staleness=2)
    d.join("w")
    d.publish(0)
    d.fill()
    d.train(0)
    d.publish(1, "dead1")
    d.fill(1, version=1)
    (late,) = d.lease(2, version=1)
    d.join(trainer="t2", step=0)
    assert d.control.weights is None
    assert d.books.dropped == {"outdated": 2, "filtered": 0, "failed": 0, "lost": 4, "returned": 0}
    refused = d.deliver((late,), version=1)
    assert refused.refused == late.samples
    assert "does not exist" in refused.reason
    assert d.ask(2, version=1).verdict == "version_too_old"
    d.publish(0, member="t2")
    assert d.lease(2, version=0)


def test_a_same_numbered_version_of_another_lineage_is_told_apart_by_its_digest(drive):
    d = drive(max_staleness=2)
    d.join("w")
    d.publish(0)
    d.fill()
    d.train(0)
    d.publish(1, "dead1")
    (late,) = d.lease(2, version=1)
    dead = messages.Deliver(P, "w", tuple(d.rollout(sample, 1) for sample in late.samples))
    d.join(trainer="t2", step=0)
    d.fill(3, version=0)
    d.train(0, "t2")
    d.publish(1, "alive1", member="t2")
    answer = d.send(dead)
    assert answer.refused == late.samples
    assert "'dead1'" in answer.reason


def test_what_was_given_ahead_is_taken_back_from_a_dead_trainer(drive):
    d = drive(max_staleness=2)
    d.join("w")
    d.fill(4)
    first = d.batch(0)
    d.batch(1)
    d.join(trainer="t2", step=0)
    assert d.batch(0, "t2") == first
    assert list(d.books.redo) == [2, 3]


def test_a_step_in_the_checkpoint_whose_acknowledgement_was_lost_counts_as_trained(drive):
    d = drive()
    d.join("w")
    d.fill()
    d.batch(0)
    d.join(trainer="t2", step=1)
    assert d.counts == {"trained": 4}
    assert d.control.newest == 1


@pytest.mark.parametrize("step", [1, 5])
def test_a_trainer_ahead_of_the_journal_cannot_be_placed(drive, step):
    d = drive()
    d.join("w")
    answer = d.send(messages.Register(P, "t2", "trainer", step=step))
    assert answer.kind == "RunFailed"
    assert "the journal has only 0 trained steps" in answer.message


def test_a_trainer_behind_a_confirmed_checkpoint_cannot_be_placed(drive):
    d = drive()
    d.join("w")
    d.fill()
    d.train(0)
    d.checkpoint(1)
    answer = d.send(messages.Register(P, "t2", "trainer", step=0))
    assert answer.kind == "RunFailed"
    assert "a checkpoint of step 1 was confirmed" in answer.message


def test_weights_are_offered_newest_only_and_never_from_the_future(drive):
    d = drive()
    d.join("w")
    assert d.publish(2).kind == "LocalProtocolError"
    d.publish(0)
    assert "weights" in d.announced()
    d.publish(1)
    assert d.control.weights.version == 1
    assert d.publish(0) == messages.Ok()
    assert d.control.weights.version == 1


def test_a_checkpoint_of_untrained_steps_is_refused(drive):
    d = drive()
    d.join("w")
    assert d.checkpoint(3).kind == "LocalProtocolError"


def test_a_resumed_run_issues_again_all_that_was_not_trained(drive):
    d = drive(max_staleness=3)
    d.join("w")
    d.publish(0)
    d.fill(2)
    d.train(0)
    d.fill(2)
    d.batch(1)
    d.fill(1)
    d.lease(2)
    d.send(messages.Stop(P, MemberId(""), "Ctrl-C"))
    d.send(events.RunResumed())
    assert d.control.phase == "running"
    assert d.control.weights is None
    assert d.counts == {"trained": 4, "dropped": 8}
    d.join("w2", trainer="t2", step=1)
    assert [lease.prompt for lease in d.lease(100, member="w2")] == [2, 3, 4, 5, 6, 7, 8, 9]


def test_a_sample_that_only_the_step_in_training_could_have_used_is_refused(drive):
    d = drive(max_staleness=1, groups_per_step=1, straggler_wait_s=0.0)
    d.join("w", "slow")
    late = d.lease(2, member="slow")
    d.fill(1)
    d.train(0)
    d.fill(1)
    d.batch(1)
    assert d.deliver(late, member="slow", version=0).refused == late[0].samples


def test_prompts_of_a_rollback_come_before_those_already_waiting(drive):
    d = drive(max_staleness=2)
    d.join("w")
    d.fill()
    batch = d.batch(0)
    d.ack(0, missing=(batch.groups[0].prompt,))
    assert list(d.books.redo) == [0]
    d.join(trainer="t2", step=0)
    assert list(d.books.redo) == [1, 0]


def test_a_partial_batch_is_never_given_ahead(drive):
    """The step in training may still give prompts back that would fill it."""
    d = drive(steps=None, prompt_limit=3, max_staleness=5)
    d.join("w")
    d.fill(3)
    d.batch(0)
    assert isinstance(d.send(messages.AskBatch(P, "t", 1)), messages.NotYet)
    d.ack(0, missing=(1,))
    d.fill(1)
    assert prompts_of(d.batch(1)) == [2, 1]


def test_weights_published_before_the_acknowledgement_may_be_used_at_once(drive):
    d = drive(max_staleness=1)
    d.join("w")
    d.publish(0)
    d.fill()
    d.batch(0)
    d.publish(1)
    leases = d.lease(2, version=1)
    assert d.deliver(leases, version=1).refused == ()
    d.ack(0)
    d.fill(1, version=1)
    assert all(group.versions == (1, 1) for group in d.batch(1).groups)


def test_a_run_resumed_right_after_a_checkpoint_forms_its_next_batch_anew(drive):
    d = drive()
    d.join("w")
    d.fill()
    d.train(0)
    d.checkpoint(1)
    d.fill()
    d.batch(1)
    d.send(events.RunResumed())
    d.join("w2", trainer="t2", step=1)
    d.fill(member="w2")
    assert prompts_of(d.batch(1, "t2")) == [2, 3]


def test_samples_of_a_dead_lineage_are_refused_even_before_the_new_weights_are_published(drive):
    """The new trainer reaches version 1 again, and has not published it: the old version 1 is not it."""
    d = drive(max_staleness=2)
    d.join("w")
    d.publish(0)
    d.fill()
    d.train(0)
    d.publish(1, "dead1")
    (late,) = d.lease(2, version=1)
    dead = messages.Deliver(P, "w", tuple(d.rollout(sample, 1) for sample in late.samples))
    d.join(trainer="t2", step=0)
    d.fill(3, version=0)
    d.train(0, "t2")
    answer = d.send(dead)
    assert answer.refused == late.samples
    assert "version 1 was not published" in answer.reason


def test_what_is_remembered_of_weights_and_rings_is_bounded(drive):
    d = drive(steps=50, max_staleness=1)
    for step in range(30):
        d.join(f"w{step}")
        d.publish(step)
        d.fill(member=f"w{step}")
        d.send(messages.Unregister(P, f"w{step}"))
        d.train(step)
        d.checkpoint(step + 1)
    assert len(d.control.state.published.valid) <= HISTORY
    assert len(d.control.state.members.rings) <= 4
    assert len(d.control.state.recent) == 16
    assert len(d.control.snapshot()) < 10_000
