"""Captured decode steps draw what uncaptured ones draw, with rows that join and leave, swaps and sleeps between."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from penstock.engines.requests import Completion, Sampling
from penstock.engines.torch.engine import TorchEngine
from penstock.engines.torch.settings import TorchEngineSection

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def model() -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=500,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    built: Any = Qwen2ForCausalLM(config)
    return built.to("cuda")


def fresh_logprobs(engine: TorchEngine, context: list[int], drawn: Completion, temperature: float = 1.0) -> np.ndarray:
    ids = torch.tensor([[*context, *drawn.token_ids.tolist()]], device="cuda")
    with torch.inference_mode():
        logits = engine.model(input_ids=ids).logits[0].float() / temperature
    logprobs = torch.log_softmax(logits, -1)[len(context) - 1 : -1]
    return logprobs.gather(-1, torch.from_numpy(drawn.token_ids).long().cuda()[:, None])[:, 0].cpu().numpy()


def test_rows_that_join_and_leave_captured_steps_draw_what_they_draw_alone() -> None:
    chance = random.Random(1)
    engine = TorchEngine(model(), TorchEngineSection(rows=13, cache_tokens=13 * 400), pad_id=0)
    wanted = [
        (
            [chance.randrange(500) for _ in range(chance.choice([1, 3, 40, 200]))],
            Sampling(max_new_tokens=chance.randint(1, 150), temperature=chance.choice([1.0, 0.7]), stop_ids=(7,)),
        )
        for _ in range(80)
    ]

    async def all_of_them() -> list[Completion]:
        async def one(context: list[int], sampling: Sampling) -> Completion:
            await asyncio.sleep(chance.random() * 0.3)
            return await engine.complete(context, sampling)

        async with asyncio.timeout(100):
            return list(await asyncio.gather(*(one(*each) for each in wanted)))

    done = asyncio.run(all_of_them())
    assert engine._rows._decoding.captured > 2
    for (context, sampling), drawn in zip(wanted, done, strict=True):
        again = fresh_logprobs(engine, context, drawn, sampling.temperature)
        assert np.abs(drawn.logprobs - again).max() < 5e-3
        assert drawn.ending == ("stop" if drawn.token_ids[-1] == 7 else "length")
        assert drawn.ending == "stop" or len(drawn.token_ids) == sampling.max_new_tokens
        assert 7 not in drawn.token_ids[:-1]


def test_draws_of_a_captured_step_differ_from_one_another_and_follow_the_distribution() -> None:
    engine = TorchEngine(model(), TorchEngineSection(rows=256, cache_tokens=256 * 64), pad_id=0, seed=3)
    completions = engine.generate([[1, 2, 3]], Sampling(max_new_tokens=20, top_k=3), repeats=[256])
    assert len({tuple(one.token_ids) for one in completions}) > 200
    with torch.inference_mode():
        logits = engine.model(input_ids=torch.tensor([[1, 2, 3]], device="cuda")).logits[0, -1].float()
    likely = torch.softmax(logits.topk(3).values, -1).cpu().numpy()
    firsts = np.array([one.token_ids[0] for one in completions])
    counts = np.array([(firsts == int(token)).mean() for token in logits.topk(3).indices])
    assert counts.sum() == 1.0
    assert np.abs(counts - likely).max() < 0.12


def test_a_swap_keeps_the_captured_steps_and_a_sleep_drops_them() -> None:
    steps = [0]

    def count() -> None:
        steps[0] += 1
        if steps[0] == 40:
            engine.stage({name: tensor * 0.5 for name, tensor in engine.served_tensors().items()})
            engine.swap(2, "two")

    settings = TorchEngineSection(rows=4, cache_tokens=4 * 256)
    engine = TorchEngine(model(), settings, pad_id=0, version=1, digest="one", progressed=count)
    context = [5, 6, 7]
    [first] = engine.generate([context], Sampling(max_new_tokens=100))
    captured = engine._rows._decoding.captured
    assert captured > 0
    assert [version for _, version in first.versions.tolist()] == [1, 2]
    [second] = engine.generate([context], Sampling(max_new_tokens=100))
    assert engine._rows._decoding.captured == captured
    assert np.abs(second.logprobs - fresh_logprobs(engine, context, second)).max() < 5e-3
    engine.sleep()
    assert engine._rows._decoding.captured == 0
    assert torch.cuda.memory_allocated() < 64 << 20
    engine.wake()
    [third] = engine.generate([context], Sampling(max_new_tokens=100))
    assert np.abs(third.logprobs - fresh_logprobs(engine, context, third)).max() < 5e-3
