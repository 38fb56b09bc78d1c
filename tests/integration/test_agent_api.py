"""The endpoint as clients of the OpenAI API see it: answers, streams, and what is refused, by a real server."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from openai import APIStatusError, AsyncOpenAI, BadRequestError, InternalServerError, NotFoundError
from test_agent_endpoint import Scripted, client_of, user

from penstock.engines.requests import Sampling
from penstock.engines.tokenizer import PretrainedTokenizer
from penstock.errors import Transient
from penstock.rollout.io.endpoint import Endpoint, Recorded
from penstock.rollout.io.language_workload import chat_of
from unit.envs.test_chat_parser import PIECES
from unit.envs.test_envs_chat import CHATML, DROPPING, FAMILIES, GEMMA, OPENING, TOOLS, tokenizer_of

ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
END = "<|im_end|>"
STRICT = {"type": "function", "function": {"name": "add", "strict": True, "parameters": {}}}
WORDS = ["<|im_start|>", END, "<tool_call>", "</tool_call>"]


class Served:
    """An endpoint with a scripted engine, and the client of one episode."""

    def __init__(self, template: str, limit: int) -> None:
        self.tokenizer = PretrainedTokenizer(tokenizer_of(template, WORDS, "", END))
        self.engine: Any = Scripted()
        sampling = Sampling(limit, stop_ids=self.tokenizer.stop_ids)
        self.endpoint = Endpoint(self.engine, self.tokenizer, sampling, chat_of(self.tokenizer, None))
        self.key, self.recorded = self.endpoint.open()
        self.client = client_of(self.endpoint, self.key)

    async def ask(self, said: str, *messages: dict[str, Any], **more: Any) -> Any:
        """One call, with what the engine answers."""
        self.engine.left = self.tokenizer.encode(said)
        asked: dict[str, Any] = {"model": "policy", "messages": [*messages] or [user("Go.")], **more}
        return await self.client.chat.completions.create(**asked)

    async def message(self, said: str, *messages: dict[str, Any], **more: Any) -> dict[str, Any]:
        answer = await self.ask(said, *messages, **more)
        return answer.choices[0].message.model_dump(exclude_none=True)

    async def streamed(self, said: str, *messages: dict[str, Any], **more: Any) -> dict[str, Any]:
        """The deltas of a stream, joined."""
        message: dict[str, Any] = {}
        async for chunk in await self.ask(said, *messages, stream=True, **more):
            for field, value in chunk.choices[0].delta.model_dump(exclude_none=True).items():
                message[field] = message[field] + value if field in message and field != "role" else value
        for number, call in enumerate(message.get("tool_calls", ())):
            assert call.pop("index") == number
        return message

    async def post(self, body: Any, path: str = "/chat/completions") -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        async with httpx.AsyncClient(timeout=30.0) as client:
            url = self.endpoint.base_url.removesuffix("/v1") + (path if "/v1" in path else f"/v1{path}")
            return await client.post(url, content=content, headers=headers)


@asynccontextmanager
async def served(template: str = CHATML, limit: int = 400) -> AsyncIterator[Served]:
    found = Served(template, limit)
    async with asyncio.TaskGroup() as group:
        group.create_task(found.endpoint.run())
        try:
            async with found.client:
                yield found
        finally:
            found.endpoint.close()


def context(recorded: Recorded, number: int) -> list[int]:
    """All tokens of a call."""
    call = recorded.calls[number]
    return [*call.context, *call.drawn.token_ids.tolist()]


async def test_the_id_of_a_tool_call_is_new_in_its_episode() -> None:
    async with served() as api:
        first = await api.message(f"{ADD}{ADD}{END}", tools=TOOLS)
        second = await api.streamed(f"{ADD}{END}", tools=TOOLS)
        ids = [call["id"] for message in (first, second) for call in message["tool_calls"]]
        assert len({*ids}) == 3
        given = {"role": "assistant", "content": "", "tool_calls": first["tool_calls"]}
        given["tool_calls"][0]["id"] = "call00003"
        third = await api.message(f"{ADD}{END}", user("Go."), given, user("on"), tools=TOOLS)
    assert third["tool_calls"][0]["id"] == "call00004"


SAID = [
    "plain é text",
    f"I add. {ADD}\n{ADD} Done. ",
    "<think>\nhm <b> \n</think>\n\nyes",
    f"<think>{ADD}</think>{ADD}",
    "<think> cut",
    "hm\n</think>\n\nyes",
    '{"name": "add", "parameters": {"a": 1}}',
    '[TOOL_CALLS] [{"name": "add"}, {"name": "sub"}]',
    f"<tool_call>none</tool_call>{ADD}",
]


@pytest.mark.parametrize("template", [CHATML, OPENING], ids=["plain", "opens reasoning"])
async def test_a_stream_is_the_message(template: str) -> None:
    more: dict[str, Any] = {"tools": TOOLS, "stop": ["STOP", "word</"]} if "tools" in template else {}
    draw = random.Random(0)
    said_by_chance = ["".join(draw.choices([*PIECES, "word", "STO", "STOP"], k=8)) for _ in range(40)]
    async with served(template) as api:
        for said in [*SAID, *said_by_chance]:
            whole, streamed = await api.message(f"{said}{END}", **more), await api.streamed(f"{said}{END}", **more)
            for message in (whole, streamed):
                for call in message.get("tool_calls", ()):
                    assert call.pop("id")
            assert streamed == whole, said
        assert len(api.recorded.calls) == 2 * len(SAID + said_by_chance)


@pytest.mark.parametrize("ended", [False, True])
async def test_reasoning_that_the_template_opens_is_not_the_answer(ended: bool) -> None:
    said = f"It is two. {ADD}\n</think>\n\n2" if ended else "It is tw"
    expected = {"reasoning_content": f"It is two. {ADD}" if ended else "It is tw", "content": "2" if ended else ""}
    async with served(OPENING) as api:
        assert await api.streamed(f"{said}{END}") == {"role": "assistant"} | expected
        assert await api.message(f"{said}{END}") == {"role": "assistant"} | expected


async def test_parallel_calls_come_one_by_one_and_the_clients_own_reader_finds_both() -> None:
    async with served() as api:
        other = ADD.replace("add", "sub")
        deltas = [
            chunk.choices[0].delta async for chunk in await api.ask(f"{ADD}{other}{END}", tools=TOOLS, stream=True)
        ]
        assert [[call.index for call in delta.tool_calls] for delta in deltas if delta.tool_calls] == [[0], [1]]
        api.engine.left = api.tokenizer.encode(f"Both. {ADD}{other}{END}")
        asked: Any = {"model": "policy", "messages": [user("Go.")], "tools": [STRICT]}
        async with api.client.chat.completions.stream(**asked) as stream:
            choice = (await stream.get_final_completion()).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Both."
    assert [call.function.name for call in choice.message.tool_calls or ()] == ["add", "sub"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("said", ["One. Observation: two", f"{ADD} Observation: x", "so é"[:-1] + "\u00e9"])
async def test_an_answer_is_continued_as_it_was_sent(said: str, stream: bool) -> None:
    """Without the stop string that ended it, or without the character in which it was cut."""
    cut = said.endswith("\u00e9")
    async with served() as api:
        ask = api.streamed if stream else api.message
        more: dict[str, Any] = {"tools": TOOLS, "stop": ["Observation:"]}
        tokens = api.tokenizer.encode(said)
        first = await ask(said, max_tokens=len(tokens) - 1 if cut else 300, **more)
        assert "Observation" not in str(first)
        assert "\ufffd" not in str(first)
        assert not first["content"].endswith(" Obs")
        await ask(f"Done.{END}", user("Go."), first, user("on"), **more)
        one, two = api.recorded.calls
        assert two.context[: len(context(api.recorded, 0))] == context(api.recorded, 0)
        written = api.tokenizer.inner.decode(one.drawn.token_ids.tolist(), skip_special_tokens=False)
        assert written.endswith("\ufffd" if cut else "Observation:")


async def test_an_answer_with_its_stop_string_is_continued_too() -> None:
    async with served() as api:
        first = await api.message("Let me see.</code> and", stop=["</code>"])
        assert first["content"] == "Let me see."
        again = {"role": "assistant", "content": "Let me see.</code>"}
        await api.message(f"Done.{END}", user("Go."), again, user("on"), stop=["</code>"])
        assert api.recorded.calls[1].context[: len(context(api.recorded, 0))] == context(api.recorded, 0)


async def test_a_message_may_come_back_with_fields_that_are_null() -> None:
    async with served() as api:
        for said in (f"Yes.{END}", f"{ADD}{END}"):
            answer = (await api.ask(said, tools=TOOLS)).choices[0].message.model_dump()
            assert None in answer.values()
            rest = {"content": answer["content"] or None}
            await api.ask(f"Done.{END}", user("Go."), answer | rest, user("on"), tools=TOOLS)
            first, second = api.recorded.calls[-2:]
            assert second.context[: len(first.context) + len(first.drawn.token_ids)] == context(api.recorded, -2)


async def test_a_stop_string_is_never_sent_in_part() -> None:
    async with served() as api:
        said = "It may rain. Observation: it rains."
        assert (await api.streamed(said, stop=["Observation:"]))["content"] == "It may rain. "
        assert (await api.message(said, stop="Observation:"))["content"] == "It may rain. "
        assert (await api.message(f"a {ADD}", stop=["</tool_call>"]))["content"].endswith("}\n")
        assert api.tokenizer.inner.decode(api.recorded.calls[-1].drawn.token_ids.tolist()).endswith("</tool_call>")


async def test_another_model_is_neither_served_nor_trained() -> None:
    async with served() as api:
        with pytest.raises(NotFoundError, match="model='policy'") as refused:
            await api.ask("A.", model="gpt-4o")
        assert (refused.value.code, refused.value.param, refused.value.type) == (
            "model_not_found",
            "model",
            "invalid_request_error",
        )
        for path, body in (
            ("/completions", {"prompt": "a", "model": "judge"}),
            ("/chat/completions", {"messages": [user("a")], "model": "gpt-4o-mini"}),
            ("/inference/v1/generate", {"token_ids": [1], "model": "judge"}),
        ):
            assert (await api.post(body, path)).json()["error"]["code"] == "model_not_found"
        with pytest.raises(NotFoundError):
            await api.client.models.retrieve("gpt-4o")
        assert (await api.client.models.retrieve("policy")).id == "policy"
        assert not api.recorded.calls


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
SOUND = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([{"role": "user", "content": [{"type": "text", "text": "See:"}, IMAGE]}], r"messages\[0\].content\[1\] is of"),
        ([{"role": "user", "content": [SOUND]}], "'input_audio': the model reads text only"),
        ([{"role": "user", "content": [{"type": "file", "file": {"file_id": "a"}}]}], "'file'"),
        ([user("a"), {"role": "tool", "content": [IMAGE], "tool_call_id": "a"}], r"messages\[1\]"),
        ([user("a"), {"role": "function", "name": "f", "content": "3"}], "use 'tool'"),
        ([{"role": "critic", "content": "3"}], "the role 'critic'"),
        ([user("a"), {"role": "assistant", "content": None, "function_call": {"name": "f"}}], "function_call"),
        ([user("a"), {"role": "assistant", "content": "The answer is"}], "cannot begin with a given text"),
        ([{"role": "user"}], "no content"),
        ([user("a"), {"role": "assistant", "content": "", "tool_calls": "all"}], "tool_calls: expected `array"),
        ([user("a"), {"role": "assistant", "tool_calls": [{"type": "custom"}]}], "field `function`"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content"),
        (["a"], r"messages\[0\]"),
        ([], "empty"),
    ],
)
async def test_what_the_model_would_not_read_is_refused(messages: list[Any], sentence: str) -> None:
    async with served() as api:
        with pytest.raises(BadRequestError, match=sentence) as refused:
            await api.client.chat.completions.create(model="policy", messages=messages)
        assert refused.value.type == "invalid_request_error"
        assert refused.value.param
        has_parts = any(isinstance(message, dict) and isinstance(message.get("content"), list) for message in messages)
        assert refused.value.code == ("unsupported_content" if has_parts else None)
        assert not api.recorded.calls


async def test_a_template_that_leaves_a_role_or_tools_out_is_refused() -> None:
    async with served(DROPPING) as api:
        await api.ask("yes|", user("Go."))
        with pytest.raises(BadRequestError, match=r"leaves out the content of message 0 \(role 'system'\)"):
            await api.ask("yes", {"role": "developer", "content": "Be brief."}, user("Go."))
        with pytest.raises(BadRequestError, match="leaves out the tools"):
            await api.ask("yes", tools=TOOLS)
        said = {"role": "assistant", "content": "yes|"}
        with pytest.raises(BadRequestError, match=r"message 2 \(role 'tool'\)"):
            await api.ask("yes", user("Go."), said, {"role": "tool", "content": "3", "tool_call_id": "a"})
    async with served(GEMMA) as api:
        with pytest.raises(BadRequestError, match="leaves out the tools"):
            await api.ask("yes", tools=TOOLS)


async def test_the_developer_speaks_as_the_system_and_parts_of_text_are_joined() -> None:
    async with served() as api:
        parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
        await api.ask("Yes.", {"role": "developer", "content": parts}, user("Go."))
        [call] = api.recorded.calls
    assert call.text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nGo.")


async def test_tool_choice_none_has_no_calls_and_the_same_context() -> None:
    async with served() as api:
        answer = await api.message(f"{ADD}{END}", tools=TOOLS, tool_choice="none")
        assert (answer["content"], "tool_calls" in answer) == (ADD, False)
        await api.message(f"{ADD}{END}", tools=TOOLS)
        one, two = api.recorded.calls
        assert one.context == two.context
        assert (await api.message(f"{ADD}{END}"))["content"] == ADD, "a request without tools has no calls"


async def test_errors_are_json_that_clients_understand(caplog: pytest.LogCaptureFixture) -> None:
    async with served() as api:
        ok = b'{"model": "policy", "messages": [{"role": "user", "content": "Go."}]'
        for body, status in (
            (ok + b', "user": "\\ud800"}', 400),
            (ok.replace(b"Go.", b"\\udcff") + b"}", 400),
            (ok.replace(b"Go.", b"\xff") + b"}", 400),
            (b'{"messages": ' + b"[" * 100_000, 400),
            (b'{"messages": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}", 400),
            (ok + b', "tools": [{"type": "function", "function": {"name": 3}}]}', 400),
            (ok + b', "stop": 3}', 400),
            (b"[]", 400),
            (b"", 400),
            (ok + b', "user": "' + b"a" * (17 << 20) + b'"}', 413),
        ):
            answer = await api.post(body)
            error = answer.json()["error"]
            assert answer.status_code == status
            assert error.keys() == {"message", "type", "param", "code"}
            assert error["type"] == "invalid_request_error"
            assert answer.headers["x-request-id"].startswith("req_")
        unknown = await api.post({"input": "Go."}, "/responses")
        assert (unknown.status_code, "Chat Completions" in unknown.json()["error"]["message"]) == (404, True)
        async with httpx.AsyncClient() as plain:
            method = await plain.get(f"{api.endpoint.base_url}/chat/completions")
            assert (method.status_code, method.headers["allow"]) == (405, "POST")
            assert method.json()["error"]["type"] == "invalid_request_error"
            stranger = await plain.get(f"{api.endpoint.base_url}/models", headers={"Authorization": "Bearer sk-a"})
            assert stranger.json()["error"]["code"] == "invalid_api_key"
        assert not api.recorded.calls

        api.engine.complete = broken
        retrying = AsyncOpenAI(base_url=api.endpoint.base_url, api_key=api.key, max_retries=3)
        with pytest.raises(InternalServerError) as failed:
            await retrying.chat.completions.create(model="policy", messages=[{"role": "user", "content": "Go."}])
        assert failed.value.type == "server_error"
        assert "secret" not in failed.value.response.text
        assert "a secret of the engine" in caplog.text
        api.engine.complete = full
        with pytest.raises(APIStatusError, match="the engine is full") as refused:
            await retrying.chat.completions.create(model="policy", messages=[{"role": "user", "content": "Go."}])
        assert (refused.value.status_code, refused.value.response.headers["x-should-retry"]) == (503, "false")
        assert calls == ["broken", "full"], "an episode that has failed is not asked again"
        await retrying.close()


calls: list[str] = []


async def broken(*arguments: Any, **options: Any) -> Any:
    calls.append("broken")
    raise KeyError("a secret of the engine")


async def full(*arguments: Any, **options: Any) -> Any:
    calls.append("full")
    raise Transient("the engine is full")


async def test_the_usage_is_in_a_chunk_of_its_own_where_it_is_asked_for() -> None:
    async with served() as api:
        plain = [chunk async for chunk in await api.ask("a b c.", stream=True)]
        more: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = [chunk async for chunk in await api.ask("a b c.", **more)]
        *texts, end = [chunk async for chunk in await api.client.completions.create(model="policy", prompt="a", **more)]
    assert all(chunk.choices and chunk.usage is None for chunk in [*plain, *chunks, *texts])
    assert [chunk.choices for chunk in (last, end)] == [[], []]
    assert last.usage is not None
    assert last.usage.completion_tokens == len(api.recorded.calls[1].drawn.token_ids)
    assert end.usage is not None


async def test_a_model_without_a_template_has_no_tools() -> None:
    tokenizer = PretrainedTokenizer(tokenizer_of(*FAMILIES["chatml"]))
    tokenizer.inner.chat_template = None
    async with served() as api:
        api.endpoint._chat, api.endpoint._tokenizer = None, tokenizer
        with pytest.raises(BadRequestError, match="has no chat template"):
            await api.ask("yes", tools=TOOLS)
        await api.ask("<think>yes", user("Go."), {"role": "assistant", "content": "on", "tool_calls": None})
        assert api.recorded.calls[0].text.startswith("Go.on")
