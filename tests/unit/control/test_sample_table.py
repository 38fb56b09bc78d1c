"""Samples through their states, prompts through their attempts."""

# pyright: reportArgumentType=false
# Ids are written plainly here.

from __future__ import annotations

from collections.abc import Sequence

import pytest

from penstock.control import effects, events
from penstock.control.sample_table import SampleTable
from penstock.control.samples import LedgerState
from penstock.errors import InvalidTransition
from penstock.records.ids import PipelineName
from penstock.wire import messages

P = PipelineName("p")


def test_a_sample_walks_through_every_state(drive):
    d = drive()
    d.join("w")
    leases = d.lease(4)
    assert d.counts == {"leased": 4}
    d.deliver(leases[:1])
    assert d.counts == {"leased": 2, "buffered": 2}
    first = leases[1].samples[0]
    d.send(messages.Deliver(P, "w", (d.rollout(first),)))
    assert d.counts == {"leased": 1, "delivered": 1, "buffered": 2}
    assert d.control.ledger.state_of(first) == "delivered"
    d.send(messages.Deliver(P, "w", (d.rollout(leases[1].samples[1]),)))
    assert d.counts == {"buffered": 4}
    assert [group.prompt for group in d.batch(0).groups] == [0, 1]
    assert d.counts == {"dispatched": 4}
    d.ack(0)
    assert d.counts == {"trained": 4}
    assert d.control.ledger.state_of(first) == "trained"
    d.checkpoint(1)
    assert d.counts == {"trained": 4}
    assert d.control.ledger.state_of(first) is None
    assert not d.books.groups


def test_a_move_that_is_not_in_the_table_is_refused():
    with pytest.raises(InvalidTransition, match="from leased to trained"):
        SampleTable(LedgerState(), 1)._move("leased", "trained", 1)


def test_a_delivery_may_be_repeated_in_any_later_state(drive):
    d = drive()
    d.join("w")
    leases = d.lease(4)
    d.deliver(leases)
    for advance in (lambda: None, lambda: d.batch(0), lambda: d.ack(0)):
        advance()
        revision = d.control.revision
        assert d.deliver(leases) == messages.Delivered()
        assert d.control.revision == revision
    d.checkpoint(1)
    assert d.deliver(leases).refused == (0, 1, 2, 3)


def test_a_sample_leased_to_another_worker_is_refused(drive):
    d = drive()
    d.join("w", "x")
    leases = d.lease(2)
    assert d.deliver(leases, member="x").refused == leases[0].samples
    assert d.counts == {"leased": 2}
    assert d.deliver(leases).refused == ()


@pytest.mark.parametrize("how", ["failed", "returned", "worker left"])
def test_a_lost_member_is_issued_again_alone_with_a_new_sample(drive, how):
    d = drive()
    d.join("w", "x")
    (lease,) = d.lease(2)
    d.send(messages.Deliver(P, "w", (d.rollout(lease.samples[0]),)))
    lost = lease.samples[1]
    if how == "failed":
        d.fail(lost)
    elif how == "returned":
        d.send(messages.Deliver(P, "w", returned=(lost,)))
    else:
        d.send(messages.Unregister(P, "w"))
    assert d.counts == {"delivered": 1, "dropped": 1}
    assert d.books.dropped[how if how in ("failed", "returned") else "lost"] == 1
    assert "leases" in d.announced()
    (again,) = d.lease(2, member="x")
    assert (again.prompt, again.attempt, again.members) == (lease.prompt, lease.attempt, (1,))
    assert again.samples != (lost,)
    assert d.deliver((again,), member="x").refused == ()
    assert d.counts == {"buffered": 2, "dropped": 1}


def test_members_to_issue_again_come_before_fresh_prompts_and_keep_their_place(drive):
    d = drive(max_staleness=0)
    d.join("w")
    leases = d.lease(4)
    assert d.ask(2) == messages.Leased((), "throttled", "running")
    d.fail(leases[0].samples[0])
    (again,) = d.lease(4)
    assert again.prompt == 0
    assert d.ask(2).verdict == "throttled"


