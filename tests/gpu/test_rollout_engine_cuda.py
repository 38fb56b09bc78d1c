"""The language engine on a GPU: the same promises, and memory that really is given back."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.engines.requests import Sampling
from penstock.engines.torch.engine import TorchEngine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def model(hidden: int, layers: int, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    built: Any = LlamaForCausalLM(config)
    return built.to("cuda", dtype)


def logprobs_again(engine: TorchEngine, prompt: list[int], completion: np.ndarray) -> np.ndarray:
    ids = torch.tensor([[*prompt, *completion.tolist()]], device="cuda")
    with torch.inference_mode():
        logits = engine.model(input_ids=ids).logits[0].float()
    logprobs = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return logprobs.gather(-1, torch.from_numpy(completion).long().cuda()[:, None])[:, 0].cpu().numpy()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 0.1)])
def test_logprobs_and_versions_on_the_gpu(dtype: torch.dtype, tolerance: float) -> None:
    steps = iter(range(1000))

    def swap_once() -> None:
        if next(steps) == 9:
            engine.swap(1, "one")

    engine = TorchEngine(model(128, 4, dtype), pad_id=0, progressed=swap_once)
    engine.stage({name: tensor.clone() for name, tensor in engine.served_tensors().items()})
    prompts = [list(range(1, 40)), [7], list(range(100, 110))]
    completions = engine.generate(prompts, Sampling(max_new_tokens=32), repeats=[8, 8, 8])
    for row, completion in enumerate(completions):
        assert completion.versions.tolist() == [[0, 0], [10, 1]]
        again = logprobs_again(engine, prompts[row // 8], completion.token_ids)
        assert np.abs(completion.logprobs - again).max() < tolerance


def test_sleep_gives_the_memory_back_and_generation_goes_on_after_waking() -> None:
    held: dict[str, int] = {}

    def nap() -> None:
        if engine_steps[0] == 5:
            held["awake"] = torch.cuda.memory_allocated()
            engine.sleep()
            held["asleep"] = torch.cuda.memory_allocated()
            threading.Timer(0.2, engine.wake).start()
        engine_steps[0] += 1

    engine_steps = [0]
    before = torch.cuda.memory_allocated()
    engine = TorchEngine(model(1024, 8, torch.bfloat16), pad_id=0, progressed=nap)
    completions = engine.generate([list(range(500))] * 4, Sampling(max_new_tokens=16))
    assert all(len(completion.token_ids) == 16 for completion in completions)
    assert held["asleep"] - before < 0.1 * (held["awake"] - before)
    assert engine.version == 0
