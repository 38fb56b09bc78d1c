"""Draining and completion, apart from stopping."""

# pyright: reportArgumentType=false
# Ids are written plainly here.

from __future__ import annotations

import itertools
from typing import Any

import pytest

from penstock.control import effects, events, phase
from penstock.control.phase import PHASES, Prospects, decide
from penstock.errors import InvalidTransition
from penstock.records.ids import MemberId, PipelineName
from penstock.wire import messages

P = PipelineName("p")

ALL = ("running", "draining", "complete", "stopped")


def test_every_prospect_leads_to_a_phase_or_is_refused():
    for current in ALL:
        for values in itertools.product((False, True), repeat=4):
            prospects = Prospects(*values)
            try:
                decided = decide(current, prospects)
            except InvalidTransition:
                raise AssertionError(f"{current} has no answer to {prospects}") from None
            assert decided == current or (current, decided) in PHASES


def test_a_move_that_is_not_in_the_table_is_refused(monkeypatch):
    others = {move: why for move, why in PHASES.items() if move != ("running", "draining")}
    monkeypatch.setattr(phase, "PHASES", others)
    with pytest.raises(InvalidTransition, match="from running to draining"):
        decide("running", Prospects(stop_asked=False, finished=False, safe=False, still_needed=False))


def test_a_run_drains_completes_and_is_stopped_explicitly(drive):
    d = drive(steps=2, max_staleness=1)
    d.join("w")
    d.fill(4)
    assert d.control.phase == "draining"
    assert d.ask(2) == messages.Leased((), "throttled", "draining")
    d.train(0)
    assert d.batch(1).final
    d.ack(1)
    assert d.control.phase == "draining", "the last step is trained but could still be lost"
    assert "the last checkpoint is not confirmed: the trainer t should save it" in d.control.diagnose(d.now)
    assert d.send(messages.AskBatch(P, "t", 2)) == messages.Complete(2)
    assert d.ask(2).verdict == "throttled"
    d.checkpoint(2)
    assert d.control.phase == "complete"
    assert d.announced() >= {"phase", "leases", "batches"}
    assert d.ask(2) == messages.Leased((), "exhausted", "complete")
    d.send(messages.Stop(P, MemberId(""), "complete"))
    assert d.control.phase == "stopped"


def test_without_checkpoints_the_trainer_completes_the_run_when_it_unregisters(drive):
    d = drive(steps=1)
    d.join("w")
    d.fill()
    d.train(0)
    assert d.control.phase == "draining"
    d.send(messages.Unregister(P, "t", "done"))
    assert d.control.phase == "complete"


def completed(drive) -> Any:
    """Two steps with a checkpoint after each, both kept."""
    d = drive(steps=2)
    d.join("w")
    for step in range(2):
        d.fill()
        d.train(step)
        d.checkpoint(step + 1, last_resort=min(1, step))
    assert d.control.phase == "complete"
    return d


def test_in_the_same_life_nothing_leads_back_from_complete(drive):
    """Workers told `exhausted` have left: a trainer that wants to train a step again cannot be served."""
    d = completed(drive)
    d.send(messages.Unregister(P, "t", "killed", died=True))
    refused = d.send(messages.Register(P, "t2", "trainer", step=1))
    assert refused == messages.Refused(
        "RunFailed",
        "training is complete after 2 steps and its workers have left, but the trainer restarts at step 1, so its "
        "last checkpoint is damaged or missing; resume the run to train the missing steps again",
    )


@pytest.mark.parametrize("stopped", [False, True])
def test_a_resumed_pipeline_whose_last_checkpoint_is_lost_trains_the_missing_step_again(drive, stopped):
    d = completed(drive)
    last = set(d.books.steps[1].prompts)
    if stopped:
        d.send(messages.Stop(P, MemberId(""), "the trainer failed", failed=True))
    d.send(events.RunResumed())
    assert d.control.phase == "draining", "the last step may be lost: no trainer has found its checkpoint"
    d.join("w2", trainer=None)
    assert d.ask(2, "w2").verdict == "throttled"
    waits = "No trainer is registered yet: the supervisor should start one. Training ended after 2 steps; the last"
    assert d.control.diagnose(d.now) == f"{waits} checkpoint is not confirmed."
    d.join(trainer="t2", step=1)
    assert d.control.phase == "running"
    d.fill(member="w2")
    assert {group.prompt for group in d.train(1, "t2").groups} == last
    assert d.control.phase == "draining"
    d.checkpoint(2, "t2", last_resort=1)
    assert d.control.phase == "complete"


@pytest.mark.parametrize("stopped", [False, True])
def test_a_resumed_pipeline_is_complete_when_its_trainer_has_found_the_last_checkpoint(drive, stopped):
    d = completed(drive)
    if stopped:
        d.send(messages.Stop(P, MemberId(""), "another pipeline failed", failed=True))
    d.send(events.RunResumed())
    d.join("w2", trainer="t2", step=2)
    assert d.control.phase == "complete"
    assert d.ask(2, "w2").verdict == "exhausted"
    assert d.send(messages.AskBatch(P, "t2", 2)) == messages.Complete(2)


