"""How much is leased, to whom, and with which weights."""

# pyright: reportArgumentType=false
# Ids are written plainly here.

from __future__ import annotations

import pytest

from penstock.control import effects
from penstock.control.admission import ThrottleState, watch_throttle
from penstock.control.settings import EvaluationSection
from penstock.records.ids import PipelineName
from penstock.wire import messages

P = PipelineName("p")


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_no_more_is_leased_than_the_bound_allows(drive, staleness):
    d = drive(max_staleness=staleness)
    d.join("w")
    leases = d.lease(1000)
    assert sum(len(lease.samples) for lease in leases) == (staleness + 1) * 4
    assert d.ask(2) == messages.Leased((), "throttled", "running")
    d.deliver(leases)
    assert d.ask(2).verdict == "throttled", "delivered samples still stand before the trainer"
    d.batch(0)
    assert d.ask(2).verdict == "throttled", "and so do dispatched ones"
    d.ack(0)
    assert "leases" in d.announced()
    assert len(d.lease(1000, version=d.control.newest)) == 2


def test_a_step_trained_on_less_than_a_batch_does_not_widen_the_bound(drive):
    d = drive(max_staleness=0)
    d.join("w")
    d.fill()
    batch = d.batch(0)
    d.ack(0, missing=(batch.groups[0].prompt,))
    assert sum(len(lease.samples) for lease in d.lease(1000)) == 4


def test_no_more_is_issued_than_the_remaining_steps_need(drive):
    d = drive(steps=2, max_staleness=5)
    d.join("w")
    assert sum(len(lease.samples) for lease in d.lease(1000)) == 2 * 4
    assert d.control.phase == "draining"


def test_a_drop_near_the_end_is_made_good(drive):
    d = drive(steps=1, max_staleness=5)
    d.join("w")
    leases = d.lease(1000)
    assert d.ask(2) == messages.Leased((), "throttled", "draining")
    d.fail(leases[0].samples[0], poison=True)
    assert d.control.phase == "running"
    d.deliver((*leases[1:], *d.lease(1000)))
    d.train(0)
    assert d.counts == {"trained": 4, "dropped": 2}


def test_what_there_is_is_divided_among_the_workers(drive):
    d = drive(groups_per_step=8, max_staleness=0)
    d.join("greedy", "slow")
    answer = d.ask(1000, "greedy")
    assert sum(len(lease.samples) for lease in answer.leases) == 8
    assert len(d.lease(2, member="slow")) == 1


def test_a_worker_that_hangs_leaves_leases_for_the_others(drive):
    """The first worker to ask took all there was; when it hung, nothing was generated until it was given up."""
    d = drive(groups_per_step=4, max_staleness=1, straggler_wait_s=0.0)
    d.join("hangs", "works")
    assert sum(len(lease.samples) for lease in d.ask(1000, "hangs").leases) == 8
    assert d.ask(1000, "hangs") == messages.Leased((), "throttled", "running")
    for step in range(3):
        d.deliver(d.lease(1000, member="works", version=d.control.newest), member="works")
        d.train(step)
    assert d.counts == {"leased": 8, "trained": 24}


def test_leases_are_kept_for_workers_that_are_still_to_come(drive):
    d = drive(groups_per_step=4, max_staleness=0, workers=4)
    d.join("first")
    assert len(d.ask(1000, "first").leases) == 1


def test_a_worker_at_its_part_is_called_again_when_it_has_delivered(drive):
    d = drive(groups_per_step=4, max_staleness=1, workers=2)
    d.join("w", "other")
    leases = d.lease(1000)
    assert d.ask(1000).verdict == "throttled"
    d.deliver(leases[:1])
    assert d.instructed(effects.Announce) == [effects.Announce("leases", "w")]
    assert len(d.lease(1000)) == 1


def test_a_worker_at_its_part_is_not_told_that_its_weights_are_old(drive):
    """It would ask again and again instead of waiting."""
    d = drive(groups_per_step=4, max_staleness=1, workers=2)
    d.join("w", "other")
    d.publish(0)
    d.lease(1000)
    d.publish(1)
    assert d.ask(1000, version=0).verdict == "throttled"


def test_a_part_below_a_group_takes_only_members_of_begun_groups(drive):
    d = drive(groups_per_step=2, group_size=4, max_staleness=0, workers=2)
    d.join("w", "other")
    first = d.lease(1000)[0].samples[0]
    d.send(messages.Deliver(P, "w", (d.rollout(first),)))
    assert d.ask(1000).verdict == "throttled"
    other = d.lease(1000, member="other")
    d.fail(other[0].samples[0], member="other")
    assert [len(lease.samples) for lease in d.lease(1000)] == [1]


