from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
import torch

from penstock.batch.pack import TokenMicroBatch, TrajectoryBatch
from penstock.engines.models import ActorCriticPolicy, GymnasiumPolicy, LanguagePolicy, TinyLanguageModel, build
from penstock.train.losses.ppo import EpisodeTensors, discounted_sums, ppo_loss
from penstock.train.losses.tokens import Tokens, cispo, dppo, grpo, gspo, reinforce
from penstock.train.objectives import PriorLogprobs, TokenObjective, Totals
from penstock.train.scores import TokenTensors, chunked_scores
from penstock.train.settings import PpoLossSection, TokenLossSection

SPEC = TinyLanguageModel(alphabet="abcdef>", hidden_size=16, layers=2, heads=2, max_positions=64)


def language_policy() -> LanguagePolicy:
    policy = build(SPEC)
    assert isinstance(policy, LanguagePolicy)
    return policy


def tokens(lengths: list[int], prompt: int, seed: int = 0) -> TokenMicroBatch:
    """Random sequences, as if sampled by a uniform policy."""
    rng = np.random.default_rng(seed)
    rows = [rng.integers(3, 10, length) for length in lengths]
    shape = (len(lengths), max(lengths))
    batch = TokenMicroBatch(
        np.zeros(shape, np.int32),
        np.zeros(shape, np.int32),
        np.full(shape, -1, np.int16),
        np.zeros(shape, np.uint8),
        np.zeros(shape, np.float32),
        np.linspace(-1, 1, len(lengths)).astype(np.float32),
        np.array([length - prompt for length in lengths]),
        np.array([length - prompt for length in lengths]),
    )
    for index, row in enumerate(rows):
        at = (index, slice(0, len(row)))
        batch.token_ids_RT[at] = row
        batch.position_ids_RT[at] = np.arange(len(row))
        batch.sequences_RT[at] = index
        batch.loss_mask_RT[at] = np.arange(len(row)) >= prompt
        batch.logprobs_RT[at] = np.where(np.arange(len(row)) >= prompt, -np.log(10.0), 0)
    return batch


def value(batch: TokenMicroBatch, policy: LanguagePolicy, settings: TokenLossSection, **more: torch.Tensor) -> float:
    prepared = TokenTensors(batch, torch.device("cpu"))
    totals = Totals(prepared.tokens, prepared.samples)
    reference = policy if settings.kl_coefficient else None
    loss, _ = TokenObjective(policy, settings, reference=reference, packing="padded").share(
        prepared, PriorLogprobs(**more), totals
    )
    return loss.item()


def test_logprobs_are_those_of_a_plain_forward_pass() -> None:
    policy = language_policy()
    batch = tokens([7, 5], 3)
    found = TokenTensors(batch, torch.device("cpu")).scores(policy.module, 0.7)[0]
    wanted = []
    for row, length in enumerate([7, 5]):
        ids = torch.from_numpy(batch.token_ids_RT[row : row + 1, :length].astype(np.int64))
        log_p = torch.log_softmax(policy.module(input_ids=ids).logits[0] / 0.7, -1)
        wanted += [log_p[t - 1, ids[0, t]] for t in range(3, length)]
    torch.testing.assert_close(found, torch.stack(wanted), atol=1e-5, rtol=1e-5)


def test_the_gradient_does_not_depend_on_micro_batches() -> None:
    policy = language_policy()
    whole = tokens([6, 9, 4, 7], 2)
    for average in ("token", "sequence", "constant"):
        settings = TokenLossSection(average=average, constant_length=9, entropy_coefficient=0.01)  # type: ignore[arg-type]
        gradients = []
        for parts in ([[0, 1, 2, 3]], [[0], [1, 2], [3]]):
            policy.module.zero_grad()
            prepared = []
            for rows in parts:
                part = {name: value[rows] for name, value in asdict(whole).items() if isinstance(value, np.ndarray)}
                renumbered = np.arange(len(rows), dtype=np.int16)[:, None]
                part["sequences_RT"] = np.where(part["sequences_RT"] < 0, -1, renumbered).astype(np.int16)
                prepared.append(TokenTensors(TokenMicroBatch(**part), torch.device("cpu")))
            for batch in prepared:
                totals = Totals(sum(p.tokens for p in prepared), sum(p.samples for p in prepared))
                loss, _ = TokenObjective(policy, settings, packing="padded").share(batch, PriorLogprobs(), totals)
                loss.backward()
            gradients.append(torch.cat([p.grad.flatten() for p in policy.module.parameters() if p.grad is not None]))
        torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=1e-4)


