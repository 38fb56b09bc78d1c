"""From turns to micro-batches, byte-exact against a naive reference that grows every branch token by token."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.batch import codec
from penstock.batch.assemble import sequences_of
from penstock.batch.pack import Packing, PackSettings, TokenMicroBatch, pack_tokens
from penstock.errors import LocalProtocolError, RemoteProtocolError
from penstock.rollout.episode import Episode
from profiles import examples

LAYERS, TOP_K = 2, 3


@dataclass
class Naive:
    """One branch as plain lists."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    drawn: list[tuple[int, int] | None] = field(default_factory=list)
    """Which token of which turn; None for tokens that were not drawn."""

    def copy(self) -> Naive:
        return Naive(list(self.tokens), list(self.logprobs), list(self.drawn))


def routing_row(tokens: list[int], position: int) -> np.ndarray:
    """What a model would do: the row depends on the whole prefix, so a wrong row cannot go unnoticed."""
    seed = hash((tuple(tokens[: position + 1]), position)) & 0xFFFFFFFF
    return np.random.default_rng(seed).integers(0, 256, (LAYERS, TOP_K), dtype=np.uint8)


def naively_packed(branches: list[Naive], routed: bool, advantage: float) -> list[tuple[bytes, ...]]:
    trained: set[tuple[int, int]] = set()
    packed = []
    for branch in branches:
        mask = [int(one is not None and one not in trained) for one in branch.drawn]
        trained |= {one for one in branch.drawn if one is not None}
        rows = [routing_row(branch.tokens, at) for at in range(len(branch.tokens) - 1)] if routed else []
        packed.append(
            (
                np.array(branch.tokens, np.int32).tobytes(),
                np.array(mask, np.uint8).tobytes(),
                np.array(branch.logprobs, np.float32).tobytes(),
                np.stack([*rows, np.zeros((LAYERS, TOP_K), np.uint8)]).tobytes() if routed else b"",
                np.float32(advantage).tobytes(),
            )
        )
    return packed


def unpacked(batches: list[TokenMicroBatch]) -> list[tuple[bytes, ...]]:
    found = []
    for batch in batches:
        for index, advantage in enumerate(batch.advantages_N):
            at = batch.sequences_RT == index
            assert np.array_equal(batch.position_ids_RT[at], np.arange(at.sum()))
            arrays = (batch.token_ids_RT, batch.loss_mask_RT, batch.logprobs_RT, batch.routed_experts_RTLK)
            found.append((*(b"" if a is None else a[at].tobytes() for a in arrays), advantage.tobytes()))
    return found


few = st.integers(0, 9)
scripts = st.lists(
    st.tuples(
        st.none() | st.integers(0, 5),  # to which of the completions so far the reply before this one goes back
        st.lists(few, max_size=4),  # the reply
        st.lists(st.lists(few, min_size=1, max_size=4), min_size=1, max_size=2),  # the parts of the completion
    ),
    min_size=1,
    max_size=7,
)


def play(prompt: list[int], script: list, routed: bool) -> tuple[Episode, list[Naive]]:
    """The episode, and its branches as the reference sees them."""
    episode = Episode.start(prompt)
    now = Naive(list(prompt), [0.0] * len(prompt), [None] * len(prompt))
    begun: list[Naive] = []
    branches: list[Naive] = []
    read = 0
    for turn, (back, reply, parts) in enumerate(script):
        if turn:
            to = None if back is None else back % turn
            if to is not None:
                branches.append(now)
                now = begun[to].copy()
                read = len(now.tokens)
            episode.replied("reply", reply, back_to=to)
            now.tokens += reply
            now.logprobs += [0.0] * len(reply)
            now.drawn += [None] * len(reply)
        begun.append(now.copy())
        drawn = 0
        for version, part in enumerate(parts):
            logprobs = [-0.25 * token - 0.5 for token in part]
            now.tokens += part
            now.logprobs += logprobs
            now.drawn += [(turn, drawn + at) for at in range(len(part))]
            drawn += len(part)
            rows = [routing_row(now.tokens, at) for at in range(read, len(now.tokens) - 1)]
            episode.generated(
                np.array(part, np.int32),
                np.array(logprobs, np.float32),
                np.array([[0, turn + version]], np.int32),
                turn + version,
                "",
                routed_experts=np.stack(rows)
                if routed and rows
                else np.zeros((0, LAYERS, TOP_K), np.uint8)
                if routed
                else None,
                boundary_experts=routing_row(now.tokens, read - 1)[None] if routed and read else None,
            )
            read = len(now.tokens)
        episode.finish_turn("text")
        assert episode.context() == now.tokens
    return episode, [*branches, now]


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(few, min_size=1, max_size=4), scripts, st.booleans(), st.sampled_from(["padded", "packed"]))
def test_what_is_trained_equals_the_naive_reference(
    prompt: list[int], script: list, routed: bool, layout: Packing
) -> None:
    episode, branches = play(prompt, script, routed)
    episode = Episode.from_bytes(episode.to_bytes())
    sample = codec.decode(bytes(codec.encode(episode.arrays())))
    assert ("branches" in sample) == (len(branches) > 1)
    drawn = sum(len(part) for _, _, parts in script for part in parts)
    assert len(sample["token_ids"]) == len(prompt) + drawn + sum(len(reply) for _, reply, _ in script[1:])
    packed = pack_tokens([sample], np.array([0.5]), PackSettings(micro_batch_tokens=100, layout=layout))
    assert sorted(unpacked(packed)) == sorted(naively_packed(branches, routed, 0.5))
    # A token is trained once, however many branches share it.
    assert sum(int(batch.loss_mask_RT.sum()) for batch in packed) == drawn == episode.generated_tokens


