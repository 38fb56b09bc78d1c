"""Prompt streams and episodes, for any size, weight and cut."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.envs.cursor import Cursor
from penstock.envs.mixture import Mixture
from penstock.envs.tasks import Copy
from penstock.rollout.episode import Episode
from profiles import examples


@settings(max_examples=examples(60), deadline=None)
@given(rows=st.integers(1, 400), seed=st.integers(-(2**62), 2**62), epoch=st.integers(0, 10**6))
def test_every_epoch_is_a_permutation(rows: int, seed: int, epoch: int) -> None:
    cursor = Cursor(rows, seed)
    assert sorted(cursor.row(epoch * rows + offset) for offset in range(rows)) == list(range(rows))


@settings(max_examples=examples(40), deadline=None)
@given(
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=6), seed=st.integers(0, 99), start=st.integers(0, 50)
)
def test_a_mixture_skips_and_repeats_nothing(weights: list[float], seed: int, start: int) -> None:
    mixture = Mixture({f"part{number}": (Copy(), weight) for number, weight in enumerate(weights)}, seed=seed)
    block = sum(mixture.shares)
    places = [mixture.place(position) for position in range(start * block, (start + 2) * block)]
    for name, share in zip(mixture.names, mixture.shares, strict=True):
        own = [position for part, position in places if part == name]
        assert own == list(range(start * share, (start + 2) * share))
    assert Counter(name for name, _ in places).total() == 2 * block


tokens = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6)
turn = st.tuples(st.lists(tokens, min_size=1, max_size=3), tokens)


@settings(max_examples=examples(80), deadline=None)
@given(prompt=tokens, turns=st.lists(turn, max_size=4), cut=st.integers(0, 20))
def test_an_episode_cut_anywhere_and_carried_over_is_the_same_episode(
    prompt: list[int], turns: list[tuple[list[list[int]], list[int]]], cut: int
) -> None:
    """Against the naive reference: plain lists, joined by hand."""
    episode = Episode.start(prompt)
    ids, mask, logprobs = list(prompt), [0] * len(prompt), [0.0] * len(prompt)
    step = 0
    for pieces, reply in turns:
        for piece in pieces:
            if step == cut:
                episode = Episode.from_bytes(episode.to_bytes())
            drawn = np.linspace(-1, -0.5, len(piece), dtype=np.float32)
            episode.generated(np.array(piece), drawn, np.array([[0, step]]), step, f"digest {step}")
            ids += piece
            mask += [1] * len(piece)
            logprobs += drawn.tolist()
            step += 1
            assert episode.context() == ids
        assert episode.turn_ids() == [token for piece in pieces for token in piece]
        episode.finish_turn("text")
        episode.replied("reply", reply)
        ids += reply
        mask += [0] * len(reply)
        logprobs += [0.0] * len(reply)
    arrays = episode.arrays()
    assert arrays["token_ids"].tolist() == ids
    assert arrays["loss_mask"].tolist() == mask
    assert arrays["logprobs"].tolist() == logprobs
    assert arrays["versions"][:, 1].tolist() == list(range(step))
    assert all(mask[start] for start in arrays["versions"][:, 0])
    assert (episode.version, episode.digest) == ((0, "digest 0") if step else (None, ""))