def test_importance_weights_are_truncated_masked_or_ignored() -> None:
    policy = language_policy()
    even = tokens([6, 6], 2)
    even.advantages_N[:] = 1.0
    prepared = TokenTensors(even, torch.device("cpu"))
    exact = prepared.scores(policy.module, 1.0)[0].detach().numpy()

    def loss_at(ratio: float, settings: TokenLossSection) -> float:
        batch = tokens([6, 6], 2)
        batch.advantages_N[:] = 1.0
        batch.logprobs_RT[np.nonzero(batch.loss_mask_RT)] = exact - np.log(ratio)
        return value(batch, policy, settings)

    assert loss_at(1.5, TokenLossSection()) == pytest.approx(-1.5, rel=1e-4)
    assert loss_at(9.0, TokenLossSection(importance_cap=2.0)) == pytest.approx(-2.0, rel=1e-4)
    assert loss_at(9.0, TokenLossSection(importance="none")) == pytest.approx(-1.0, rel=1e-4)
    assert loss_at(9.0, TokenLossSection(importance="mask")) == pytest.approx(0.0)
    assert loss_at(4.0, TokenLossSection(importance="mask")) == pytest.approx(-4.0, rel=1e-4)
    assert loss_at(0.1, TokenLossSection(importance="mask")) == pytest.approx(0.0)


def test_averages_weigh_tokens_or_sequences() -> None:
    policy = language_policy()
    batch = tokens([3, 10], 2)  # 1 and 8 trained tokens
    batch.advantages_N[:] = [1.0, -1.0]
    none = {"importance": "none"}
    assert value(batch, policy, TokenLossSection(**none)) == pytest.approx((8 - 1) / 9)  # type: ignore[arg-type]
    assert value(batch, policy, TokenLossSection(average="sequence", **none)) == pytest.approx(0, abs=1e-6)  # type: ignore[arg-type]
    constant = TokenLossSection(average="constant", constant_length=10, **none)  # type: ignore[arg-type]
    assert value(batch, policy, constant) == pytest.approx((8 - 1) / 20)


def test_the_clip_stops_the_gradient_on_the_rewarded_side_only() -> None:
    policy = language_policy()
    settings = TokenLossSection(importance="none", clip_low=0.2, clip_high=0.2)
    for advantage, distance, held in ((1.0, 0.5, True), (1.0, -0.5, False), (-1.0, -0.5, True), (-1.0, 0.5, False)):
        batch = tokens([6], 2)
        batch.advantages_N[:] = advantage
        prepared = TokenTensors(batch, torch.device("cpu"))
        old = prepared.scores(policy.module, 1.0)[0].detach() - distance
        policy.module.zero_grad()
        loss, _ = TokenObjective(policy, settings, packing="padded").share(
            prepared, PriorLogprobs(old_M=old), Totals(4, 1)
        )
        loss.backward()
        moved = any(bool(p.grad.abs().sum() > 0) for p in policy.module.parameters() if p.grad is not None)
        assert moved != held


def test_divergence_from_the_reference_is_zero_at_the_reference_only() -> None:
    policy = language_policy()
    batch = tokens([6], 2)
    batch.advantages_N[:] = 0
    prepared = TokenTensors(batch, torch.device("cpu"))
    same = prepared.scores(policy.module, 1.0)[0].detach()
    settings = TokenLossSection(kl_coefficient=1.0)
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
    torch.nn.init.normal_(policy.network.critic[-1].weight)  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    observations = rng.normal(size=(5, 3)).astype(np.float32)
    actions = np.zeros(5, np.int64) if kind == "discrete" else np.zeros((5, 2), np.float32)
    last = rng.normal(size=(2, 3)).astype(np.float32)
    batch = TrajectoryBatch(
        observations, actions, np.zeros(5, np.float32), np.ones(5, np.float32), np.array([2, 3]),
        np.array([1, 0], np.uint8), last,
    )  # fmt: skip
    settings = PpoLossSection(discount=0.9, gae_lambda=1.0)
    prepared = EpisodeTensors(batch, policy.network, settings, torch.device("cpu"))
    future = policy.network.value(torch.from_numpy(last))[1].item()
    assert future != 0
    assert prepared.returns_S.tolist() == pytest.approx(
        [1.9, 1.0, 2.71 + 0.729 * future, 1.9 + 0.81 * future, 1.0 + 0.9 * future], abs=1e-4
    )
    undiscounted = PpoLossSection(discount=1.0, gae_lambda=1.0)  # a time limit is then an end like any other
    assert EpisodeTensors(batch, policy.network, undiscounted, torch.device("cpu")).returns_S.tolist() == pytest.approx(
        [2.0, 1.0, 3.0, 2.0, 1.0], abs=1e-4
    )
    loss, metrics = ppo_loss(prepared, torch.arange(5), policy.network, settings)
    loss.backward()
    assert all(torch.isfinite(value) for value in metrics.values())


