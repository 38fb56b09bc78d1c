"""The actual controller, workers, trainer and supervisor of a run, in seeded storms of faults."""

from __future__ import annotations

import msgspec
import pytest

from penstock.errors import InvalidTransition
from penstock.launch.simulated import simulate
from penstock.sim.parts import SimEngine, Work
from penstock.sim.plan import Plan, Report, mixed
from penstock.sim.storms import Fault, storm
from penstock.sim.system import TIMED, System
from penstock.train import checkpoint
from penstock.train.loop import TrainingLoop

WORKERS = ["p0.rollout.0", "p0.rollout.1"]
SETTLED_WITHIN_S = 60.0
"""After the last fault: processes that were suspected are heard again or replaced by then."""


def stormy(seed: int, *, steps: int = 30, span_s: float = 90.0, every_s: float = 8.0) -> Plan:
    faults = storm(seed, WORKERS, ["p0.trainer"], span_s=span_s, every_s=every_s)
    return Plan(seed=seed, steps=steps, faults=tuple(faults))


def test_an_undisturbed_run_trains_every_step_and_ends_well() -> None:
    report = simulate(Plan(seed=3, steps=8))
    assert report.complete
    assert len(report.steps["p0"]) == 8
    assert report.samples == 8 * 4 * 2


def test_all_work_that_has_a_duration_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Durations go by the names of functions: one that is renamed or wrapped would take no time, unnoticed."""
    duration, seen = System.duration, set[str]()

    def recorded(self: System, offload: str, function: str) -> float:
        seen.add(function.rpartition(".")[2])
        return duration(self, offload, function)

    monkeypatch.setattr(System, "duration", recorded)
    assert simulate(Plan(seed=3, steps=8)).trained_s > 8 * 0.5 * 0.7
    assert seen >= TIMED.keys()


@pytest.mark.parametrize("role", ["p0.rollout.0", "p0.trainer", "controller"])
def test_a_run_goes_on_after_a_kill_of_each_role(role: str) -> None:
    report = simulate(Plan(seed=4, steps=12, faults=(Fault(6.0, "kill", role), Fault(14.0, "kill", role))))
    assert report.complete
    assert report.restarts == 4 + 2


def test_the_same_seed_gives_the_same_history() -> None:
    plan = stormy(5, steps=12)
    first, second = simulate(plan), simulate(plan)
    assert first.digest == second.digest
    assert first.lines == second.lines
    assert simulate(stormy(6, steps=12)).digest != first.digest


FOUND = [8, 19, 31, 33, 46, 109, 256]
"""Seeds that once failed: a rolled-back evaluation, devices at the end of a run, restarts that were used up by a muted
heartbeat and by kills, a lease whose lost answer was never asked for again, a delivery that a drain cut off, samples
refused for their weights that counted as an environment that fails."""


@pytest.mark.parametrize("target", ["p0.rollout.0", "p0.trainer", "controller"])
def test_a_process_that_dies_again_and_again_is_started_at_a_bounded_pace(target: str) -> None:
    """The pauses double up to ten seconds; the run goes on once it lives."""
    report = simulate(Plan(seed=3, steps=12, faults=(Fault(5.0, "crash_loop", target, for_s=60.0, amount=0.2),)))
    assert report.complete
    pauses = [one.line.rpartition(" in ")[2] for one in report.log_lines if f"{target} ended" in one.line]
    assert pauses[:6] == ["0.5 s", "1 s", "2 s", "4 s", "8 s", "10 s"]


def test_a_worker_that_dies_again_and_again_hides_no_stall() -> None:
    """If its starts counted as progress, the diagnosis of a trainer that hangs would come late or never."""
    hung = Fault(10.0, "hang_trainer", for_s=2.0)
    dying = Fault(12.0, "crash_loop", "p0.rollout.1", for_s=150.0, amount=2.0)
    report = simulate(Plan(seed=3, steps=20, faults=(hung, dying), settings={"control.wedged_after_s": 120.0}))
    assert report.complete
    assert (report.first_logged("p0: stalled for") or 1e9) < 10.0 + 60.0 + 20.0


def test_losses_count_within_a_window_and_not_for_ever() -> None:
    """A worker is lost every 20 s. Two losses in 30 s are allowed: the run goes on. Two in an hour: it fails."""
    lost = tuple(Fault(at_s, "lose_host", WORKERS[0]) for at_s in range(10, 90, 20))
    for window_s, complete in ((30.0, True), (3600.0, False)):
        settings = {"run.max_restarts": 2, "run.restart_window_s": window_s}
        report = simulate(Plan(seed=3, steps=80, faults=lost, settings=settings))
        assert report.complete is complete, report.ended
        assert report.fired["lose_host"] == (len(lost) if complete else 3)
    assert report.ended == "p0.rollout.0 ended again after 2 restarts within 3600 s: killed by SIGKILL"


def test_the_last_checkpoint_of_a_complete_pipeline_is_damaged_while_another_still_trains() -> None:
    """The run could not be resumed: the trainer fell back to the checkpoint before, and was refused as too late."""
    faults = (Fault(4.0, "stop", "p1.trainer", for_s=40.0), Fault(24.0, "damage_checkpoint"), Fault(26.0, "power_off"))
    settings = {"pipeline.checkpoint.every_steps": 2}
    report = simulate(Plan(seed=3, steps=8, pipelines=2, faults=faults, settings=settings))
    assert report.complete
    assert report.first_logged("p0: running -> draining", after_s=26.0) is not None
    assert report.first_logged("p0: training rolled back from step 8 to 6") is not None


def test_the_last_checkpoint_is_damaged_when_the_workers_have_left() -> None:
    """The trainer dies between its last checkpoint and its end: the run says what to do, and that helps."""
    plan = Plan(seed=3, steps=4, settings={"pipeline.checkpoint.every_steps": 2})
    at_s = simulate(plan).first_logged("draining -> complete")
    assert at_s is not None
    faults = tuple(Fault(at_s + 0.001, what, "p0.trainer") for what in ("damage_checkpoint", "kill"))
    ended = simulate(msgspec.structs.replace(plan, faults=faults)).ended
    assert ended.endswith("resume the run to train the missing steps again")
    report = simulate(msgspec.structs.replace(plan, faults=faults, resumed=True))
    assert report.complete
    assert report.first_logged("training rolled back from step 4 to 2") is not None


def test_a_trainer_that_hangs_on_its_devices_keeps_them_until_it_has_ended() -> None:
    """It could not move off, unregistered all the same, and another moved on while its step still ran there."""
    settings = {"pool.devices": 2, "control.reconnect_s": 5.0, "control.wedged_after_s": 40.0}
    hung = 0
    for seed, at in ((1, 7.0), (2, 7.0), (4, 5.0), (6, 9.0)):
        faults = (Fault(at, "hang_trainer", for_s=3.0), Fault(at + 1.5, "cut", "p0.trainer", for_s=8.0))
        report = simulate(Plan(seed=seed, steps=8, pipelines=2, faults=faults, settings=settings))
        assert report.complete
        hung += report.first_logged("unregister: Transient: it is still on its devices") is not None
    assert hung > 0, "in no run did the trainer hang in a step as it left"


def test_the_supervisor_reports_the_end_of_a_worker_that_could_not_move_off_its_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fails(self: SimEngine, timeout_s: float) -> None:
        raise ValueError("it stays")

    monkeypatch.setattr(SimEngine, "vacate", fails)
    report = simulate(Plan(seed=3, steps=4, pipelines=2, settings={"pool.devices": 2}))
    assert report.complete
    assert report.first_logged("left: exit code 0") is not None


def test_a_disk_that_lies_about_every_kept_checkpoint_ends_the_run_with_a_sentence() -> None:
    """The journal knows of a checkpoint that was written before; it was removed when two newer ones seemed written."""
    power_off = Fault(14.0, "power_off", for_s=5.0)
    plan = Plan(seed=42, settings={"pipeline.checkpoint.every_steps": 1}, resumed=True, faults=(power_off,))
    assert simulate(plan).complete
    lying = msgspec.structs.replace(plan, faults=(Fault(7.0, "lying_disk", for_s=18.0), power_off))
    report = simulate(lying)
    assert report.ended.startswith("p0.trainer: the trainer starts at step 0, but a checkpoint of step ")
    assert report.first_logged("is damaged: ") is not None
    assert len({line.split("/")[2] for line in report.lost if line.startswith("checkpoints/p0/")}) == 2
    assert report.acceptable


def test_a_run_may_not_end_for_want_of_a_checkpoint_that_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "latest", lambda directory: None)
    faults = (Fault(10.0, "kill", "p0.trainer"),)
    with pytest.raises(InvalidTransition, match="were kept, and only"):
        simulate(Plan(seed=3, settings={"pipeline.checkpoint.every_steps": 1}, faults=faults))


def test_a_checkpoint_may_not_be_confirmed_before_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingLoop, "_write_checkpoint", lambda self: None)
    with pytest.raises(InvalidTransition, match="the checkpoint of step 5 is confirmed and not written"):
        simulate(Plan(seed=3, steps=8))


@pytest.mark.slow
@pytest.mark.parametrize("seed", FOUND)
def test_storms(seed: int) -> None:
    report = simulate(mixed(seed, disks=False))
    assert report.complete, report.ended


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 200, 10))
def test_many_storms(first: int) -> None:
    """A hundred random shapes of run in random storms."""
    for seed in range(first, first + 10):
        report = simulate(mixed(seed))
        assert report.acceptable, f"seed {seed}: {report.ended}"


@pytest.mark.parametrize(("seed", "for_s"), [(0, 2.4), (1, 2.4), (5066, 2.4), (2, 30.0)])
def test_a_damaged_version_costs_a_worker_some_time_and_not_the_run(seed: int, for_s: float) -> None:
    """A worker that starts while the newest version is damaged waits for it to be written afresh."""
    faults = (
        Fault(10.2239, "lose", for_s=6.9, amount=0.09),
        Fault(10.33, "kill", WORKERS[0]),
        Fault(16.22, "damage_weights", for_s=for_s),
        Fault(16.31, "kill", WORKERS[0]),
    )
    work = Work(equal_rewards=0.2, poison=0.02)
    report = simulate(Plan(seed=seed, steps=30, faults=faults, work=work))
    assert report.complete
    assert report.restarts == 4 + 2, "only those that were killed were started again"


@pytest.mark.parametrize("seed", range(3))
def test_a_worker_whose_ring_was_deleted_is_replaced(seed: int) -> None:
    """A trainer that starts after that could read none of its samples."""
    faults = (Fault(8.0, "unlink_ring", WORKERS[0]), Fault(8.5, "kill", "p0.trainer"))
    report = simulate(Plan(seed=seed, steps=30, faults=faults))
    assert report.complete
    assert report.restarts == 4 + 2
    said = report.first_logged("was deleted or moved")
    assert said is not None
    assert said < 8.0 + 5.0


def pace(report: Report, steps: int) -> float:
    """Seconds per step over the last of them."""
    times = report.steps["p0"]
    return (times[-1] - times[-1 - steps]) / steps


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_after_a_storm_the_pace_of_an_undisturbed_run_returns(seed: int) -> None:
    """The storm ends after a minute; what it left behind is over soon after."""
    storming = stormy(seed, steps=130, span_s=45.0, every_s=5.0)
    ceased_s = max(one.at_s + one.for_s for one in storming.faults)
    report, calm = simulate(storming), simulate(Plan(seed=seed, steps=120))
    times = report.steps["p0"]
    left = sum(at > ceased_s + SETTLED_WITHIN_S for at in times)
    assert left > 20, "the run was over before the storm"
    assert pace(report, left - 1) < 1.25 * pace(calm, 60)


def test_what_reaches_nothing_any_more_ends_within_its_bound() -> None:
    """No call waits for ever: a worker and a trainer that are cut off for good give up, each with a sentence."""
    names = (*WORKERS, "p0.trainer")
    faults = tuple(Fault(10.0, "cut", name, for_s=3000.0) for name in names)
    settings = {"control.reconnect_s": 30.0, "run.max_restarts": 4, "control.stall_fail_after_s": 400.0}
    report = simulate(Plan(steps=40, faults=faults, settings=settings))
    assert not report.complete
    assert report.virtual_s < 10.0 + 500.0
    for name in names:
        assert any(one.process == name and one.at < 10.0 + 60.0 for one in report.log_lines), name
