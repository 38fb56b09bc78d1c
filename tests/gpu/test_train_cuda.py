"""Training on a GPU: bounded memory of the head, flash attention over forests, masters, and micro-batches that fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.batch.pack import PackSettings, pack_tokens
from penstock.engines.models import GymnasiumPolicy, LanguagePolicy, build
from penstock.engines.policy import PolicyEngine
from penstock.engines.tokenizer import CharacterTokenizer
from penstock.train.objectives import TokenObjective
from penstock.train.scores import chunked_scores
from penstock.train.settings import OptimizerSection, TokenLossSection
from penstock.train.step import Learner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

CUDA = torch.device("cuda", 0)


def policy(dtype: torch.dtype, hidden: int = 256, vocabulary: int = 1000) -> LanguagePolicy:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = Qwen2ForCausalLM(config)
    return LanguagePolicy(model.to(CUDA, dtype), CharacterTokenizer("ab"))


def samples(seed: int, groups: int = 3, size: int = 4, prompt: int = 300, longest: int = 200) -> list[dict]:
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(groups):
        shared = rng.integers(3, 1000, prompt)
        for _ in range(size):
            ids = np.concatenate([shared, rng.integers(3, 1000, rng.integers(1, longest))]).astype(np.int32)
            mask = (np.arange(len(ids)) >= prompt).astype(np.uint8)
            found.append({"token_ids": ids, "loss_mask": mask, "logprobs": (mask * -6.9).astype(np.float32)})
    return found


def gradients(made: LanguagePolicy, layout: Any, tokens: int = 4096) -> dict[str, torch.Tensor]:
    data = samples(0)
    advantages = np.random.default_rng(1).normal(size=len(data)).astype(np.float32)
    objective = TokenObjective(made, TokenLossSection(entropy_coefficient=0.01), packing=layout)
    settings = OptimizerSection(name="torch.optim:SGD", learning_rate=1.0, max_grad_norm=1e9)
    learner = Learner(objective, settings)
    before = {name: t.float().clone() for name, t in (made.named_tensors() | _masters(learner)).items()}
    learner.step(pack_tokens(data, advantages, PackSettings(micro_batch_tokens=tokens, layout=layout)))
    after = made.named_tensors() | _masters(learner)
    return {name: after[name].float() - before[name] for name in before}


def _masters(learner: Learner) -> dict[str, torch.Tensor]:
    return {name.removeprefix("master/"): t for name, t in learner.state().items() if name.startswith("master/")}


@pytest.mark.parametrize("layout", ["packed", "prefix"])
def test_packed_float32_is_exact(layout: str) -> None:
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    wanted, found = gradients(policy(torch.float32), "padded"), gradients(policy(torch.float32), layout)
    for name, change in wanted.items():
        torch.testing.assert_close(found[name], change, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("layout", ["padded", "packed", "prefix"])
def test_bfloat16_is_as_near_to_float32_packed_as_padded(layout: str) -> None:
    wanted, found = gradients(policy(torch.float32), "padded"), gradients(policy(torch.bfloat16), layout)
    flat = [found[name].flatten() for name in wanted], [wanted[name].flatten() for name in wanted]
    cosine = torch.nn.functional.cosine_similarity(torch.cat(flat[0]), torch.cat(flat[1]), dim=0)
    assert cosine > 0.99


def test_the_head_stays_under_two_gibibytes(capsys: pytest.CaptureFixture[str]) -> None:
    """16,384 tokens and a vocabulary of 151,936, with the gradient of the entropy."""
    hidden = torch.randn(16384, 896, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(151936, 896, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, 151936, (16384,), device=CUDA)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    logprobs, entropy = chunked_scores(hidden, weight, None, target, 1.0)
    (logprobs - 0.01 * entropy).sum().backward()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    with capsys.disabled():
        print(f"\nhead of 16384 x 151936: {peak / 2**30:.2f} GiB above its inputs")  # noqa: T201
    assert peak < 2 << 30


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunked_scores_are_the_dense_ones(dtype: torch.dtype) -> None:
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    torch.manual_seed(0)
    inputs = torch.randn(1000, 64, device=CUDA, dtype=dtype), torch.randn(151936, 64, device=CUDA, dtype=dtype)
    target = torch.randint(0, 151936, (1000,), device=CUDA)
    found = []
    for dense in (True, False):
        hidden, weight = (tensor.clone().requires_grad_() for tensor in inputs)
        if dense:
            log_p = torch.log_softmax(hidden.float() @ weight.float().T, -1)
            scores = log_p.gather(-1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
        else:
            scores = chunked_scores(hidden, weight, None, target, 1.0)
        (scores[0] - 0.1 * scores[1]).mean().backward()
        found.append([*(score.detach() for score in scores), hidden.grad, weight.grad])
    exact = dtype == torch.float32
    for wanted, got in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-4 if exact else 1e-3, rtol=1e-4 if exact else 2e-2)


def test_out_of_memory_halves_the_micro_batch(caplog: pytest.LogCaptureFixture) -> None:
    made = policy(torch.bfloat16)
    data = samples(0, groups=8, size=8, prompt=200, longest=800)
    learner = Learner(TokenObjective(made, packing="prefix"), OptimizerSection(learning_rate=1e-4))
    batches = pack_tokens(data, np.ones(len(data)), PackSettings(micro_batch_tokens=1 << 20, layout="prefix"))
    learner.step(pack_tokens(data[:2], np.ones(2), PackSettings(layout="prefix")))
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(CUDA).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (400 << 20)) / total)
    try:
        metrics = learner.step(batches)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert metrics["updates"] == 1
    assert "out of device memory" in caplog.text


def test_a_gaussian_policy_acts_on_a_gpu() -> None:
    made = build(GymnasiumPolicy((4,), "gaussian", 2))
    made.module.to(CUDA)
    engine = PolicyEngine(made.module, seed=0)
    actions, logprobs, _, _ = engine.act(np.zeros((3, 4), np.float32))
    assert actions.shape == (3, 2)
    assert np.isfinite(np.asarray(logprobs)).all()


def test_masters_on_the_host_give_the_same_update() -> None:
    found = []
    for offload in (False, True):
        made = policy(torch.bfloat16)
        settings = OptimizerSection(learning_rate=1e-3, offload=offload)
        learner = Learner(TokenObjective(made, packing="prefix"), settings)
        learner.onload(CUDA)
        advantages = np.random.default_rng(1).normal(size=12).astype(np.float32)
        for step in range(2):
            learner.step(pack_tokens(samples(step), advantages, PackSettings(layout="prefix")))
        found.append({name: tensor.float() for name, tensor in made.named_tensors().items()})
        places = {tensor.device.type for name, tensor in learner.state().items() if "/" in name}
        assert places == ({"cpu"} if offload else {"cuda"})
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, atol=4e-3, rtol=2e-2)