def test_a_small_ask_gets_part_of_a_group_and_the_next_worker_the_rest(drive):
    d = drive(group_size=4, groups_per_step=1)
    d.join("w", "x")
    (part,) = d.lease(3)
    assert part.members == (0, 1, 2)
    (rest,) = d.lease(3, member="x")
    assert (rest.prompt, rest.members) == (part.prompt, (3,))
    d.deliver((part,))
    d.deliver((rest,), member="x")
    assert len(d.batch(0).groups[0].samples) == 4


def test_an_outdated_group_is_dropped_whole_and_its_prompt_issued_again_first(drive):
    d = drive(max_staleness=1, group_size=2, groups_per_step=1, straggler_wait_s=0.0)
    d.join("w")
    slow = d.lease(2)
    d.fill(1, version=0)
    d.train(0)
    d.fill(1, version=1)
    d.train(1)
    late = d.deliver(slow, version=0)
    assert late.refused == slow[0].samples
    assert "too old" in late.reason
    assert d.books.dropped["outdated"] == 2
    (again,) = d.lease(2)
    assert (again.prompt, again.attempt) == (slow[0].prompt, 1)


def test_groups_that_can_no_longer_be_trained_leave_the_count_at_once(drive):
    """Both complete groups and begun ones, without waiting for anybody to look at them."""
    d = drive(max_staleness=1, group_size=2, groups_per_step=2, steps=9, straggler_wait_s=0.0)
    d.join("w")
    d.fill(3, version=0)
    (begun,) = d.lease(2, version=0)
    d.send(messages.Deliver(P, "w", (d.rollout(begun.samples[0], 0),)))
    d.train(0)
    assert d.books.dropped["outdated"] == 0
    d.publish(1)
    d.fill(2, version=1)
    batch = d.batch(1)
    assert [group.versions for group in batch.groups] == [(0, 0), (1, 1)], "the older group goes first"
    assert d.books.dropped["outdated"] == 2, "the begun group can only be trained at step 2, one too late"
    assert list(d.books.redo) == [begun.prompt]
    assert d.deliver((begun,), version=0).refused == begun.samples


def test_a_prompt_that_keeps_failing_is_set_aside_with_its_error_and_the_run_goes_on(drive):
    d = drive(max_failures=3, groups_per_step=1, steps=1)
    d.join("w")
    (lease,) = d.lease(2)
    d.fail(lease.samples[0])
    (again,) = d.lease(1)
    d.fail(again.samples[0])
    d.fail(lease.samples[1])
    assert not d.books.set_aside
    (again,) = d.lease(1)
    assert again.members == (0,)
    d.fail(again.samples[0])
    assert d.books.set_aside[lease.prompt].error == "boom"
    assert d.books.set_aside[lease.prompt].failures == 3
    assert any("set aside after 3 failures in generate: boom" in line for line in d.lines)
    d.fill(1)
    assert d.train(0).groups[0].prompt == 1


def test_a_call_that_fails_for_all_samples_of_a_prompt_is_one_failure_of_each(drive):
    """A group of four was set aside when its first call failed, with no second try, and the run failed after eight."""
    d = drive(group_size=4, groups_per_step=1, steps=100, max_staleness=1)
    d.join("w")
    (lease,) = d.lease(4)
    for _ in range(2):
        d.fail(*lease.samples)
        assert not d.books.set_aside
        (lease,) = d.lease(4)
        assert lease.prompt == 0
    d.fail(*lease.samples)
    assert list(d.books.set_aside) == [0]


def test_a_poisoned_prompt_is_set_aside_at_once(drive):
    d = drive()
    d.join("w")
    (lease,) = d.lease(2)
    d.fail(lease.samples[0], poison=True)
    assert list(d.books.set_aside) == [0]
    assert d.deliver((lease,)).refused == lease.samples


