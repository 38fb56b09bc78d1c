"""The interface of an environment: a deterministic stream of prompts and a way to score completions.

The basic invariant: `prompt(position)` is a pure function of the environment's construction arguments and the
position. Every worker computes the same prompt, so leases carry positions, and a resumed run needs only the next
position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message of a conversation, with the fields of chat templates."""

    role: str
    content: str
    name: str = ""
    reasoning_content: str = ""
    tool_calls: list[dict[str, Any]] = []
    tool_call_id: str = ""

    def plain(self) -> dict[str, Any]:
        """The form that chat templates take."""
        return msgspec.to_builtins(self)


class Prompt(msgspec.Struct, frozen=True):
    """The input of the policy: plain text, or chat messages when `messages` is not empty."""

    text: str = ""
    messages: tuple[Message, ...] = ()
    columns: dict[str, Any] = {}
    """Inputs of reward functions besides the text: the answer, a difficulty, a source."""

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
        """Number of positions of the stream; None if it is endless. A run that passes the last starts again."""
        ...

    def prompt(self, position: int) -> Prompt:
        """The prompt at a position of the stream. Pure; any position, any order, any thread."""
        ...

    def score(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        """One reward per completion; None where the environment cannot score it."""
        ...


@runtime_checkable
class DividedEnvironment(Protocol):
    """An environment over a finite set that can hold out a part of it for evaluation.

    Other environments are evaluated with another seed, which gives other prompts only if prompts depend on the seed.
    """

    def hold_out(self, count: int) -> Any:
        """Removes `count` rows from this environment's stream, always the same ones, and returns an environment of
        these rows."""
        ...


class GoBack(msgspec.Struct, frozen=True):
    """A reply that rewinds the conversation: `text` follows where completion number `to` began.

    The later turns leave the context (a failed attempt, a history that grew too long), but are still trained: the
    sample has one branch per end, all with the same reward, and their common prefix is trained once.
    """

    to: int
    text: str


@runtime_checkable
class ConversingEnvironment(TextEnvironment, Protocol):
    """A text environment that may reply to a completion and start another turn."""

    def reply(self, prompt: Prompt, completions: Sequence[str]) -> str | Message | Sequence[Message] | GoBack | None:
        """The input that follows the last completion; None ends the episode.

        After a prompt of text, a text is appended unchanged. After a prompt of messages, it is a user message that the
        chat template renders; `completions` then include special tokens, except the one that ended them. A pure
        function of the conversation so far, so that any worker can resume an interrupted episode.
        """
        ...


def prompts_per_pass(environment: Any) -> int | None:
    """Number of prompts before one is repeated; None if new ones never end.

    An endless stream that shuffles a finite set in each pass gives its size in `rows`.
    """
    count = getattr(environment, "count", None)
    return count if count is not None else getattr(environment, "rows", None)
