"""Asking an engine for a completion: how to draw it, what comes back, and engines that serve many at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec
import numpy as np

Ending = Literal["stop", "length", "interrupted"]


class Sampling(msgspec.Struct, frozen=True):
    """How tokens are drawn. Recorded log-probabilities are those of exactly this distribution.

    `min_p`, `top_k` and `top_p` apply in this order, each to what the one before left, after the temperature. By
    default the distribution is the model's own.
    """

    max_new_tokens: int
    temperature: float = 1.0
    stop_ids: tuple[int, ...] = ()
    """Each ends a completion and belongs to it; without any, every completion runs to its full length."""
    greedy: bool = False
    """Takes the most likely token instead; the log-probabilities stay those of the distribution."""
    top_k: int | None = None
    """Draws only from the k most likely tokens, and those just as likely as the last of them."""
    top_p: float = 1.0
    """Draws only from the most likely tokens that together have at least this probability."""
    min_p: float = 0.0
    """Draws only from tokens at least this likely in proportion to the most likely one."""


class Completion(msgspec.Struct):
    """What was generated for one row. Token ids as sampled: they are never made again from text."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    """int32[S, 2]: from which generated token on, which version of the weights."""
    ending: Ending
    version: int
    """The oldest version of them."""
    digest: str
    """Of the weights of that version."""


class RequestEngine(Protocol):
    """An engine with many generations in flight. All methods are called on the event loop and return at once."""

    max_positions: int | None

    async def complete(self, context: Sequence[int], sampling: Sampling, *, cache_key: object = None) -> Completion:
        """One completion after the context.

        An engine that is interrupted gives what it has (`ending` is "interrupted"); a call that is cancelled frees
        what it held. `cache_key` names the conversation, so that an engine may keep its cache from turn to turn.
        """
        ...

    def forget(self, cache_key: object) -> None:
        """The conversation is over; a no-op for one that is not known."""
        ...

    def interrupt(self) -> None:
        """Ends all completions, now and later, with what they have; `resume` undoes it."""
        ...

    def resume(self) -> None:
        """Allows completions after `interrupt`."""
        ...
