"""The average of a loss is over all samples of an update: one whose tokens are masked counts too."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

import small_learner
from penstock.batch.pack import Packing, PackSettings, pack_tokens
from penstock.batch.truncation import masked
from penstock.train.objectives import TokenObjective
from penstock.train.settings import OptimizerSection, TokenLossSection
from penstock.train.step import Learner

LENGTHS = [3, 5, 2, 6, 4, 1]


def samples() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    found = []
    for length in LENGTHS:
        ids = rng.integers(3, 10, 4 + length).astype(np.int32)
        mask = (np.arange(4 + length) >= 4).astype(np.uint8)
        found.append({"token_ids": ids, "loss_mask": mask, "logprobs": (mask * -2.3).astype(np.float32)})
    return found


def trained(
    average: str,
    left_out: Sequence[int],
    *,
    layout: Packing = "packed",
    tokens: int = 16_384,
    limit: int | None = None,
) -> torch.Tensor:
    """The gradient of one update over all samples; `tokens` makes micro-batches, `limit` passes."""
    policy = small_learner.policy()
    settings = TokenLossSection(average=average, constant_length=8, importance="none")  # type: ignore[arg-type]
    advantages = np.linspace(-1, 2, len(LENGTHS)).astype(np.float32)
    out = np.isin(np.arange(len(LENGTHS)), left_out)
    batches = pack_tokens(masked(samples(), out), advantages, PackSettings(layout=layout, micro_batch_tokens=tokens))
    plain = OptimizerSection(name="torch.optim:SGD", learning_rate=1.0, max_grad_norm=1e9)
    before = torch.cat([p.detach().flatten().clone() for p in policy.module.parameters()])
    objective = TokenObjective(policy, settings, packing=layout)
    objective.limit_tokens = limit
    passes: list[str] = []
    learner = Learner(objective, plain, progressed=lambda doing: passes.append(doing) if "training" in doing else None)
    metrics = learner.step(batches)
    assert metrics["sequences"] == pytest.approx(len(LENGTHS))
    assert limit is None or len(passes) > len(batches)
    return before - torch.cat([p.detach().flatten() for p in policy.module.parameters()])


def by_hand(average: str, left_out: Sequence[int]) -> torch.Tensor:
    policy = small_learner.policy()
    total = torch.zeros(())
    kept = [number for number in range(len(LENGTHS)) if number not in left_out]
    for number in kept:
        ids = torch.from_numpy(samples()[number]["token_ids"].astype(np.int64))[None]
        log_p = torch.log_softmax(policy.module(input_ids=ids).logits[0, :-1], -1)
        logprobs = log_p.gather(-1, ids[0, 1:, None])[-LENGTHS[number] :, 0]
        loss = -np.linspace(-1, 2, len(LENGTHS))[number] * logprobs
        if average == "token":
            total = total + loss.sum() / sum(LENGTHS[one] for one in kept)
        elif average == "sequence":
            total = total + loss.mean() / len(LENGTHS)
        else:
            total = total + loss.sum() / (len(LENGTHS) * 8)
    total.backward()
    return torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in policy.module.parameters()]
    )


@pytest.mark.parametrize("average", ["token", "sequence", "constant"])
@pytest.mark.parametrize("left_out", [[], [1], [0, 3, 5]])
def test_masked_samples_count_as_samples(average: str, left_out: list[int]) -> None:
    wanted = by_hand(average, left_out)
    for layout, tokens in (("padded", 16_384), ("packed", 16_384), ("prefix", 16), ("padded", 9), ("packed", 9)):
        found = trained(average, left_out, layout=layout, tokens=tokens)  # type: ignore[arg-type]
        torch.testing.assert_close(found, wanted, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("layout", ["padded", "packed", "prefix"])
def test_halved_passes_change_no_average(layout: Packing) -> None:
    """Passes that do not fit into memory are split; a masked sample counts once."""
    found = trained("sequence", [1, 4], layout=layout, limit=16)
    torch.testing.assert_close(found, by_hand("sequence", [1, 4]), atol=2e-6, rtol=1e-4)
