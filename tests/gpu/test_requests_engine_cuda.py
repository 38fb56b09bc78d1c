"""The request engine on a GPU: right log-probabilities in mixed batches, and a sleep that gives all memory back."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.engines.requests import Completion, Sampling
from penstock.engines.torch.engine import TorchEngine
from penstock.engines.torch.settings import TorchEngineSection

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def model(hidden: int, layers: int, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    built: Any = LlamaForCausalLM(config)
    return built.to("cuda", dtype)


def complete_all(engine: TorchEngine, contexts: list[list[int]], sampling: Sampling) -> list[Completion]:
    async def complete() -> list[Completion]:
        calls = [engine.complete(context, sampling, cache_key=index) for index, context in enumerate(contexts)]
        async with asyncio.timeout(100):
            return list(await asyncio.gather(*calls))

    return asyncio.run(complete())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 0.1)])
def test_logprobs_of_rows_of_many_lengths(dtype: torch.dtype, tolerance: float) -> None:
    engine = TorchEngine(model(128, 4, dtype), TorchEngineSection(rows=7), pad_id=0)
    contexts = [list(range(1, 2 + 9 * index)) for index in range(20)]
    for context, completion in zip(contexts, complete_all(engine, contexts, Sampling(max_new_tokens=32)), strict=True):
        ids = torch.tensor([[*context, *completion.token_ids.tolist()]], device="cuda")
        with torch.inference_mode():
            logprobs = torch.log_softmax(engine.model(input_ids=ids).logits[0].float(), -1)[len(context) - 1 : -1]
        again = logprobs.gather(-1, torch.from_numpy(completion.token_ids).long().cuda()[:, None])[:, 0].cpu().numpy()
        assert np.abs(completion.logprobs - again).max() < tolerance


def test_a_sleep_gives_back_rows_and_kept_conversations_too() -> None:
    held: dict[str, int] = {}
    steps = [0]

    def nap() -> None:
        steps[0] += 1
        if steps[0] == 25:
            held["awake"] = torch.cuda.memory_allocated()
            engine.sleep()
            held["asleep"] = torch.cuda.memory_allocated()
            threading.Timer(0.2, engine.wake).start()

    before = torch.cuda.memory_allocated()
    engine = TorchEngine(model(1024, 8, torch.bfloat16), TorchEngineSection(rows=4), pad_id=0, progressed=nap)
    completions = complete_all(engine, [list(range(500))] * 4 + [[1, 2]] * 4, Sampling(max_new_tokens=16))
    assert [len(completion.token_ids) for completion in completions] == [16] * 8
    assert held["asleep"] - before < 0.05 * (held["awake"] - before)
