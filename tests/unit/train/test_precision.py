"""bfloat16 with float32 masters learns as float32 does, at learning rates that bfloat16 alone cannot resolve."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.batch.pack import PackSettings, pack_tokens
from penstock.engines.models import LanguagePolicy
from penstock.train import checkpoint
from penstock.train.objectives import TokenObjective
from penstock.train.settings import OptimizerSection, TokenLossSection
from penstock.train.step import Learner
from small_learner import batches, policy


def learner(dtype: torch.dtype, rate: float = 1e-6) -> Learner:
    objective = TokenObjective(policy(dtype), TokenLossSection(importance="none"), packing="prefix")
    return Learner(objective, OptimizerSection(learning_rate=rate))


def progress(owner: Learner, steps: int) -> float:
    """Mean of A·Δlogp, of the weights that are served, computed in float32."""
    data = batches()
    judged = TokenObjective(policy(torch.float32), TokenLossSection(importance="none"), packing="prefix")
    found = []
    for done in (0, steps):
        for _ in range(done):
            owner.step(data)
        judged.policy.load_tensors({name: tensor.float() for name, tensor in owner.policy.named_tensors().items()})
        (score,) = judged.score(data, several_updates=True)
        found.append(score.old_M)
    advantages = torch.from_numpy(data[0].advantages_N[data[0].sequences_RT[data[0].loss_mask_RT != 0]])
    return float((advantages * (found[1] - found[0])).mean())


@pytest.mark.slow
def test_a_hundred_small_steps_make_the_progress_of_float32() -> None:
    plain, mixed = progress(learner(torch.float32), 100), progress(learner(torch.bfloat16), 100)
    assert plain > 0
    assert mixed >= 0.95 * plain


def test_small_steps_are_summed_in_the_masters() -> None:
    mixed, data = learner(torch.bfloat16), batches()
    before = {name: tensor.clone() for name, tensor in mixed.policy.named_tensors().items()}
    for _ in range(3):
        mixed.step(data)
    masters = {name: tensor for name, tensor in mixed.state().items() if name.startswith("master/")}
    assert all(tensor.dtype == torch.float32 for tensor in mixed.state().values() if tensor.is_floating_point())
    moved = [float((masters[f"master/{name}"] != before[name].float()).float().mean()) for name in before]
    assert np.mean(moved) > 0.9
    for name, tensor in mixed.policy.named_tensors().items():
        assert torch.equal(tensor, masters[f"master/{name}"].bfloat16()), "what is published is what masters round to"


def test_gradients_are_summed_in_float32() -> None:
    """Many micro-batches or one: bfloat16 sums would differ."""
    once, often = learner(torch.bfloat16, 1e-2), learner(torch.bfloat16, 1e-2)
    (whole,) = batches()
    often.objective.limit_tokens = 20  # type: ignore[attr-defined]
    once.step([whole])
    often.step([whole])
    for name, tensor in once.state().items():
        if name.startswith("exp_avg/"):
            torch.testing.assert_close(often.state()[name], tensor, rtol=0.05, atol=2e-4)


def test_resuming_restores_the_masters(tmp_path: Path) -> None:
    straight = learner(torch.bfloat16)
    for step in range(4):
        straight.step(batches(step))
    first, second = learner(torch.bfloat16), learner(torch.bfloat16)
    for step in range(2):
        first.step(batches(step))
    checkpoint.load(checkpoint.save(tmp_path, first), second)
    for step in range(2, 4):
        second.step(batches(step))
    assert all(torch.equal(second.state()[name], tensor) for name, tensor in straight.state().items())


def test_masters_stay_when_a_learner_moves() -> None:
    mixed = learner(torch.bfloat16)
    mixed.step(batches())
    wanted = copy.deepcopy(mixed.state())
    mixed.offload()
    mixed.onload(torch.device("cpu"))
    mixed.step(batches())
    assert mixed.state().keys() == wanted.keys()


def test_dropout_is_off_as_in_generation() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=12, n_embd=16, n_layer=1, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=2)
    owner = Learner(
        TokenObjective(LanguagePolicy(GPT2LMHeadModel(config), policy(torch.float32).tokenizer), packing="padded")
    )
    padded = _padded()
    score = next(iter(owner.objective.score(padded, several_updates=True)))
    assert score.old_M is not None
    padded[0].logprobs_RT[padded[0].loss_mask_RT != 0] = score.old_M.numpy()
    assert abs(owner.step(padded)["kl_sampling"]) < 1e-6


def _padded() -> list:
    ids = np.random.default_rng(0).integers(3, 10, (3, 8)).astype(np.int32)
    mask = np.array([0] * 4 + [1] * 4, np.uint8)
    samples = [{"token_ids": row, "loss_mask": mask, "logprobs": np.zeros(8, np.float32)} for row in ids]
    return pack_tokens(samples, np.ones(3), PackSettings(layout="padded"))
