"""The whole system under seeded faults: every machine of a run, several pipelines, one pool.

A failure prints its seed; the same seed fails again in the same way.
"""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest

from penstock.errors import PenstockError
from penstock.sim.faults import WholeFaults
from penstock.sim.whole import WholeReport, WholeSettings, simulate_whole

EVERY_FAULT = {
    "worker killed",
    "worker wedged",
    "worker stopped",
    "heartbeat muted",
    "trainer killed",
    "controller killed",
    "run resumed",
    "request lost",
    "reply lost",
    "request repeated",
    "prefetch flipped",
    "prepare raised",
    "generate raised",
    "postprocess raised",
    "sample failed",
    "group missing",
    "payload port refused",
    "payload port timed out",
    "payload connection reset",
    "payload damaged on its way",
    "payload transfer slow",
    "artifact damaged",
    "version gone before it was read",
    "weights transfer broke off",
    "digest mismatch",
    "write failed",
    "resume failed",
    "engine hung",
    "emergency checkpoint",
    "move failed",
    "move hung",
}


def run(settings: WholeSettings) -> WholeReport:
    try:
        return simulate_whole(settings)
    except PenstockError as error:
        pytest.fail(f"seed {settings.seed}: {type(error).__name__}: {error}\nreproduce: simulate_whole({settings!r})")


