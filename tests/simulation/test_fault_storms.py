"""Whole runs under seeded faults. A failure prints its seed; the same seed fails again in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import msgspec
import pytest

from penstock.errors import PenstockError
from penstock.sim.actors import Pace
from penstock.sim.faults import Faults
from penstock.sim.world import SimReport, SimSettings, simulate


def run(settings: SimSettings, group_filter=None) -> SimReport:
    try:
        return simulate(settings, group_filter)
    except PenstockError as error:
        pytest.fail(f"seed {settings.seed}: {type(error).__name__}: {error}\nreproduce with simulate({settings!r})")


def storm(seed: int) -> SimSettings:
    """A random shape of pipeline in a random storm that blows over, so that the run must finish afterwards."""
    random = Random(seed)
    faults = Faults.everything(random.choice((0.5, 1.0, 3.0)))
    by_prompts = random.random() < 0.5
    return SimSettings(
        seed=seed,
        steps=None if by_prompts else 30,
        prompt_limit=random.choice((90, 101)) if by_prompts else None,
        workers=random.choice((1, 2, 5)),
        concurrency=random.choice((4, 8, 32)),
        groups_per_step=random.choice((1, 4, 8)),
        group_size=random.choice((1, 3, 8)),
        max_staleness=random.choice((0, 1, 2, 4)),
        straggler_wait_s=random.choice((0.0, 0.0, 5.0)),
        checkpoint_every=random.choice((1, 3, 10)),
        faults=msgspec.structs.replace(faults, until_s=500.0, controller_down_s=random.choice((3.0, 45.0))),
        check_every=5,
        max_virtual_s=60_000,
    )


def dull(rewards: Sequence[float], lengths: Sequence[int]) -> str | None:
    return "dull" if max(rewards) < 0.5 else None


@pytest.mark.parametrize("seed", range(25))
def test_a_run_in_a_storm_trains_every_prompt_once_and_ends(seed):
    report = run(storm(seed), dull if seed % 3 == 0 else None)
    assert report.faults.get("worker killed", 0) > 0, f"seed {seed}: no fault fired, nothing was shown"
    assert report.samples_trained > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1100))
def test_many_more_storms(seed):
    run(storm(seed), dull if seed % 3 == 0 else None)


@pytest.mark.parametrize(
    ("name", "witness"),
    [
        ("kill_worker_every_s", "worker killed"),
        ("wedge_worker_every_s", "worker wedged"),
        ("kill_trainer_every_s", "trainer killed"),
        ("kill_controller_every_s", "controller killed"),
        ("resume_every_s", "run resumed"),
    ],
)
def test_many_faults_of_one_kind_cost_time_but_no_prompt(name, witness):
    """An epoch of 400 prompts, trained exactly once with respect to the final checkpoint (checked at the end)."""
    faults = msgspec.structs.replace(Faults(until_s=240.0), **{name: 12.0})
    settings = SimSettings(steps=None, prompt_limit=400, checkpoint_every=3, faults=faults, check_every=3, seed=3)
    report = run(settings)
    calm = run(msgspec.structs.replace(settings, faults=Faults()))
    assert report.faults[witness] >= 5
    assert report.samples_trained == calm.samples_trained == 400 * 4
    assert report.virtual_s > calm.virtual_s


def test_a_worker_that_falls_silent_is_replaced_unless_its_deliveries_show_it_alive():
    settings = SimSettings(steps=None, prompt_limit=60, faults=Faults(mute_worker_every_s=10.0), check_every=3)
    delivering = run(settings)
    assert delivering.faults["heartbeat muted"] > 0
    assert delivering.dropped["lost"] == 0
    long_silence = run(msgspec.structs.replace(settings, pace=Pace(generate_s=90.0, generate_spread=0.1)))
    assert long_silence.dropped["lost"] > 0
    assert long_silence.samples_trained == 60 * 4


@pytest.mark.parametrize("name", ["lose_request", "lose_reply", "repeat_request"])
def test_a_bad_network_loses_and_doubles_nothing(name):
    faults = msgspec.structs.replace(Faults(), **{name: 0.2})
    report = run(SimSettings(steps=None, prompt_limit=200, faults=faults, check_every=3))
    assert sum(report.faults.values()) > 20
    assert report.samples_trained == 200 * 4
    assert report.dropped["lost"] == report.dropped["failed"] == 0


def test_wrong_weights_never_reach_the_trainer():
    report = run(SimSettings(steps=40, faults=Faults(wrong_weights=0.3), check_every=3))
    assert report.faults["wrong weights"] > 5
    assert report.dropped["outdated"] > 0


def test_poisoned_prompts_are_set_aside_and_the_rest_is_trained():
    report = run(SimSettings(steps=None, prompt_limit=300, faults=Faults(poison_prompt=0.05), check_every=3))
    assert 0 < report.set_aside < 40
    assert report.samples_trained == (300 - report.set_aside) * 4


def test_a_slow_worker_neither_stops_the_others_nor_breaks_the_bound():
    calm = run(SimSettings(steps=60))
    report = run(SimSettings(steps=60, faults=Faults(slow_workers=1, slow_factor=20.0)))
    assert max(report.staleness) <= 2
    assert report.virtual_s < 2 * calm.virtual_s
