"""The comparison of the engine's log-probabilities with the trainer's, before the first step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import small_learner
from penstock.engines.models import ActorCriticPolicy, GymnasiumPolicy, build
from penstock.engines.requests import Sampling
from penstock.engines.torch.engine import TorchEngine
from penstock.errors import RunFailed
from penstock.train.comparison import TOKENS, Difference, longest, summed
from penstock.train.objectives import EpisodeObjective, TokenObjective
from penstock.train.step import Learner

PROMPT = [3, 4, 5, 6]


def learner(dtype: torch.dtype = torch.float32, *, cut: bool = False, check: bool = True) -> Learner:
    policy = small_learner.policy(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in policy.module.parameters():
            if weight.ndim > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.25)
    return Learner(TokenObjective(policy, packing="prefix", cut=cut), check_logprobs=check)


def drawn(made: Learner, **sampling: Any) -> list[dict[str, np.ndarray]]:
    module = made.policy.module
    engine = TorchEngine(small_learner.policy(next(module.parameters()).dtype).module, pad_id=0)
    engine.model.load_state_dict(module.state_dict())
    completions = engine.generate([PROMPT] * 16, Sampling(max_new_tokens=12, **sampling))
    return [
        {
            "token_ids": np.array([*PROMPT, *one.token_ids], np.int32),
            "loss_mask": np.array([0] * len(PROMPT) + [1] * len(one.token_ids), np.uint8),
            "logprobs": np.concatenate([np.zeros(len(PROMPT)), one.logprobs]).astype(np.float32),
        }
        for one in completions
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_the_engine_draws_is_accepted_and_the_difference_recorded_once(dtype: torch.dtype) -> None:
    made = learner(dtype)
    samples = drawn(made)
    assert "engine_difference_mean" not in made.step(small_learner.batches(0)), "nothing was drawn with these weights"
    metrics = made.step([], [], drawn(made))
    assert 0 <= metrics["engine_difference_mean"] <= metrics["engine_difference_max"]
    assert metrics["engine_difference_mean"] < (1e-5 if dtype == torch.float32 else 0.02)
    assert "engine_difference_mean" not in made.step([], [], samples)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sampling", [{"temperature": 0.5}, {"top_p": 0.5}])
def test_samples_of_another_distribution_are_refused_before_they_change_anything(
    dtype: torch.dtype, sampling: dict[str, float]
) -> None:
    made = learner(dtype)
    before = made.policy.snapshot()
    with pytest.raises(RunFailed, match=r"disagree about .* step 0 .*temperature.*train.check_logprobs = false"):
        made.step(small_learner.batches(0), None, drawn(made, **sampling))
    assert made.steps == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in made.policy.named_tensors().items())
    unchecked = learner(dtype, check=False)
    unchecked.step(small_learner.batches(0), None, drawn(unchecked, **sampling))


def test_tokens_that_a_cut_made_more_probable_are_expected_and_no_others() -> None:
    for sampling in ({"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.3}):
        made = learner(cut=True)
        assert made.step([], [], drawn(made, **sampling))["engine_difference_mean"] < 1e-5
    made = learner(cut=True)
    with pytest.raises(RunFailed, match="top_p"):
        made.step([], [], drawn(made, temperature=1.5))


def test_a_gymnasium_policy_is_compared_too() -> None:
    policy = build(GymnasiumPolicy((4,), "discrete", 2))
    assert isinstance(policy, ActorCriticPolicy)
    observations = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)
    actions, logprobs = policy.network.act(torch.from_numpy(observations), torch.Generator().manual_seed(0))
    episode = {
        "observations": observations,
        "actions": actions.numpy(),
        "logprobs": logprobs.numpy(),
        "rewards": np.ones(30, np.float32),
        "terminated": np.ones(1, np.uint8),
        "last_observation": observations[-1],
    }
    assert Learner(EpisodeObjective(policy)).step([], None, [episode])["engine_difference_max"] < 1e-5
    with pytest.raises(RunFailed, match="30 tokens differ"):
        Learner(EpisodeObjective(policy)).step([], None, [episode | {"logprobs": logprobs.numpy() - 0.1}])


def test_no_single_token_decides_and_what_is_no_number_counts_as_a_large_difference() -> None:
    for extreme in (9999.0, -9999.0, float("nan")):
        differences = torch.zeros(1000)
        differences[3] = extreme
        count, total, most = summed(differences, one_sided=False)
        assert (count, total) == (1000, 1)
        assert most > 9000
        Difference(count, total / count, most).check(0, torch.float32, torch.device("cpu"))


def test_the_longest_samples_are_compared() -> None:
    samples = [{"logprobs": np.zeros(size)} for size in (10, TOKENS - 100, 300, 90)]
    assert [len(one["logprobs"]) for one in longest(samples)] == [TOKENS - 100]
    assert [len(one["logprobs"]) for one in longest(samples[2:])] == [300, 90]
    assert longest([]) == []
