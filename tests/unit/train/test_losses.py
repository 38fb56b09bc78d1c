from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
import torch

from penstock.batch.pack import TokenMicroBatch, TrajectoryBatch
from penstock.engines.models import ActorCriticPolicy, GymnasiumPolicy, LanguagePolicy, TinyLanguageModel, build
from penstock.train.loss import (
    EpisodeTensors,
    PpoLossSettings,
    TokenLossSettings,
    TokenTensors,
    discounted_sums,
    ppo_loss,
    token_loss,
)

SPEC = TinyLanguageModel(alphabet="abcdef>", hidden_size=16, layers=2, heads=2, max_positions=64)


def language_policy() -> LanguagePolicy:
    policy = build(SPEC)
    assert isinstance(policy, LanguagePolicy)
    return policy


def tokens(lengths: list[int], prompt: int, packed: bool, seed: int = 0) -> TokenMicroBatch:
    """The same sequences either one per row or all in one row, as if sampled by a uniform policy."""
    rng = np.random.default_rng(seed)
    rows = [rng.integers(3, 10, length) for length in lengths]
    width = sum(lengths) if packed else max(lengths)
    shape = (1 if packed else len(lengths), width)
    batch = TokenMicroBatch(
        np.zeros(shape, np.int32),
        np.zeros(shape, np.int32),
        np.full(shape, -1, np.int16),
        np.zeros(shape, np.uint8),
        np.zeros(shape, np.float32),
        np.linspace(-1, 1, len(lengths)).astype(np.float32),
        np.array([length - prompt for length in lengths]),
        packed,
    )
    start = 0
    for index, row in enumerate(rows):
        at = (0, slice(start, start + len(row))) if packed else (index, slice(0, len(row)))
        batch.token_ids_RT[at] = row
        batch.position_ids_RT[at] = np.arange(len(row))
        batch.sequences_RT[at] = index
        batch.loss_mask_RT[at] = np.arange(len(row)) >= prompt
        batch.logprobs_RT[at] = np.where(np.arange(len(row)) >= prompt, -np.log(10.0), 0)
        start += len(row)
    return batch


def value(batch: TokenMicroBatch, policy: LanguagePolicy, settings: TokenLossSettings, **more: torch.Tensor) -> float:
    prepared = TokenTensors(batch, torch.device("cpu"))
    loss, _ = token_loss(
        prepared, policy.module, settings, total_tokens=prepared.tokens, total_sequences=prepared.sequences, **more
    )
    return loss.item()


def test_packed_rows_give_the_logprobs_of_separate_rows() -> None:
    policy = language_policy()
    lengths = [6, 9, 4]
    apart = TokenTensors(tokens(lengths, 2, packed=False), torch.device("cpu")).logprobs(policy.module, 1.0)
    together = TokenTensors(tokens(lengths, 2, packed=True), torch.device("cpu")).logprobs(policy.module, 1.0)
    torch.testing.assert_close(apart, together, atol=1e-5, rtol=1e-5)


def test_logprobs_are_those_of_a_plain_forward_pass() -> None:
    policy = language_policy()
    batch = tokens([7, 5], 3, packed=False)
    found = TokenTensors(batch, torch.device("cpu")).logprobs(policy.module, 0.7)
    wanted = []
    for row, length in enumerate([7, 5]):
        ids = torch.from_numpy(batch.token_ids_RT[row : row + 1, :length].astype(np.int64))
        log_p = torch.log_softmax(policy.module(input_ids=ids).logits[0] / 0.7, -1)
        wanted += [log_p[t - 1, ids[0, t]] for t in range(3, length)]
    torch.testing.assert_close(found, torch.stack(wanted), atol=1e-5, rtol=1e-5)


def test_the_gradient_does_not_depend_on_micro_batches() -> None:
    policy = language_policy()
    whole = tokens([6, 9, 4, 7], 2, packed=False)
    for average in ("token", "sequence", "constant"):
        settings = TokenLossSettings(average=average, constant_length=9, entropy_coefficient=0.01)  # type: ignore[arg-type]
        gradients = []
        for parts in ([[0, 1, 2, 3]], [[0], [1, 2], [3]]):
            policy.module.zero_grad()
            prepared = []
            for rows in parts:
                part = {name: value[rows] for name, value in asdict(whole).items() if isinstance(value, np.ndarray)}
                renumbered = np.arange(len(rows), dtype=np.int16)[:, None]
                part["sequences_RT"] = np.where(part["sequences_RT"] < 0, -1, renumbered).astype(np.int16)
                prepared.append(TokenTensors(TokenMicroBatch(**part, packed=False), torch.device("cpu")))
            for batch in prepared:
                loss, _ = token_loss(
                    batch,
                    policy.module,
                    settings,
                    total_tokens=sum(p.tokens for p in prepared),
                    total_sequences=sum(p.sequences for p in prepared),
                )
                loss.backward()
            gradients.append(torch.cat([p.grad.flatten() for p in policy.module.parameters() if p.grad is not None]))
        torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=1e-4)


