"""One conversation between a policy and its environment, stored as the exact tokens.

Invariants:
- generated tokens are never re-tokenised from text: ids, log-probabilities and versions stay as the engine returned
  them;
- pieces are collected by reference as they arrive, and laid out once, in `arrays`;
- the context is always the exact prefix of the next token, so an interrupted episode can continue from it anywhere,
  also in another process (`to_bytes`, `from_bytes`).

An environment may take the conversation back to an earlier point (to drop a failed attempt, or to summarise a long
history). The tokens then form a tree: every token is stored once, and the sample has one branch for each leaf.

An engine that records expert routing has a row for every token it has read, which is all but the last one it drew. A
later request that reads this token returns its row as a separate chunk. The last token of a branch is never read: its
row is zero, and no token is predicted from it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from penstock.batch.columns import TRUNCATED
from penstock.errors import LocalProtocolError, RemoteProtocolError
from penstock.rollout.hooks import Arrays

EMPTY = np.zeros(0, np.float32)


class _Piece(msgspec.Struct, array_like=True, gc=False):
    """Consecutive tokens of one origin."""

    token_ids: np.ndarray
    after: int
    """Index of the piece that precedes this one; -1 for the first."""
    logprobs: np.ndarray | None = None
    """None for tokens that were not generated."""
    routed_experts: np.ndarray | None = None
    """Of the tokens read since the last generated piece, and of these except the last."""
    boundary_experts: np.ndarray | None = None
    """Of the one token before them."""


class Episode(msgspec.Struct):
    """Prompt, completions and replies of one sample, in order."""

    pieces: list[_Piece]
    tokens: int
    """Total of all pieces."""
    spans: list[tuple[int, int]] = []
    """First token and version of each span of tokens that have the same version."""
    completions: list[str] = []
    """The text of every finished completion, for rewards and replies only."""
    drawn_texts: list[str] = []
    """The same texts with special tokens, as a chat template would write them; empty without a template."""
    endings: list[str] = []
    """How each of them ended: "stop" by a token that ends a turn, "length" at the token limit, "context"
    if the reply to it did not fit into the context, "error" if the environment raised instead of replying."""
    replies: list[str] = []
    turn_tokens: int = 0
    """Tokens generated of the unfinished completion."""
    version: int | None = None
    """Version of the oldest weights that generated a token; None before the first token."""
    digest: str = ""
    """Digest of the weights of that version."""
    tip: int = 0
    """The piece that ends the context."""
    turns: list[int] = []
    """For each completion, the tip at its start."""

    @classmethod
    def start(cls, prompt_ids: Sequence[int] | np.ndarray) -> Episode:
        """An episode with only its prompt."""
        if not len(prompt_ids):
            raise LocalProtocolError("an episode needs a prompt of at least one token")
        return cls([_Piece(np.asarray(prompt_ids, dtype=np.int32), -1)], len(prompt_ids))

    @property
    def generated_tokens(self) -> int:
        return sum(len(piece.token_ids) for piece in self.pieces if piece.logprobs is not None)

    @property
    def truncated(self) -> bool:
        """The last completion was cut off before its end."""
        return bool(self.endings) and self.endings[-1] not in ("stop", "error")

    @property
    def broken(self) -> bool:
        """The environment raised after the last completion."""
        return self.endings[-1:] == ["error"]

    def break_off(self) -> None:
        """Ends the episode because the environment raised."""
        self.endings[-1] = "error"

    @property
    def awaits_completion(self) -> bool:
        """The policy generates next (or is still generating), not the environment."""
        return len(self.completions) == len(self.replies)

    @property
    def size_bytes(self) -> int:
        return sum(
            8 * len(piece.token_ids) + (0 if piece.routed_experts is None else piece.routed_experts.nbytes)
            for piece in self.pieces
        )

    def context_tokens(self, back_to: int | None = None) -> int:
        """Number of context tokens here, or at the start of the completion with that index."""
        return sum(len(self.pieces[index].token_ids) for index in self._path(self._start_of(back_to)))

    def context(self) -> list[int]:
        """All tokens up to the tip: the context of the next request."""
        return np.concatenate([self.pieces[index].token_ids for index in self._path(self.tip)]).tolist()

    def generated(
        self,
        token_ids: np.ndarray,
        logprobs: np.ndarray,
        versions: np.ndarray,
        version: int,
        digest: str,
        *,
        routed_experts: np.ndarray | None = None,
        boundary_experts: np.ndarray | None = None,
    ) -> None:
        """Appends tokens that the engine drew after the context; `versions` as in `arrays`, counted from the first of
        them.

        With routing: `[rows, layers, top-k]` of all tokens added to the context since the previous request (or since
        it was taken back), except the last; and, except in the first request, the one row of the token before them.
        The arrays are kept by reference: the caller must not change them.
        """
        if len(token_ids) != len(logprobs):
            raise LocalProtocolError(f"{len(token_ids)} tokens came with {len(logprobs)} log-probabilities")
        if not len(token_ids):
            return
        self._begin_turn()
        for start, of in versions.tolist():
            if not self.spans or self.spans[-1][1] != of:
                self.spans.append((self.tokens + start, of))
        token_ids = np.asarray(token_ids, dtype=np.int32)
        logprobs = np.asarray(logprobs, dtype=np.float32)
        self._append(_Piece(token_ids, self.tip, logprobs, routed_experts, boundary_experts))
        self.turn_tokens += len(token_ids)
        if self.version is None or version < self.version:
            self.version, self.digest = version, digest

    def turn_ids(self) -> list[int]:
        """The tokens of the unfinished completion, from the newest pieces."""
        pieces: list[np.ndarray] = []
        missing = self.turn_tokens
        for piece in reversed(self.pieces):
            if missing <= 0:
                break
            pieces.append(piece.token_ids)
            missing -= len(piece.token_ids)
        return np.concatenate(pieces[::-1]).tolist() if pieces else []

    def finish_turn(self, text: str, ending: str = "stop", drawn_text: str | None = None) -> None:
        """Ends the completion; `text` is its decoded text."""
        if drawn_text is not None:
            self.drawn_texts.append(drawn_text)
        self._begin_turn()
        self.completions.append(text)
        self.endings.append(ending)
        self.turn_tokens = 0

    def replied(self, text: str, token_ids: Sequence[int] | np.ndarray, back_to: int | None = None) -> None:
        """Appends the environment's reply; its tokens are context, not trained.

        They follow the last completion, or the start of completion `back_to`: the tokens since then leave the context
        and stay in the sample as a branch.
        """
        if self.turn_tokens:
            raise LocalProtocolError("the environment replied before the completion was finished")
        self.tip = self._start_of(back_to)
        self.replies.append(text)
        if len(token_ids):
            self._append(_Piece(np.asarray(token_ids, dtype=np.int32), self.tip))

    def set_context(self, context: Sequence[int]) -> None:
        """Sets the exact context of the next completion. Its longest prefix that is already in the tree is reused; this
        need not be the end of the last completion."""
        context_ids = np.asarray(context, dtype=np.int32)
        best, length = 0, 0
        for index in range(len(self.pieces)):
            tokens = np.concatenate([self.pieces[at].token_ids for at in self._path(index)])
            if length < len(tokens) <= len(context_ids) and np.array_equal(tokens, context_ids[: len(tokens)]):
                best, length = index, len(tokens)
        if not length:
            raise LocalProtocolError("the requested context does not begin with the first tokens of its episode")
        if len(self.replies) < len(self.completions):
            self.replies.append("")
        self.tip = best
        if length < len(context_ids):
            self._append(_Piece(context_ids[length:], self.tip))

    def arrays(self) -> Arrays:
        """The whole episode: `token_ids`, `loss_mask`, `logprobs` per token, `versions` as spans, `truncated`.

        With routing, `routed_experts` in the chunks that arrived: they are joined when they are written. With several
        branches, `branches`: the token ranges of each branch.
        """
        pieces = self.pieces
        token_ids = [piece.token_ids for piece in pieces]
        counts = list(map(len, token_ids))
        starts = list(itertools.accumulate(counts, initial=0))
        drawn = np.repeat([piece.logprobs is not None for piece in pieces], counts)
        logprobs = np.zeros(self.tokens, np.float32)
        logprobs[drawn] = np.concatenate([EMPTY, *(p.logprobs for p in pieces if p.logprobs is not None)])
        arrays: Arrays = {
            "token_ids": np.concatenate(token_ids),
            "loss_mask": drawn.view(np.uint8),
            "logprobs": logprobs,
            "versions": np.array(self.spans, np.int32).reshape(-1, 2),
            TRUNCATED: np.array([self.truncated], np.uint8),
        }
        if any(piece.routed_experts is not None for piece in pieces):
            arrays["routed_experts"] = self._routing(starts)
        if [piece.after for piece in pieces] != list(range(-1, len(pieces) - 1)):
            arrays["branches"] = self._branches(starts)
        return arrays

    def to_bytes(self) -> bytes:
        """Serialises the episode, so that another process can continue it."""
        return msgspec.msgpack.encode(self, enc_hook=_encode_array)

    @classmethod
    def from_bytes(cls, body: bytes) -> Episode:
        """Decodes and checks the output of `to_bytes`."""
        try:
            episode = msgspec.msgpack.decode(body, type=cls, dec_hook=_decode_array)
        except (msgspec.DecodeError, TypeError, ValueError) as error:
            raise RemoteProtocolError(f"the bytes are not a kept episode: {error}") from error
        episode.check()
        return episode

    def check(self) -> None:
        """Raises if the pieces do not fit together."""
        for index, piece in enumerate(self.pieces):
            if piece.token_ids.dtype != np.int32 or piece.token_ids.ndim != 1:
                raise RemoteProtocolError(f"a kept episode has tokens of {piece.token_ids.dtype}, expected int32")
            if piece.logprobs is not None and piece.logprobs.shape != piece.token_ids.shape:
                raise RemoteProtocolError("a kept episode has a piece whose arrays differ in length")
            if not -1 <= piece.after < index or (piece.after == -1) != (index == 0):
                raise RemoteProtocolError("a kept episode has a piece that follows none before it")
        if not self.pieces or self.pieces[0].logprobs is not None:
            raise RemoteProtocolError("a kept episode does not begin with a prompt")
        if (
            self.tokens != sum(len(piece.token_ids) for piece in self.pieces)
            or self.turn_tokens > self.generated_tokens
            or len(self.replies) > len(self.completions)
            or len(self.endings) != len(self.completions)
            or len(self.turns) != len(self.completions) + bool(self.turn_tokens)
            or not all(0 <= index < len(self.pieces) for index in (self.tip, *self.turns))
        ):
            raise RemoteProtocolError("a kept episode has counts that do not match its content")

    def __repr__(self) -> str:
        return (
            f"Episode(tokens={self.tokens}, generated={self.generated_tokens}, turns={len(self.completions)}, "
            f"open={self.turn_tokens}, version={self.version})"
        )

    def _start_of(self, completion: int | None) -> int:
        if completion is None:
            return self.tip
        if not 0 <= completion < len(self.turns):
            raise LocalProtocolError(
                f"the environment took the conversation back to completion {completion} of {len(self.turns)}"
            )
        return self.turns[completion]

    def _append(self, piece: _Piece) -> None:
        self.pieces.append(piece)
        self.tokens += len(piece.token_ids)
        self.tip = len(self.pieces) - 1

    def _path(self, index: int) -> list[int]:
        """The pieces from the first to that one."""
        path: list[int] = []
        while index >= 0:
            path.append(index)
            index = self.pieces[index].after
        return path[::-1]

    def _begin_turn(self) -> None:
        if len(self.turns) == len(self.completions):
            self.turns.append(self.tip)

    def _branches(self, starts: list[int]) -> np.ndarray:
        """int32[ranges, 3]: branch, first token, token after the last. Branches are in the order of their leaves."""
        inner = {piece.after for piece in self.pieces}
        stretches: list[list[int]] = []
        for branch, leaf in enumerate(index for index in range(len(self.pieces)) if index not in inner):
            for index in self._path(leaf):
                start, end = starts[index], starts[index + 1]
                if start and stretches[-1][2] == start:
                    stretches[-1][2] = end
                else:
                    stretches.append([branch, start, end])
        return np.array(stretches, np.int32)

    def _routing(self, starts: list[int]) -> list[np.ndarray]:
        """One row per token. Each request fills in the row that the previous one left open. Where the conversation was
        taken back, that token ends a branch: its row is zero, and the next request's boundary row is already present.
        """
        chunks: list[np.ndarray] = []
        rows = 0
        joined = True
        for index, piece in enumerate(self.pieces):
            joined &= piece.after == index - 1
            if piece.logprobs is None:
                continue
            read = starts[index + 1]
            routed, boundary = piece.routed_experts, piece.boundary_experts
            if routed is None or len(routed) != read - rows - bool(rows) - 1 or (boundary is None) != (rows == 0):
                raise LocalProtocolError(
                    f"an episode's routing does not fit its tokens: a request that ended at token {read} returned "
                    f"{'no rows' if routed is None else f'{len(routed)} rows'} and "
                    f"{'none' if boundary is None else 'one'} for the token before; all requests must return theirs"
                )
            if boundary is not None:
                chunks.append(boundary if joined else np.zeros_like(boundary))
            chunks.append(routed)
            rows, joined = read - 1, True
        chunks.append(np.zeros((1, *chunks[0].shape[1:]), chunks[0].dtype))
        return chunks


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, np.ascontiguousarray(value).data
    raise LocalProtocolError(f"a kept episode cannot hold a {type(value).__name__}")


def _decode_array(_: type, value: Any) -> np.ndarray:
    dtype, shape, body = value  # arrays are the only type in an episode that needs a hook
    return np.frombuffer(body, np.dtype(dtype)).reshape(shape)
