"""Plans cover everything once and keep within their bounds, for any lengths."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.batch.pack import plan_micro_batches, plan_rows
from profiles import examples

lengths = st.lists(st.integers(1, 500), max_size=60)


@settings(max_examples=examples(200), deadline=None)
@given(lengths, st.integers(0, 600))
def test_rows_hold_each_sequence_once_within_their_room(sizes: list[int], row_tokens: int) -> None:
    rows = plan_rows(sizes, row_tokens)
    assert sorted(index for row in rows for index in row) == list(range(len(sizes)))
    for row in rows:
        assert len(row) == 1 or sum(sizes[index] for index in row) <= row_tokens
    # No two rows could have been one and a half: at most one row in use is half empty.
    loads = sorted(sum(sizes[index] for index in row) for row in rows)
    assert len(loads) < 2 or loads[0] + loads[1] > row_tokens


@settings(max_examples=examples(200), deadline=None)
@given(lengths, st.integers(1, 2000))
def test_micro_batches_hold_each_row_once_within_the_budget(widths: list[int], budget: int) -> None:
    batches = plan_micro_batches(widths, budget)
    assert sorted(row for batch in batches for row in batch) == list(range(len(widths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(widths[row] for row in batch) <= budget
