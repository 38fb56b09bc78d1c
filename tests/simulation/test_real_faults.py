"""One kind of fault at a time, often, on the actual loops: each costs time, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.control.controller import Controller
from penstock.errors import InvalidTransition
from penstock.launch.simulated import simulate
from penstock.records.ids import PipelineName
from penstock.sim.parts import SimWorkload, Work
from penstock.sim.plan import EVALUATION, Plan, Report
from penstock.sim.storms import Fault

W0, W1, TRAINER, CONTROLLER = "p0.rollout.0", "p0.rollout.1", "p0.trainer", "controller"
EPOCH = Work(prompts=100)
EVALUATED = {f"pipeline.evaluation.{name}": value for name, value in EVALUATION.items()}


def run(*faults: Fault, **plan: Any) -> Report:
    report = simulate(Plan(faults=faults, **{"seed": 3, **plan}))
    assert report.complete, report.ended
    return report


def epoch(*faults: Fault, settings: dict[str, Any] | None = None, work: Work = EPOCH, **plan: Any) -> dict[str, Any]:
    """All prompts of an environment once, with respect to the final checkpoint."""
    report = run(*faults, steps=400, work=work, settings={"pipeline.epochs": 1, **(settings or {})}, **plan)
    status = report.status["pipelines"]["p0"]
    assert status["prompts_issued"] == work.prompts
    assert status["prompts_to_redo"] == 0
    return status


def every(seconds: float, what: str, target: str = "", until_s: float = 60.0, **details: Any) -> tuple[Fault, ...]:
    times = [seconds * number for number in range(1, int(until_s / seconds) + 1)]
    return tuple(Fault(at_s, what, target, **details) for at_s in times)


@pytest.mark.parametrize(
    "faults",
    [
        every(6.0, "kill", W0),
        every(9.0, "kill", TRAINER),
        every(9.0, "kill", CONTROLLER),
        every(15.0, "power_off", for_s=3.0),
        every(20.0, "stop", W1, for_s=18.0),
        every(6.0, "terminate", W0),
        every(3.0, "flip_prefetch"),
    ],
    ids=lambda faults: f"{faults[0].what} {faults[0].target}".strip(),
)
def test_faults_of_one_kind_cost_no_prompt(faults: tuple[Fault, ...]) -> None:
    assert epoch(*faults)["prompts_set_aside"] == 0


@pytest.mark.parametrize(("what", "amount"), [("lose", 0.03), ("reset", 0.2), ("repeat", 0.4), ("latency", 0.3)])
def test_a_bad_network_loses_and_doubles_nothing(what: str, amount: float) -> None:
    """Short of what makes a worker pass for dead: then its samples are lost, and drawn again."""
    status = epoch(Fault(2.0, what, for_s=400.0, amount=amount))
    assert status["dropped_lost"] == status["dropped_failed"] == 0


def test_poisoned_prompts_are_set_aside_and_the_rest_is_trained() -> None:
    assert 0 < epoch(work=Work(prompts=100, poison=0.06))["prompts_set_aside"] < 20


def test_a_worker_whose_heartbeat_is_lost_works_on_while_it_delivers() -> None:
    assert run(Fault(5.0, "cut", f"{W0}.heart", for_s=40.0), steps=40).restarts == 4
    muted = run(Fault(5.0, "cut", f"{W0}.heart", for_s=40.0), work=Work(sample_s=40.0), steps=6)
    assert muted.restarts == 5, "it was evicted and replaced"


def test_an_end_that_the_controller_could_not_be_told_of_is_told_later() -> None:
    """By its silence alone, a worker that was never heard of would be missed only after the startup grace."""
    report = run(
        Fault(5.0, "kill", W0),
        Fault(5.1, "cut", f"{W0}.heart", for_s=30.0),
        Fault(9.0, "cut", "supervisor", for_s=6.0),
        Fault(10.0, "kill", W0),
        steps=40,
    )
    ends = [one.at for one in report.log_lines if one.process == "controller" and "left: killed by SIGKILL" in one.line]
    assert report.first_logged("could not be notified that p0.rollout.0") is not None
    assert len(ends) == 2
    assert 15.0 < ends[1] < 20.0


def test_a_slow_worker_neither_stops_the_others_nor_breaks_the_bound() -> None:
    calm = run(steps=40, workers=4)
    for wait_s in (0.0, 5.0):
        slowed = Fault(3.0, "slow", W0, for_s=1000.0, amount=20.0)
        slow = run(slowed, steps=40, workers=4, settings={"pipeline.train.straggler_wait_s": wait_s})
        assert max(slow.staleness) <= 2
        assert slow.virtual_s < 2.5 * calm.virtual_s


def test_a_slow_worker_that_is_waited_for_loses_no_sample() -> None:
    slow = run(Fault(3.0, "slow", W0, for_s=1000.0, amount=20.0), steps=20, workers=4)
    assert slow.status["pipelines"]["p0"]["dropped_outdated"] == 0


def test_staleness_zero_is_synchronous_training() -> None:
    report = run(steps=12, max_staleness=0)
    assert report.staleness == {0: 12 * 8}


def test_nothing_is_dropped_by_default_for_being_long() -> None:
    report = run(steps=30, work=Work(spread=0.9))
    assert report.status["pipelines"]["p0"]["dropped_outdated"] == 0


@pytest.mark.parametrize("way", ["staged", "in_place"])
def test_mismatches_failed_writes_and_hung_engines_never_let_a_mixture_generate(way: str) -> None:
    faults = (
        Fault(5.0, "damage_memory", W0, for_s=6.0),
        Fault(8.0, "wake_fails", W1, for_s=10.0, amount=0.3),
        Fault(12.0, "tear", W0, for_s=6.0),
        Fault(20.0, "stuck_update", W1, for_s=3.0),
    )
    report = run(*faults, steps=40, settings={"pipeline.weights.way": way})
    assert report.first_logged("update failed at step") is not None


@pytest.mark.parametrize(
    ("way", "what", "said"),
    [
        ("staged", "damage_memory", "the staged version is not version"),
        ("in_place", "damage_memory", "the engine does not hold version"),
        ("in_place", "tear", "the transfer broke off"),
    ],
)
def test_each_fault_of_an_engine_happens_and_is_noticed(way: str, what: str, said: str) -> None:
    report = run(Fault(5.0, what, W0, for_s=4.0), steps=12, settings={"pipeline.weights.way": way})
    assert report.first_logged(said, after_s=5.0) is not None


def test_steps_that_learn_nothing_and_steps_that_are_filtered_away() -> None:
    """Equal bytes under many versions, groups of equal rewards, and a filter that leaves a step nothing for long."""
    work = Work(equal_bytes=1.0, equal_rewards=0.9)
    report = run(every(8.0, "kill", W0)[0], steps=12, work=work, settings={"pipeline.train.filters": ["zero_signal"]})
    assert report.status["pipelines"]["p0"]["dropped_filtered"] > 100


# -- disks ------------------------------------------------------------------------------------------------------------

QUICK = Work(sample_s=0.1, step_s=0.05, publish_s=0.01, fetch_weights_s=0.01, save_s=0.01)
SAVED = {"pipeline.checkpoint.every_steps": 1}


def test_no_checkpoint_is_ahead_of_the_journal_after_a_power_failure() -> None:
    """The journal lost its last second, in which ten steps were trained and saved: the run could not be resumed."""
    faults = (Fault(5.05, "power_off", for_s=2.0), Fault(10.45, "power_off", for_s=2.0))
    report = run(*faults, steps=60, work=QUICK, settings=SAVED)
    assert len(report.steps["p0"]) == 60
    assert report.lost == []


def test_a_disk_that_lied_costs_the_steps_since_the_last_whole_checkpoint() -> None:
    faults = (Fault(11.0, "lying_disk", for_s=6.0), Fault(13.0, "power_off", for_s=2.0))
    report = run(*faults, steps=30, settings={"pipeline.checkpoint.every_steps": 3})
    assert any(name.startswith("checkpoints/") for name in report.lost)


def test_a_journal_that_was_torn_ends_the_run_with_its_sentence() -> None:
    report = simulate(Plan(seed=3, faults=(Fault(8.0, "torn_journal", for_s=2.0),)))
    assert "is damaged" in report.ended
    assert "restore the file from a copy" in report.ended


@pytest.mark.parametrize("what", ["kill", "power_off"])
def test_a_controller_that_starts_from_snapshots_loses_no_prompt(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal is replayed from its first event at the end, and every decision compared."""
    restore, restored = Controller.restore, list[PipelineName]()

    def counted(self: Controller, name: PipelineName, state: bytes) -> None:
        restored.append(name)
        restore(self, name, state)

    monkeypatch.setattr(Controller, "restore", counted)
    faults = every(9.0, what, CONTROLLER, for_s=2.0)
    status = epoch(*faults, settings={"journal.snapshot_every_events": 25} | EVALUATED, groups_per_step=2)
    assert status["prompts_set_aside"] == 0
    assert len(restored) > 2