def test_a_resumed_pipeline_that_lost_all_its_checkpoints_says_so(drive):
    d = completed(drive)
    d.send(events.RunResumed())
    refused = d.send(messages.Register(P, "t2", "trainer", step=0))
    assert "a checkpoint of step 1 was confirmed; start it from the newest checkpoint, or a new run" in refused.message


def test_a_trainer_that_dies_before_its_last_checkpoint_is_waited_for(drive):
    d = drive(steps=1)
    d.join("w")
    d.fill()
    d.train(0)
    d.send(messages.Unregister(P, "t", "killed", died=True))
    assert d.control.phase == "draining"
    d.join(trainer="t2", step=0)
    assert d.control.phase == "running"
    d.fill()
    d.train(0, "t2")
    d.checkpoint(1, "t2")
    assert d.control.phase == "complete"
    assert d.books.dropped["lost"] == 4


@pytest.mark.parametrize(("prompts", "sizes"), [(5, [2, 2, 1]), (4, [2, 2]), (1, [1])])
def test_when_the_prompts_run_out_the_last_step_may_be_partial(drive, prompts, sizes):
    d = drive(steps=None, prompt_limit=prompts, max_staleness=5)
    d.join("w")
    d.fill(prompts)
    seen = []
    for step in range(len(sizes)):
        batch = d.train(step)
        seen.append(len(batch.groups))
        assert batch.final == (step == len(sizes) - 1)
    assert seen == sizes
    assert d.send(messages.AskBatch(P, "t", len(sizes))) == messages.Complete(len(sizes))
    d.checkpoint(len(sizes))
    assert d.control.phase == "complete"


def test_a_partial_batch_waits_for_everything_that_could_still_fill_it(drive):
    d = drive(steps=None, prompt_limit=2, max_staleness=5)
    d.join("w")
    d.fill(1)
    (last,) = d.lease(2)
    assert isinstance(d.send(messages.AskBatch(P, "t", 0)), messages.NotYet)
    d.fail(last.samples[0])
    assert isinstance(d.send(messages.AskBatch(P, "t", 0)), messages.NotYet)
    d.deliver(d.lease(2))
    d.send(messages.Deliver(P, "w", (d.rollout(last.samples[1]),)))
    assert len(d.batch(0).groups) == 2


def test_an_empty_last_step_balances_the_books(drive):
    """The only group of the last batch cannot be fetched: the step trains nothing, and the prompt comes again."""
    d = drive(steps=None, prompt_limit=1)
    d.join("w")
    d.fill(1)
    assert d.batch(0).final
    d.ack(0, missing=(0,))
    assert d.counts == {"dropped": 2}
    assert d.control.phase == "running"
    d.fill(1)
    assert d.train(1).groups[0].attempt == 1
    assert d.send(messages.AskBatch(P, "t", 2)) == messages.Complete(2)
    assert d.counts == {"trained": 2, "dropped": 2}


def test_a_run_whose_last_prompts_are_set_aside_completes_without_them(drive):
    d = drive(steps=None, prompt_limit=2, groups_per_step=1)
    d.join("w")
    d.fill(1)
    d.train(0)
    d.checkpoint(1)
    d.fail(d.lease(2)[0].samples[0], poison=True)
    assert d.control.phase == "complete"
    assert "batches" in d.announced()
    assert d.send(messages.AskBatch(P, "t", 1)) == messages.Complete(1)


def test_the_first_worker_tells_how_long_an_epoch_is(drive):
    d = drive(steps=None, epochs=2, groups_per_step=3, max_staleness=9)
    d.send(messages.Register(P, "w", "rollout", prompt_count=3))
    d.send(messages.Register(P, "x", "rollout", prompt_count=7))
    assert "x reports 14 prompts for the run, which began with 6" in d.lines[-2]
    d.join(trainer="t")
    d.fill(6)
    assert d.ask(2).verdict == "throttled"
    assert d.control.phase == "draining"


def test_a_stopped_pipeline_still_takes_acknowledgements_and_checkpoints(drive):
    """Otherwise the checkpoint a trainer saves on its way out would be ahead of the books."""
    d = drive()
    d.join("w")
    d.fill()
    d.batch(0)
    d.send(messages.Stop(P, MemberId(""), "Ctrl-C"))
    assert isinstance(d.send(messages.AskBatch(P, "t", 0)), messages.BatchReady)
    assert d.ack(0) == messages.Ok()
    assert d.checkpoint(1) == messages.Ok()
    answer = d.send(messages.AskBatch(P, "t", 1))
    assert answer.phase == "stopped"
    assert "Ctrl-C" in answer.waiting_for


def test_a_failed_stop_carries_its_sentence(drive):
    d = drive()
    d.send(messages.Stop(P, MemberId(""), "worker 0 cannot start: no such model", failed=True))
    assert d.instructed(effects.FailRun) == [effects.FailRun("p: worker 0 cannot start: no such model")]
    assert d.control.phase == "stopped"
