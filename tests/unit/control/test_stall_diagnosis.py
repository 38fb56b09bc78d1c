"""A stall is named: who waits for what, since when, and who should have moved."""

# pyright: reportArgumentType=false
# Ids are written plainly here.

from __future__ import annotations

import numpy as np
import pytest

from penstock.control import effects
from penstock.errors import Transient
from penstock.payload.io.shm import Ring
from penstock.records.ids import MemberId, PipelineName
from penstock.rollout.io import worker_client
from penstock.rollout.io.worker_client import RingStore
from penstock.wire import messages

P = PipelineName("p")


def beating(d, seconds: float, *members: str, doing: str = "", stuck: str = "") -> list[effects.Effect]:
    seen = []
    for second in range(int(seconds)):
        d.now += 1.0
        for member in members:
            d.send(messages.Heartbeat(P, member, float(second) if member == stuck else 0.0, doing))
        seen += d.tick()
    return seen


def lines(seen: list[effects.Effect]) -> list[str]:
    return [effect.line for effect in seen if isinstance(effect, effects.Log) and effect.level == "warning"]


def test_a_worker_that_keeps_its_samples_is_named(drive):
    d = drive(stall_after_s=60, max_staleness=0)
    d.join("w")
    d.lease(4)
    seen = beating(d, 65, "w", "t", doing="generate", stuck="w")
    (line,) = lines(seen)
    assert line.startswith("p: stalled for 6")
    assert "The trainer t has waited 61 s for 2 more of 2 groups for step 0 (4 samples leased" in line
    assert "Worker w holds 4 samples and should deliver them" in line
    assert "last progress 6" in line
    assert "in 'generate'" in line


def test_a_worker_whose_ring_is_full_is_not_said_to_generate(drive, tmp_path, monkeypatch):
    """From the full ring through what the worker reports to the sentence, which names who does not fetch."""
    monkeypatch.setattr(worker_client, "REPORT_EVERY_S", 0.01)
    monkeypatch.setattr(worker_client, "WRITE_S", 0.1)
    ring = Ring.create("run-1", capacity_bytes=64 * 1024, slots=1, directory=str(tmp_path))
    reported: list[str] = []
    store = RingStore(ring, reported.append)
    store.write({"rewards": np.zeros(4, np.float32)})
    with pytest.raises(Transient, match="payloads are waiting"):
        store.write({"rewards": np.zeros(4, np.float32)})
    ring.close()
    d = drive(stall_after_s=60, max_staleness=0)
    d.join("w")
    d.lease(4)
    (line,) = lines(beating(d, 65, "w", "t", doing=reported[-1], stuck="w"))
    assert "Worker w holds 4 samples" in line
    assert "in 'ring full: " in line
    assert "1 payloads are waiting and no consumer has attached" in line
    assert "generat" not in line


def test_a_trainer_that_keeps_its_batch_is_named(drive):
    d = drive(stall_after_s=60, max_staleness=0)
    d.join("w")
    d.fill()
    d.batch(0)
    (line,) = lines(beating(d, 65, "w", "t", doing="optimiser", stuck="t"))
    assert "The trainer t has held the batch of step 0 for 6" in line


def test_a_worker_that_dies_again_and_again_hides_no_stall(drive):
    d = drive(stall_after_s=60, max_staleness=0)
    d.join("w")
    d.lease(4)
    seen = beating(d, 40, "w", "t", doing="generate", stuck="w")
    for life in range(2):
        d.send(messages.Register(P, f"v{life}", role="rollout", pid=1, host_id="h"))
        seen += beating(d, 10, "w", "t", f"v{life}", doing="generate", stuck="w")
        d.send(messages.Unregister(P, f"v{life}", "killed", died=True))
        seen += beating(d, 2, "w", "t", doing="generate", stuck="w")
    assert [line.partition(" s: ")[0] for line in lines(seen)] == ["p: stalled for 61"]


def test_a_long_step_is_no_stall_while_the_trainer_gets_on_with_it(drive):
    d = drive(stall_after_s=20, stall_fail_after_s=50, max_staleness=0)
    d.join("w")
    d.fill()
    d.batch(0)
    assert not lines(beating(d, 500, "w", "t", doing="training step 0"))
    d.ack(0)
    assert lines(beating(d, 30, "w", "t")), "without a batch the others make no progress"


def test_the_report_comes_once_per_period_and_stops_when_something_moves(drive):
    d = drive(stall_after_s=20, max_staleness=0)
    d.join("w")
    leases = d.lease(4)
    assert len(lines(beating(d, 65, "w", "t"))) == 3
    d.deliver(leases)
    assert not lines(beating(d, 15, "w", "t"))
    assert d.control.status(d.now)["stalled_s"] == 15