def test_a_shared_turn_is_context_in_the_second_branch() -> None:
    episode, _ = play([1], [(None, [], [[2, 3]]), (None, [4], [[5]]), (1, [6], [[7]])], routed=False)
    first, second = sequences_of([codec.decode(bytes(codec.encode(episode.arrays())))])
    assert (first.stretches, first.loss_mask.tolist()) == (((0, 5),), [0, 1, 1, 0, 1])
    assert (second.stretches, second.loss_mask.tolist()) == (((0, 4), (5, 7)), [0, 0, 0, 0, 0, 1])


@pytest.mark.parametrize("wrong", ["a missing row", "no rows", "no boundary"])
def test_routing_that_does_not_fit_is_refused(wrong: str) -> None:
    def rows(count: int) -> np.ndarray:
        return np.zeros((count, LAYERS, TOP_K), np.uint8)

    one = (np.array([7, 8], np.int32), np.zeros(2, np.float32), np.array([[0, 0]], np.int32), 0, "")
    episode = Episode.start([1, 2, 3])
    episode.generated(*one, routed_experts=rows(4))
    episode.generated(
        *one,
        routed_experts={"a missing row": rows(0), "no rows": None}.get(wrong, rows(1)),
        boundary_experts=None if wrong == "no boundary" else rows(1),
    )
    with pytest.raises(LocalProtocolError, match="does not fit its tokens"):
        episode.arrays()


@pytest.mark.parametrize(
    "branches",
    [
        np.zeros((0, 3), np.int32),
        np.zeros(3, np.int32),
        np.array([[0, 0, 3.0]]),
        np.array([[1, 0, 3]], np.int32),
        np.array([[0, 0, 3], [2, 0, 3]], np.int32),
        np.array([[0, 0, 3], [1, 0, 3], [0, 0, 3]], np.int32),
        np.array([[0, -1, 3]], np.int32),
        np.array([[0, 2, 2]], np.int32),
        np.array([[0, 0, 2], [0, 1, 3]], np.int32),
        np.array([[0, 0, 7]], np.int32),
        np.array([[0, 0, 2**40]], np.int64),
    ],
)
def test_branches_that_lie_are_refused(branches: np.ndarray) -> None:
    sample = {
        "token_ids": np.arange(6, dtype=np.int32),
        "loss_mask": np.array([0, 1, 1, 1, 1, 1], np.uint8),
        "logprobs": np.zeros(6, np.float32),
        "branches": branches,
    }
    with pytest.raises(RemoteProtocolError, match="invalid branches"):
        pack_tokens([sample], np.zeros(1), PackSettings(layout="padded"))


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(*[st.integers(-1, 8)] * 3), min_size=1, max_size=5))
def test_any_branches_are_packed_within_the_sample_or_refused(rows: list[tuple[int, int, int]]) -> None:
    sample = {
        "token_ids": np.arange(1, 7, dtype=np.int32),
        "loss_mask": np.array([0, 1, 1, 1, 1, 1], np.uint8),
        "logprobs": np.zeros(6, np.float32),
        "branches": np.array(rows, np.int32),
    }
    try:
        packed = pack_tokens([sample], np.zeros(1), PackSettings(layout="padded"))
    except RemoteProtocolError:
        return
    trained = [token for batch in packed for token in batch.token_ids_RT[batch.loss_mask_RT != 0].tolist()]
    assert len(trained) == len(set(trained))
    assert set(trained) <= set(range(2, 7))
