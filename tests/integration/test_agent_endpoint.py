"""The endpoint for agents: keys, calls that become samples, conversations that fork."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
import torch

from penstock.batch.assemble import sequences_of
from penstock.engines.models import LanguagePolicy, TinyLanguageModel, build
from penstock.engines.requests import Sampling
from penstock.engines.torch.engine import TorchEngine
from penstock.envs.io.agents import Agent
from penstock.rollout.io.agent_workload import episode_of
from penstock.rollout.io.endpoint import Endpoint


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Endpoint, LanguagePolicy]]:
    torch.set_num_threads(1)
    policy = build(TinyLanguageModel(alphabet="abcd>?", hidden_size=16, layers=1, heads=2, max_positions=48))
    assert isinstance(policy, LanguagePolicy)
    engine = TorchEngine(policy.module, pad_id=0, version=3, digest="three")
    sampling = Sampling(max_new_tokens=4, stop_ids=policy.tokenizer.stop_ids)
    endpoint = Endpoint(engine, policy.tokenizer, sampling, None)
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


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer sk-guessed"}])
async def test_strangers_are_refused(headers: dict[str, str]) -> None:
    async with served() as (endpoint, _), httpx.AsyncClient(timeout=30.0) as client:
        assert (await client.get(f"{endpoint.base_url}/models", headers=headers)).status_code == 401


async def test_bad_requests_are_answered_with_a_sentence() -> None:
    async with served() as (endpoint, _), httpx.AsyncClient(timeout=30.0) as client:
        key, recorded = endpoint.open()
        headers = {"Authorization": f"Bearer {key}"}
        for body in ({"messages": []}, {"messages": [user("a>")], "n": 2}, {"messages": [user("a" * 60)]}):
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