def storm(seed: int) -> WholeSettings:
    """Random pipelines in a random storm that blows over, so that everything must come to rest afterwards."""
    random = Random(seed)
    pipelines, workers = random.choice((1, 1, 2, 3)), random.choice((1, 2, 4))
    groups_per_step, group_size = random.choice((1, 4, 8)), random.choice((1, 3, 8))
    max_staleness = random.choice((0, 1, 2, 4))
    by_prompts = random.random() < 0.5
    faults = WholeFaults.everything(random.choice((0.5, 1.0, 3.0)))
    return WholeSettings(
        seed=seed,
        steps=None if by_prompts else 20,
        prompt_limit=random.choice((60, 71)) if by_prompts else None,
        pipelines=pipelines,
        workers=workers,
        devices=random.choice((0, pipelines * workers, max(1, pipelines * workers // 2))),
        concurrency=random.choice((4, 8, 32)),
        batches=random.choice((1, 2, 4)),
        groups_per_step=groups_per_step,
        group_size=group_size,
        max_staleness=max_staleness,
        checkpoint_every=random.choice((1, 3, 10)),
        ring_slots=random.choice((8 + 2 * (max_staleness + 1) * groups_per_step * group_size, 512)),
        faults=msgspec.structs.replace(faults, until_s=500.0, controller_down_s=random.choice((3.0, 45.0))),
        check_every=5,
        max_virtual_s=60_000,
    )


def calm(**changes: object) -> WholeSettings:
    """A small run in which only what is asked for goes wrong."""
    settings = WholeSettings(steps=25, workers=3, groups_per_step=4, group_size=2, concurrency=8, check_every=5)
    return msgspec.structs.replace(settings, **changes)


def faults(**rates: Any) -> WholeFaults:
    return WholeFaults(until_s=200.0, **rates)


def test_storms_in_which_every_fault_strikes_lose_nothing_and_come_to_rest() -> None:
    fired: dict[str, int] = {}
    for seed in range(8):
        report = run(storm(seed))
        assert report.faults, f"seed {seed}: no fault fired, nothing was shown"
        assert report.samples_trained > 0
        assert report.decode_looks > 0
        for name, count in report.faults.items():
            fired[name] = fired.get(name, 0) + count
    missing = EVERY_FAULT - fired.keys()
    assert not missing, f"these never struck in any of the storms: {missing}"


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1060, 6))
def test_many_more_storms_of_everything(first: int) -> None:
    for seed in range(first, first + 6):
        run(storm(seed))


def test_equal_seeds_give_equal_runs() -> None:
    storming = WholeFaults.everything(3.0)
    settings = calm(steps=10, seed=5, pipelines=2, faults=msgspec.structs.replace(storming, until_s=60.0))
    assert run(settings) == run(settings)
    assert run(settings) != run(msgspec.structs.replace(settings, seed=6))


@pytest.mark.parametrize("in_place", [0.0, 1.0])
def test_mismatches_failed_writes_and_hung_engines_never_let_a_mixture_generate(in_place: float) -> None:
    rates = faults(damage_memory=0.15, write_fails=0.1, resume_fails=0.2, engine_hangs=0.02, bring_fails=0.1)
    report = run(calm(in_place=in_place, faults=rates))
    expected = {"digest mismatch", "engine hung", "weights transfer broke off", "resume failed"}
    expected |= {"write failed"} if in_place else set()
    assert expected <= report.faults.keys()
    assert report.steps == 25
    assert report.weight_updates > 25


def test_a_version_that_nobody_can_load_is_healed_by_a_checkpoint_out_of_turn() -> None:
    report = run(calm(faults=faults(damage_artifact=0.3)))
    assert report.faults["artifact damaged"] > 3
    assert report.faults["emergency checkpoint"] > 0
    assert report.steps == 25


def test_versions_removed_before_they_were_read_are_skipped() -> None:
    report = run(calm(faults=faults(slow_bring=0.4)))
    assert report.faults["version gone before it was read"] > 0
    assert report.dropped["failed"] == report.dropped["lost"] == 0


def test_payloads_come_through_sick_ports_and_dead_producers_or_are_made_again() -> None:
    rates = faults(sick_port_every_s=2.0, slow_transfer=0.1, corrupt_transfer=0.1, lose_acknowledgement=0.2)
    report = run(calm(remote=1.0, faults=rates))
    expected = {"payload connection reset", "payload port refused", "payload port timed out", "confirmation lost"}
    assert expected <= report.faults.keys()
    assert report.payloads_read == report.samples_trained == 25 * 8 - 2 * report.faults.get("group missing", 0)
    killing = run(calm(remote=1.0, faults=faults(kill_worker_every_s=8.0)))
    assert killing.faults["worker killed"] > 3
    assert killing.faults["group missing"] > 0, "no producer died with payloads that were wanted"


def test_trainers_killed_in_the_middle_of_a_step_find_their_payloads_again() -> None:
    report = run(calm(faults=faults(kill_trainer_every_s=6.0)))
    assert report.faults["trainer killed"] > 5
    assert report.steps == 25
    assert report.turns["initialisation"] > 5, "every incarnation comes up anew"


def test_stops_flips_and_failing_hooks_cost_no_prompt() -> None:
    rates = faults(stop_worker_every_s=10.0, flip_prefetch_every_s=3.0, hook_fails=0.02)
    report = run(calm(steps=None, prompt_limit=100, faults=rates))
    assert {"worker stopped", "prefetch flipped", "prepare raised", "postprocess raised"} <= report.faults.keys()
    assert report.dropped["returned"] > 0
    assert report.samples_trained == (100 - report.set_aside) * 2


def test_pipelines_that_share_too_few_devices_all_finish() -> None:
    shared = run(calm(pipelines=3, workers=2, devices=3, steps=10, faults=faults(move_fails=0.1, move_hangs=0.03)))
    assert shared.steps == 30
    assert shared.moves > 12
    assert shared.turns["training"] >= 30
    assert shared.turns["scoring"] >= 20, "two of the three pipelines ask a reference in every step"
    assert shared.turns["initialisation"] == 3
    assert {"move failed"} <= shared.faults.keys()


def test_trainers_that_come_up_are_given_what_lower_classes_were_only_promised() -> None:
    """Three pipelines train on two devices; workers that hang when they are to leave keep promises open for long."""
    rates = faults(kill_trainer_every_s=20.0, move_hangs=0.2, kill_controller_every_s=60.0)
    reports = [run(calm(seed=seed, pipelines=3, workers=2, devices=2, steps=10, faults=rates)) for seed in range(2)]
    assert sum(report.promises_withdrawn for report in reports) > 0, "no promise was open when a higher class came"
    assert all(report.faults["trainer killed"] and report.faults["controller killed"] for report in reports)
    assert all(report.steps == 30 for report in reports)


def test_devices_of_workers_that_were_given_up_are_given_on_when_they_are_gone() -> None:
    """A worker that stands still or is not heard of may be on its device until it is ended, seconds later."""
    rates = faults(wedge_worker_every_s=15.0, mute_worker_every_s=15.0)
    for seed in (1, 3):
        report = run(calm(seed=seed, pipelines=3, workers=2, devices=2, steps=10, faults=rates))
        assert report.faults["worker wedged"] > 3
        assert report.faults["heartbeat muted"] > 3
        assert report.steps == 30


def test_a_controller_killed_again_and_again_forgets_nothing() -> None:
    report = run(calm(pipelines=2, faults=faults(kill_controller_every_s=10.0, lose_reply=0.1, repeat_request=0.1)))
    assert report.controller_restarts > 3
    assert report.dropped["lost"] == 0
