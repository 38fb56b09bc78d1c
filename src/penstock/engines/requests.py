"""Requests to an engine: sampling parameters, the completion, and the interface of engines with many in flight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec
import numpy as np

Ending = Literal["stop", "length", "interrupted"]


class Sampling(msgspec.Struct, frozen=True):
    """How tokens are drawn. Recorded log-probabilities are those of exactly this distribution.

    `min_p`, `top_k` and `top_p` apply in this order, each to the tokens that the one before left, after the
    temperature. By default the distribution is the model's own.
    """

    max_new_tokens: int
    temperature: float = 1.0
    stop_ids: tuple[int, ...] = ()
    """Each ends a completion and belongs to it; without any, every completion runs to its full length."""
    greedy: bool = False
    """Takes the most likely token instead; the log-probabilities stay those of the distribution."""
    top_k: int | None = None
    """Draws only from the k most likely tokens, and those that are as likely as the last of them."""
    top_p: float = 1.0
    """Draws only from the most likely tokens that together have at least this probability."""
    min_p: float = 0.0
    """Draws only from tokens at least this likely in proportion to the most likely one."""


class Completion(msgspec.Struct):
    """The tokens generated for one row, as sampled: text is never tokenised again."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    """int32[S, 2]: the first generated token of each span, and the version of its weights."""
    ending: Ending
    version: int
    """The oldest of these versions."""
    digest: str
    """Of the weights of that version."""


class RequestEngine(Protocol):
    """An engine with many generations in flight. All methods are called on the event loop and return at once."""

    max_positions: int | None

    async def complete(self, context: Sequence[int], sampling: Sampling, *, cache_key: object = None) -> Completion:
        """One completion after the context.

        An interrupted engine returns the tokens drawn so far (`ending` is "interrupted"); a cancelled call frees its
        cache. `cache_key` names the conversation, so that an engine may keep its cache from turn to turn.
        """
        ...

    def forget(self, cache_key: object) -> None:
        """Drops the cache of a conversation that has ended; a no-op if there is none."""
        ...

    def interrupt(self) -> None:
        """Ends all completions, now and later, with the tokens drawn so far, until `resume`."""
        ...

    def resume(self) -> None:
        """Allows completions after `interrupt`."""
        ...
