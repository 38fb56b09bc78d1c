"""From journalled events to seconds per stage, staleness and remarks."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.dashboard.ring_fold import RingFold


def rollout(sample: int, version: int, reward: float = 1.0) -> dict[str, Any]:
    return {"sample": sample, "version": version, "reward": reward, "length": 4, "times": [0.5, 2.0, 0.25, 1.0]}


def lease(member: str, version: int, *leases: tuple[int, int, list[int]]) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"type": "ask_lease", "member": member, "version": version}, {"leases": list(leases)}


def manifest(version: int) -> dict[str, Any]:
    return {"version": version, "buckets": [{"size_bytes": 100}, {"size_bytes": 20}]}


def folded(*events: tuple[float, tuple[dict[str, Any], dict[str, Any]]]) -> RingFold:
    fold = RingFold("p")
    for at, (event, notes) in events:
        fold.take(at, event, notes)
    fold.settle()
    return fold


def test_one_group_around_the_ring():
    fold = folded(
        (10.0, ({"type": "publish_weights", "member": "t", "manifest": manifest(0)}, {})),
        (11.0, lease("w", 0, (5, 0, [50, 51]))),
        (15.0, ({"type": "deliver", "member": "w", "rollouts": [rollout(50, 0, reward=0.0)]}, {})),
        (18.0, ({"type": "deliver", "member": "w", "rollouts": [rollout(51, 0, reward=1.0)]}, {})),
        (20.0, ({"type": "ask_batch", "member": "t", "step": 1}, {"batch": [(5, 0, [50, 51])]})),
        (23.0, ({"type": "ack_step", "member": "t", "step": 1}, {})),
        (24.0, ({"type": "publish_weights", "member": "t", "manifest": manifest(2)}, {})),
        (24.5, lease("w", 2, (6, 0, [52, 53]))),
    )
    means = {name: series.mean_since() for name, series in fold.stages.items()}
    assert means == pytest.approx(
        {
            "wait": 1.0,
            "prepare": 0.5,
            "generate": 2.0,
            "postprocess": 0.25,
            "deliver": (0.25 + 3.25) / 2,  # what the 4 and 7 seconds had besides the above
            "group": (3.0 + 0.0) / 2,
            "buffer": 2.0,
            "train": 3.0,
            "publish": 1.0,
            "reach": (1.0 + 0.5) / 2,
        }
    )
    assert fold.staleness == {1: 2}
    assert fold.rewards["mean"].points().mean.tolist() == [0.5]
    assert list(fold.versions) == [(0, 10.0, 120), (2, 24.0, 120)]


def test_refused_failed_and_returned_samples_are_no_part_of_a_batch():
    fold = folded(
        (1.0, lease("w", 0, (5, 0, [50, 51, 52, 53]))),
        (
            2.0,
            (
                {"type": "deliver", "member": "w", "rollouts": [rollout(50, 0), rollout(51, 0)]},
                {"refused": ([51], "old")},
            ),
        ),
        (3.0, ({"type": "deliver", "member": "w", "failures": [{"sample": 52}], "returned": [53, 999]}, {})),
        (4.0, ({"type": "ask_batch", "member": "t", "step": 0}, {"batch": [(5, 0, [50])]})),
    )
    assert fold.staleness == {0: 1}


def test_only_what_is_in_flight_is_remembered():
    fold = RingFold("p")
    for number in range(1000):
        fold.take(number, *lease("w", number, (number, 0, [number])))
        fold.take(number + 0.1, {"type": "deliver", "member": "w", "rollouts": [rollout(number, number)]}, {})
        fold.take(
            number + 0.2, {"type": "ask_batch", "member": "t", "step": number}, {"batch": [(number, 0, [number])]}
        )
        fold.take(number + 0.3, {"type": "ack_step", "member": "t", "step": number}, {})
    assert "0 groups in flight" in repr(fold)
    assert fold.staleness == {0: 1000}


def test_a_group_that_starts_afresh_forgets_its_first_attempt():
    fold = folded(
        (1.0, lease("w", 0, (5, 0, [50]))),
        (2.0, lease("w", 0, (5, 1, [60]))),
        (3.0, ({"type": "deliver", "member": "w", "rollouts": [rollout(50, 0), rollout(60, 0)]}, {})),
        (4.0, ({"type": "ask_batch", "member": "t", "step": 2}, {"batch": [(5, 1, [60])]})),
    )
    assert fold.staleness == {2: 1}


def test_a_filtered_group_and_a_resumed_run_let_go_of_their_samples():
    fold = folded(
        (1.0, lease("w", 0, (5, 0, [50]), (6, 0, [60]))),
        (2.0, ({"type": "deliver", "member": "w", "rollouts": [rollout(50, 0)]}, {"filtered": [(5, "zero signal")]})),
        (3.0, ({"type": "run_resumed"}, {})),
    )
    assert "0 groups in flight" in repr(fold)
    assert fold.resumed == 1


def test_steps_done_again_replace_their_rewards():
    events = []
    for at, step, reward in ((1.0, 0, 1.0), (2.0, 1, 1.0), (3.0, 1, 5.0)):
        prompt = int(at)
        events += [
            (at, lease("w", 0, (prompt, 0, [prompt]))),
            (at, ({"type": "deliver", "member": "w", "rollouts": [rollout(prompt, 0, reward)]}, {})),
            (at, ({"type": "ask_batch", "member": "t", "step": step}, {"batch": [(prompt, 0, [prompt])]})),
        ]
    assert folded(*events).rewards["mean"].points().mean.tolist() == [1.0, 5.0]


def test_stalls_and_failures_are_told_apart_from_chatter():
    fold = folded(
        (1.0, ({"type": "register", "role": "rollout", "member": "w"}, {"said": ["p: rollout w joined"]})),
        (2.0, ({"type": "time_passed"}, {"said": ["p: stalled for 61 s: the trainer t waits"]})),
        (3.0, ({"type": "time_passed"}, {"failed": "p: nothing moved for 600 s"})),
    )
    assert [(remark.kind, remark.at) for remark in fold.remarks] == [
        ("register", 1.0),
        ("stall", 2.0),
        ("failure", 3.0),
    ]
    assert fold.failed == "p: nothing moved for 600 s"
    assert fold.stalled == "the trainer t waits"


def test_a_resumed_run_has_not_failed():
    fold = folded(
        (1.0, ({"type": "time_passed"}, {"failed": "p: nothing moved", "said": ["p: stalled for 9 s: why"]})),
        (2.0, ({"type": "run_resumed"}, {})),
    )
    assert (fold.failed, fold.stalled) == ("", "")


def test_events_of_other_versions_are_passed_over():
    fold = folded((1.0, ({"type": "something_new", "member": "x"}, {"unheard_of": 1})))
    assert not fold.remarks
