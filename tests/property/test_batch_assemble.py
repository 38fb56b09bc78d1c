"""Joined samples are byte-exact against a naive reference that grows every branch token by token."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.batch import codec
from penstock.batch.assemble import Turn, TurnId, TurnTree
from penstock.errors import LocalProtocolError

LAYERS, TOP_K = 2, 3


@dataclass
class Naive:
    """One branch as plain lists. The routing of a token is known when a later turn has read it."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turn_of_token: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    spans: list[list[int]] = field(default_factory=list)

    def copy(self) -> Naive:
        return Naive(*(list(getattr(self, name)) for name in vars(self)))


def routing_row(tokens: list[int], position: int) -> np.ndarray:
    """What a model would do: the row depends on the whole prefix, so a wrong row cannot go unnoticed."""
    seed = hash((tuple(tokens[: position + 1]), position)) & 0xFFFFFFFF
    return np.random.default_rng(seed).integers(0, 256, (LAYERS, TOP_K), dtype=np.uint8)


def reference(branches: dict[int, Naive], leaves: list[int], routed: bool) -> list[dict[str, np.ndarray]]:
    seen: set[int] = set()
    samples = []
    for leaf in leaves:
        branch = branches[leaf]
        mask = [int(s and turn not in seen) for s, turn in zip(branch.sampled, branch.turn_of_token, strict=True)]
        seen |= set(branch.turn_of_token)
        sample = {
            "token_ids": np.array(branch.tokens, np.int32),
            "loss_mask": np.array(mask, np.uint8),
            "logprobs": np.array(branch.logprobs, np.float32),
            "versions": np.array(branch.spans, np.int32),
        }
        if routed:
            rows = [routing_row(branch.tokens, at) for at in range(len(branch.tokens) - 1)]
            sample["routed_experts"] = np.stack([*rows, np.zeros((LAYERS, TOP_K), np.uint8)])
        samples.append(sample)
    return samples


