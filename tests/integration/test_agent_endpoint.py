"""The endpoint for agents: keys, calls that become samples, conversations that fork."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from openai import APIError, AsyncOpenAI, DefaultAsyncHttpxClient

from penstock.batch.assemble import sequences_of
from penstock.engines.models import LanguagePolicy, TinyLanguageModel, build
from penstock.engines.requests import Completion, Sampling
from penstock.engines.tokenizer import PretrainedTokenizer
from penstock.engines.torch.engine import TorchEngine
from penstock.envs.io.agents import Agent
from penstock.rollout.io.agent_workload import episode_of
from penstock.rollout.io.endpoint import Endpoint
from penstock.rollout.io.language_workload import chat_of
from unit.envs.test_envs_chat import FAMILIES, FIVE_TURNS, TOOLS, tokenizer_of


@asynccontextmanager
async def served(
    max_new_tokens: int = 4, stop_strings: Sequence[str] = (), *, stops: bool = True
) -> AsyncIterator[tuple[Endpoint, LanguagePolicy]]:
    torch.set_num_threads(1)
    policy = build(TinyLanguageModel(alphabet="abcd>?", hidden_size=16, layers=1, heads=2, max_positions=48))
    assert isinstance(policy, LanguagePolicy)
    engine = TorchEngine(policy.module, pad_id=0, version=3, digest="three")
    sampling = Sampling(max_new_tokens=max_new_tokens, stop_ids=policy.tokenizer.stop_ids if stops else ())
    endpoint = Endpoint(engine, policy.tokenizer, sampling, None, stop_strings)
    async with asyncio.TaskGroup() as group:
        group.create_task(endpoint.run())
        try:
            yield endpoint, policy
        finally:
            endpoint.close()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def test_calls_become_one_sample_and_a_rewritten_conversation_a_branch() -> None:
    async with served() as (endpoint, policy), httpx.AsyncClient(timeout=30.0) as client:
        key, recorded = endpoint.open()
        headers = {"Authorization": f"Bearer {key}"}

        async def ask(*messages: dict[str, str], **more: object) -> httpx.Response:
            body = {"model": "policy", "messages": [*messages], **more}
            return await client.post(f"{endpoint.base_url}/chat/completions", json=body, headers=headers)

        first = (await ask(user("ab>"))).json()["choices"][0]
        said = first["message"]["content"]
        assert first["finish_reason"] in ("stop", "length")
        await ask(user("ab>"), {"role": "assistant", "content": said}, user("?"))
        streamed = await ask(user("ab?"), stream=True)
        assert streamed.text.endswith("data: [DONE]\n\n")
        endpoint.finish(key)
        assert (await ask(user("ab>"))).status_code == 401

    one, two, three = recorded.calls
    assert two.context == [*one.context, *one.drawn.token_ids.tolist(), *policy.tokenizer.encode("?")]
    episode = episode_of(recorded.calls)
    episode.check()
    arrays = episode.arrays()
    assert arrays["loss_mask"].sum() == sum(len(call.drawn.token_ids) for call in recorded.calls)
    assert (episode.version, episode.digest) == (3, "three")
    sequences = sequences_of([arrays])
    whole = [[*call.context, *call.drawn.token_ids.tolist()] for call in (two, three)]
    read = [[t for low, high in s.stretches for t in arrays["token_ids"][low:high].tolist()] for s in sequences]
    assert read == whole


def client_of(endpoint: Endpoint, key: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=endpoint.base_url, api_key=key, max_retries=0, http_client=DefaultAsyncHttpxClient())


async def test_a_stream_has_the_tokens_as_they_come() -> None:
    async with served(24, stops=False) as (endpoint, policy):
        key, recorded = endpoint.open()
        async with client_of(endpoint, key) as client:
            asked: Any = {"model": "policy", "messages": [user("ab>")], "stream": True}
            chunks = [chunk async for chunk in await client.chat.completions.create(**asked)]
            more: Any = {"stream": True, "stream_options": {"include_usage": True}}
            *texts, last = [
                chunk async for chunk in await client.completions.create(model="policy", prompt="a>", **more)
            ]
    chat, text = recorded.calls
    said = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert len([one for one in said if one]) > 3
    assert "".join(said) == policy.tokenizer.decode(chat.drawn.token_ids.tolist())
    assert len(chat.drawn.token_ids) == 24
    assert chat.drawn.versions.tolist() == [[0, 3]]
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "length"]
    assert "".join(chunk.choices[0].text for chunk in texts) == policy.tokenizer.decode(text.drawn.token_ids.tolist())
    assert {chunk.usage for chunk in [*chunks, *texts]} == {None}
    assert (last.choices, last.usage.total_tokens) == ([], len(text.context) + 24)
    # Drawn in pieces or at once, it is the same distribution: log-probabilities are those of one pass over the whole.
    for call in recorded.calls:
        ids = torch.tensor([[*call.context, *call.drawn.token_ids.tolist()]])
        with torch.no_grad():
            expected = torch.log_softmax(policy.module(ids).logits[0, len(call.context) - 1 : -1], -1)
        taken = expected.gather(-1, ids[0, len(call.context) :, None])[:, 0]
        assert torch.allclose(taken, torch.tensor(call.drawn.logprobs), atol=1e-4)


async def test_what_an_agent_saw_of_a_stream_that_it_left_is_recorded() -> None:
    async with served(24, stops=False) as (endpoint, _):
        key, recorded = endpoint.open()
        async with client_of(endpoint, key) as client:
            stream = await client.completions.create(model="policy", prompt="a>", stream=True)
            seen = ""
            async for chunk in stream:
                seen += chunk.choices[0].text
                if seen:
                    break
            await stream.close()
            # The endpoint learns of it when it writes the next event: before it has served another request.
            await client.completions.create(model="policy", prompt="b>")
    left = next(call for call in recorded.calls if call.text.startswith("a>"))
    assert len(seen) <= len(left.drawn.token_ids) < 24


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "ab>"}),
        ("/v1/chat/completions", {"messages": [user("ab>")]}),
        ("/inference/v1/generate", {"token_ids": [3, 4]}),
    ],
)
async def test_a_call_that_its_client_left_is_cancelled_and_not_recorded(path: str, body: dict[str, Any]) -> None:
    """A client that timed out asks again: only the answer that it received may be trained."""
    async with served() as (endpoint, _):
        complete, cancelled = endpoint._engine.complete, asyncio.Event()

        async def hanging(*arguments: Any, **options: Any) -> Completion:
            try:
                await asyncio.sleep(60.0)
            except asyncio.CancelledError:
                cancelled.set()
                raise
            raise AssertionError("not cancelled")

        key, recorded = endpoint.open()
        url, headers = endpoint.base_url.removesuffix("/v1") + path, {"Authorization": f"Bearer {key}"}
        endpoint._engine.complete = hanging
        async with httpx.AsyncClient(timeout=0.5) as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.post(url, json=body, headers=headers)
        async with asyncio.timeout(30.0):
            await cancelled.wait()
        endpoint._engine.complete = complete
        async with httpx.AsyncClient(timeout=30.0) as client:
            assert (await client.post(url, json=body, headers=headers)).status_code == 200
    assert len(recorded.calls) == 1


async def test_models_completions_and_token_ids() -> None:
    async with served() as (endpoint, policy):
        key, recorded = endpoint.open()
        async with client_of(endpoint, key) as client, httpx.AsyncClient(timeout=30.0) as plain:
            assert [model.id async for model in client.models.list()] == ["policy"]
            first = await client.completions.create(model="policy", prompt="ab>", max_tokens=2)
            ids = [*policy.tokenizer.bos_ids, *policy.tokenizer.encode("ab>")]
            second = await client.completions.create(model="policy", prompt=ids)
            headers = {"Authorization": f"Bearer {key}"}
            generate = endpoint.base_url.removesuffix("/v1") + "/inference/v1/generate"
            body = {"token_ids": ids, "sampling_params": {"max_tokens": 3}}
            third = (await plain.post(generate, json=body, headers=headers)).json()["choices"][0]
            beyond = {"token_ids": [policy.tokenizer.vocabulary_size]}
            refused = await plain.post(generate, json=beyond, headers=headers)
            assert (refused.status_code, "below" in refused.json()["error"]["message"]) == (400, True)
    one, two, three = recorded.calls
    assert [call.context for call in recorded.calls] == [ids] * 3
    assert len(one.drawn.token_ids) <= 2
    assert [first.choices[0].text, second.choices[0].text] == [
        policy.tokenizer.decode(call.drawn.token_ids.tolist()) for call in (one, two)
    ]
    assert third["token_ids"] == three.drawn.token_ids.tolist()
    assert [token["logprob"] for token in third["logprobs"]["content"]] == three.drawn.logprobs.tolist()


async def test_stop_strings_end_a_completion() -> None:
    async with served(40, ["a"], stops=False) as (endpoint, policy):
        key, recorded = endpoint.open()
        async with client_of(endpoint, key) as client:
            own = await client.completions.create(model="policy", prompt="b>")
            asked = await client.completions.create(model="policy", prompt="b>", stop=["b"])
    drawn = [policy.tokenizer.decode(call.drawn.token_ids.tolist()) for call in recorded.calls]
    assert own.choices[0].text == drawn[0]
    assert [drawn[0].find("a"), own.choices[0].finish_reason] == [len(drawn[0]) - 1, "stop"]
    assert asked.choices[0].text == drawn[1].removesuffix("b")  # as the API has it: without the request's own


async def test_an_engine_that_ends_in_a_stream_is_an_error_of_the_client() -> None:
    async with served(40, stops=False) as (endpoint, _):
        key, recorded = endpoint.open()
        async with client_of(endpoint, key) as client:
            stream = await client.completions.create(model="policy", prompt="b>", stream=True)
            await anext(aiter(stream))
            endpoint._engine.interrupt()
            with pytest.raises(APIError, match="will be restarted"):
                await _read(stream)
    assert recorded.interrupted


async def _read(stream: Any) -> None:
    async for _ in stream:
        pass


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer sk-guessed"}])
async def test_clients_without_the_token_are_refused(headers: dict[str, str]) -> None:
    async with served() as (endpoint, _), httpx.AsyncClient(timeout=30.0) as client:
        assert (await client.get(f"{endpoint.base_url}/models", headers=headers)).status_code == 401


async def test_bad_requests_are_answered_with_a_sentence() -> None:
    async with served() as (endpoint, _), httpx.AsyncClient(timeout=30.0) as client:
        key, recorded = endpoint.open()
        headers = {"Authorization": f"Bearer {key}"}
        for body in (
            {"messages": []},
            {"messages": [user("a>")], "n": 2},
            {"messages": [user("a" * 60)]},
            {"messages": [user("not a letter of the alphabet")]},
            {"messages": [user("a>")], "stop": 3},
            {"messages": [user("a>")], "max_tokens": "many"},
        ):
            answer = await client.post(f"{endpoint.base_url}/chat/completions", json=body, headers=headers)
            assert (answer.status_code, bool(answer.json()["error"]["message"])) == (400, True)
        assert not recorded.calls


def test_an_agent_as_a_program_is_told_where_to_ask_and_prints_its_reward() -> None:
    script = (
        "import os; print(os.environ['OPENAI_BASE_URL'] == 'http://x/v1'); print(len(os.environ['OPENAI_API_KEY']))"
    )
    agent = Agent(command=["python3", "-c", script])
    assert agent.play("http://x/v1", "key", 0).reward == 3.0
    with pytest.raises(RuntimeError, match="exit code 3"):
        Agent(command=["python3", "-c", "raise SystemExit(3)"]).play("http://x/v1", "key", 0)


class Scripted:
    """An engine that draws what it is told to, in as many pieces as it is asked for."""

    max_positions = None

    def __init__(self) -> None:
        self.left: list[int] = []

    async def complete(self, context: Sequence[int], sampling: Sampling, *, cache_key: object = None) -> Completion:
        ids, self.left = self.left[: sampling.max_new_tokens], self.left[sampling.max_new_tokens :]
        logprobs = np.full(len(ids), -0.5, np.float32)
        ending = "length" if self.left else "stop"
        return Completion(np.array(ids, np.int32), logprobs, np.array([[0, 1]], np.int32), ending, 1, "one")

    def forget(self, cache_key: object) -> None: ...


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("odd", [False, True], ids=["canonical", "odd"])
@pytest.mark.parametrize("family", [family for family, (template, *_) in FAMILIES.items() if "tools" in template])
async def test_five_turns_with_tools_are_one_sequence_by_the_template(family: str, odd: bool, stream: bool) -> None:
    template, special, bos, eos = FAMILIES[family]
    tokenizer = PretrainedTokenizer(tokenizer_of(template, special, bos, eos))
    inner: Any = tokenizer.inner
    engine: Any = Scripted()
    endpoint = Endpoint(engine, tokenizer, Sampling(200, stop_ids=tokenizer.stop_ids), chat_of(tokenizer, None))
    messages: list[Any] = [user("What is 1 + 2 + 4?")]
    whole: list[Any] = [*messages]
    async with asyncio.TaskGroup() as group:
        group.create_task(endpoint.run())
        key, recorded = endpoint.open()
        async with client_of(endpoint, key) as client:
            for said, reply in FIVE_TURNS:
                before = inner.apply_chat_template(whole, tools=TOOLS, tokenize=False, add_generation_prompt=True)
                turn = inner.apply_chat_template([*whole, said], tools=TOOLS, tokenize=False)[len(before) :]
                turn = turn[: turn.index(eos) + len(eos)]
                engine.left = tokenizer.encode(turn.replace(": ", ":  ") if odd else turn)
                asked: Any = {"model": "policy", "messages": messages, "tools": TOOLS, "stream": stream}
                answer = await client.chat.completions.create(**asked)
                message = await _collected(answer) if stream else answer.choices[0].message.model_dump()
                assert bool(message["tool_calls"]) == bool(said.get("tool_calls"))
                assert message["content"].strip() == said["content"]
                calls = message["tool_calls"] or []
                reply = [one | ({"tool_call_id": calls[0]["id"]} if calls else {}) for one in reply]
                messages += [{name: value for name, value in message.items() if value is not None}, *reply]
                whole += [said, *reply]
            fork = [*messages[:3], user("Rather 9?")]
            engine.left = tokenizer.encode(f"No.{eos}")
            await client.chat.completions.create(model="policy", messages=fork, tools=TOOLS)  # type: ignore[arg-type]
        endpoint.close()
    *calls, forked = recorded.calls
    stream_ids = [*calls[-1].context, *calls[-1].drawn.token_ids.tolist()]
    if not odd:
        expected = tokenizer.encode(inner.apply_chat_template(whole, tools=TOOLS, tokenize=False))
        assert stream_ids == expected[: len(stream_ids)]
    [one] = sequences_of([episode_of(calls).arrays()])
    assert sum(high - low for low, high in one.stretches) == len(stream_ids)
    first = [*calls[0].context, *calls[0].drawn.token_ids.tolist()]
    assert forked.context[: len(first)] == first
    assert len(sequences_of([episode_of(recorded.calls).arrays()])) == 2


async def _collected(stream: Any) -> dict[str, Any]:
    """The message of a stream, as its client puts it together."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
    async for chunk in stream:
        delta = chunk.choices[0].delta
        message["content"] += delta.content or ""
        message["tool_calls"] += [call.model_dump(exclude={"index"}) for call in delta.tool_calls or ()]
    return message | {"tool_calls": message["tool_calls"] or None}