def test_a_discount_of_one_keeps_the_rewards() -> None:
    policy = build(GymnasiumPolicy((3,), "discrete", 2))
    assert isinstance(policy, ActorCriticPolicy)
    rewards, lengths, ended = np.array([1.0, 0.0, 2.0], np.float32), np.array([2, 1]), np.array([1, 1], np.uint8)
    states, last = np.zeros((3, 3), np.float32), np.zeros((2, 3), np.float32)
    batch = TrajectoryBatch(states, np.zeros(3, np.int64), np.zeros(3, np.float32), rewards, lengths, ended, last)
    settings = PpoLossSection(discount=1.0, gae_lambda=1.0)
    prepared = EpisodeTensors(batch, policy.network, settings, torch.device("cpu"))
    assert prepared.returns_S.tolist() == pytest.approx([1.0, 0.0, 2.0])


def hand_made(current: list[float], old: list[float], behaviour: list[float], advantage: list[float]) -> Tokens:
    """Tokens with these probabilities; the first two are one sequence, the rest another."""
    logs = [torch.tensor(values).log() for values in (current, old, behaviour)]
    sequence = torch.tensor([0, 0] + [1] * (len(current) - 2))
    return Tokens(logs[0].requires_grad_(), logs[1], logs[2], torch.tensor(advantage), sequence, 2)


def test_grpo_by_hand() -> None:
    tokens = hand_made([0.3, 0.1, 0.2, 0.6], [0.2, 0.2, 0.2, 0.1], [0.1, 0.2, 0.8, 0.1], [1.0, -1.0, 2.0, -1.0])
    loss, metrics = grpo(tokens, TokenLossSection())
    # Ratios 1.5, 0.5, 1, 6; weights 2, 1, 0.25, 1. The first two are clipped, at 1.28 and 0.8.
    assert loss.tolist() == pytest.approx([-2 * 1.28, 0.8, -0.25 * 2, 6.0], rel=1e-5)
    assert metrics["clip_fraction"].item() == 2
    held, metrics = grpo(tokens, TokenLossSection(dual_clip=3.0))
    assert held.tolist() == pytest.approx([-2 * 1.28, 0.8, -0.25 * 2, 3.0], rel=1e-5)
    assert metrics["clip_fraction"].item() == 3


def test_gspo_by_hand() -> None:
    tokens = hand_made([0.4, 0.1, 0.3, 0.3], [0.1, 0.1, 0.3, 0.3], [0.1, 0.1, 0.3, 0.1], [1.0, 1.0, -1.0, -1.0])
    loss, metrics = gspo(tokens, TokenLossSection(clip_high=0.5))
    # The first ratio is sqrt(4 · 1) = 2, clipped to 1.5; the second's is 1, its weights 1 and 3, capped to 2
    assert loss.tolist() == pytest.approx([-1.5, -1.5, 1, 2], rel=1e-5)
    assert metrics["clip_fraction"].item() == 2
    assert metrics["capped_fraction"].item() == 1
    loss.sum().backward()
    assert tokens.current_M.grad is not None
    assert tokens.current_M.grad.tolist() == pytest.approx([0, 0, 1.5, 1.5], rel=1e-5)
    dropped, _ = gspo(tokens, TokenLossSection(clip_high=0.5, importance="mask", mask_high=2.5))
    assert dropped.tolist() == pytest.approx([-1.5, -1.5, 1, 0], rel=1e-5)


def test_cispo_by_hand() -> None:
    tokens = hand_made([0.3, 0.1, 0.8, 0.6], [0.3, 0.1, 0.8, 0.6], [0.1, 0.2, 0.8, 0.4], [1.0, -1.0, 2.0, -1.0])
    loss, metrics = cispo(tokens, TokenLossSection(importance_cap=2.0))
    loss.sum().backward()
    assert tokens.current_M.grad is not None
    assert tokens.current_M.grad.tolist() == pytest.approx([-2.0, 0.5, -2.0, 1.5], rel=1e-5)
    assert metrics["capped_fraction"].item() == 1


