"""Deliberate mistakes in the real code, each of which the simulation must notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from penstock.control.io.memory import MemoryClient
from penstock.control.io.service import ControlService
from penstock.control.ledger import Ledger
from penstock.control.samples import Redo
from penstock.errors import InvalidTransition, RunFailed
from penstock.launch import restarts
from penstock.launch.simulated import as_test, attempted, minimised, simulate
from penstock.payload import slot as slots
from penstock.payload.io.shm import Ring
from penstock.payload.slot import STATE_MASK
from penstock.records.ids import StepIndex
from penstock.rollout.io.worker_client import WorkerClient
from penstock.sim.parts import Work
from penstock.sim.plan import Plan, Report
from penstock.sim.storms import Fault
from penstock.train.data import BatchLoader
from penstock.train.loop import TrainingLoop
from penstock.weights import replica
from penstock.weights.io.updater import ReplicaUpdater
from penstock.weights.replica import Replica, ReplicaState, Resumed, ResumeEngine
from penstock.weights.transaction import WeightTransaction
from penstock.wire.messages import Delivered

pytestmark = pytest.mark.slow

W0, W1, TRAINER, CONTROLLER = "p0.rollout.0", "p0.rollout.1", "p0.trainer", "controller"
SETTINGS = {
    "control.stall_after_s": 20.0,
    "control.stall_fail_after_s": 60.0,
    "pipeline.checkpoint.every_steps": 1,
    "pipeline.train.straggler_wait_s": 0.0,
}

STRAGGLING = (
    *(Fault(4.0, "hooks_fail", worker, for_s=300.0, amount=0.2) for worker in (W0, W1)),
    Fault(4.0, "slow", W1, for_s=300.0, amount=3.0),
)
"""Members of groups fail and are issued again, some to a worker that is slow; the others' groups train on."""
DAMAGED = (Fault(4.0, "damage_weights", for_s=5.0),)
TRAINER_DIES = tuple(Fault(5.0 + 3.1 * number, "kill", TRAINER) for number in range(10))
CONTROLLER_DIES = tuple(
    one
    for at_s in (5.0, 12.0, 19.0, 26.0)
    for one in (Fault(at_s, "slow_disk", for_s=2.0, amount=1.5), Fault(at_s + 1.9, "kill", CONTROLLER))
)


def outcome(plan: Plan) -> str:
    """How the run ended, or which promise was broken."""
    try:
        report: Report = simulate(plan)
    except (InvalidTransition, RunFailed) as error:
        return str(error)
    return report.ended


def plan(faults: tuple[Fault, ...], steps: int = 20) -> Plan:
    return Plan(seed=11, steps=steps, faults=faults, settings=SETTINGS, limit_s=900.0)


@pytest.mark.parametrize("faults", [DAMAGED, TRAINER_DIES, CONTROLLER_DIES])
def test_without_a_mistake_these_runs_end_well(faults: tuple[Fault, ...]) -> None:
    assert outcome(plan(faults)) == "complete"


def unchecked(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    def dispatched(self: Ledger, **options: Any) -> Any:
        bound, self.max_staleness = self.max_staleness, 1 << 30
        try:
            return dispatch(self, **options)
        finally:
            self.max_staleness = bound

    return dispatched


def outdating() -> Plan:
    settings = {"pipeline.train.straggler_wait_s": 0.0}
    return Plan(seed=1, steps=30, workers=3, max_staleness=1, faults=STRAGGLING, settings=settings)


def test_without_a_mistake_outdated_groups_are_dropped_and_the_run_ends_well(monkeypatch: pytest.MonkeyPatch) -> None:
    drop, dropped = Ledger._drop_outdated, 0

    def counted(self: Ledger) -> None:
        nonlocal dropped
        before = len(self.state.groups)
        drop(self)
        dropped += before - len(self.state.groups)

    monkeypatch.setattr(Ledger, "_drop_outdated", counted)
    assert outcome(outdating()) == "complete"
    assert dropped


def test_a_skipped_staleness_check_is_found_in_the_books(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "dispatch", unchecked(Ledger.dispatch))
    assert "is kept although it is outdated" in outcome(outdating())


def test_a_skipped_staleness_check_and_no_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "check", lambda self: None)
    monkeypatch.setattr(Ledger, "dispatch", unchecked(Ledger.dispatch))
    assert "received a sample of version" in outcome(outdating())