def test_a_prompt_that_kills_its_workers_is_set_aside(drive):
    d = drive(max_losses=3, groups_per_step=1, max_staleness=0)
    for name in ("a", "b", "c"):
        d.join(name)
        assert d.lease(2, member=name)[0].prompt == 0
        d.send(messages.Unregister(P, name, "SIGSEGV", died=True))
    assert "3 workers died while they generated it, the last was c" in d.books.set_aside[0].error
    d.join("d")
    assert d.lease(2, member="d")[0].prompt == 1


def test_workers_that_unregister_do_not_count_against_a_prompt(drive):
    d = drive(max_losses=1)
    d.join("a", "b")
    d.lease(2, member="a")
    d.send(messages.Unregister(P, "a"))
    assert not d.books.set_aside
    assert d.lease(2, member="b")[0].prompt == 0


def test_a_worker_that_is_replaced_for_its_weights_does_not_count_against_a_prompt(drive):
    d = drive(max_losses=1)
    d.join("a", "b")
    d.lease(2, member="a")
    assert d.send(events.ReplicaEvicted("a", "3 updates failed in a row")) == messages.Ok()
    assert d.instructed(effects.EvictMember) == [effects.EvictMember("a", "3 updates failed in a row")]
    assert not d.books.set_aside
    assert d.lease(2, member="b")[0].prompt == 0
    assert d.send(events.ReplicaEvicted("a", "again")) == messages.Ok()
    assert not d.instructed(effects.EvictMember)


@pytest.mark.parametrize("silent", [False, True])
def test_prompts_that_kill_their_worker_are_named_in_one_line(drive, silent):
    d = drive(max_losses=1, groups_per_step=4, max_staleness=3)
    d.join("w")
    d.lease(6)
    if silent:
        d.send(messages.Heartbeat(P, "w", 0.0))
        d.tick(d.settings.evict_after_s + 1)
    else:
        d.send(messages.Unregister(P, "w", "SIGSEGV", died=True))
    (line,) = [line for line in d.lines if "set aside" in line]
    assert line == "p: prompts set aside, since 1 workers died while they generated them, the last was w: 0, 1, 2"
    assert list(d.books.set_aside) == [0, 1, 2]
    assert d.control.state.set_aside_in_a_row == 1, "one death, whatever the worker held"


def test_when_every_worker_dies_of_its_prompts_the_run_fails(drive):
    """All prompts were set aside one worker after the other, and the run was complete."""
    d = drive(max_losses=1, steps=None, prompt_limit=100, groups_per_step=4, max_staleness=3)
    for death in range(8):
        assert d.control.phase == "running"
        d.join(f"w{death}")
        d.lease(6, f"w{death}")
        d.send(messages.Unregister(P, f"w{death}", "SIGSEGV", died=True))
    assert d.instructed(effects.FailRun)[0].sentence == (
        "p: prompts were set aside 8 times in a row; the last in generate: 1 workers died while they generated it, "
        "the last was w7"
    )
    assert d.control.phase == "stopped"


def test_failures_are_remembered_when_a_group_starts_afresh(drive):
    d = drive(max_failures=2, groups_per_step=1, max_staleness=0)
    d.join("w")
    d.fail(d.lease(2)[0].samples[0])
    d.deliver(d.lease(2))
    d.send(events.RunResumed())
    d.join("y", trainer="t2")
    (afresh,) = d.lease(2, member="y")
    assert (afresh.prompt, afresh.attempt) == (0, 1)
    d.fail(afresh.samples[0], member="y")
    assert 0 in d.books.set_aside


def test_when_nothing_but_failures_comes_in_the_run_fails_with_the_last_error(drive):
    d = drive(max_failures=1, groups_per_step=4, max_staleness=3)
    d.join("w")
    for _ in range(8):
        d.fail(d.lease(2)[0].samples[0])
    assert d.instructed(effects.FailRun)[0].sentence.endswith("the last in generate: boom")
    assert d.control.phase == "stopped"
    assert d.ask(2) == messages.Leased((), "exhausted", "stopped")


def test_failures_between_successes_do_not_end_the_run(drive):
    d = drive(max_failures=1, groups_per_step=1, max_staleness=3, steps=100)
    d.join("w")
    for step in range(20):
        d.fail(d.lease(2)[0].samples[0])
        d.fill(1)
        d.train(step)
    assert len(d.books.set_aside) == 20
    assert d.control.phase == "running"