def test_after_the_second_bound_the_run_fails_with_the_diagnosis(drive):
    d = drive(stall_after_s=20, stall_fail_after_s=50, max_staleness=0)
    d.join("w")
    d.lease(4)
    (failed,) = [effect for effect in beating(d, 60, "w", "t") if isinstance(effect, effects.FailRun)]
    assert failed.sentence.startswith("p: no progress for 51 s: The trainer t has waited 51 s for")
    assert d.control.phase == "stopped"
    assert d.control.diagnose(d.now).startswith("stopped: p: no progress")


@pytest.mark.parametrize("stuck", ["w", "t"])
@pytest.mark.parametrize("again", [False, True])
def test_a_process_that_hangs_is_replaced_once_before_the_run_is_given_up(drive, stuck, again):
    """By default the run failed in the moment in which the process was evicted. It must not go on for ever either."""
    d = drive(max_staleness=0)
    d.join("w")
    leases = d.lease(4)
    if stuck == "t":
        d.deliver(leases)
        d.batch(0)
    seen = beating(d, 610, "w", "t", stuck=stuck)
    assert f"p: {stuck} evicted: no progress for 601 s" in lines(seen)
    assert not [effect for effect in seen if isinstance(effect, effects.FailRun)]
    if stuck == "t":
        d.join(trainer="t2", step=0)
        d.batch(0, "t2")
        d.ack(0, "t2") if not again else None
    else:
        d.join("w2", trainer=None)
        leases = d.lease(4, "w2")
        d.deliver(leases, "w2") if not again else None
    assert (d.control.state.wedged_at is None) == (not again)
    seen = beating(d, 610, f"{stuck}2", "w" if stuck == "t" else "t", stuck=f"{stuck}2")
    failed = [effect.sentence for effect in seen if isinstance(effect, effects.FailRun)]
    since = "no sample or step arrived for 610 s, since another process was evicted for the same reason"
    assert failed == ([f"p: {stuck}2: no progress for 601 s, and {since}"] if again else [])


def test_workers_that_hang_one_after_the_other_are_all_replaced(drive):
    d = drive(wedged_after_s=50, max_staleness=0)
    d.join("a", "b")
    d.lease(2, "a")
    d.now += 20
    d.lease(2, "b")
    for second in range(80):
        d.now += 1.0
        for member, since in (("a", 20), ("b", 0)):
            d.send(messages.Heartbeat(P, member, float(second + since)))
        d.send(messages.Heartbeat(P, "t", 0.0))
        d.tick()
    assert not d.control.members.having("rollout")
    assert d.control.phase == "running"


def test_nothing_is_a_stall_before_the_first_workers_had_time_to_register(drive):
    """A controller does not give up before its first registration."""
    d = drive(stall_after_s=10, stall_fail_after_s=20, startup_grace_s=100)
    assert not lines(d.tick(105))
    seen = d.tick(20)
    assert "No trainer is registered yet: the supervisor should start one." in lines(seen)[0]
    assert "No rollout worker is registered" in lines(seen)[0]
    assert any(isinstance(effect, effects.FailRun) for effect in seen)


@pytest.mark.parametrize(
    ("prepare", "sentence"),
    [
        (lambda d: d.join("w"), "No weights are published: the trainer should publish"),
        (
            lambda d: (d.join("w"), d.publish(0)),
            "1 workers are registered and could lease 8 samples, but none does: w (",
        ),
        (lambda d: d.join("w", trainer=None), "No trainer is registered yet"),
        (lambda d: (d.join("w"), d.fill()), "The batch of step 0 is ready: the trainer t should fetch it ("),
        (lambda d: (d.join("w"), d.send(messages.Unregister(P, "t"))), "No trainer has been registered for 0 s"),
        (lambda d: d.send(messages.Stop(P, MemberId(""), "enough")), "stopped: enough."),
    ],
)
def test_every_kind_of_waiting_has_its_sentence(drive, prepare, sentence):
    d = drive()
    prepare(d)
    assert sentence in d.control.diagnose(d.now)


def test_workers_are_not_blamed_when_all_that_is_lacking_is_a_trainer(drive):
    """Seen in a run whose trainer took a while to come back: the buffers were full, and that was called a bug."""
    d = drive()
    d.join("w")
    d.fill(4)
    assert d.ask().verdict == "throttled"
    d.send(messages.Unregister(P, "t"))
    assert d.control.diagnose(d.now) == (
        "No trainer has been registered for 0 s: the supervisor should start one. The batch of step 0 is ready."
    )


def test_workers_are_not_blamed_when_the_trainer_died_with_its_batch(drive):
    d = drive(max_staleness=0)
    d.join("w")
    d.publish(0)
    d.fill()
    d.batch(0)
    d.send(messages.Unregister(P, "t", "exit code -9", died=True))
    assert d.control.diagnose(d.now) == (
        "No trainer has been registered for 0 s: the supervisor should start one. The batch of step 0 is kept for it."
    )


