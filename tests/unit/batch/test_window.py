from __future__ import annotations

import pytest

from penstock.batch.window import outdated, staleness
from penstock.errors import LocalProtocolError


def test_staleness_counts_the_steps_between() -> None:
    assert staleness(7, [7, 5, 0]).tolist() == [0, 2, 7]
    assert staleness(7, []).tolist() == []
    assert outdated(7, [7, 5, 4], 2).tolist() == [False, False, True]


def test_a_sample_from_the_future_is_a_bug() -> None:
    with pytest.raises(LocalProtocolError, match="version 9"):
        staleness(7, [9, 3])