turns = st.lists(
    st.tuples(
        st.integers(0, 5),  # which of the turns before it continues (0: none), modulo what exists
        st.lists(st.integers(0, 9), min_size=1, max_size=5),
        st.lists(st.integers(0, 9), min_size=1, max_size=5),
        st.booleans(),  # the weights changed inside the completion
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(turns, st.booleans())
def test_joined_samples_equal_the_naive_reference(script: list, routed: bool) -> None:
    tree = TurnTree()
    branches: dict[int, Naive] = {}
    parents: set[int] = set()
    for number, (choice, appended, sampled, changed) in enumerate(script):
        after = choice % (number + 1) - 1
        branch = branches[after].copy() if after >= 0 else Naive()
        context = len(branch.tokens)
        start = context + len(appended)
        branch.tokens += appended + sampled
        logprobs = [-0.25 * token - 0.5 for token in sampled]
        branch.logprobs += [0.0] * len(appended) + logprobs
        branch.turn_of_token += [number] * (len(appended) + len(sampled))
        branch.sampled += [False] * len(appended) + [True] * len(sampled)
        spans = [[0, number]] + ([[1, number + 1]] if changed and len(sampled) > 1 else [])
        branch.spans += [[start + at, version] for at, version in spans]
        rows = [routing_row(branch.tokens, at) for at in range(context, len(branch.tokens) - 1)]
        turn = Turn(
            np.array(appended, np.int32),
            np.array(sampled, np.int32),
            np.array(logprobs, np.float32),
            np.array(spans, np.int32),
            np.stack(rows) if routed else None,
            routing_row(branch.tokens, context - 1)[None] if routed and context else None,
        )
        assert tree.add(turn, TurnId(after) if after >= 0 else None) == number
        branches[number] = branch
        parents.add(after)
    leaves = [number for number in branches if number not in parents]
    wanted = reference(branches, leaves, routed)
    found = tree.samples()
    assert len(found) == len(wanted)
    for mine, naive in zip(found, wanted, strict=True):
        assert list(mine) == list(naive)
        for name in naive:
            assert mine[name].dtype == naive[name].dtype
            assert mine[name].shape == naive[name].shape
            assert mine[name].tobytes() == naive[name].tobytes()
    encoded = [codec.decode(bytes(codec.encode(sample))) for sample in tree.chunks()]
    for mine, written in zip(found, encoded, strict=True):
        assert {name: array.tobytes() for name, array in mine.items()} == {k: a.tobytes() for k, a in written.items()}
        assert {name: array.shape for name, array in mine.items()} == {k: a.shape for k, a in written.items()}
    # A turn is trained once, however many samples share it.
    assert sum(int(s["loss_mask"].sum()) for s in found) == sum(len(sampled) for _, _, sampled, _ in script)


@settings(max_examples=100, deadline=None)
@given(turns, st.lists(st.integers(0, 1), max_size=30))
def test_the_longest_known_prefix_is_found(script: list, context: list[int]) -> None:
    tree = TurnTree()
    paths: dict[int, list[int]] = {}
    for number, (choice, appended, sampled, _) in enumerate(script):
        after = choice % (number + 1) - 1
        few = [token % 2 for token in appended], [token % 2 for token in sampled]
        turn = Turn(
            np.array(few[0], np.int32),
            np.array(few[1], np.int32),
            np.zeros(len(sampled), np.float32),
            np.array([[0, 0]], np.int32),
        )
        tree.add(turn, TurnId(after) if after >= 0 else None)
        paths[number] = [*paths.get(after, []), *few[0], *few[1]]
    longest = max((len(path) for path in paths.values() if context[: len(path)] == path), default=0)
    turn_id, tokens = tree.match(np.array(context, np.int32))
    assert tokens == longest
    assert (turn_id is None) == (longest == 0)
    if turn_id is not None:
        assert paths[turn_id] == context[:longest]


def plain(appended: int = 2, sampled: int = 3, **changes: np.ndarray | None) -> Turn:
    values = {
        "appended_ids": np.zeros(appended, np.int32),
        "sampled_ids": np.zeros(sampled, np.int32),
        "logprobs": np.zeros(sampled, np.float32),
        "versions": np.array([[0, 0]], np.int32),
    }
    return Turn(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "turn",
    [
        plain(sampled=0),
        plain(appended=0),
        plain(logprobs=np.zeros(2, np.float32)),
        plain(versions=np.zeros((0, 2), np.int32)),
        plain(versions=np.array([[1, 0]], np.int32)),
        plain(versions=np.array([[0, 0], [3, 1]], np.int32)),
        plain(routed_experts=np.zeros((5, 1, 1), np.uint8)),
        plain(routed_experts=np.zeros((4, 1, 1), np.uint8), boundary_experts=np.zeros((1, 1, 1), np.uint8)),
    ],
)
def test_a_turn_that_contradicts_itself_is_refused(turn: Turn) -> None:
    with pytest.raises(LocalProtocolError, match="inconsistent"):
        TurnTree().add(turn)


def test_routing_must_be_complete_over_a_sample() -> None:
    tree = TurnTree()
    first = tree.add(plain(routed_experts=np.zeros((4, 1, 1), np.uint8)))
    tree.add(plain(), after=first)
    with pytest.raises(LocalProtocolError, match="all or none"):
        tree.samples()


def test_a_boundary_row_is_asked_for_where_turns_meet() -> None:
    tree = TurnTree()
    routed = np.zeros((4, 1, 1), np.uint8)
    first = tree.add(plain(routed_experts=routed))
    with pytest.raises(LocalProtocolError, match="expected none, or 4 with 1"):
        tree.add(plain(routed_experts=routed), after=first)


def test_a_turn_after_an_unknown_one_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="turn 3"):
        TurnTree().add(plain(), after=TurnId(3))