def test_workers_that_cannot_get_newer_weights_are_named(drive):
    d = drive(max_staleness=0)
    d.join("w")
    d.publish(0)
    d.fill()
    d.batch(0)
    d.publish(1)
    d.ack(0)
    sentence = "The last leases of all 1 workers were for weights older than 1; they should load newer ones: w ("
    assert sentence in d.control.diagnose(d.now)


def test_a_worker_whose_server_is_loading_is_not_said_to_be_idle(drive):
    d = drive(stall_after_s=60, startup_grace_s=1)
    d.join("w", "v")
    d.publish(0)
    (line,) = lines(beating(d, 65, "w", "v", "t", doing=f"{messages.LOADING} the vLLM server for 65 s"))
    assert "Worker w cannot lease before its engine serves (" in line
    assert "in 'loading the vLLM server for 65 s'" in line
    assert "none does" not in line


def test_a_long_load_is_reported_and_fails_no_run(drive):
    """A large model may load for longer than a standstill is allowed to last; its server has a deadline of its own."""
    d = drive(stall_after_s=20, stall_fail_after_s=50, startup_grace_s=1)
    d.join("w")
    d.publish(0)
    seen = beating(d, 200, "w", "t", doing=f"{messages.LOADING} the vLLM server")
    assert len(lines(seen)) >= 8
    assert not [effect for effect in seen if isinstance(effect, effects.FailRun)]
    seen = beating(d, 60, "w", "t", doing=f"{messages.LOADING} the vLLM server", stuck="w")
    assert [effect for effect in seen if isinstance(effect, effects.FailRun)], "it does not get on with it"


def test_the_run_may_end_when_no_trainer_comes_back(drive):
    d = drive(exit_without_trainer_s=30, stall_after_s=1000)
    d.join("w")
    assert not [effect for effect in beating(d, 40, "w", "t") if isinstance(effect, effects.FailRun)]
    d.send(messages.Unregister(P, "t", "exit code 1", died=True))
    (failed,) = [effect for effect in beating(d, 40, "w") if isinstance(effect, effects.FailRun)]
    assert "no trainer registered within 30 s" in failed.sentence


def test_a_trainer_that_comes_back_in_time_is_forgiven(drive):
    d = drive(exit_without_trainer_s=30, stall_after_s=1000)
    d.join("w")
    d.send(messages.Unregister(P, "t", "exit code 1", died=True))
    beating(d, 20, "w")
    d.join(trainer="t2")
    assert not [effect for effect in beating(d, 60, "w", "t2") if isinstance(effect, effects.FailRun)]


def test_a_pause_of_the_run_is_no_time_without_a_trainer(drive):
    """An interrupted run failed at its first resume: the pause counted."""
    d = drive(exit_without_trainer_s=30, stall_after_s=1000)
    d.join("w")
    d.send(messages.Unregister(P, "t", "SIGINT"))
    beating(d, 20, "w")
    d.now += 3600
    assert not [effect for effect in d.tick() if isinstance(effect, effects.FailRun)]
    (failed,) = [effect for effect in beating(d, 20, "w") if isinstance(effect, effects.FailRun)]
    assert "no trainer registered within 30 s" in failed.sentence, "the time before the pause counts"


def test_by_default_a_run_waits_for_a_trainer_to_join_later(drive):
    d = drive(stall_after_s=1000)
    d.join("w")
    d.send(messages.Unregister(P, "t", "exit code 1", died=True))
    assert not [effect for effect in beating(d, 300, "w") if isinstance(effect, effects.FailRun)]


def test_the_status_is_plain_numbers(drive):
    d = drive()
    d.join("w")
    d.publish(0)
    d.fill()
    d.train(0)
    status = d.control.status(d.now)
    assert all(isinstance(value, int | float) for key, value in status.items() if key != "phase")
    assert (status["step"], status["samples_trained"], status["reward_mean"]) == (1, 4, 1.0)
    assert status["conservation_error"] == 0
    assert "p running" in repr(d.control)


def test_a_worker_that_calls_often_is_not_said_to_load_any_more(drive):
    """Heartbeats between other calls are not recorded, but for those that say what users are told."""
    d = drive(stall_after_s=60)
    d.join("w")
    d.publish(0)
    d.send(messages.Heartbeat(P, "w", 0.0, f"{messages.LOADING} the vLLM server for 3 s"))
    assert d.control.status(d.now)["workers_loading"] == 1
    for step in range(5):
        d.fill()
        d.batch(step)
        d.publish(step + 1)
        d.ack(step)
        d.send(messages.Heartbeat(P, "w", 0.0, "generating"))
        assert d.control.status(d.now)["workers_loading"] == 0
    d.send(messages.Heartbeat(P, "w", 0.0, f"{messages.REWARD} judge running for 12 s, 1 call"))
    assert "judge" in d.control.slow(d.now)
    d.send(messages.Heartbeat(P, "w", 0.0, "generating"))
    assert d.control.slow(d.now) == ""