def test_a_run_whose_disk_was_full_is_resumed_and_misses_nothing() -> None:
    assert epoch(Fault(8.0, "full_disk", for_s=20.0), resumed=True)["prompts_set_aside"] == 0


def test_checkpoints_torn_by_kills_on_a_slow_disk_are_passed_over() -> None:
    faults = (Fault(6.0, "slow_disk", for_s=60.0, amount=0.5), *every(8.0, "kill", TRAINER, until_s=40.0))
    report = run(*faults, steps=20, settings=SAVED)
    assert len(report.steps["p0"]) == 20


# -- evaluations ------------------------------------------------------------------------------------------------------


def test_without_faults_every_point_is_made_and_training_goes_on_beside() -> None:
    without = run(steps=40)
    report = run(steps=40, settings=EVALUATED)
    assert [point["due"] for point in report.points] == list(range(0, 41, 5))
    assert not any("skipped" in point for point in report.points)
    assert report.samples == without.samples
    assert report.virtual_s < 2.5 * without.virtual_s


def test_points_end_whatever_happens_to_those_who_make_them() -> None:
    faults = (*every(7.0, "kill", W0), *every(11.0, "kill", W1), *every(23.0, "kill", CONTROLLER))
    report = run(*faults, Fault(30.0, "kill", TRAINER), Fault(40.0, "power_off", for_s=3.0), settings=EVALUATED)
    assert sum("skipped" not in point for point in report.points) >= 3


