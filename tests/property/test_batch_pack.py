"""Plans cover everything once and keep within their bounds, for any lengths."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.batch.pack import plan_micro_batches
from profiles import examples

lengths = st.lists(st.integers(1, 500), max_size=60)


@settings(max_examples=examples(200), deadline=None)
@given(lengths, st.integers(1, 2000))
def test_micro_batches_hold_each_row_once_within_the_budget(widths: list[int], budget: int) -> None:
    batches = plan_micro_batches(widths, budget)
    assert sorted(row for batch in batches for row in batch) == list(range(len(widths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(widths[row] for row in batch) <= budget
