"""One conversation between a policy and its environment, kept as the tokens that really passed.

Invariants:
- what was generated is never made again from text: ids, log-probabilities and versions stay as the engine gave them;
- pieces are collected as they come and joined once, in `arrays`;
- the context is always the exact prefix the next token was or will be drawn after, so an interrupted episode goes on
  from it anywhere, also in another process (`to_bytes`, `from_bytes`).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from penstock.errors import LocalProtocolError, RemoteProtocolError


class _Piece(msgspec.Struct, array_like=True):
    """Consecutive tokens of one origin, as bytes, so that an episode can be stored as it is."""

    token_ids: bytes
    logprobs: bytes = b""
    """Empty for tokens that were not generated."""
    versions: tuple[tuple[int, int], ...] = ()
    """From which token of the piece on, which version."""

    @property
    def tokens(self) -> int:
        return len(self.token_ids) // 4

    def ids(self) -> np.ndarray:
        return np.frombuffer(self.token_ids, dtype=np.int32)


class Episode(msgspec.Struct):
    """Prompt, completions and replies of one sample, in order."""

    pieces: list[_Piece]
    completions: list[str] = []
    """The text of every finished completion, for rewards and replies only."""
    replies: list[str] = []
    turn_tokens: int = 0
    """Generated in the completion that is not finished yet."""
    version: int | None = None
    """The oldest weights any token was drawn with; None before the first."""
    digest: str = ""
    """Of the weights of that version."""

    @classmethod
    def start(cls, prompt_ids: Sequence[int]) -> Episode:
        """An episode that has seen its prompt and nothing else."""
        if not len(prompt_ids):
            raise LocalProtocolError("an episode needs a prompt of at least one token")
        return cls(pieces=[_Piece(np.asarray(prompt_ids, dtype=np.int32).tobytes())])

    @property
    def tokens(self) -> int:
        return sum(piece.tokens for piece in self.pieces)

    @property
    def generated_tokens(self) -> int:
        return sum(piece.tokens for piece in self.pieces if piece.logprobs)

    @property
    def wants_completion(self) -> bool:
        """The policy is to speak next (or still speaking), not the environment."""
        return len(self.completions) == len(self.replies)

    @property
    def size_bytes(self) -> int:
        return 8 * self.tokens

    def context(self) -> list[int]:
        """Every token so far: what the engine reads to go on."""
        return np.concatenate([piece.ids() for piece in self.pieces]).tolist()

    def generated(
        self, token_ids: np.ndarray, logprobs: np.ndarray, versions: np.ndarray, version: int, digest: str
    ) -> None:
        """The engine drew these tokens after the context; `versions` as in `arrays`, counted from the first of them."""
        if len(token_ids) != len(logprobs):
            raise LocalProtocolError(f"{len(token_ids)} tokens came with {len(logprobs)} log-probabilities")
        if not len(token_ids):
            return
        self.pieces.append(
            _Piece(
                np.asarray(token_ids, dtype=np.int32).tobytes(),
                np.asarray(logprobs, dtype=np.float32).tobytes(),
                tuple((int(start), int(of)) for start, of in versions),
            )
        )
        self.turn_tokens += len(token_ids)
        if self.version is None or version < self.version:
            self.version, self.digest = version, digest

    def turn_ids(self) -> list[int]:
        """The tokens of the completion that is not finished yet."""
        pieces: list[np.ndarray] = []
        missing = self.turn_tokens
        for piece in reversed(self.pieces):
            if missing <= 0:
                break
            pieces.append(piece.ids())
            missing -= piece.tokens
        return np.concatenate(pieces[::-1]).tolist() if pieces else []

    def finish_turn(self, text: str) -> None:
        """The completion is complete; `text` is what it says."""
        self.completions.append(text)
        self.turn_tokens = 0

    def replied(self, text: str, token_ids: Sequence[int]) -> None:
        """The environment answered; these tokens are read, not trained."""
        if self.turn_tokens:
            raise LocalProtocolError("the environment replied before the completion was finished")
        self.replies.append(text)
        if len(token_ids):
            self.pieces.append(_Piece(np.asarray(token_ids, dtype=np.int32).tobytes()))

    def arrays(self) -> dict[str, np.ndarray]:
        """The whole episode, joined: `token_ids`, `loss_mask`, `logprobs` per token and `versions` as spans."""
        counts = [piece.tokens for piece in self.pieces]
        logprobs = np.zeros(sum(counts), dtype=np.float32)
        loss_mask = np.zeros(sum(counts), dtype=np.uint8)
        spans: list[tuple[int, int]] = []
        at = 0
        for piece, count in zip(self.pieces, counts, strict=True):
            if piece.logprobs:
                logprobs[at : at + count] = np.frombuffer(piece.logprobs, dtype=np.float32)
                loss_mask[at : at + count] = 1
                for start, version in piece.versions:
                    if not spans or spans[-1][1] != version:
                        spans.append((at + start, version))
            at += count
        return {
            "token_ids": np.concatenate([piece.ids() for piece in self.pieces]),
            "loss_mask": loss_mask,
            "logprobs": logprobs,
            "versions": np.array(spans, dtype=np.int32).reshape(-1, 2),
        }

    def to_bytes(self) -> bytes:
        """For another process to go on from."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, body: bytes) -> Episode:
        """What `to_bytes` wrote, checked."""
        try:
            episode = msgspec.msgpack.decode(body, type=cls)
        except msgspec.DecodeError as error:
            raise RemoteProtocolError(f"not a kept episode: {error}") from error
        episode.check()
        return episode

    def check(self) -> None:
        """Raises if the pieces do not fit together."""
        for piece in self.pieces:
            if len(piece.token_ids) % 4 or (piece.logprobs and len(piece.logprobs) != len(piece.token_ids)):
                raise RemoteProtocolError("a kept episode has a piece whose arrays differ in length")
        if not self.pieces or self.pieces[0].logprobs:
            raise RemoteProtocolError("a kept episode does not begin with a prompt")
        if self.turn_tokens > self.generated_tokens or len(self.replies) > len(self.completions):
            raise RemoteProtocolError("a kept episode counts more than it holds")

    def __repr__(self) -> str:
        return (
            f"Episode(tokens={self.tokens}, generated={self.generated_tokens}, turns={len(self.completions)}, "
            f"open={self.turn_tokens}, version={self.version})"
        )
