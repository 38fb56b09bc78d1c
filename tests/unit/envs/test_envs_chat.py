"""Conversations of five turns with tools: the tokens that passed are the template applied to the whole conversation."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from penstock.engines.tokenizer import PretrainedTokenizer
from penstock.envs.chat import Chat
from penstock.envs.chat_parser import assistant_message
from penstock.errors import ConfigError

CHATML = """\
{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- else %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}
{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA = """\
{{- bos_token }}
{%- if tools %}<|start_header_id|>system<|end_header_id|>

Environment: ipython
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|eot_id|>{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>

{{ message.content | tojson }}<|eot_id|>
{%- elif message.tool_calls %}<|start_header_id|>assistant<|end_header_id|>

{% set call = message.tool_calls[0].function %}
{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>
{%- else %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{{ message.content | trim }}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

MISTRAL = """\
{{- bos_token }}
{%- if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}[INST] {{ message.content }}[/INST]
{%- elif message.role == 'tool' %}[TOOL_RESULTS] {"content": {{ message.content | tojson }}}[/TOOL_RESULTS]
{%- elif message.tool_calls %}[TOOL_CALLS] [
{%- for call in message.tool_calls -%}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
{%- if not loop.last %}, {% endif %}
{%- endfor -%}
]{{ eos_token }}
{%- else %} {{ message.content | trim }}{{ eos_token }}
{%- endif %}
{%- endfor %}"""

GEMMA = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'assistant' %}<start_of_turn>model
{{ message.content | trim }}
{%- for call in message.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", "arguments": \
{{ call.function.arguments | tojson }}}</tool_call>{% endfor %}<end_of_turn>
{% else %}<start_of_turn>user
{{ message.content | trim }}<end_of_turn>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

FORGETFUL = """\
{%- for message in messages %}<|im_start|>{{ message.role + "\n" }}
{%- if message.reasoning_content and loop.last %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

FAMILIES = {
    "chatml": (CHATML, ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"], "", "<|im_end|>"),
    "llama": (
        LLAMA,
        ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "<|begin_of_text|>",
        "<|eot_id|>",
    ),
    "mistral": (
        MISTRAL,
        ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
        "<s>",
        "</s>",
    ),
    "gemma": (GEMMA, ["<bos>", "<start_of_turn>", "<end_of_turn>"], "<bos>", "<end_of_turn>"),
}

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": "integer", "b": "integer"}}}]


def tokenizer_of(template: str, special: list[str], bos: str, eos: str) -> PreTrainedTokenizerFast:
    """One token per byte and per special word, so that a boundary in the wrong place would show."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "d"), ("ad", "d"), ("\u0120", "i"), ("i", "s"), ("\u010a", "\u010a"), ("{", '"')]
    vocabulary = {word: number for number, word in enumerate([*letters, *(a + b for a, b in merges)])}
    inner = Tokenizer(models.BPE(vocabulary, merges))
    words = pre_tokenizers.Split(Regex(r"[\r\n]+| ?[a-z]+|."), "isolated")
    letter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([words, letter])  # type: ignore[assignment]
    inner.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=eos, bos_token=bos or None, additional_special_tokens=special
    )
    tokenizer.chat_template = template
    return tokenizer


def chat_of(tokenizer: Any, tools: Any = TOOLS) -> Chat:
    def render(messages: Any, tools: Any, prompting: bool) -> str:
        return tokenizer.apply_chat_template(
            list(messages), tools=tools or None, tokenize=False, add_generation_prompt=prompting
        )

    return Chat(render, tools)


def tools_of(template: str) -> list[Any]:
    """The tools, if the template renders tools: others describe them in a message."""
    return TOOLS if "tools" in template else []


def call(a: int, b: int) -> dict[str, Any]:
    function = {"name": "add", "arguments": {"a": a, "b": b}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


FIVE_TURNS = [
    (call(1, 2), [{"role": "tool", "content": "3"}]),
    (call(3, 4), [{"role": "tool", "content": "7"}]),
    ({"role": "assistant", "content": "It is 7."}, [{"role": "user", "content": "And with 5?"}]),
    (call(7, 5), [{"role": "tool", "content": "12"}]),
    ({"role": "assistant", "content": "It is 12."}, []),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_five_turns_with_tools_pass_as_the_template_writes_them(family: str) -> None:
    template, special, bos, eos = FAMILIES[family]
    tokenizer = PretrainedTokenizer(tokenizer_of(template, special, bos, eos))
    chat = chat_of(tokenizer.inner, tools_of(template))
    prompt = [{"role": "user", "content": "What is 1 + 2 + 4?"}]
    stream = tokenizer.encode(chat.opening(prompt))
    whole: list[Any] = [*prompt]
    drawn: list[str] = []
    replies: list[Any] = []
    for said, reply in FIVE_TURNS:
        before = tokenizer.inner.apply_chat_template(whole, tools=TOOLS, tokenize=False, add_generation_prompt=True)
        after = tokenizer.inner.apply_chat_template([*whole, said], tools=TOOLS, tokenize=False)
        assert after.startswith(before)
        turn = after[len(before) :]
        drawn.append(turn[: turn.index(eos) + len(eos)])  # a policy's completion ends with the stop token
        stream += tokenizer.encode(drawn[-1])
        whole += [said, *reply]
        if reply:
            replies.append(reply)
            added = chat.next_turn(prompt, drawn, replies)
            assert added.back_to is None
            stream += tokenizer.encode(added.text)
    expected = tokenizer.inner.apply_chat_template(whole, tools=TOOLS, tokenize=False)
    assert stream == tokenizer.encode(expected)[: len(stream)]
    assert tokenizer.encode(expected)[len(stream) :] in ([], tokenizer.encode("\n"))
    assert eos == chat.turn_end() or chat.turn_end().startswith(eos)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_drawn_stays_as_drawn_where_the_template_would_write_it_otherwise(family: str) -> None:
    template, special, bos, eos = FAMILIES[family]
    chat = chat_of(tokenizer_of(template, special, bos, eos), tools_of(template))
    prompt = [{"role": "user", "content": "Go."}]
    odd = ' <tool_call>{"name":"add" , "arguments":{"b":2,"a":1}}</tool_call>  '
    reply = [{"role": "user", "content": "so?"}]
    ended, cut = (chat.next_turn(prompt, [odd + end], [reply]) for end in (eos, ""))
    assert ended.back_to is cut.back_to is None
    assert cut.text == eos + ended.text  # a completion without its end is given one, as context
    assert "so?" in ended.text


def test_a_template_that_leaves_old_reasoning_out_makes_a_branch() -> None:
    chat = chat_of(tokenizer_of(FORGETFUL, ["<|im_start|>", "<|im_end|>"], "", "<|im_end|>"), [])
    prompt = [{"role": "user", "content": "Go."}]
    drawn = ["<think>\nhm\n</think>\n\nyes<|im_end|>", "no<|im_end|>"]
    replies = [[{"role": "user", "content": "sure?"}], [{"role": "user", "content": "so?"}]]
    first = chat.next_turn(prompt, drawn[:1], replies[:1])
    assert first.back_to == 0
    assert first.text == "yes<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
    second = chat.next_turn(prompt, drawn, replies)
    assert second.back_to is None
    assert second.text == "\n<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_rewrites_the_prompt_is_refused() -> None:
    def render(messages: Any, tools: Any, prompting: bool) -> str:
        return f"[{len(messages)}]" + "".join(message["content"] for message in messages)

    with pytest.raises(ConfigError, match="rewrites the beginning"):
        Chat(render).next_turn([{"role": "user", "content": "a"}], ["b"], [[{"role": "user", "content": "c"}]])


DROPPING = """\
{%- for message in messages %}
{%- if message.role == 'user' %}[{{ message.content }}]
{%- elif message.role == 'assistant' %}({{ message.content }}
{%- if message.tool_calls %}{{ message.tool_calls[0].function.name }}{% endif %})
{%- endif %}
{%- endfor %}"""


def test_what_a_template_leaves_out_is_an_error_that_names_it() -> None:
    chat = chat_of(tokenizer_of(DROPPING, [], "", "|"), [])
    ask: dict[str, Any] = {"role": "user", "content": "Go."}
    assert chat.opening([ask]) == "[Go.]"
    two = call(1, 2)["tool_calls"] * 2
    for messages, sentence in (
        ([{"role": "system", "content": "Be brief."}, ask], "leaves out the content of message 0 .role 'system'"),
        ([ask, {"role": "assistant", "content": "", "tool_calls": two}, ask], "leaves out the tool calls of message 1"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "message 0 .* has a content of type list"),
        ([{"role": "user", "content": None}], "of type NoneType"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            chat.opening(messages)
    with pytest.raises(ConfigError, match=r"leaves out the content of message 2 .role 'tool'"):
        chat.next_turn([ask], ["a|"], [[{"role": "tool", "content": "3"}]])
    with pytest.raises(ConfigError, match="leaves out the tools"):
        chat.with_tools(TOOLS).opening([ask])
    assert chat.opening([{"role": "system", "content": " "}, ask]) == "[Go.]"


OPENING = """\
{%- for message in messages %}<|im_start|>{{ message.role + "\n" + message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""


def test_a_template_that_opens_reasoning_itself() -> None:
    chat = chat_of(tokenizer_of(OPENING, ["<|im_start|>", "<|im_end|>"], "", "<|im_end|>"), [])
    prompt = [{"role": "user", "content": "Go."}]
    called = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    [_, said] = chat.conversation(prompt, [f"{called} or not?\n</think>\n\nNot.<|im_end|>"], [])
    assert said == {"role": "assistant", "reasoning_content": f"{called} or not?", "content": "Not."}
    [_, cut] = chat.conversation(prompt, [called], [])
    assert cut == {"role": "assistant", "reasoning_content": called, "content": ""}


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]',
        '{"name": "add", "parameters": {"a": 1}}',
        '<|python_tag|>{"name": "add", "parameters": {"a": 1}}',
    ],
)
def test_tool_calls_are_read_in_every_usual_form(text: str) -> None:
    message = assistant_message(text)
    [found] = message["tool_calls"]
    assert found["function"] == {"name": "add", "arguments": {"a": 1}}
    assert message["content"] == ""
    assert "tool_calls" not in assistant_message(re.sub("name", "mane", text))
    assert json.dumps(found)


def test_a_tokenizer_without_an_end_is_refused_by_name() -> None:
    inner = tokenizer_of(CHATML, ["<|im_end|>"], "<|im_start|>", "<|im_end|>")
    assert PretrainedTokenizer(inner, [7]).stop_ids == (inner.eos_token_id, 7)
    inner.eos_token = None  # type: ignore[assignment]
    assert PretrainedTokenizer(inner, [7]).eos_id == 7
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        PretrainedTokenizer(inner)
