"""Conversations as the model's own chat template writes them, token by token as they really passed.

A completion is never tokenised again: what the policy drew stays as drawn, and a reply adds only what the template
writes after it: the conversation is rendered with the reply, and what follows the text so far is taken.

    rendered so far │ the completion │ what the reply adds, up to where the policy speaks again
    ────────────────┴────────────────┴──────────────────────────────────────────────────────────
    the template, applied to the whole conversation

A template may rewrite earlier turns when the conversation goes on: some leave out the reasoning of all turns but the
last. The text then begins as it did when an earlier turn began, and the conversation goes on from there as a branch:
each completion is trained after exactly the tokens it was drawn after. Where not even that holds, several turns cannot
be trained with the template, which is a ConfigError.

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
"""Stands for a completion in a rendering, to see what the template writes around it."""

_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_MISTRAL = re.compile(r"\[TOOL_CALLS\]\s*(\[.*\])", re.DOTALL)
_REASONING = re.compile(r"\A\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)


class Turn:
    """What comes after a completion: these tokens' text, there or from where the completion `back_to` began."""

    def __init__(self, text: str, back_to: int | None = None) -> None:
        self.text = text
        self.back_to = back_to


class Chat:
    """Conversations by one chat template. Keeps no state: everything follows from the conversation so far."""

    def __init__(self, render: Render, tools: Sequence[Any] = ()) -> None:
        """`tools` are functions or JSON schemas, given to the template."""
        self._render = render
        self.tools = list(tools)

    def with_tools(self, tools: Sequence[Any]) -> Chat:
        """The same template with other tools."""
        return Chat(self._render, tools)

    def opening(self, messages: Sequence[ChatMessage]) -> str:
        """The prompt, up to where the policy speaks."""
        return self._written(messages)

    def turn_end(self) -> str:
        """What the template writes after an assistant's message, up to white space; empty if it writes nothing."""
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": MARK}]
        return self._written(messages, prompting=False).rpartition(MARK)[2].strip()

    def next_turn(
        self, messages: Sequence[ChatMessage], completions: Sequence[str], replies: Sequence[Sequence[ChatMessage]]
    ) -> Turn:
        """What follows the last completion. `completions` as drawn, with special tokens, also the one that ended it;
        `replies` are the messages after each of them. ConfigError if the template does not let the conversation go on.
        """
        began: list[str] = []
        context = self.opening(messages)
        history = [*messages]
        turn = Turn("")
        for drawn, reply in zip(completions, replies, strict=True):
            began.append(context)
            turn = self._continued(history, began, drawn, reply)
            start = context + drawn if turn.back_to is None else began[turn.back_to]
            context = start + turn.text
            history += [assistant_message(self.without_end(drawn)), *reply]
        return turn

    def continuation(
        self, history: Sequence[ChatMessage], context: str, drawn: str, reply: Sequence[ChatMessage]
    ) -> str | None:
        """What the template writes after a completion that was drawn after `context`, the writing of `history`; None if
        it rewrites what came before."""
        try:
            turn = self._continued(history, [context], drawn, reply)
        except ConfigError:
            return None
        return turn.text if turn.back_to is None else None

    def conversation(
        self, messages: Sequence[ChatMessage], completions: Sequence[str], replies: Sequence[Sequence[ChatMessage]]
    ) -> list[ChatMessage]:
        """All messages so far, the completions parsed."""
        history = [*messages]
        for drawn, reply in itertools.zip_longest(completions, replies, fillvalue=()):
            if isinstance(drawn, str):
                history.append(assistant_message(self.without_end(drawn)))
            history += reply
        return history

    def _continued(
        self, history: Sequence[ChatMessage], began: Sequence[str], drawn: str, reply: Sequence[ChatMessage]
    ) -> Turn:
        context, said = began[-1], self.without_end(drawn)
        ended = drawn[len(said) :]
        parsed = assistant_message(said)
        whole = self._written([*history, parsed, *reply])
        if whole.startswith(context + said):
            return Turn(_after(whole[len(context) + len(said) :], ended))
        # The template trims what is said, or writes reasoning or a tool call in its own way: what was drawn stays as it
        # was, unless the template leaves reasoning out.
        reasoning = parsed.get("reasoning_content", "").strip()
        kept = not reasoning or reasoning in whole[len(context) :]
        marked = self._written([*history, {"role": "assistant", "content": MARK}, *reply])
        before, _, after = marked.rpartition(MARK)
        # An earlier completion that stayed as drawn differs from how the template writes it now.
        for begun in (context, self._written(history)) if kept else ():
            if before.startswith(begun) and not before[len(begun) :].strip():
                return Turn(_after(after, ended))
        for number in reversed(range(len(began))):
            if whole.startswith(began[number]):
                return Turn(whole[len(began[number]) :], number)
        raise ConfigError(
            "the model's chat template rewrites the beginning of a conversation that goes on, so that several turns "
            f"cannot be trained with it: {began[0][-200:]!r} became {whole[: len(began[0])][-200:]!r}"
        )

    def without_end(self, drawn: str) -> str:
        """A completion without what ended it."""
        end = self.turn_end()
        return drawn.removesuffix(end) if end else drawn

    def _written(self, messages: Sequence[ChatMessage], *, prompting: bool = True) -> str:
        try:
            return self._render(messages, self.tools, prompting)
        except Exception as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ConfigError(f"the model's chat template cannot write messages of ({roles}): {error}") from error


def _after(text: str, ended: str) -> str:
    """What the template writes after a completion, less what the completion brought itself."""
    return text.removeprefix(ended) if ended else text


def assistant_message(text: str) -> ChatMessage:
    """A completion as a message: reasoning and tool calls apart from what is said, as templates want them."""
    message: ChatMessage = {"role": "assistant", "content": text}
    if (found := _REASONING.match(text)) is not None:
        message |= {"reasoning_content": found[1].strip("\n"), "content": text[found.end() :]}
    calls = tool_calls(message["content"])
    if calls:
        said = _MISTRAL.sub("", _HERMES.sub("", message["content"])).strip()
        message |= {"content": "" if _whole_call(message["content"]) else said, "tool_calls": calls}
    return message


def tool_calls(text: str) -> list[ChatMessage]:
    """The calls written in a completion, in any of the usual ways: `<tool_call>{…}</tool_call>`, `[TOOL_CALLS] [{…}]`,
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
