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

`renderers` does the same with a hand-written renderer per model family; here the template itself is the renderer.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from penstock.errors import ConfigError

ChatMessage = dict[str, Any]
Render = Callable[[Sequence[ChatMessage], Sequence[Any], bool], str]
"""`(messages, tools, add_generation_prompt) -> text`: the chat template."""

MARK = "\u2063penstock\u2063"
"""Placeholder for a completion, to find the text that the template writes around it."""

_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_MISTRAL = re.compile(r"\[TOOL_CALLS\]\s*(\[.*\])", re.DOTALL)
_REASONING = re.compile(r"\A\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)


class Turn:
    """The text that follows a completion, or, with `back_to`, the context at the start of that completion."""

    def __init__(self, text: str, back_to: int | None = None) -> None:
        self.text = text
        self.back_to = back_to


class Chat:
    """Conversations with one chat template. Stateless: all results depend only on the conversation so far."""

    def __init__(self, render: Render, tools: Sequence[Any] = ()) -> None:
        """`tools` are functions or JSON schemas, passed to the template."""
        self._render = render
        self.tools = list(tools)

    def with_tools(self, tools: Sequence[Any]) -> Chat:
        """The same template with other tools."""
        return Chat(self._render, tools)

    def opening(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt, up to the first completion."""
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
        history = [*messages]
        turn = Turn("")
        for drawn, reply in zip(completions, replies, strict=True):
            starts.append(context)
            turn = self._turn_after(history, starts, drawn, reply)
            start = context + drawn if turn.back_to is None else starts[turn.back_to]
            context = start + turn.text
            history += [assistant_message(self.without_end(drawn)), *reply]
        return turn

    def continuation(
        self, history: Sequence[ChatMessage], context: str, drawn: str, reply: Sequence[ChatMessage]
    ) -> str | None:
        """The text after a completion that was drawn after `context`, the rendered `history`; None if the template
        rewrites earlier text."""
        try:
            turn = self._turn_after(history, [context], drawn, reply)
        except ConfigError:
            return None
        return turn.text if turn.back_to is None else None

    def conversation(
        self, messages: Sequence[ChatMessage], completions: Sequence[str], replies: Sequence[Sequence[ChatMessage]]
    ) -> list[ChatMessage]:
        """All messages so far, with parsed completions."""
        history = [*messages]
        for drawn, reply in itertools.zip_longest(completions, replies, fillvalue=()):
            if isinstance(drawn, str):
                history.append(assistant_message(self.without_end(drawn)))
            history += reply
        return history

    def _turn_after(
        self, history: Sequence[ChatMessage], starts: Sequence[str], drawn: str, reply: Sequence[ChatMessage]
    ) -> Turn:
        context, content = starts[-1], self.without_end(drawn)
        ended = drawn[len(content) :]
        parsed = assistant_message(content)
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

    def _rendered(self, messages: Sequence[ChatMessage], *, prompting: bool = True) -> str:
        try:
            return self._render(messages, self.tools, prompting)
        except Exception as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ConfigError(f"the model's chat template cannot render messages of ({roles}): {error}") from error


def _without_prefix(text: str, ended: str) -> str:
    """The template's text after a completion, without the end that the completion already includes."""
    return text.removeprefix(ended) if ended else text


def assistant_message(text: str) -> ChatMessage:
    """A completion as a message: reasoning, tool calls and content in separate fields, as templates need them."""
    message: ChatMessage = {"role": "assistant", "content": text}
    if (found := _REASONING.match(text)) is not None:
        message |= {"reasoning_content": found[1].strip("\n"), "content": text[found.end() :]}
    calls = tool_calls(message["content"])
    if calls:
        content = _MISTRAL.sub("", _HERMES.sub("", message["content"])).strip()
        message |= {"content": "" if _whole_call(message["content"]) else content, "tool_calls": calls}
    return message


def tool_calls(text: str) -> list[ChatMessage]:
    """The calls in a completion, in any of the usual formats: `<tool_call>{…}</tool_call>`, `[TOOL_CALLS] [{…}]`,
    or a JSON object with a `name` and nothing else."""
    bodies: list[Any] = []
    for body in _HERMES.findall(text):
        bodies.append(_json(body))
    if (listed := _MISTRAL.search(text)) is not None:
        found = _json(listed[1])
        bodies += found if isinstance(found, list) else []
    if not bodies and (whole := _whole_call(text)) is not None:
        bodies.append(whole)
    return [_call(number, body) for number, body in enumerate(bodies) if isinstance(body, dict) and "name" in body]


def _whole_call(text: str) -> dict[str, Any] | None:
    text = text.strip().removeprefix("<|python_tag|>")
    if not text.startswith("{"):
        return None
    found = _json(text)
    return found if isinstance(found, dict) and {"name"} < found.keys() & {"name", "parameters", "arguments"} else None


def _call(number: int, body: dict[str, Any]) -> ChatMessage:
    arguments = body.get("arguments", body.get("parameters", {}))
    return {
        "id": body.get("id") or f"call{number:05d}",
        "type": "function",
        "function": {"name": body["name"], "arguments": arguments},
    }


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
