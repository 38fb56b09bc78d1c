"""Faults that were found in the field in controllers like this one. Each test would fail on theirs."""

# pyright: reportArgumentType=false
# Ids are written plainly here.

from __future__ import annotations

import msgspec

from penstock.control import effects
from penstock.records.ids import PipelineName
from penstock.records.rollout import FailedRollout
from penstock.wire import messages

P = PipelineName("p")


def test_discarded_samples_do_not_stay_in_flight_and_throttle_the_rest(drive):
    """In-flight counts that ignored discards closed admission for good."""
    d = drive(max_staleness=1, groups_per_step=1, steps=100)
    d.join("first")
    d.fill(1, member="first")
    d.train(0)
    for step in range(1, 20):
        good, doomed = f"good{step}", f"doomed{step}"
        d.join(good, doomed, trainer=None)
        outdated = d.lease(2, member=good)
        d.fill(1, member=doomed)
        d.train(step)
        d.lease(2, member=doomed)
        d.send(messages.Unregister(P, doomed, "SIGKILL", died=True))
        d.deliver(outdated, member=good, version=step - 1)
        d.send(messages.Deliver(P, good, returned=d.lease(2, member=good)[0].samples))
        assert d.control.ledger.in_flight == 0
        assert d.control.admission.capacity() + d.books.awaiting_count == 4
    assert d.books.dropped == {"outdated": 38, "filtered": 0, "failed": 0, "lost": 38, "returned": 38}


def test_leases_of_a_dead_worker_come_back(drive):
    """Leases without an owner starved the survivors once a worker had died with all of them."""
    d = drive(max_staleness=4)
    d.join("dead", "alive")
    assert len(d.lease(1000, member="dead")) == 5
    assert len(d.lease(1000, member="alive")) == 5
    assert d.ask(2, "alive").verdict == "throttled"
    d.send(messages.Unregister(P, "dead", "SIGKILL", died=True))
    assert len(d.lease(1000, member="alive")) == 5


def test_an_acknowledgement_releases_what_the_step_was_given_not_a_nominal_batch(drive):
    """A partial or empty last step subtracted a whole batch, or nothing."""
    d = drive(steps=None, prompt_limit=3, max_staleness=5)
    d.join("w")
    d.fill(3)
    d.train(0)
    assert d.control.ledger.in_flight == 2
    d.train(1)
    assert d.control.ledger.in_flight == 0
    assert d.counts == {"trained": 6}


def test_exhausted_is_final_and_said_only_when_it_is_true(drive):
    """Workers span on a verdict that was neither final nor something one could wait for."""
    d = drive(steps=1)
    d.join("w")
    d.fill()
    assert d.ask(2).verdict == "throttled", "a rollback could still need this worker"
    d.train(0)
    d.checkpoint(1)
    revision = d.control.revision
    for _ in range(3):
        assert d.ask(2).verdict == "exhausted"
    assert d.control.revision == revision


def test_a_version_rejection_changes_nothing_and_ends_with_the_next_weights(drive):
    """A busy loop after each rejection; here the answer is stable and the way out is announced."""
    d = drive(max_staleness=0, groups_per_step=1)
    d.join("w")
    d.publish(0)
    d.fill(1)
    d.batch(0)
    d.publish(1)
    d.ack(0)
    assert d.ask(2, version=0).verdict == "version_too_old"
    assert d.control.weights is not None
    assert d.control.weights.version == 1


def test_a_heartbeat_cannot_lie_for_a_parent_that_does_not_move(drive):
    """A sidecar that outlived its parent kept it alive on paper."""
    d = drive(wedged_after_s=20)
    d.join("w")
    d.lease(4)
    evicted = []
    for second in range(30):
        d.now += 1.0
        d.send(messages.Heartbeat(P, "w", float(second)))
        d.send(messages.Heartbeat(P, "t", 0.0))
        evicted += [effect for effect in d.tick() if isinstance(effect, effects.EvictMember)]
    assert [effect.member for effect in evicted] == ["w"]
    assert d.counts == {"dropped": 4}


