"""Plans cover everything once and keep within their bounds, for any lengths."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.batch.pack import PackSettings, halved, pack_tokens, plan_micro_batches
from profiles import examples

lengths = st.lists(st.integers(1, 500), max_size=60)


@settings(max_examples=examples(200), deadline=None)
@given(lengths, st.integers(1, 2000))
def test_micro_batches_hold_each_row_once_within_the_budget(widths: list[int], budget: int) -> None:
    batches = plan_micro_batches(widths, budget)
    assert sorted(row for batch in batches for row in batch) == list(range(len(widths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(widths[row] for row in batch) <= budget


def branching(seed: int) -> dict[str, np.ndarray]:
    """A sample with branches that go on from any point of any earlier branch."""
    rng = np.random.default_rng(seed)
    tokens = int(rng.integers(4, 40))
    end = int(rng.integers(2, tokens + 1))
    paths, rows = [[(0, end)]], [(0, 0, end)]
    while end < tokens:
        origin = paths[rng.integers(len(paths))]
        shared = int(rng.integers(1, sum(high - low for low, high in origin) + 1))
        path: list[tuple[int, int]] = []
        for low, high in origin:
            if shared > 0:
                path.append((low, min(high, low + shared)))
                shared -= high - low
        begin, end = end, min(tokens, end + int(rng.integers(1, 10)))
        path.append((begin, end))
        rows += [(len(paths), low, high) for low, high in path]
        paths.append(path)
    mask = (rng.random(tokens) < 0.7).astype(np.uint8)
    mask[0] = 0
    return {
        "token_ids": rng.integers(3, 6, tokens, dtype=np.int32),
        "loss_mask": mask,
        "logprobs": np.zeros(tokens, np.float32),
        "branches": np.array(rows, np.int32),
    }


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.integers(0, 1 << 30), min_size=1, max_size=3))
def test_all_trained_tokens_of_a_sequence_stay_in_one_half(seeds: list[int]) -> None:
    samples = [branching(seed) for seed in seeds]
    whole = pack_tokens(samples, np.ones(len(samples)), PackSettings(layout="prefix"))
    left = list(whole)
    while left:
        batch = left.pop()
        parts = halved(batch)
        trained = np.stack([part.trained_tokens_N for part, _ in parts])
        assert trained.sum(0).tolist() == batch.trained_tokens_N.tolist()
        assert (np.count_nonzero(trained, 0) <= 1).all()
        left += [part for part, _ in parts if len(parts) == 2]