def test_sleeping_workers_of_a_pool_leave_their_part_to_those_awake(drive):
    d = drive(groups_per_step=4, max_staleness=0, workers=4)
    d.join("awake", "asleep")
    assert len(d.ask(1000, "awake", workers=1).leases) == 4


def test_even_the_smallest_share_is_a_whole_group(drive):
    d = drive(groups_per_step=2, max_staleness=0, workers=99)
    d.join("w")
    assert len(d.ask(1000).leases) == 1


@pytest.mark.parametrize(
    ("max_staleness", "call", "part"),
    [
        (0, 64, 16),  # more would leave the others too little for a step
        (1, 64, 64),
        (2, 64, 64),  # an equal part would be 48: three calls, and the fourth waits, make more than four of 48
        (2, 16, 48),
        (2, 20, 40),
        (2, 0, 48),
        (4, 64, 64),  # and not 80: the 16 would be a call of their own
        (4, 3, 80),  # less than a group
        (7, 64, 128),
    ],
)
def test_a_part_is_a_number_of_whole_calls(drive, max_staleness: int, call: int, part: int) -> None:
    d = drive(groups_per_step=16, group_size=4, max_staleness=max_staleness, workers=4)
    d.join("w")
    assert sum(len(lease.samples) for lease in d.ask(1000, call=call).leases) == part
    assert d.ask(1000, call=call).verdict == "throttled"


def test_a_repeated_request_gets_the_same_leases(drive):
    d = drive()
    d.join("w")
    first = d.send(messages.AskLease(P, "w", 5, 4, 0))
    revision = d.control.revision
    assert d.send(messages.AskLease(P, "w", 5, 4, 0)) == first
    assert d.control.revision == revision
    assert d.counts == {"leased": 4}
    answer = d.send(messages.AskLease(P, "w", 4, 4, 0))
    assert isinstance(answer, messages.Refused)
    assert answer.kind == "Stale"


def test_a_worker_with_old_weights_is_told_so_until_it_has_newer_ones(drive):
    """The rejection changes nothing, so asking again may wait as long as it likes."""
    d = drive(max_staleness=0, steps=3)
    d.join("w")
    d.publish(0)
    d.fill()
    d.batch(0)
    d.publish(1)
    d.ack(0)
    revision = d.control.revision
    assert d.ask(4, version=0) == messages.Leased((), "version_too_old", "running")
    assert d.control.revision == revision
    leases = d.lease(4, version=1)
    assert [lease.min_version for lease in leases] == [1, 1]


def test_an_engine_with_weights_of_a_trainer_that_is_gone_must_load_others(drive):
    d = drive()
    d.join("w")
    assert d.ask(4, version=7).verdict == "version_too_old"


def test_a_worker_with_the_newest_weights_is_never_sent_away_to_load_newer_ones(drive):
    """While step 0 trains, version 1 is needed and no worker has it: there is nothing to do but wait."""
    d = drive(max_staleness=0, groups_per_step=1)
    d.join("w")
    d.publish(0)
    d.fill(1)
    d.batch(0)
    assert d.ask(2).verdict == "throttled"
    d.publish(1)
    assert d.ask(2, version=0).verdict == "throttled"
    d.ack(0)
    assert "leases" in d.announced()
    assert d.ask(2, version=0).verdict == "version_too_old"
    assert d.lease(2, version=1)


def test_rollouts_of_unpublished_weights_are_refused_and_made_again(drive):
    d = drive()
    d.join("w")
    d.publish(0, "right")
    leases = d.lease(2)
    rollouts = [d.rollout(sample) for sample in leases[0].samples]
    torn = messages.Deliver(P, "w", tuple(type(r)(r.sample, r.version, "torn", 1.0, 1, r.payload) for r in rollouts))
    answer = d.send(torn)
    assert answer.refused == leases[0].samples
    assert "'torn'" in answer.reason
    assert "'right'" in answer.reason
    assert d.control.status(0.0)["samples_wrong_weights"] == 2
    assert d.counts == {"dropped": 2}
    assert d.deliver(d.lease(2)).refused == ()


def test_a_duplicate_delivery_is_not_judged_by_its_digest_again(drive):
    d = drive()
    d.join("w")
    leases = d.lease(2)
    d.deliver(leases)
    stale = messages.Deliver(P, "w", tuple(d.rollout(sample) for sample in leases[0].samples))
    d.publish(0, "published later")
    assert d.send(stale) == messages.Delivered()


def test_the_throttle_says_one_line_each_for_engaged_still_engaged_and_released():
    state = ThrottleState()
    said = []
    for now, closed in [(0, False), (1, True), (2, True), (9, True), (12, True), (13, False), (14, False), (15, True)]:
        change = watch_throttle(state, closed=closed, now=float(now), report_every_s=10)
        said.append((change.what, change.lasted_s) if change else None)
    assert said == [
        None,
        ("engaged", 0.0),
        None,
        None,
        ("still engaged", 11.0),
        ("released", 12.0),
        None,
        ("engaged", 0.0),
    ]
    assert state.engagements == 2