def test_the_controller_does_not_give_up_before_the_first_registration(drive):
    d = drive(exit_without_trainer_s=1, stall_after_s=10, stall_fail_after_s=10, startup_grace_s=300)
    assert not [effect for effect in d.tick(299) if isinstance(effect, effects.FailRun)]
    d.join("w")
    assert d.control.phase == "running"


def test_completion_waits_while_buffered_samples_can_still_fill_a_step(drive):
    """Completing as soon as the prompts were consumed threw trained-for samples away."""
    d = drive(steps=None, prompt_limit=4, max_staleness=5)
    d.join("w")
    d.fill(3)
    (last,) = d.lease(2)
    assert d.control.phase == "draining"
    d.train(0)
    d.checkpoint(1)
    assert d.control.phase == "draining", "one group is buffered and one is out"
    d.deliver((last,))
    d.train(1)
    d.checkpoint(2)
    assert d.control.phase == "complete"
    assert d.counts == {"trained": 8}


def test_departures_do_not_turn_version_checks_off(drive):
    """After any departure samples were stamped with version 0 for good."""
    d = drive(max_staleness=0, groups_per_step=1)
    d.join("w", "x")
    d.publish(0)
    d.send(messages.Unregister(P, "x"))
    d.fill(1)
    d.batch(0)
    d.publish(1)
    d.ack(0)
    leases = d.lease(2, version=1)
    assert d.deliver(leases, version=0).refused == leases[0].samples


def test_a_repeated_failure_report_frees_its_place_once(drive):
    d = drive(max_failures=10)
    d.join("w")
    (lease,) = d.lease(2)
    d.fail(lease.samples[0])
    assert d.fail(lease.samples[0]).refused == lease.samples[:1]
    assert d.books.dropped["failed"] == 1
    assert d.books.awaiting_count == 1


def test_a_repeated_delivery_does_not_forgive_failures_unrecorded(drive):
    """A lost reply made a worker deliver again; that changed a count that the journal never heard of."""
    d = drive(groups_per_step=8, steps=100, max_staleness=1, max_failures=1)
    d.join("w", "sick")
    delivered = d.lease(2)
    d.deliver(delivered)
    d.send(
        messages.Deliver(P, "sick", failures=(FailedRollout(d.lease(2, member="sick")[0].samples[0], "generate", "x"),))
    )
    assert d.control.state.set_aside_in_a_row == 1
    d.deliver(delivered)
    assert d.control.state.set_aside_in_a_row == 1
    d.deliver(d.lease(2))
    assert d.control.state.set_aside_in_a_row == 0


def test_a_sample_refused_for_its_weights_shows_that_the_environment_works(drive):
    """A worker with the wrong weights whose hooks failed at times ended the run as if its environment was broken."""
    d = drive(groups_per_step=8, steps=100, max_staleness=1, max_failures=1)
    d.join("w")
    d.publish(0)
    for _ in range(20):
        d.fail(d.lease(2)[0].samples[0])
        rollout = msgspec.structs.replace(d.rollout(d.lease(2)[0].samples[0]), weights_digest="another")
        assert d.send(messages.Deliver(P, "w", (rollout,))).refused
        assert d.control.state.set_aside_in_a_row == 0
    assert d.control.phase == "running"


def test_a_reward_that_is_no_number_is_a_failure_of_the_environment(drive):
    d = drive(groups_per_step=8, steps=100, max_staleness=1, max_failures=1)
    d.join("w")
    for expected in (1, 2, 3):
        d.deliver(d.lease(2), rewards=(float("nan"), 1.0))
        assert d.control.state.set_aside_in_a_row == expected


def test_a_late_copy_of_a_trainers_registration_rolls_nothing_back(drive):
    """A process registers once. What the network repeats says where it began, not where it is."""
    d = drive()
    d.join("w", step=0)
    d.fill()
    d.train(0)
    d.publish(1)
    answer = d.send(messages.Register(P, "t", "trainer", step=0))
    assert isinstance(answer, messages.Registered)
    assert d.books.version == 1
    assert d.books.dropped["lost"] == 0
    d.fill()
    d.train(1)
