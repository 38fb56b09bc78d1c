"""A completion as an assistant's message: reasoning, content and tool calls, whole or while it is generated.

`MessageParser` is fed the text in pieces of any size and returns the parts of the message that are certain. The message
of a whole text is that of one piece: how a text is divided changes nothing.

Tool calls are found in the usual formats: `<tool_call>{…}</tool_call>`, `[TOOL_CALLS] [{…}]`, or one JSON object with a
name and arguments as the whole content. What looks like a call but is none stays content.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, TypeGuard

ChatMessage = dict[str, Any]

REASONING, REASONING_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
LISTED = "[TOOL_CALLS]"
TAG = "<|python_tag|>"


class CallIds:
    """Ids of tool calls: each once in a conversation, or in an episode of several conversations."""

    def __init__(self, messages: Iterable[ChatMessage] = ()) -> None:
        """`messages` have calls with ids already."""
        self._used: set[str] = set()
        self._number = 0
        self.add(messages)

    def add(self, messages: Iterable[ChatMessage]) -> None:
        self._used.update(str(call.get("id")) for message in messages for call in message.get("tool_calls") or ())

    def new(self, written: Any = None) -> str:
        """The id that the model wrote, if it is a new one; else `call00000` and so on: some templates require nine
        letters or digits."""
        found = written if isinstance(written, str) and written else ""
        while not found or found in self._used:
            found = f"call{self._number:05d}"
            self._number += 1
        self._used.add(found)
        return found


class MessageParser:
    """Feed it a completion, then close it. `message` is the message so far: the returned parts, joined."""

    def __init__(self, ids: CallIds, *, reasoning: bool = False, calls: bool = True) -> None:
        """`reasoning`: the completion begins inside reasoning, which its context has opened. Without `calls` tool calls
        stay content."""
        self.message: ChatMessage = {"role": "assistant", "content": ""}
        self._ids = ids
        self._calls = calls
        self._begins_inside = reasoning
        self._text = ""
        """Not yet decided."""
        self._space = ""
        """White space that belongs to the content if more of it follows, or if there are no calls."""
        self._parts: list[ChatMessage] = []
        self._closing = False
        self._step = self._opening

    @classmethod
    def plain(cls) -> MessageParser:
        """For a model without a chat template: everything is content."""
        parser = cls(CallIds(), calls=False)
        parser._step = parser._in_content
        return parser

    def feed(self, text: str) -> list[ChatMessage]:
        """The new parts: each has one of `reasoning_content`, `content` and `tool_calls`, the latter with one call."""
        self._text += text
        while self._step():
            pass
        parts, self._parts = self._parts, []
        return parts

    def close(self) -> list[ChatMessage]:
        """The rest, once the text is complete."""
        self._closing = True
        parts = self.feed("")
        if self._space and "tool_calls" not in self.message:
            self._add("content", self._space)
        self._space = ""
        parts += self._parts
        self._parts = []
        return parts

    # Each step takes a part of the text; it returns False if it needs more text, or has none left.

    def _opening(self) -> bool:
        begun = self._text.lstrip()
        if REASONING.startswith(begun) and begun != REASONING and not self._closing:
            return False
        if begun.startswith(REASONING):
            self._text = begun.removeprefix(REASONING)
        elif not self._begins_inside:
            self._step = self._content_begins
            return True
        self._add("reasoning_content", "")
        self._step = self._in_reasoning
        return True

    def _in_reasoning(self) -> bool:
        if not self.message["reasoning_content"]:
            self._text = self._text.lstrip("\n")
        reasoning, ended, rest = self._text.partition(REASONING_END)
        certain = reasoning if ended or self._closing else without_beginning_of(reasoning, REASONING_END)
        certain = certain.rstrip("\n")
        if certain:
            self._add("reasoning_content", certain)
        self._text = rest if ended else "" if self._closing else self._text[len(certain) :]
        if ended:
            self._step = self._after_reasoning
        return bool(ended)

    def _after_reasoning(self) -> bool:
        self._text = self._text.lstrip()
        if self._text:
            self._step = self._content_begins
        return bool(self._text)

    def _content_begins(self) -> bool:
        begun = self._text.lstrip()
        if self._calls and not self._closing and TAG.startswith(begun) and begun != TAG:
            return False
        whole = self._calls and begun.startswith(("{", TAG))
        self._step = self._whole_call if whole else self._in_content
        return True

    def _whole_call(self) -> bool:
        if not self._closing:
            return False
        found = parsed_json(self._text.strip().removeprefix(TAG))
        if _is_call(found) and found.keys() & {"arguments", "parameters"}:
            self._add_call(found)
            self._text = ""
        self._step = self._in_content
        return bool(self._text)

    def _in_content(self) -> bool:
        text = self._text
        if not self._calls:
            self._text = ""
            if text:
                self._add("content", text)
            return False
        starts = [(at, mark) for mark in (CALL, LISTED) if (at := text.find(mark)) >= 0]
        if starts:
            at, mark = min(starts)
            self._add_content(text[:at])
            self._text = text[at:]
            self._step = self._in_call if mark == CALL else self._in_list
            return True
        certain = text if self._closing else without_beginning_of(text, CALL, LISTED)
        self._add_content(certain)
        self._text = text[len(certain) :]
        return False

    def _in_call(self) -> bool:
        body, ended, rest = self._text.removeprefix(CALL).partition(CALL_END)
        if not ended and not self._closing:
            return False
        found = parsed_json(body) if ended else None
        if _is_call(found):
            self._add_call(found)
        else:
            self._add_content(f"{CALL}{body}{ended}")
        self._text = rest
        self._step = self._in_content
        return True

    def _in_list(self) -> bool:
        """Until the end of the text: the list may have brackets inside."""
        if not self._closing:
            return False
        body = self._text.removeprefix(LISTED).lstrip()
        found, length = _json_list(body)
        if found and all(map(_is_call, found)):
            for call in found:
                self._add_call(call)
            self._add_content(body[length:])
        else:
            self._add_content(self._text)
        self._text = ""
        return False

    def _add_content(self, text: str) -> None:
        text = self._space + text
        if self.message.get("tool_calls") and not self.message["content"]:
            text = text.lstrip()
        certain = text.rstrip()
        self._space = text[len(certain) :]
        if certain:
            self._add("content", certain)

    def _add(self, field: str, text: str) -> None:
        self.message[field] = self.message.get(field, "") + text
        if self._parts and field in self._parts[-1]:
            self._parts[-1][field] += text
        else:
            self._parts.append({field: text})

    def _add_call(self, body: ChatMessage) -> None:
        arguments = body.get("arguments", body.get("parameters", {}))
        function = {"name": body["name"], "arguments": arguments}
        call = {"id": self._ids.new(body.get("id")), "type": "function", "function": function}
        self.message.setdefault("tool_calls", []).append(call)
        self._parts.append({"tool_calls": [call]})


def assistant_message(
    text: str, ids: CallIds | None = None, *, reasoning: bool | None = None, calls: bool = True
) -> ChatMessage:
    """A whole completion as a message. `reasoning` as for `MessageParser`; if it is unknown: whether reasoning ends in
    the text without having begun in it."""
    if reasoning is None:
        before, ended, _ = text.partition(REASONING_END)
        reasoning = bool(ended) and REASONING not in before
    parser = MessageParser(ids or CallIds(), reasoning=reasoning, calls=calls)
    parser.feed(text)
    parser.close()
    return parser.message


def ends_in_reasoning(context: str) -> bool:
    """Whether a completion after this context begins inside reasoning: some templates open it themselves."""
    return context.rstrip().endswith(REASONING)


def without_beginning_of(text: str, *words: str) -> str:
    """The text without its longest end that may be the beginning of one of the words."""
    longest = max((len(word) - 1 for word in words), default=0)
    for at in range(max(len(text) - longest, 0), len(text)):
        if any(word.startswith(text[at:]) for word in words):
            return text[:at]
    return text


def _is_call(found: Any) -> TypeGuard[ChatMessage]:
    return isinstance(found, dict) and isinstance(found.get("name"), str) and bool(found["name"])


def _json_list(text: str) -> tuple[list[Any], int]:
    """The list at the beginning of a text, and its length; an empty one if there is none."""
    try:
        found, length = json.JSONDecoder(parse_constant=_refused).raw_decode(text)
        return (found, length) if isinstance(found, list) and _is_text(found) else ([], 0)
    except (ValueError, RecursionError):
        return [], 0


def parsed_json(text: str) -> Any:
    """None if the text is not JSON, or such that other parsers refuse it."""
    try:
        found = json.loads(text, parse_constant=_refused)
        return found if _is_text(found) else None
    except (ValueError, RecursionError):
        return None


def _is_text(found: Any) -> bool:
    """Raises for half of a surrogate pair, which no encoding has."""
    return bool(json.dumps(found, ensure_ascii=False).encode())


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
