"""Many turns into samples: every array is joined once, in time linear in its bytes.

A turn is one request to an engine: some tokens are appended to a context already known (the question, a tool's answer)
and the engine completes them. Turns form a tree. A path from the root to a leaf is one sample; a turn that lies on
several paths is trained in the first of them only, and is context in the others.

An engine has computed the routing of every token it read, so of all but the very last one it sampled. That boundary
row is computed when the next turn reads the token, and the next turn brings it. The last token of a sample is never
read; its row is zero, and nothing is predicted from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

import numpy as np

from penstock.errors import LocalProtocolError

TurnId = NewType("TurnId", int)


@dataclass(frozen=True, slots=True)
class Turn:
    """What one request added, as the engine gave it."""

    appended_ids: np.ndarray
    """int32[A]: tokens put after the context before the engine was asked; read, never trained."""
    sampled_ids: np.ndarray
    """int32[C]: the completion."""
    logprobs: np.ndarray
    """float32[C]: of the completion's tokens."""
    versions: np.ndarray
    """int32[S, 2]: from which token of the completion on, which version of the weights."""
    routed_experts: np.ndarray | None = None
    """uint8 or uint16, [rows, layers, top-k]: of the appended tokens, and of the completion but for its last token."""
    boundary_experts: np.ndarray | None = None
    """[1, layers, top-k]: of the last token of the context, if there is a context."""


@dataclass(frozen=True, slots=True)
class _Node:
    parent: TurnId | None
    turn: Turn
    context_tokens: int
    """Tokens on the path before this turn."""

    @property
    def end(self) -> int:
        return self.context_tokens + len(self.turn.appended_ids) + len(self.turn.sampled_ids)


class TurnTree:
    """The turns of one rollout. Adding one keeps references and copies nothing.

    `chunks` is for encoding, where writing is the join; `samples` joins in memory.
    """

    def __init__(self) -> None:
        self._nodes: list[_Node] = []
        self._children: dict[TurnId | None, list[TurnId]] = {None: []}

    def __repr__(self) -> str:
        return f"<TurnTree of {len(self._nodes)} turns, {len(self.leaves())} samples>"

    def add(self, turn: Turn, after: TurnId | None = None) -> TurnId:
        """The turn continued the context that ends with the turn `after`; None: it began a new one."""
        if after is not None and not 0 <= after < len(self._nodes):
            raise LocalProtocolError(f"turn {after} does not exist; the episode has {len(self._nodes)} turns")
        context_tokens = 0 if after is None else self._nodes[after].end
        node = _Node(after, turn, context_tokens)
        _check(node)
        turn_id = TurnId(len(self._nodes))
        self._nodes.append(node)
        self._children[turn_id] = []
        self._children[after].append(turn_id)
        return turn_id

    def match(self, context_ids: np.ndarray) -> tuple[TurnId | None, int]:
        """The turn whose path is the longest prefix of `context_ids`, and that path's length in tokens.

        For engines that are asked with whole contexts. Compares each token at most once per sibling.
        """
        best: TurnId | None = None
        matched = 0
        candidates = list(self._children[None])
        while candidates:
            turn_id = candidates.pop()
            node = self._nodes[turn_id]
            middle = node.context_tokens + len(node.turn.appended_ids)
            if (
                node.end <= len(context_ids)
                and np.array_equal(context_ids[node.context_tokens : middle], node.turn.appended_ids)
                and np.array_equal(context_ids[middle : node.end], node.turn.sampled_ids)
            ):
                if node.end > matched:
                    best, matched = turn_id, node.end
                candidates.extend(self._children[turn_id])
        return best, matched

    def leaves(self) -> list[TurnId]:
        """The last turn of each sample, in the order they were added."""
        return [TurnId(index) for index in range(len(self._nodes)) if not self._children[TurnId(index)]]

    def chunks(self) -> list[dict[str, list[np.ndarray]]]:
        """One sample per leaf, every array still in pieces along its first axis."""
        trained: set[TurnId] = set()
        return [self._collect(leaf, trained) for leaf in self.leaves()]

    def samples(self) -> list[dict[str, np.ndarray]]:
        """One sample per leaf, joined."""
        return [{name: np.concatenate(pieces) for name, pieces in sample.items()} for sample in self.chunks()]

    def _collect(self, leaf: TurnId, trained: set[TurnId]) -> dict[str, list[np.ndarray]]:
        path = self._path(leaf)
        nodes = [self._nodes[turn_id] for turn_id in path]
        tokens = nodes[-1].end
        token_ids: list[np.ndarray] = []
        loss_mask = np.zeros(tokens, np.uint8)
        logprobs = np.zeros(tokens, np.float32)
        versions: list[np.ndarray] = []
        starts: list[int] = []
        for turn_id, node in zip(path, nodes, strict=True):
            turn = node.turn
            start = node.end - len(turn.sampled_ids)
            token_ids += (turn.appended_ids, turn.sampled_ids)
            logprobs[start : node.end] = turn.logprobs
            versions.append(turn.versions)
            starts += [start] * len(turn.versions)
            if turn_id not in trained:
                loss_mask[start : node.end] = 1
                trained.add(turn_id)
        spans = np.concatenate(versions)
        spans[:, 0] += starts
        # Only routing is worth keeping in pieces: the rest is a few bytes per token.
        sample = {
            "token_ids": [np.concatenate(token_ids)],
            "loss_mask": [loss_mask],
            "logprobs": [logprobs],
            "versions": [spans],
        }
        if nodes[0].turn.routed_experts is not None:
            sample["routed_experts"] = _collect_routing(nodes)
        return sample

    def _path(self, leaf: TurnId) -> list[TurnId]:
        path: list[TurnId] = []
        at: TurnId | None = leaf
        while at is not None:
            path.append(at)
            at = self._nodes[at].parent
        return path[::-1]


def _collect_routing(nodes: list[_Node]) -> list[np.ndarray]:
    """The boundary row of each turn, as a chunk of its own, closes the gap that the turn before it left."""
    chunks: list[np.ndarray] = []
    for node in nodes:
        if node.turn.boundary_experts is not None:
            chunks.append(node.turn.boundary_experts)
        if node.turn.routed_experts is None:
            raise LocalProtocolError("some of an episode's turns have routed experts and some do not; all or none must")
        chunks.append(node.turn.routed_experts)
    chunks.append(np.zeros((1, *chunks[0].shape[1:]), chunks[0].dtype))
    return chunks


def _check(node: _Node) -> None:
    turn = node.turn
    completion = len(turn.sampled_ids)
    rows = len(turn.appended_ids) + completion - 1
    routed, boundary = turn.routed_experts, turn.boundary_experts
    boundary_rows = 0 if boundary is None else len(boundary)
    boundary_due = int(routed is not None and node.context_tokens > 0)
    starts = turn.versions[:, 0]
    if (
        completion == 0
        or node.context_tokens + len(turn.appended_ids) == 0
        or len(turn.logprobs) != completion
        or len(starts) == 0
        or starts[0] != 0
        or starts[-1] >= completion
        or (routed is not None and len(routed) != rows)
        or boundary_rows != boundary_due
    ):
        raise LocalProtocolError(
            f"a turn after {node.context_tokens} tokens is inconsistent: {len(turn.appended_ids)} appended and "
            f"{completion} sampled tokens (at least one, after at least one), {len(turn.logprobs)} logprobs, version "
            f"spans {turn.versions.tolist()} (the first at 0), and "
            f"{'no' if routed is None else len(routed)} routing rows with {boundary_rows} of the boundary "
            f"(expected none, or {rows} with {boundary_due})"
        )
