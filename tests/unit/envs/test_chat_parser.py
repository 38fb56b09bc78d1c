"""A completion as a message: the same in one piece or in many, with nothing lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.envs.chat_parser import CallIds, MessageParser, assistant_message, ends_in_reasoning

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
PIECES = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<thi", "</", "[", "]"),
    *('{"name": "f", "arguments": {"x": "]"}}', '{"name": "g", "parameters": {}}', '[{"name": "h"}]', CALL, "{", "}"),
    *("\n", " ", "\n\n", "a", "words ", "é", "<", "\ufffd"),
]
texts = st.lists(st.sampled_from(PIECES), max_size=12).map("".join) | st.text(max_size=40)


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """A message, as clients of a stream put it together."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for part in parts:
        [(field, value)] = part.items()
        message[field] = message[field] + value if field in message else value
    return message


@given(texts, st.data(), st.booleans(), st.booleans())
def test_a_text_in_pieces_is_the_message_of_the_whole(text: str, data: Any, reasoning: bool, calls: bool) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parser = MessageParser(CallIds(), reasoning=reasoning, calls=calls)
    parts: list[dict[str, Any]] = []
    for low, high in zip([0, *cuts], [*cuts, len(text)], strict=True):
        parts += parser.feed(text[low:high])
        assert parser.message == joined(parts)
    parts += parser.close()
    assert joined(parts) == parser.message == assistant_message(text, reasoning=reasoning, calls=calls)
    assert all(len(part.get("tool_calls", [1])) == 1 for part in parts)


@given(st.lists(st.sampled_from(PIECES), max_size=8), st.booleans())
def test_no_word_is_lost(pieces: list[str], reasoning: bool) -> None:
    text = "".join(f"{piece}word{number}." for number, piece in enumerate(pieces))
    message = assistant_message(text, reasoning=reasoning)
    said = message.get("reasoning_content", "") + message["content"]
    assert all(f"word{number}." in said for number in range(len(pieces)))
    if len(message) == 2:
        assert message["content"] == text


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("<think>\nhm\n</think>\n\nyes", False, {"reasoning_content": "hm", "content": "yes"}),
        ("hm\n</think>\n\nyes", True, {"reasoning_content": "hm", "content": "yes"}),
        ("<think>hm</think>yes", True, {"reasoning_content": "hm", "content": "yes"}),
        ("<think>\n\n</think>\n\nyes", False, {"reasoning_content": "", "content": "yes"}),
        ("hm, cut o", True, {"reasoning_content": "hm, cut o", "content": ""}),
        ("<think>hm, cut </thi", False, {"reasoning_content": "hm, cut </thi", "content": ""}),
        ("a </think> b", False, {"content": "a </think> b"}),
        (" a <b> [c] ", False, {"content": " a <b> [c] "}),
        ("<tool_call>{</tool_call> x", False, {"content": "<tool_call>{</tool_call> x"}),
        ('<tool_call>{"name": "cut"', False, {"content": '<tool_call>{"name": "cut"'}),
        ('{"thought": "none"} then', False, {"content": '{"thought": "none"} then'}),
        ("[TOOL_CALLS] none", False, {"content": "[TOOL_CALLS] none"}),
    ],
)
def test_reasoning_and_what_is_no_call(text: str, inside: bool, expected: dict[str, str]) -> None:
    assert assistant_message(text, reasoning=inside) == {"role": "assistant"} | expected


def test_calls_stand_beside_the_content_and_reasoning_has_none() -> None:
    message = assistant_message(f"<think>{CALL}</think>I add. {CALL}\n{CALL} Done.\n")
    assert message["content"] == "I add. \n Done."
    assert [call["id"] for call in message["tool_calls"]] == ["call00000", "call00001"]
    assert message["reasoning_content"] == CALL
    assert assistant_message(CALL, calls=False)["content"] == CALL


@pytest.mark.parametrize("body", ["[" * 5000, '{"name": "\\ud800"}', '{"name": "f", "arguments": NaN}', '{"name": 3}'])
def test_a_call_that_no_client_can_read_is_content(body: str) -> None:
    text = f"<tool_call>{body}</tool_call>"
    assert assistant_message(text) == {"role": "assistant", "content": text}


def test_every_id_is_new() -> None:
    ids = CallIds([{"tool_calls": [{"id": "call00001"}]}])
    own = '<tool_call>{"name": "f", "id": "mine"}</tool_call>'
    found = [call["id"] for text in (CALL, own, own, CALL) for call in assistant_message(text, ids)["tool_calls"]]
    assert found == ["call00000", "mine", "call00002", "call00003"]


def test_a_context_may_end_inside_reasoning() -> None:
    assert ends_in_reasoning("<|assistant|>\n<think>\n")
    assert not ends_in_reasoning("<|assistant|>\n<think>\n\n</think>\n\n")
