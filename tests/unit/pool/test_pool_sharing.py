"""Who gets how many workers, when."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError, LocalProtocolError
from penstock.pool import events as ev
from penstock.pool.plan import Rules
from penstock.records.ids import PipelineName


def test_one_pipeline_gets_everything_at_once(town):
    town.open("a")
    town.demand("a", 100)
    assert town.awake("a") == 4
    assert town.told(ev.AnswerDemand) == [ev.AnswerDemand(PipelineName("a"))]


def test_demand_declared_again_while_awake_is_a_no_op(town):
    town.open("a")
    town.demand("a", 100)
    before = town.pool.revision
    town.demand("a", 100)
    assert town.pool.revision == before


def test_two_equal_pipelines_share_evenly(town):
    town.open("a")
    town.open("b")
    town.demand("a", 100)
    town.demand("b", 100)
    town.after(11)
    assert (town.awake("a"), town.awake("b")) == (2, 2)


def test_devices_follow_remaining_work(make_town):
    # 8 devices in bundles of 2; a has 20 left, b has 60: 1 bundle and 3.
    town = make_town((8,), rules=Rules(band=0.0))
    town.open("a", bundle=2)
    town.open("b", bundle=2)
    town.demand("a", 100)
    town.progress("a", 80)
    town.demand("b", 60)
    town.after(11)
    assert (town.awake("a"), town.awake("b")) == (1, 3)


def test_weight_counts_like_work(make_town):
    town = make_town((8,), rules=Rules(band=0.0))
    town.open("a", weight=3.0)
    town.open("b")
    town.demand("a", 100)
    town.demand("b", 100)
    town.after(40)
    assert (town.awake("a"), town.awake("b")) == (6, 2)


def test_one_remaining_sample_wakes_one_worker(make_town):
    town = make_town((8,))
    town.open("a", concurrency=4)
    town.demand("a", 1)
    assert town.awake("a") == 1


def test_waking_stops_where_it_does_not_pay(make_town):
    town = make_town((8,))
    town.open("a", move_cost=16)
    town.demand("a", 40)
    assert town.awake("a") == 2


def test_a_quota_caps_a_pipeline(town):
    town.open("a", max_bundles=1)
    town.demand("a", 100)
    assert town.awake("a") == 1


def test_a_missing_estimate_is_an_error_and_changes_nothing(town):
    town.open("a")
    before = town.pool.snapshot()
    with pytest.raises(LocalProtocolError, match="no estimate"):
        town.demand("a", 0)
    assert town.pool.snapshot() == before


def test_progress_of_an_undeclared_round_is_an_error(town):
    town.open("a")
    with pytest.raises(LocalProtocolError, match="declare demand first"):
        town.progress("a", 3)


def test_overshoot_never_gives_negative_demand(town):
    town.open("a")
    town.demand("a", 10)
    town.progress("a", 14)
    assert town.pool.status(town.now).shares[0].remaining == 0


def test_a_bundle_that_fits_nowhere_is_refused_at_the_door(make_town):
    town = make_town((2, 2))
    with pytest.raises(ConfigError, match="neighbouring"):
        town.open("a", bundle=3)


def test_a_bundle_larger_than_a_node_takes_whole_nodes(make_town):
    town = make_town((2, 2, 2, 2))
    town.open("a", bundle=4)
    town.demand("a", 100)
    assert sorted(seat.devices for seat in town.pool.status(0.0).seats) == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_small_bundles_leave_whole_blocks_for_large_ones(make_town):
    town = make_town((8, 8))
    town.open("small", concurrency=25, workers=4)
    town.open("large", bundle=8)
    town.demand("small", 100)
    town.demand("large", 100)
    assert town.awake("large") == 1
    assert town.awake("small") == 4


def test_a_large_share_is_inherited_not_taken(make_town):
    town = make_town((16,))
    town.open("a")
    town.open("b")
    town.demand("a", 1000)
    town.after(11)
    town.demand("b", 1000)
    town.after(60)
    # Of its ideal of 8 bundles b is due 2 + 6 / 4 at once; the rest comes when a has finished.
    assert (town.awake("a"), town.awake("b")) == (13, 3)
    town.progress("a", 1000)
    town.after(1)
    assert town.awake("b") == 16


def test_idle_workers_linger_for_the_next_round(make_town):
    town = make_town((8,), linger_s=20.0)
    town.open("a", max_bundles=4)
    town.open("b")
    town.demand("a", 100)
    town.demand("b", 100)
    town.after(5)
    town.progress("a", 100)
    town.after(15)
    assert (town.awake("a"), town.awake("b")) == (4, 4)
    town.demand("a", 100, round=1)
    town.after(60)
    assert not town.told(ev.SleepWorker), "a round followed soon enough: nobody moved"
    town.progress("a", 100, round=1)
    town.after(30)
    assert town.awake("b") == 8


def test_idle_workers_do_not_wait_where_waiting_was_in_vain_before(make_town):
    town = make_town((8,), linger_s=20.0)
    town.open("a", max_bundles=4)
    town.open("b")
    town.demand("a", 100)
    town.demand("b", 10_000)
    town.after(15)
    town.progress("a", 100)
    town.after(15)
    assert town.awake("a") == 4, "the first time they wait"
    town.after(100)
    town.demand("a", 100, round=1)
    town.after(30)
    assert town.awake("a") == 1, "against so much work of the other, one is its due"
    town.progress("a", 100, round=1)
    town.after(2)
    assert town.awake("b") == 8, "a round of this pipeline is followed by a long pause: nobody waits for it"
