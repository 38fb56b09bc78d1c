"""Where bundles may stand, and how many devices each pipeline should have."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.pool.places import places
from penstock.pool.share import Share, ideal_devices
from penstock.records.pool import DeviceId, Topology


def found(nodes: tuple[int, ...], allowed, size: int) -> list[list[int]]:
    return places(Topology(nodes), tuple(DeviceId(device) for device in allowed), size).tolist()


@pytest.mark.parametrize(
    ("nodes", "allowed", "size", "expected"),
    [
        ((4,), range(4), 1, [[0], [1], [2], [3]]),
        ((4,), range(4), 2, [[0, 1], [2, 3]]),
        ((4,), range(4), 3, [[0, 1, 2]]),
        ((3, 3), range(6), 2, [[0, 1], [3, 4]]),
        ((2, 2), range(4), 3, []),
        ((2, 2, 2), range(6), 4, [[0, 1, 2, 3]]),
        ((2, 4, 2), range(8), 4, [[2, 3, 4, 5]]),
        ((8,), [1, 2, 5, 6, 7], 2, [[1, 2], [6, 7]]),
        ((8,), [1, 2, 3, 4], 2, [[1, 2], [3, 4]]),
        ((8,), [0, 2, 4], 2, []),
    ],
)
def test_places_are_whole_neighbouring_and_inside_nodes(nodes, allowed, size, expected):
    assert found(nodes, allowed, size) == expected


def test_places_of_sizes_that_divide_each_other_nest():
    large = {tuple(place) for place in found((8, 8), range(16), 4)}
    for small in found((8, 8), range(16), 2):
        assert sum(set(small) <= set(place) for place in large) == 1


def ideal(budget: int, weights, floors, caps) -> list[float]:
    return [round(x, 3) for x in ideal_devices(budget, np.array(weights), np.array(floors), np.array(caps)).tolist()]


@pytest.mark.parametrize(
    ("budget", "weights", "floors", "caps", "expected"),
    [
        (8, [40.0, 120.0], [2.0, 2.0], [8.0, 8.0], [2.0, 6.0]),
        (8, [1.0, 1.0, 1.0], [1.0] * 3, [8.0, 8.0, 1.0], [3.5, 3.5, 1.0]),
        (8, [1000.0, 1.0], [1.0, 1.0], [8.0, 8.0], [7.0, 1.0]),
        (2, [1.0, 1.0, 1.0], [1.0] * 3, [2.0] * 3, [1.0, 1.0, 1.0]),
        (8, [1.0, 1.0], [1.0, 1.0], [2.0, 3.0], [2.0, 3.0]),
    ],
)
def test_ideal_shares_follow_weight_between_floor_and_cap(budget, weights, floors, caps, expected):
    assert ideal(budget, weights, floors, caps) == expected


@pytest.mark.parametrize(
    ("held", "share", "useful", "short", "spare", "surplus"),
    [
        (0, 2.0, 4, 2, 0, 0),
        (1, 2.0, 4, 1, 0, 0),
        (2, 2.9, 4, 0, 0, 0),
        (0, 10.0, 16, 10, 0, 0),
        (4, 10.9, 16, 6, 0, 0),
        (4, 10.0, 6, 2, 0, 0),
        (13, 10.0, 16, 0, 3, 0),
        (4, 0.0, 0, 0, 4, 4),
        (6, 1.0, 1, 0, 5, 5),
        (0, 0.0, 0, 0, 0, 0),
    ],
)
def test_what_a_share_says_about_moves(held, share, useful, short, spare, surplus):
    it = Share(held, share, useful, part=4)
    assert (it.short, it.spare, it.surplus) == (short, spare, surplus)
