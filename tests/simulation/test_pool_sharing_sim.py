"""What sharing must be worth, in simulated pipelines: the targets of the shared pool, and what its one dial does."""

from __future__ import annotations

import pytest

from penstock.sim.pool_world import Mix, simulate

ALTERNATING = Mix(pipelines=4, devices=16, horizon_s=1800.0)
CONTINUOUS = Mix(pipelines=4, devices=16, horizon_s=900.0, train_s=0.0, apart_s=0.0, stagger_s=17.0)


@pytest.mark.slow
def test_sharing_beats_disjoint_pools_by_half_on_the_alternating_mix():
    shared = simulate(ALTERNATING, "shared")
    assert shared.samples >= 1.5 * simulate(ALTERNATING, "disjoint").samples
    assert shared.samples >= 1.03 * simulate(ALTERNATING, "colocated").samples
    assert shared.fairness >= 0.98


def test_moves_are_a_fifth_of_the_plain_rule_at_no_loss_of_throughput_where_nothing_needs_to_move():
    shared, plain = simulate(CONTINUOUS, "shared"), simulate(CONTINUOUS, "plain")
    assert shared.moves_per_round <= plain.moves_per_round / 5
    assert shared.samples >= plain.samples


@pytest.mark.slow
def test_moves_are_a_fifth_of_the_plain_rule_at_no_loss_of_throughput_on_the_alternating_mix():
    shared, plain = simulate(ALTERNATING, "shared"), simulate(ALTERNATING, "plain")
    assert shared.moves_per_round <= plain.moves_per_round / 4, "over several seeds it is a fifth: decision 070"
    assert shared.samples >= plain.samples


@pytest.mark.parametrize("seed", range(3))
def test_a_simulation_repeats_itself(seed: int):
    mix = Mix(pipelines=3, devices=6, node=2, bundle=2, samples_per_device=10, horizon_s=300.0, seed=seed)
    assert simulate(mix, "shared") == simulate(mix, "shared")


def test_no_pipeline_waits_long_with_one_device_each():
    mix = Mix(pipelines=5, devices=5, node=5, samples_per_device=20, horizon_s=900.0, train_s=5.0, apart_s=5.0)
    crowd = simulate(mix, "shared")
    assert crowd.longest_wait_s <= 120.0
    assert crowd.fairness >= 0.9