def test_a_sample_of_another_version_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = SimWorkload._outcome

    def lies(self: SimWorkload, lease: Any, member: int, sample: int, drawn: Any) -> Any:
        drawn.newest += lease.evaluation is not None
        return outcome(self, lease, member, sample, drawn)

    monkeypatch.setattr(SimWorkload, "_outcome", lies)
    with pytest.raises(InvalidTransition, match="samples of other versions"):
        simulate(Plan(steps=12, settings=EVALUATED))


# -- payloads over the network ----------------------------------------------------------------------------------------


def test_payloads_over_the_network_come_through_sick_ports_and_bad_weather() -> None:
    faults = (
        Fault(4.0, "corrupt", for_s=40.0, amount=0.2),
        Fault(5.0, "sick_port", W0, for_s=20.0, amount=0),
        Fault(9.0, "sick_port", W1, for_s=20.0, amount=1),
        Fault(20.0, "sick_port", W1, for_s=20.0, amount=2),
        Fault(25.0, "lose", for_s=25.0, amount=0.5),
    )
    report = run(*faults, steps=40, settings={"payload.transport": "tcp"})
    assert report.samples == 40 * 8, "nothing was missing"
    assert {"refused", "reset", "silent", "corrupt", "confirmation lost"} <= report.troubles.keys()


def test_payloads_that_go_with_their_producer_are_made_again() -> None:
    status = epoch(*every(5.0, "kill", W0), *every(13.0, "cut", W1, for_s=9.0), settings={"payload.transport": "tcp"})
    assert status["prompts_set_aside"] == 0


# -- shared devices ---------------------------------------------------------------------------------------------------


def test_pipelines_that_share_too_few_devices_all_finish() -> None:
    report = run(steps=8, pipelines=3, settings={"pool.devices": 3})
    assert {name: len(times) for name, times in report.steps.items()} == {"p0": 8, "p1": 8, "p2": 8}
    assert report.turns > 3 * 8


@pytest.mark.parametrize("seed", [0, 1])
def test_devices_of_processes_that_are_gone_or_stand_still_are_given_on(seed: int) -> None:
    faults = (
        *every(14.0, "kill", "p0.trainer"),
        *every(17.0, "stop", "p1.rollout.0", for_s=12.0),
        *every(19.0, "cut", "p2.rollout.0", for_s=10.0),
        *every(37.0, "kill", CONTROLLER),
    )
    report = run(*faults, seed=seed, steps=8, pipelines=3, settings={"pool.devices": 2})
    assert {name: len(times) for name, times in report.steps.items()} == {"p0": 8, "p1": 8, "p2": 8}
