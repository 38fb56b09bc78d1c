"""Conversations in the format of the model's chat template, with the exact tokens that the policy drew.

A completion is never tokenised again: drawn tokens stay unchanged. For a reply, the whole conversation is rendered with
the template, and the text after the completion is appended.

    rendered so far │ the completion │ text added by the reply, up to the next completion
    ────────────────┴────────────────┴──────────────────────────────────────────────────────────
    the template, applied to the whole conversation

A template may rewrite earlier turns when the conversation continues: some omit the reasoning of all turns but the last.
The new text then still starts like the context of an earlier turn, and the conversation continues from there as a
branch: each completion is trained after exactly the tokens after which it was drawn. If there is no such turn, the
template does not support training on several turns, which is a ConfigError.

What a template would leave out is an error: once for each shape of a conversation (its roles, and which messages have a
content, reasoning or tool calls) it is rendered with marks as contents, and all of them must be there. Reasoning is the
exception: many templates leave out that of earlier turns, on purpose.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from penstock.envs.chat_parser import CallIds, ChatMessage, assistant_message, ends_in_reasoning
from penstock.errors import ConfigError

Render = Callable[[Sequence[ChatMessage], Sequence[Any], bool], str]
"""`(messages, tools, add_generation_prompt) -> text`: the chat template."""

MARK = "\u2063penstock\u2063"
"""Placeholder for a completion, to find the text that the template writes around it."""

MAX_SHAPES = 10_000
"""Shapes of conversations that are known to be rendered whole."""


class Turn:
    """The text that follows a completion, or, with `back_to`, the context at the start of that completion."""

    def __init__(self, text: str, back_to: int | None = None) -> None:
        self.text = text
        self.back_to = back_to


class Chat:
    """Conversations with one chat template. All results depend only on the conversation so far."""

    def __init__(self, render: Render, tools: Sequence[Any] = (), *, calls: bool = True) -> None:
        """`tools` are functions or JSON schemas, passed to the template. Without `calls` completions have none:
        what looks like a tool call is content."""
        self._render = render
        self.tools = list(tools)
        self._calls = calls
        self._whole: dict[Any, None] = {}
        """Shapes of conversations of which the template leaves out nothing."""

    def with_tools(self, tools: Sequence[Any], *, calls: bool = True) -> Chat:
        """The same template with other tools."""
        chat = Chat(self._render, tools, calls=calls)
        chat._whole = self._whole
        return chat

    def opening(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt, up to the first completion. Raises ConfigError if the template leaves out a part of it."""
        self._check_whole(messages)
        return self._rendered(messages)

    def turn_end(self) -> str:
        """The text that the template writes after an assistant's message, stripped; may be empty."""
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": MARK}]
        return self._rendered(messages, prompting=False).rpartition(MARK)[2].strip()

    def next_turn(
        self, messages: Sequence[ChatMessage], completions: Sequence[str], replies: Sequence[Sequence[ChatMessage]]
    ) -> Turn:
        """The text after the last completion. `completions` as drawn, with special tokens, also the one that ended it;
        `replies` are the messages after each of them. Raises ConfigError if the template rewrites the first prompt.
        """
        starts: list[str] = []
        context = self.opening(messages)
        history, ids = [*messages], CallIds(messages)
        turn = Turn("")
        for drawn, reply in zip(completions, replies, strict=True):
            starts.append(context)
            answer = self.answer(drawn, context, ids)
            turn = self._turn_after(history, starts, drawn, answer, reply)
            start = context + drawn if turn.back_to is None else starts[turn.back_to]
            context = start + turn.text
            history += [answer, *reply]
        return turn

    def continuation(
        self,
        history: Sequence[ChatMessage],
        context: str,
        drawn: str,
        answer: ChatMessage,
        reply: Sequence[ChatMessage],
    ) -> str | None:
        """The text after a completion that was drawn after `context`, the rendered `history`; None if the template
        rewrites earlier text. The tool calls have the ids of `answer`, the completion as a message."""
        parsed = self.answer(drawn, context)
        for call, sent in zip(parsed.get("tool_calls", ()), answer.get("tool_calls") or (), strict=False):
            call["id"] = sent.get("id")
        try:
            turn = self._turn_after(history, [context], drawn, parsed, reply)
        except ConfigError:
            return None
        return turn.text if turn.back_to is None else None

    def answer(self, drawn: str, context: str, ids: CallIds | None = None) -> ChatMessage:
        """A completion after this context as a message: reasoning, tool calls and content in separate fields, as
        templates need them."""
        text, reasoning = self.without_end(drawn), ends_in_reasoning(context)
        return assistant_message(text, ids, reasoning=reasoning, calls=self._calls)

    def conversation(
        self, messages: Sequence[ChatMessage], completions: Sequence[str], replies: Sequence[Sequence[ChatMessage]]
    ) -> list[ChatMessage]:
        """All messages so far, with parsed completions."""
        history, ids = [*messages], CallIds(messages)
        context = self._rendered(messages)
        for drawn, reply in itertools.zip_longest(completions, replies, fillvalue=()):
            if isinstance(drawn, str):
                history.append(self.answer(drawn, context, ids))
            history += reply
        return history

    def _turn_after(
        self,
        history: Sequence[ChatMessage],
        starts: Sequence[str],
        drawn: str,
        parsed: ChatMessage,
        reply: Sequence[ChatMessage],
    ) -> Turn:
        self._check_whole([*history, parsed, *reply], len(history) + 1)
        context, content = starts[-1], self.without_end(drawn)
        ended = drawn[len(content) :]
        whole = self._rendered([*history, parsed, *reply])
        if whole.startswith(context + content):
            return Turn(_without_prefix(whole[len(context) + len(content) :], ended))
        # The template trims the content, or formats reasoning or a tool call differently: drawn text stays unchanged,
        # unless the template omits reasoning.
        reasoning = parsed.get("reasoning_content", "").strip()
        kept = not reasoning or reasoning in whole[len(context) :]
        marked = self._rendered([*history, {"role": "assistant", "content": MARK}, *reply])
        before, _, after = marked.rpartition(MARK)
        # An earlier completion, kept as drawn, may differ from its rendering.
        for start in (context, self._rendered(history)) if kept else ():
            if before.startswith(start) and not before[len(start) :].strip():
                return Turn(_without_prefix(after, ended))
        for number in reversed(range(len(starts))):
            if whole.startswith(starts[number]):
                return Turn(whole[len(starts[number]) :], number)
        raise ConfigError(
            "the model's chat template rewrites the beginning of a conversation that continues, so that several turns "
            f"cannot be trained with it: {starts[0][-200:]!r} became {whole[: len(starts[0])][-200:]!r}"
        )

    def without_end(self, drawn: str) -> str:
        """A completion without the text that ended it."""
        end = self.turn_end()
        return drawn.removesuffix(end) if end else drawn

    def _check_whole(self, messages: Sequence[ChatMessage], first: int = 0) -> None:
        """Raises ConfigError if the template leaves out tools, or a content or tool calls of `messages[first:]`."""
        for number, message in enumerate(messages):
            content = message.get("content")
            if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
                raise ConfigError(
                    f"message {number} (role {message.get('role')!r}) has a content of type {type(content).__name__}, "
                    "expected a text: language models here read text only"
                )
        shape = (bool(self.tools), first, *map(_shape, messages))
        if shape in self._whole:
            return
        marked = [_marked(number, message) for number, message in enumerate(messages)]
        text = self._rendered(marked)
        for number, message in enumerate(messages[first:], first):
            calls = message.get("tool_calls") or ()
            lost = [_mark(number, 0)] if (message.get("content") or "").strip() else []
            lost += [_mark(number, index) for index in range(1, len(calls) + 1)]
            lost = [mark for mark in lost if mark not in text]
            if lost:
                part = "content" if lost[0] == _mark(number, 0) else "tool calls"
                raise ConfigError(
                    f"the model's chat template leaves out the {part} of message {number} (role "
                    f"{message.get('role')!r}): the model would answer without it"
                )
        if self.tools and text == Chat(self._render)._rendered(marked):
            raise ConfigError("the model's chat template leaves out the tools: describe them in a message instead")
        if len(self._whole) >= MAX_SHAPES:
            self._whole.clear()
        self._whole[shape] = None

    def _rendered(self, messages: Sequence[ChatMessage], *, prompting: bool = True) -> str:
        try:
            return self._render(messages, self.tools, prompting)
        except Exception as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ConfigError(f"the model's chat template cannot render messages of ({roles}): {error}") from error


def _without_prefix(text: str, ended: str) -> str:
    """The template's text after a completion, without the end that the completion already includes."""
    return text.removeprefix(ended) if ended else text


def _mark(number: int, part: int) -> str:
    """What stands for a part of a message: its content, or one of its calls from 1."""
    return f"message{number}part{part}mark"


def _marked(number: int, message: ChatMessage) -> ChatMessage:
    marked = dict(message)
    if (message.get("content") or "").strip():
        marked["content"] = _mark(number, 0)
    if calls := message.get("tool_calls"):
        named = [call.get("function", {}) | {"name": _mark(number, index)} for index, call in enumerate(calls, 1)]
        marked["tool_calls"] = [call | {"function": function} for call, function in zip(calls, named, strict=True)]
    return marked


def _shape(message: ChatMessage) -> tuple[Any, ...]:
    content, reasoning = (bool(str(message.get(field) or "").strip()) for field in ("content", "reasoning_content"))
    return message.get("role"), content, reasoning, len(message.get("tool_calls") or ())