def test_an_outdated_group_that_was_not_dropped_meets_the_check_at_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "check", lambda self: None)
    monkeypatch.setattr(Ledger, "_drop_outdated", lambda self: None)
    assert "versions old" in outcome(outdating())


def test_a_skipped_digest_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReplicaUpdater, "_staged_digest", lambda self, manifest: manifest.digest)
    assert "bytes that were never published" in outcome(plan(DAMAGED))


def test_an_early_slot_release(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = BatchLoader.fetch_share

    def released(self: BatchLoader, *arguments: Any) -> Any:
        share = fetch(self, *arguments)
        share.report.consumed()
        return share

    monkeypatch.setattr(BatchLoader, "fetch_share", released)
    assert "are missing" in outcome(plan(TRAINER_DIES))


def test_a_lease_dropped_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    deliver: Callable[..., Any] = WorkerClient.deliver
    count = 0

    async def forgetful(self: WorkerClient, rollouts: Any, *others: Any) -> Delivered:
        nonlocal count
        count += 1
        if count == 9 and rollouts:
            return Delivered((), "")
        return await deliver(self, rollouts, *others)

    monkeypatch.setattr(WorkerClient, "deliver", forgetful)
    assert "should deliver them" in outcome(plan(()))


def test_a_call_without_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two workers waits for an answer that was lost; the other goes on, so nothing stalls."""
    attempt = MemoryClient._attempt

    async def patient(self: MemoryClient, body: bytes, timeout_s: float) -> Any:
        waits_long = self.member.startswith(W0) and timeout_s > 6.0  # not its heartbeat
        return await attempt(self, body, 1e6 if waits_long else timeout_s)

    monkeypatch.setattr(MemoryClient, "_attempt", patient)
    broken = outcome(Plan(seed=11, steps=150, faults=(Fault(5.0, "lose", for_s=4.0, amount=0.4),)))
    assert "p0.rollout.0: control.io.memory.MemoryClient._attempt has waited for" in broken
    assert "without a deadline" in broken


def test_a_checkpoint_before_its_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    async def skipped(self: TrainingLoop, step: StepIndex) -> None: ...

    monkeypatch.setattr(TrainingLoop, "_flush_journal", skipped)
    quick = Work(sample_s=0.1, step_s=0.05, publish_s=0.01, fetch_weights_s=0.01, save_s=0.01)
    power = (Fault(5.05, "power_off", for_s=2.0),)
    assert "the journal has only" in outcome(msgspec.structs.replace(plan(power, steps=60), work=quick))


def test_a_prompt_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = Ledger.settle

    def again(self: Ledger, *arguments: StepIndex) -> bool:
        record = self.state.steps.get(StepIndex(3))
        known = settle(self, *arguments)
        if record is not None and StepIndex(3) not in self.state.steps:
            self.state.redo[record.prompts[0]] = Redo()
        return known

    monkeypatch.setattr(Ledger, "settle", again)
    monkeypatch.setattr(Ledger, "check", lambda self: None)
    assert "was trained in step 3 and again in step" in outcome(plan(()))


def test_a_ledger_that_forgets_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    lose = Ledger.release_member

    def forgetful(self: Ledger, *arguments: Any, **options: Any) -> Any:
        lost = lose(self, *arguments, **options)
        if self.state.dropped["lost"]:
            self.state.counts["dropped"] -= 1
        return lost

    monkeypatch.setattr(Ledger, "release_member", forgetful)
    assert "the sample table is broken" in outcome(plan((Fault(6.0, "kill", W0), Fault(12.0, "kill", W1))))


def test_a_ledger_that_skips_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    acknowledge = Ledger.acknowledge

    def lossy(self: Ledger, step: StepIndex, missing: Any) -> Any:
        changed = acknowledge(self, step, missing)
        for prompt in missing:
            self.state.redo.pop(prompt, None)
        return changed

    monkeypatch.setattr(Ledger, "acknowledge", lossy)
    faults = tuple(Fault(at_s, "kill", worker) for at_s in (4.0, 9.0, 14.0, 19.0) for worker in (W0, W1))
    chosen = msgspec.structs.replace(plan(faults), settings={**SETTINGS, "payload.transport": "tcp"})
    assert "prompts" in outcome(chosen)


def test_a_replica_that_resumes_a_mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Replica._failed

    def careless(self: Replica, event: Any) -> Any:
        effects = failed(self, event)
        return [ResumeEngine()] if self.state is ReplicaState.TORN else effects

    monkeypatch.setattr(Replica, "_failed", careless)
    monkeypatch.setitem(replica.TRANSITIONS, (ReplicaState.TORN, Resumed), ReplicaState.SERVING)
    monkeypatch.setattr(Replica, "check", lambda self: None)
    torn = (Fault(6.0, "tear", W0, for_s=20.0),)
    chosen = msgspec.structs.replace(plan(torn), settings={**SETTINGS, "pipeline.weights.way": "in_place"})
    assert "an engine generates as version" in outcome(chosen)


def test_a_slot_that_is_free_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    take = slots.take
    monkeypatch.setattr(slots, "take", lambda *arguments: take(*arguments) & ~STATE_MASK)
    tight = {**SETTINGS, "pipeline.rollout.ring_slots": 24}
    assert outcome(msgspec.structs.replace(plan(()), settings=tight)) != "complete"


def test_a_slot_that_is_never_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    filtering = Plan(
        seed=11, steps=40, work=Work(equal_rewards=0.6), settings={"pipeline.train.filters": ["zero_signal"]}
    )
    assert outcome(filtering) == "complete"
    monkeypatch.setattr(Ring, "discard", lambda self, refs: len(list(refs)))
    assert "slots are in use at the end" in outcome(filtering)


def test_a_controller_that_offers_no_weights_ends_the_run_with_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeightTransaction, "_offer", lambda self, member, now, held=None: [])
    settings = {
        "control.stall_fail_after_s": 600.0,
        "pipeline.weights.min_healthy": 1,
        "pipeline.weights.unhealthy_timeout_s": 60.0,
    }
    assert "replicas served" in outcome(Plan(steps=5, settings=settings))


@pytest.mark.slow
def test_a_failing_seed_is_made_smaller_and_printed_as_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a whole storm only the fault is left that the mistake needs."""
    monkeypatch.setattr(ReplicaUpdater, "_staged_digest", lambda self, manifest: manifest.digest)
    storm = tuple(
        Fault(at_s, what, target, for_s=3.0, amount=0.1)
        for at_s, what, target in (
            (3.0, "repeat", ""),
            (4.0, "damage_weights", ""),
            (5.0, "kill", W1),
            (6.0, "stop", TRAINER),
            (9.0, "latency", ""),
            (12.0, "kill", CONTROLLER),
        )
    )
    failing = Plan(seed=11, steps=24, faults=storm)
    assert "bytes that were never published" in attempted(failing)[0]
    smaller = minimised(failing, tries=30)
    assert [one.what for one in smaller.faults] == ["damage_weights"]
    assert smaller.steps <= 12
    pasted: dict[str, Any] = {"Plan": Plan, "Fault": Fault, "simulate": simulate}
    exec(as_test(smaller, "seed_11"), pasted)
    with pytest.raises(InvalidTransition, match="never published"):
        pasted["test_seed_11"]()


def test_a_reply_before_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(self: ControlService) -> None:
        pass

    monkeypatch.setattr(ControlService, "settle", at_once)
    assert "before its event was committed" in outcome(plan(()))


def test_a_process_that_is_restarted_without_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "LONGEST_BACKOFF_S", restarts.FIRST_BACKOFF_S)
    assert "was started 11 times in a minute" in outcome(plan((Fault(5.0, "crash_loop", W0, for_s=60.0, amount=0.5),)))