def test_the_throttle_lines_carry_the_state(drive):
    d = drive(max_staleness=0, throttle_report_s=5.0)
    d.join("w")
    leases = d.lease(4)
    assert d.lines[-1] == "p: throttle engaged at step 0: 4 leased, 0 delivered, 0 buffered, 0 dispatched"
    d.tick(6)
    assert d.lines[-1].startswith("p: throttle still engaged after 6.0 s at step 0: 4 leased")
    d.deliver(leases)
    d.train(0)
    assert any("throttle released" in line for line in d.lines)
    assert d.control.status(0.0)["throttled"] == 0


def test_a_full_batch_waits_a_bounded_time_for_groups_it_would_outdate(drive):
    d = drive(max_staleness=1, groups_per_step=1, straggler_wait_s=5.0)
    d.join("w", "slow")
    straggler = d.lease(2, member="slow")
    d.fill(1)
    d.train(0)
    d.fill(1)
    answer = d.send(messages.AskBatch(P, "t", 1))
    assert answer == messages.NotYet("1 groups that step 1 would outdate, at most 5 s", "running")
    d.deliver(straggler, member="slow", version=0)
    assert "batches" in d.announced()
    assert d.batch(1).groups[0].prompt == straggler[0].prompt
    assert d.books.dropped["outdated"] == 0


def test_a_straggler_that_does_not_come_is_left_behind(drive):
    d = drive(max_staleness=1, groups_per_step=1, straggler_wait_s=5.0)
    d.join("w", "slow")
    straggler = d.lease(2, member="slow")
    d.fill(1)
    d.train(0)
    d.fill(1)
    assert isinstance(d.send(messages.AskBatch(P, "t", 1)), messages.NotYet)
    passed = d.tick(5.0)
    assert effects.Announce("batches") in passed
    d.train(1)
    assert d.deliver(straggler, member="slow", version=0).refused == straggler[0].samples


def test_the_wait_for_stragglers_begins_anew_with_each_batch(drive):
    """A batch that was complete behind another one was sent without any wait."""
    d = drive(max_staleness=2, groups_per_step=1, straggler_wait_s=5.0, workers=3)
    d.join("w", "slow")
    d.publish(0)
    straggler = d.lease(2, member="slow", version=0)
    d.fill(1, version=0)
    d.train(0)
    d.publish(1)
    d.fill(1, version=1)
    d.tick(19.0)  # the trainer asks late
    d.fill(1, version=1)
    d.batch(1)
    answer = d.send(messages.AskBatch(P, "t", 2))
    assert answer == messages.NotYet("1 groups that step 2 would outdate, at most 5 s", "running")
    d.now += 1.0
    assert not d.deliver(straggler, member="slow", version=0).refused
    assert d.batch(2).groups[0].prompt == straggler[0].prompt


def test_by_default_no_group_is_dropped_that_its_worker_still_generates(drive):
    d = drive(max_staleness=1, groups_per_step=1)
    d.join("w", "slow")
    straggler = d.lease(2, member="slow")
    d.fill(1)
    d.train(0)
    d.fill(1)
    assert d.send(messages.AskBatch(P, "t", 1)).waiting_for == "1 groups that step 1 would outdate, at most 60 s"
    assert d.control.slow(d.now) == "waiting for 1 groups that step 1 would outdate, at most 60 s"
    d.tick(50.0)
    assert "Worker slow holds 2 samples and should deliver them" in d.control.diagnose(d.now)
    assert "The batch of step 1 is full and waits for 1 groups that step 1 would outdate" in d.control.diagnose(d.now)
    d.deliver(straggler, member="slow", version=0)
    assert d.batch(1).groups[0].prompt == straggler[0].prompt
    assert d.books.counts["dropped"] == 0
    assert d.control.slow(d.now) == ""


def test_a_worker_that_delivers_nothing_in_time_costs_one_wait_and_its_samples(drive):
    d = drive(max_staleness=1, groups_per_step=1, steps=20)
    d.join("w", "slow")
    held = d.lease(2, member="slow")
    d.fill(1)
    d.train(0)
    d.fill(1)
    assert isinstance(d.send(messages.AskBatch(P, "t", 1)), messages.NotYet)
    assert effects.Announce("batches") in d.tick(60.0)
    d.train(1)
    assert any(
        line.startswith("p: step 1 waited 60 s (train.straggler_wait_s) for 1 groups of slow") for line in d.lines
    )
    assert d.books.dropped["outdated"] == 2
    again = d.lease(2, member="slow", version=2)
    for step in range(2, 6):
        d.fill(1, version=step)
        d.train(step)  # without a wait, although the worker has a group that step 3 outdates
    assert d.deliver(held, member="slow", version=0).refused == held[0].samples
    assert d.deliver(again, member="slow", version=2).refused == again[0].samples


