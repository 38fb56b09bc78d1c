"""What an environment must offer: a deterministic stream of prompts and a way to score completions.

The invariant everything else rests on: `prompt(position)` is a pure function of the environment's construction
arguments and the position. Every worker computes the same prompt, so leases carry positions and a resumed run
needs no more than the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message of a conversation, in the fields that chat templates know."""

    role: str
    content: str
    name: str = ""
    reasoning_content: str = ""
    tool_calls: list[dict[str, Any]] = []
    tool_call_id: str = ""

    def plain(self) -> dict[str, Any]:
        """As chat templates take it."""
        return msgspec.to_builtins(self)


class Prompt(msgspec.Struct, frozen=True):
    """What the policy is shown: plain text, or chat messages when `messages` is not empty."""

    text: str = ""
    messages: tuple[Message, ...] = ()
    columns: dict[str, Any] = {}
    """What reward functions need to know besides the text: the answer, a difficulty, a source."""

    def shown(self) -> str | list[dict[str, Any]]:
        """The prompt in the form reward functions receive it."""
        if not self.messages:
            return self.text
        return [message.plain() for message in self.messages]


@runtime_checkable
class TextEnvironment(Protocol):
    """Prompts in, completions scored."""

    @property
    def count(self) -> int | None:
        """How many positions the stream has; None when it never ends. A run that goes on after the last begins anew."""
        ...

    def prompt(self, position: int) -> Prompt:
        """The prompt at a position of the stream. Pure; any position, any order, any thread."""
        ...

    def score(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        """One reward per completion; None where the environment cannot judge it."""
        ...


@runtime_checkable
class DividedEnvironment(Protocol):
    """An environment over a finite set that can keep some of it out of its stream, to be evaluated on.

    Others are evaluated on with another seed, which leads to other prompts only where prompts are made from the seed.
    """

    def hold_out(self, count: int) -> Any:
        """Takes `count` rows out of this environment's own stream, always the same ones, and returns an environment
        of those alone."""
        ...


class GoBack(msgspec.Struct, frozen=True):
    """A reply that takes the conversation back: the policy is shown `text` where completion number `to` began.

    What came since is no longer in its context (a failed attempt, a history that grew too long), but is still trained:
    the sample has a branch for every end, all with its one reward, and what they share is trained once.
    """

    to: int
    text: str


@runtime_checkable
class ConversingEnvironment(TextEnvironment, Protocol):
    """A text environment that may answer a completion and ask for another turn."""

    def reply(self, prompt: Prompt, completions: Sequence[str]) -> str | Message | Sequence[Message] | GoBack | None:
        """What the policy is shown after its last completion; None ends the episode.

        A text is shown as it is after a prompt of text, and as the user's message after a prompt of messages, where the
        model's chat template writes it; `completions` then have their special tokens, but for the one that ended them.
        A pure function of the conversation so far, so that an interrupted episode can go on anywhere.
        """
        ...


def prompts_per_pass(environment: Any) -> int | None:
    """How many prompts there are before any is shown again; None if there is no end of new ones.

    A stream without an end that orders finitely many `rows` anew in each pass says how many those are.
    """
    count = getattr(environment, "count", None)
    return count if count is not None else getattr(environment, "rows", None)