def test_a_reward_that_is_not_a_number_counts_as_a_failure(drive):
    d = drive()
    d.join("w")
    leases = d.lease(2)
    answer = d.deliver(leases, rewards=(float("nan"), 1.0))
    assert answer.refused == leases[0].samples[:1]
    assert d.books.dropped["failed"] == 1
    assert d.counts["delivered"] == 1


def dull(rewards: Sequence[float], lengths: Sequence[int]) -> str | None:
    return f"zero signal: all are {rewards[0]:g}" if len(set(rewards)) == 1 else None


def test_a_filtered_group_is_dropped_and_its_prompt_counts_as_done(drive):
    d = drive(dull)
    d.join("w")
    lease = d.lease(2)
    d.deliver(lease, rewards=(1.0, 1.0))
    assert d.books.dropped["filtered"] == 2
    assert d.control.status(d.now)["filtered_groups_zero_signal"] == 1
    assert d.control.ledger.in_flight == 0
    d.deliver(d.lease(2), rewards=(1.0, 0.0))
    assert d.counts == {"buffered": 2, "dropped": 2}
    assert d.books.next_prompt == 2
    assert not d.books.redo


def test_a_filter_that_dislikes_everything_cannot_stop_the_run(drive):
    d = drive(dull, max_filtered_per_step=3, steps=2)
    d.join("w")
    for step in range(2):
        for _ in range(3 + 2):
            d.deliver(d.lease(2))
        d.train(step)
    assert d.books.filtered_prompts == 6
    assert d.counts["trained"] == 8


def test_payloads_of_dropped_samples_are_named_for_release(drive):
    d = drive(dull)
    d.join("w")
    d.deliver(d.lease(2))
    (release,) = d.instructed(effects.ReleasePayloads)
    assert [payload.slot for payload in release.payloads] == [0, 1]


def test_a_broken_book_is_noticed(drive):
    d = drive()
    d.join("w")
    d.lease(2)
    d.books.counts["leased"] += 1
    with pytest.raises(InvalidTransition, match="3 samples are counted as leased, 2 found"):
        d.control.check()
    assert d.control.status(0.0)["conservation_error"] == -1
    d.books.counts["leased"] -= 1


def test_books_that_do_not_balance_end_the_run_at_the_next_tick(drive):
    d = drive()
    d.books.counts["trained"] += 1
    d.tick()
    assert d.instructed(effects.FailRun)[0].sentence.startswith("p: -1 samples")
    d.control.restore(type(d.control)(d.settings).snapshot())
    d._journal.clear()


def with_two_checkpoints(drive):
    """Those of steps 1 and 2; after each, the one before is the last resort."""
    d = drive(groups_per_step=1, max_staleness=3, steps=4)
    d.join("w")
    for step in (0, 1):
        d.fill()
        d.train(step)
        d.checkpoint(step + 1, last_resort=step)
    return d


def test_a_damaged_newest_checkpoint_costs_its_steps_and_no_prompt(drive):
    """Checkpoints of steps 1 and 2 are kept. The one of step 2 cannot be read, so the trainer starts at step 1; the
    ledger had once closed the books of step 1 by then, and the run could not go on."""
    d = with_two_checkpoints(drive)
    d.join(trainer="t2", step=1)
    assert (d.books.version, d.books.durable, d.books.settled) == (1, 1, 1)
    assert list(d.books.redo) == [1], "the prompt of step 1 is issued again"


def test_steps_that_no_kept_checkpoint_lacks_cannot_be_undone(drive):
    d = with_two_checkpoints(drive)
    answer = d.send(messages.Register(P, "t2", "trainer", step=0))
    sentence = (
        "the trainer starts at step 0, but a checkpoint of step 1 was confirmed; start it from the newest checkpoint, "
        "or a new run if that is damaged"
    )
    assert answer == messages.Refused("RunFailed", sentence)