def test_a_worker_that_delivers_in_time_again_is_waited_for_again(drive):
    d = drive(max_staleness=1, groups_per_step=1, steps=20)
    d.join("w", "slow")
    d.lease(2, member="slow")
    d.fill(1)
    d.train(0)
    d.fill(1)
    d.send(messages.AskBatch(P, "t", 1))
    d.tick(60.0)
    d.train(1)
    assert d.control.state.not_awaited.keys() == {"slow"}
    d.fill(1, member="slow", version=2)
    assert not d.control.state.not_awaited
    d.lease(2, member="slow", version=2)
    d.train(2)
    d.fill(1, version=3)
    assert isinstance(d.send(messages.AskBatch(P, "t", 3)), messages.NotYet)


@pytest.mark.parametrize("way", ["dies", "is silent", "returns it", "fails"])
def test_a_group_that_would_begin_again_is_not_waited_for(drive, way):
    d = drive(max_staleness=1, groups_per_step=1)
    d.join("w", "slow")
    [lease] = d.lease(2, member="slow")
    d.fill(1)
    d.train(0)
    d.fill(1)
    assert isinstance(d.send(messages.AskBatch(P, "t", 1)), messages.NotYet)
    if way == "dies":
        d.send(messages.Unregister(P, "slow", died=True))
    elif way == "is silent":
        d.send(messages.Heartbeat(P, "slow", 0.0))
        for _ in range(16):
            for member in ("w", "t"):
                d.send(messages.Heartbeat(P, member, 0.0))
            d.tick(1.0)
    elif way == "returns it":
        d.send(messages.Deliver(P, "slow", returned=lease.samples))
    else:
        d.fail(lease.samples[0], member="slow")
    assert d.now < 20
    assert d.batch(1).groups[0].prompt != lease.prompt


def test_an_evaluation_holds_no_batch_back(drive):
    evaluation = EvaluationSection(every_steps=1, prompts=2)
    d = drive(max_staleness=1, groups_per_step=1, evaluation=evaluation)
    d.join("w", "slow")
    d.lease(2, member="slow")
    d.publish(0)
    assert d.ask(2, "slow", 0, steady=True).leases[0].evaluation is not None
    assert d.control.evaluation.evaluators == {"slow"}
    d.fill(1, version=0)
    d.train(0)
    d.publish(1)
    d.fill(1, version=1)
    assert isinstance(d.send(messages.AskBatch(P, "t", 1)), messages.BatchReady)


def test_a_trainer_that_is_busy_waits_for_nothing(drive):
    """A batch is requested while the step before is trained: the wait costs nothing until that ends."""
    d = drive(max_staleness=2, groups_per_step=1)
    d.join("w", "slow")
    d.publish(0)
    straggler = d.lease(2, member="slow")
    d.fill(1)
    d.train(0)
    d.fill(1, version=0)
    d.batch(1)
    d.publish(1)
    d.fill(1, version=1)
    for _ in range(100):
        for member in ("w", "slow", "t"):
            d.send(messages.Heartbeat(P, member, 0.0))
        d.tick(2.0)
        assert isinstance(d.send(messages.AskBatch(P, "t", 2)), messages.NotYet)
    d.ack(1)
    assert d.deliver(straggler, member="slow", version=0).refused == ()
    assert d.batch(2).groups[0].prompt == straggler[0].prompt


def test_between_an_acknowledgement_and_its_weights_no_lease_is_given_that_would_come_out_outdated(drive):
    """Room opens with the acknowledgement, but until the new weights are out a worker can only make doomed samples."""
    d = drive(max_staleness=1)
    d.join("w")
    d.publish(0)
    d.fill(4)
    d.train(0)
    refused = d.ask(2, version=0)
    assert getattr(refused, "verdict", "granted") != "granted", (
        "what version 0 makes now is due in step 2, two steps on"
    )
    d.publish(1)
    assert "leases" in d.announced()
    (lease,) = d.lease(2, version=1)
    assert lease.min_version == 1
    d.train(1)
    assert d.books.dropped["outdated"] == 0


def test_samples_given_back_are_not_progress(drive):
    """Seen in a run whose worker was put to sleep again and again: the pool took it for the fastest of all."""
    d = drive()
    d.join("w")
    (lease,) = d.lease(2)
    d.deliver(d.lease(2))
    assert d.control.demand() == (6, 2)
    for _ in range(5):
        d.send(messages.Deliver(P, "w", returned=lease.samples))
        assert d.control.demand() == (6, 2)
        (lease,) = d.lease(2)
