"""Prefetch never costs: the faster of the overlapped and the plain way is kept, by what was measured."""

from __future__ import annotations

from random import Random

import pytest

from penstock.rollout.overlap import Overlap

BATCH, QUEUE = 16, 32


def run(overlap: Overlap, batch_s: dict[bool, float], seconds: float, now: float = 0.0) -> tuple[float, int]:
    """Deliver batches that take so long either way; the time, and how many samples left."""
    left, until = 0, now + seconds
    while now < until:
        now += batch_s[overlap.on]
        overlap.delivered(BATCH, now)
        left += BATCH
    return now, left


@pytest.mark.parametrize(("overlapped_s", "plain_s"), [(0.10, 0.08), (0.05, 0.10), (0.1, 0.1)])
def test_the_faster_way_is_kept(overlapped_s: float, plain_s: float) -> None:
    overlap = Overlap(BATCH, QUEUE, measured=True)
    _, left = run(overlap, {True: overlapped_s, False: plain_s}, 25.0)
    assert overlap.settled
    assert overlap.on == (overlapped_s <= plain_s)
    best = 25.0 / min(overlapped_s, plain_s) * BATCH
    assert left > 0.85 * best, "trials cost little"


@pytest.mark.parametrize("overlapped", [0.8, 0.9, 1.12])
def test_noise_makes_a_trial_longer_and_seldom_wrong(overlapped: float) -> None:
    """Windows whose rates vary by a fifth either way, as on a machine that has other work."""
    right = trials = 0
    for seed in range(200):
        noise, now = Random(seed), 0.0
        overlap = Overlap(BATCH, QUEUE, measured=True)
        while not overlap.settled and trials < 1e6:
            now += noise.uniform(0.8, 1.2) * (0.1 / overlapped if overlap.on else 0.1)
            overlap.delivered(BATCH, now)
            trials += 1
        right += overlap.on == (overlapped > 1)
    assert right >= 190


def test_it_is_tried_again_and_may_change() -> None:
    overlap = Overlap(BATCH, QUEUE, measured=True)
    now, _ = run(overlap, {True: 0.1, False: 0.05}, 20.0)
    assert not overlap.on
    run(overlap, {True: 0.05, False: 0.1}, 60.0, now)
    assert overlap.on


def test_what_was_measured_while_the_desk_had_nothing_does_not_count() -> None:
    overlap = Overlap(BATCH, QUEUE, measured=True)
    for number in range(200):  # the desk makes every other batch wait
        overlap.delivered(BATCH, float(number))
        overlap.disturbed()
    assert not overlap.settled
    assert overlap.on


def test_an_engine_of_requests_is_always_fed() -> None:
    overlap = Overlap(BATCH, QUEUE, measured=False)
    run(overlap, {True: 0.1, False: 0.01}, 20.0)
    assert overlap.on
    assert overlap.settled
