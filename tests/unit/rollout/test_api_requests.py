"""The parameters of a request to the endpoint for agents: used, without effect, or refused with a reason."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.engines.requests import Sampling
from penstock.rollout.api_requests import (
    REFUSED,
    WITHOUT_EFFECT,
    ChatRequest,
    Refused,
    TextRequest,
    chat_request,
    text_request,
    token_request,
)

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guides" / "agent.md"
OWN = Sampling(16)


def chat(sampling: Sampling = OWN, **more: Any) -> ChatRequest:
    asked = {"messages": [{"role": "user", "content": "Go."}], **more}
    return chat_request(json.dumps(asked).encode(), sampling)


def test_what_frameworks_send_explicitly_changes_nothing() -> None:
    plain = chat()
    names = {*REFUSED, *ChatRequest.__struct_fields__} - {"messages"}
    nothing: dict[str, Any] = dict.fromkeys(names)
    assert chat(**nothing) == plain, "null is nothing"
    for more in ({name: value} for name, (accepted, _) in REFUSED.items() for value in accepted):
        assert chat(OWN, **more) == plain
    assert chat(OWN, **dict.fromkeys(WITHOUT_EFFECT, "x")) == plain
    assert chat(tools=[], tool_choice="auto", stream_options={}, stop=[], stream=False) == plain
    assert chat(temperature=1, top_p=1.0, top_k=-1, min_p=0).messages == plain.messages
    assert chat(stream_options={"include_usage": True, "include_obfuscation": False}).stream_options.include_usage


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"response_format": {"type": "json_object"}}, "'response_format' cannot be used: completions are not constr"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "'response_format'"),
        ({"tool_choice": "required"}, "'tool_choice' must be 'auto' or 'none'"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "'tool_choice'"),
        ({"parallel_tool_calls": False}, "'parallel_tool_calls'"),
        ({"logprobs": True}, "'logprobs'"),
        ({"logit_bias": {"5": 1}}, "'logit_bias'"),
        ({"n": 2}, "'n' cannot be used: each call has one completion"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "'chat_template_kwargs'"),
        ({"functions": [{"name": "f"}]}, "use 'tools'"),
        ({"modalities": ["text", "audio"]}, "writes text only"),
        ({"thinking": {"type": "enabled"}}, "'thinking' cannot be used: no such parameter is known"),
        ({"max_tokens": 0}, "max_tokens: expected `int` >= 1"),
        ({"max_tokens": True}, "max_tokens: expected"),
        ({"max_completion_tokens": "many"}, "max_completion_tokens: expected"),
        ({"stop": [""]}, "'stop' must not have empty texts"),
        ({"stop": [3]}, r"stop\[0\]: expected"),
        ({"stream": "yes"}, "stream: expected `bool`"),
        (
            {"temperature": 0.2},
            r"'temperature' is 0.2, but this run draws with 1.0: .* pipeline.rollout.temperature",
        ),
        ({"top_p": 0.5}, "'top_p'"),
        ({"top_k": 20}, "'top_k'"),
        ({"tools": [{"type": "web_search"}]}, "the type 'web_search'"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\].function: object missing"),
    ],
)
def test_what_would_be_ignored_is_refused_by_name(more: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Refused, match=sentence) as refused:
        chat(**more)
    assert refused.value.status == 400
    assert str(refused.value.param).startswith(next(iter(more)))


def test_the_runs_own_distribution_may_be_named() -> None:
    own = Sampling(16, temperature=0.7, top_p=0.9, top_k=20)
    assert chat(own, temperature=0.7, top_p=0.9, top_k=20).temperature == 0.7
    with pytest.raises(Refused, match="draws with 20"):
        chat(own, top_k=-1)
    with pytest.raises(Refused, match="'temperature'"):
        chat(own, temperature=0.0)
    assert chat(Sampling(16, greedy=True), temperature=0.0).temperature == 0.0, "an evaluation that is greedy"


def test_requests_for_texts_and_tokens_are_checked_too() -> None:
    assert text_request(b'{"prompt": "a", "echo": false, "best_of": 1, "logprobs": null}', OWN).prompt == "a"
    for body in ({"prompt": "a", "echo": True}, {"prompt": "a", "logprobs": 5}, {"prompt": 3}, {}):
        with pytest.raises(Refused):
            text_request(json.dumps(body).encode(), OWN)
    params = {"max_tokens": 5, "logprobs": 1, "skip_special_tokens": False, "stop_token_ids": [4]}
    body: dict[str, Any] = {"token_ids": [1, 2], "sampling_params": params, "model": "policy"}
    request, drawing = token_request(json.dumps(body).encode(), OWN)
    assert (request.token_ids, drawing.token_limit, drawing.stop_token_ids) == ([1, 2], 5, [4])
    with pytest.raises(Refused, match="'temperature'") as refused:
        token_request(json.dumps(body | {"sampling_params": {"temperature": 0}}).encode(), OWN)
    assert refused.value.status == 400
    with pytest.raises(Refused, match="'features'"):
        token_request(json.dumps(body | {"features": {"images": []}}).encode(), OWN)


def test_the_guide_has_these_parameters() -> None:
    text = GUIDE.read_text()
    values = {
        name: ", ".join(f"`{json.dumps(value)}`" for value in accepted) for name, (accepted, _) in REFUSED.items()
    }
    rows = [f"| `{name}` | {values[name] or '–'} | {reason} |" for name, (_, reason) in REFUSED.items()]
    table = "\n".join(rows)
    assert table in text, f"the table of refused parameters in {GUIDE} must be:\n{table}"
    for heading, names in (
        ("used", {*ChatRequest.__struct_fields__, *TextRequest.__struct_fields__}),
        ("without effect", {*WITHOUT_EFFECT}),
    ):
        [row] = [row for row in text.splitlines() if row.startswith(f"| {heading} |")]
        assert {*re.findall(r"`(\w+)`", row)} == names, heading
