"""More workers make more samples, and one that hangs does not hold up the others: the actual loops in virtual time."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.launch.simulated import simulate
from penstock.sim.parts import Work
from penstock.sim.plan import Plan, Report
from penstock.sim.storms import Fault

SLOW_GENERATION = Work(sample_s=2.0, step_s=0.1, fetch_weights_s=0.05, publish_s=0.02)


def run(workers: int, **plan: Any) -> Report:
    chosen: dict[str, Any] = {"steps": 9, "groups_per_step": 16, "group_size": 4, "seed": 3} | plan
    report = simulate(Plan(workers=workers, work=SLOW_GENERATION, **chosen))
    assert report.complete, report.ended
    return report


def steps_per_second(report: Report) -> float:
    times = report.steps["p0"][3:]
    return (len(times) - 1) / (times[-1] - times[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "max_staleness", "times"),
    [
        (8, 1, 3.5),
        (64, 2, 2.3),  # a whole batch: three are under way at most, with the one that is trained
        (64, 4, 3.5),
    ],
)
def test_with_slow_generation_four_workers_make_as_much_more_as_the_bound_lets_them(
    call: int, max_staleness: int, times: float
) -> None:
    settings = {"pipeline.rollout.batch_samples": call, "pipeline.train.straggler_wait_s": 0.0}
    plan = {"max_staleness": max_staleness, "settings": settings, "steps": 9 if call == 8 else 15}
    one, four = (run(workers, **plan) for workers in (1, 4))
    assert steps_per_second(four) > times * steps_per_second(one)


HANGING = {"control.wedged_after_s": 120.0, "pipeline.train.straggler_wait_s": 20.0}


def test_a_worker_that_hangs_does_not_hold_up_the_others() -> None:
    """One step waits for it, the others do not. Its part is still needed for the last step."""
    hangs = Fault(4.0, "hang", "p0.rollout.0")
    report = run(2, max_staleness=1, faults=(hangs,), settings=HANGING, steps=6)
    *others, last = report.steps["p0"]
    assert max(others) < 110.0 < last