def test_importance_weights_are_truncated_masked_or_ignored() -> None:
    policy = language_policy()
    even = tokens([6, 6], 2, packed=False)
    even.advantages_N[:] = 1.0
    prepared = TokenTensors(even, torch.device("cpu"))
    exact = prepared.logprobs(policy.module, 1.0).detach().numpy()

    def loss_at(ratio: float, settings: TokenLossSettings) -> float:
        batch = tokens([6, 6], 2, packed=False)
        batch.advantages_N[:] = 1.0
        batch.logprobs_RT[np.nonzero(batch.loss_mask_RT)] = exact - np.log(ratio)
        return value(batch, policy, settings)

    assert loss_at(1.5, TokenLossSettings()) == pytest.approx(-1.5, rel=1e-4)
    assert loss_at(9.0, TokenLossSettings(importance_cap=2.0)) == pytest.approx(-2.0, rel=1e-4)
    assert loss_at(9.0, TokenLossSettings(importance="none")) == pytest.approx(-1.0, rel=1e-4)
    assert loss_at(9.0, TokenLossSettings(importance="mask")) == pytest.approx(0.0)
    assert loss_at(4.0, TokenLossSettings(importance="mask")) == pytest.approx(-4.0, rel=1e-4)
    assert loss_at(0.1, TokenLossSettings(importance="mask")) == pytest.approx(0.0)


def test_averages_weigh_tokens_or_sequences() -> None:
    policy = language_policy()
    batch = tokens([3, 10], 2, packed=False)  # 1 and 8 trained tokens
    batch.advantages_N[:] = [1.0, -1.0]
    none = {"importance": "none"}
    assert value(batch, policy, TokenLossSettings(**none)) == pytest.approx((8 - 1) / 9)  # type: ignore[arg-type]
    assert value(batch, policy, TokenLossSettings(average="sequence", **none)) == pytest.approx(0, abs=1e-6)  # type: ignore[arg-type]
    constant = TokenLossSettings(average="constant", constant_length=10, **none)  # type: ignore[arg-type]
    assert value(batch, policy, constant) == pytest.approx((8 - 1) / 20)


def test_the_clip_stops_the_gradient_on_the_rewarded_side_only() -> None:
    policy = language_policy()
    settings = TokenLossSettings(importance="none", clip_low=0.2, clip_high=0.2)
    for advantage, distance, held in ((1.0, 0.5, True), (1.0, -0.5, False), (-1.0, -0.5, True), (-1.0, 0.5, False)):
        batch = tokens([6], 2, packed=False)
        batch.advantages_N[:] = advantage
        prepared = TokenTensors(batch, torch.device("cpu"))
        old = prepared.logprobs(policy.module, 1.0).detach() - distance
        policy.module.zero_grad()
        loss, _ = token_loss(prepared, policy.module, settings, total_tokens=4, total_sequences=1, old_M=old)
        loss.backward()
        moved = any(bool(p.grad.abs().sum() > 0) for p in policy.module.parameters() if p.grad is not None)
        assert moved != held


def test_divergence_from_the_reference_is_zero_at_the_reference_only() -> None:
    policy = language_policy()
    batch = tokens([6], 2, packed=False)
    batch.advantages_N[:] = 0
    prepared = TokenTensors(batch, torch.device("cpu"))
    same = prepared.logprobs(policy.module, 1.0).detach()
    settings = TokenLossSettings(kl_coefficient=1.0)
    assert value(batch, policy, settings, reference_M=same) == pytest.approx(0.0, abs=1e-6)
    assert value(batch, policy, settings, reference_M=same - 1.0) == pytest.approx(np.exp(-1), rel=1e-3)


def test_discounted_sums_agree_with_the_plain_recursion() -> None:
    rng = np.random.default_rng(0)
    lengths = [1, 7, 500, 2, 64, 33]
    values = rng.normal(size=sum(lengths)).astype(np.float32)
    wanted = []
    start = 0
    for length in lengths:
        total, reverse = 0.0, []
        for x in values[start : start + length][::-1]:
            total = float(x) + 0.93 * total
            reverse.append(total)
        wanted += reverse[::-1]
        start += length
    found = discounted_sums(torch.from_numpy(values), torch.tensor(lengths), 0.93)
    assert found.numpy() == pytest.approx(np.array(wanted), abs=1e-4)


@pytest.mark.parametrize("kind", ["discrete", "gaussian"])
def test_episode_ends_bootstrap_only_when_cut_off(kind: str) -> None:
    policy = build(GymnasiumPolicy((3,), kind, 2))  # type: ignore[arg-type]
    assert isinstance(policy, ActorCriticPolicy)
    rng = np.random.default_rng(0)
    observations = rng.normal(size=(5, 3)).astype(np.float32)
    actions = np.zeros(5, np.int64) if kind == "discrete" else np.zeros((5, 2), np.float32)
    last = rng.normal(size=(2, 3)).astype(np.float32)
    batch = TrajectoryBatch(
        observations, actions, np.zeros(5, np.float32), np.ones(5, np.float32), np.array([2, 3]),
        np.array([1, 0], np.uint8), last,
    )  # fmt: skip
    settings = PpoLossSettings(discount=0.9, gae_lambda=1.0)
    prepared = EpisodeTensors(batch, policy.network, settings, torch.device("cpu"))
    future = policy.network.value(torch.from_numpy(last))[1].item()
    # A reward of 1 counts 0.1: values are in units of the horizon, which is 10 steps here.
    assert prepared.returns_S.tolist() == pytest.approx(
        [0.19, 0.1, 0.271 + 0.729 * future, 0.19 + 0.81 * future, 0.1 + 0.9 * future], abs=1e-4
    )
    loss, metrics = ppo_loss(prepared, torch.arange(5), policy.network, settings)
    loss.backward()
    assert torch.isfinite(metrics).all()
