"""Every loss and its gradient are finite, whatever log-probabilities the tokens have."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from penstock.engines.models import ActorCriticPolicy, GymnasiumPolicy, LanguagePolicy, TinyLanguageModel, build
from penstock.train.losses import tokens as losses
from penstock.train.losses.ppo import ppo_loss
from penstock.train.losses.tokens import NAMED, Tokens, divergence
from penstock.train.objectives import PriorLogprobs, TokenObjective, Totals
from penstock.train.settings import PpoLossSection, TokenLossSection

INF = float("inf")
EXTREMES = (0.0, -1e-8, -0.7, -30.0, -95.0, -9999.0, -1e4, -3e38, -INF)
ALL = list(itertools.product(EXTREMES, EXTREMES, EXTREMES, (1.5, -1.5, 0.0)))
SETTINGS = [
    {"importance": mode, "dual_clip": dual, "kl_coefficient": 0.1, "entropy_coefficient": 0.01, "average": average}
    for mode in ("truncate", "mask", "none")
    for dual in (0.0, 3.0)
    for average in ("token", "sequence", "constant")
]


@pytest.fixture(scope="module")
def policy() -> LanguagePolicy:
    made = build(TinyLanguageModel(alphabet="ab>", hidden_size=8, layers=1, heads=1, max_positions=8))
    assert isinstance(made, LanguagePolicy)
    return made


def column(index: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor([one[index] for one in ALL], dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss", NAMED)
def test_every_loss_is_finite_for_every_mixture_of_logprobs(
    loss: str, dtype: torch.dtype, policy: LanguagePolicy
) -> None:
    current, old, behaviour, advantage = (column(index, dtype) for index in range(4))
    sequence = torch.arange(len(ALL)) // 3
    for one in SETTINGS:
        leaf = current.clone().requires_grad_()
        entropy = torch.zeros_like(leaf, requires_grad=True)
        batch: Any = SimpleNamespace(
            scores=lambda module, temperature, leaf=leaf, entropy=entropy: (leaf, entropy),
            behaviour_M=behaviour,
            advantage_M=advantage,
            sequence_M=sequence,
            sequences=int(sequence[-1]) + 1,
            sample_tokens_M=torch.full((len(ALL),), 3.0),
        )
        settings = TokenLossSection(**one)
        objective = TokenObjective(policy, settings, loss=loss, packing="padded", reference=policy, teacher=policy)
        prior = PriorLogprobs(reference_M=behaviour.flip(0), old_M=old, teacher_M=old.roll(5))
        value, metrics = objective.share(batch, prior, Totals(len(ALL), len(ALL) / 3))
        value.backward()
        assert value.isfinite(), one
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all(), one
        assert all(metric.isfinite() for metric in metrics.values()), (one, metrics)


@pytest.mark.parametrize("loss", NAMED)
@pytest.mark.parametrize("importance", ["truncate", "mask", "none"])
def test_bounds_change_nothing_below_them(loss: str, importance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    logs = [-5 * torch.rand(300) for _ in range(5)]
    settings = TokenLossSection(importance=importance, dual_clip=3.0)  # type: ignore[arg-type]

    def values() -> list[Tensor]:
        leaf = logs[0].clone().requires_grad_()
        advantage = torch.linspace(-2, 2, 300)
        made = Tokens(leaf, logs[1], logs[2], advantage, torch.arange(300) // 6, 50, logs[3])
        found = NAMED[loss][0](made, settings)[0] + 0.1 * divergence(leaf, logs[4])
        found.sum().backward()
        assert leaf.grad is not None
        return [found.detach(), leaf.grad]

    bounded = values()
    monkeypatch.setattr(losses, "MAX_LOG_RATIO", INF)
    for with_bound, without in zip(bounded, values(), strict=True):
        assert torch.equal(with_bound, without)


def test_a_token_far_more_probable_under_the_reference_is_not_pushed_further_away() -> None:
    current = torch.tensor([-9999.0, -30.0, -12.0, -0.1], requires_grad=True)
    divergence(current, torch.tensor([-1.0, -1.0, -1.0, -9999.0])).sum().backward()
    assert current.grad is not None
    assert (current.grad[:3] <= 0).all()
    assert current.grad[3] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ppo_is_finite_for_every_mixture_of_logprobs(dtype: torch.dtype) -> None:
    policy = build(GymnasiumPolicy((3,), "discrete", 2))
    assert isinstance(policy, ActorCriticPolicy)
    current, old, behaviour, advantage = (column(index, dtype) for index in range(4))
    leaf = current.clone().requires_grad_()
    distribution = SimpleNamespace(log_prob=lambda actions: leaf, entropy=lambda: torch.zeros(len(ALL)))
    network = SimpleNamespace(
        distribution=lambda observations: distribution,
        value=lambda observations: torch.zeros(len(ALL)),
        return_std=torch.tensor(1.0),
    )
    batch = SimpleNamespace(
        observations_S=torch.zeros(len(ALL), 3),
        actions_S=torch.zeros(len(ALL)),
        old_S=old,
        sampled_S=behaviour,
        advantages_S=advantage,
        returns_S=torch.zeros(len(ALL)),
    )
    settings = PpoLossSection(entropy_coefficient=0.01)
    loss, metrics = ppo_loss(cast("Any", batch), torch.arange(len(ALL)), cast("Any", network), settings)
    loss.backward()
    assert loss.isfinite()
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()
    assert all(metric.isfinite() for metric in metrics.values()), metrics
