"""Lanes of the pool: a device has one occupant at a time, and every stay ends when something ended it."""

from __future__ import annotations

from typing import Any

from penstock.dashboard.lanes_fold import MOST_STAYS, LanesFold

NAMES = {"pipeline": "p", "member": "w"}


def event(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": f"pool_{kind}", **NAMES, **more}


def stays(fold: LanesFold) -> list[tuple[int, str, float, float | None]]:
    return [(stay.device, stay.doing, stay.since, stay.until) for stay in (*fold.past, *fold.present.values())]


def test_a_worker_wakes_generates_and_leaves():
    fold = LanesFold()
    fold.take(1.0, event("worker_joined"), {})
    fold.take(2.0, {"type": "pool_time_passed"}, {"ordered": [("w", 1, "wake", [0, 1])]})
    fold.take(4.0, event("move_done", order=1), {})
    fold.take(9.0, {"type": "pool_time_passed"}, {"ordered": [("w", 2, "sleep", [0, 1])]})
    fold.take(10.0, event("move_done", order=2), {})
    assert stays(fold) == [
        (device, doing, since, until)
        for doing, since, until in (("waking", 2.0, 4.0), ("generating", 4.0, 9.0), ("leaving", 9.0, 10.0))
        for device in (0, 1)
    ]
    assert fold.busy_s[0] == {"waking": 2.0, "generating": 5.0, "leaving": 1.0}
    assert [move.what for move in fold.moves] == ["wake", "sleep"]


def test_a_trainer_takes_turns_without_a_gap():
    fold = LanesFold()
    fold.take(1.0, event("devices_requested", request=1, priority=0), {"granted": [("w", 1, [3])]})
    fold.take(5.0, event("devices_requested", request=2, priority=1, release=1), {"granted": [("w", 2, [3])]})
    fold.take(6.0, event("devices_released", request=2), {})
    assert stays(fold) == [(3, "initialising", 1.0, 5.0), (3, "training", 5.0, 6.0)]


def test_a_process_that_is_lost_frees_what_it_had():
    fold = LanesFold()
    fold.take(1.0, event("worker_joined"), {"ordered": [("w", 1, "wake", [0])]})
    fold.take(2.0, {"type": "pool_time_passed"}, {"fenced": [("w", "silent")]})
    fold.take(3.0, event("member_lost"), {})
    assert [doing for _, doing, _, _ in stays(fold)] == ["waking", "fenced"]
    assert not fold.present


def test_another_life_of_the_run_begins_with_free_devices():
    fold = LanesFold()
    fold.take(1.0, event("worker_joined"), {"ordered": [("w", 1, "wake", [0])]})
    fold.take(2.0, event("devices_requested", request=1, priority=1), {"granted": [("t", 1, [1])]})
    fold.take(5.0, {"type": "pool_life_began"}, {})
    assert stays(fold) == [(0, "waking", 1.0, 5.0), (1, "training", 2.0, 5.0)]
    assert not fold.present


def test_a_failed_wake_frees_its_devices_only_if_it_proved_so():
    fold = LanesFold()
    fold.take(1.0, event("worker_joined"), {"ordered": [("w", 1, "wake", [0]), ("w", 2, "wake", [1])]})
    fold.take(2.0, event("move_failed", order=1, released=True, error="x"), {})
    fold.take(2.0, event("move_failed", order=2, released=False, error="x"), {})
    assert list(fold.present) == [1]


def test_a_journal_without_decisions_leaves_the_lanes_empty():
    fold = LanesFold()
    fold.take(1.0, event("move_done", order=7), {})
    fold.take(2.0, event("devices_released", request=1), {})
    assert not stays(fold)
    assert fold.events == 2


def test_what_is_remembered_is_bounded():
    fold = LanesFold()
    for number in range(MOST_STAYS):
        fold.take(number, event("devices_requested", request=number, priority=1), {"granted": [("w", number, [0, 1])]})
        fold.take(number + 0.5, event("devices_released", request=number), {})
    assert len(fold.past) == MOST_STAYS
    assert fold.busy_s[0] == {"training": MOST_STAYS * 0.5}
    assert "0 devices in use" in repr(fold)