def test_reinforce_by_hand() -> None:
    tokens = hand_made([0.3, 0.1, 0.8, 0.6], [0.3, 0.1, 0.8, 0.6], [0.1, 0.2, 0.8, 0.4], [1.0, -1.0, 2.0, -1.0])
    loss, metrics = reinforce(tokens, TokenLossSection(importance="truncate", importance_cap=2.0))
    loss.sum().backward()
    assert tokens.current_M.grad is not None
    assert tokens.current_M.grad.tolist() == pytest.approx([-2.0, 0.5, -2.0, 1.5], rel=1e-5)
    assert metrics["capped_fraction"].item() == 1


def test_the_trust_region_of_dppo_by_hand() -> None:
    tokens = hand_made([0.5, 0.1, 0.5, 0.1], [0.5, 0.1, 0.5, 0.1], [0.2, 0.4, 0.2, 0.4], [1.0, -1.0, -1.0, 1.0])
    loss, metrics = dppo(tokens, TokenLossSection(importance_cap=9.0))
    loss.sum().backward()
    assert tokens.current_M.grad is not None
    # 0.3 too probable and to be more so, 0.3 too improbable and to be less so: masked. The way back is open.
    assert tokens.current_M.grad.tolist() == pytest.approx([0, 0, 2.5, -0.25], rel=1e-5)
    assert metrics["clip_fraction"].item() == 2


def test_a_loss_is_found_by_name_or_by_path() -> None:
    from penstock.train.losses.tokens import resolve

    assert resolve("dr_grpo")[1] == "constant"
    assert resolve("penstock.train.losses.tokens:grpo") == (grpo, "token")


def test_dr_grpo_divides_by_the_longest_completion() -> None:
    policy = language_policy()
    batch = tokens([3, 10], 2)  # 1 and 8 trained tokens
    batch.advantages_N[:] = [1.0, -1.0]
    prepared = TokenTensors(batch, torch.device("cpu"))
    objective = TokenObjective(
        policy, TokenLossSection(importance="none"), loss="dr_grpo", longest=16, packing="padded"
    )
    loss, _ = objective.share(prepared, PriorLogprobs(), Totals(9, 2))
    assert loss.item() == pytest.approx((8 - 1) / (2 * 16))


def test_branches_of_a_sample_count_as_one_sample() -> None:
    """A sample of 1 and 8 trained tokens in two branches, in one micro-batch or two, weighs as one of 9."""
    policy = language_policy()
    batch = tokens([3, 10], 2)
    batch.advantages_N[:] = 1.0
    batch.sample_tokens_N[:] = 9
    prepared = TokenTensors(batch, torch.device("cpu"))
    assert prepared.samples == pytest.approx(1.0)
    settings = TokenLossSection(importance="none", average="sequence")
    assert value(batch, policy, settings) == pytest.approx(-1.0, rel=1e-5)


@pytest.mark.parametrize("tau", [1.0, 0.7])
@pytest.mark.parametrize("chunk_bytes", [1, 4 * 50 * 7, 1 << 20])
def test_chunked_scores_are_the_dense_ones(tau: float, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.train.scores.CHUNK_BYTES", chunk_bytes)
    torch.manual_seed(0)
    inputs = [torch.randn(23, 8), torch.randn(50, 8), torch.randn(50)]
    target = torch.randint(0, 50, (23,))
    by_logprob, by_entropy = torch.randn(23), torch.randn(23)
    gradients = []
    for dense in (True, False):
        hidden, weight, bias = (tensor.clone().requires_grad_() for tensor in inputs)
        if dense:
            log_p = torch.log_softmax((hidden @ weight.T + bias) / tau, -1)
            scores = log_p.gather(-1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
        else:
            scores = chunked_scores(hidden, weight, bias, target, tau)
        (by_logprob * scores[0] + by_entropy * scores[1]).sum().backward()
        gradients.append([*(s.detach() for s in scores), hidden.grad, weight.grad, bias.grad])
    for wanted, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_entropy_without_a_gradient_costs_none() -> None:
    hidden, weight = torch.randn(5, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    target = torch.arange(5)
    chunked_scores(hidden, weight, None, target, 1.0)[0].sum().backward()
    log_p = torch.log_softmax(hidden.detach().requires_grad_() @ weight.detach().T, -1)
    assert hidden.grad is not None
    assert log_p.shape == (5, 9)
    wanted = (torch.nn.functional.one_hot(target, 9) - log_p.exp()) @ weight.detach()
    torch.testing.assert_close(hidden.grad, wanted.detach(), atol=1e-5, rtol=1e-5)
