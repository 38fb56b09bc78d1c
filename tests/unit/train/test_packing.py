"""Rows without padding, and prompts that are read once, give the numbers of one sequence per row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.batch.pack import Packing, PackSettings, TokenMicroBatch, halved, pack_tokens
from penstock.engines.models import LanguagePolicy, TinyLanguageModel, build
from penstock.errors import RunFailed
from penstock.train.attention import attend_in_forests
from penstock.train.objectives import PriorLogprobs, TokenObjective
from penstock.train.settings import OptimizerSection, TokenLossSection
from penstock.train.step import Learner

SPEC = TinyLanguageModel(alphabet="abcdef>", hidden_size=16, layers=2, heads=2, max_positions=64)


def policy() -> LanguagePolicy:
    made = build(SPEC)
    assert isinstance(made, LanguagePolicy)
    return made


def sample(prompt: list[int], completion: list[int], **more: np.ndarray) -> dict[str, np.ndarray]:
    size = len(prompt) + len(completion)
    mask = np.array([0] * len(prompt) + [1] * len(completion), np.uint8)
    token_ids = np.array(prompt + completion, np.int32)
    return {"token_ids": token_ids, "loss_mask": mask, "logprobs": np.linspace(-3, -1, size, dtype=np.float32), **more}


def groups(seed: int, sizes: list[int], prompt: int = 9, longest: int = 6) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    found = []
    for size in sizes:
        shared = rng.integers(3, 10, rng.integers(1, prompt + 1)).tolist()
        found += [sample(shared, rng.integers(3, 10, rng.integers(1, longest + 1)).tolist()) for _ in range(size)]
    return found


def branching() -> dict[str, np.ndarray]:
    """Two branches: the second goes on from the fifth token, in other words."""
    stretches = np.array([[0, 0, 8], [1, 0, 5], [1, 8, 11]], np.int32)
    one = sample([3, 4], [5, 6, 7, 8, 9, 3, 4, 5, 6])
    one["loss_mask"][8] = 0
    return one | {"branches": stretches}


def trained(samples: list[dict[str, np.ndarray]], layout: Packing, tokens: int = 1000, **loss: Any) -> dict[str, Any]:
    """Metrics, gradient and size of one step."""
    made = policy()
    objective = TokenObjective(made, TokenLossSection(entropy_coefficient=0.01), packing=layout, **loss)
    assert objective.packing == layout
    advantages = np.linspace(-1, 1, len(samples)).astype(np.float32)
    batches = pack_tokens(samples, advantages, PackSettings(micro_batch_tokens=tokens, layout=layout))
    learner = Learner(objective, OptimizerSection(name="torch.optim:SGD", learning_rate=1.0, max_grad_norm=1e9))
    before = {name: tensor.clone() for name, tensor in made.named_tensors().items()}
    metrics = learner.step(batches)
    change = {name: tensor - before[name] for name, tensor in made.named_tensors().items()}
    return {"metrics": metrics, "change": change, "tokens": sum(batch.token_ids_RT.size for batch in batches)}


def assert_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["metrics"] == pytest.approx(wanted["metrics"], rel=1e-4, abs=1e-5)
    for name, change in wanted["change"].items():
        torch.testing.assert_close(found["change"][name], change, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("layout", ["packed", "prefix"])
@pytest.mark.parametrize("loss", ["grpo", "gspo", "dr_grpo"])
def test_a_step_is_the_same(layout: Packing, loss: str) -> None:
    samples = [*groups(0, [4, 1, 3]), branching(), *groups(1, [2])]
    wanted = trained(samples, "padded", loss=loss)
    for tokens in (1000, 40):
        found = trained(samples, layout, tokens, loss=loss)
        assert_equal(found, wanted)
        assert found["tokens"] < wanted["tokens"]


@pytest.mark.parametrize("layout", ["padded", "packed", "prefix"])
@pytest.mark.parametrize("tokens", [1000, 8])
def test_a_sample_with_branches_is_one_sample_to_every_average(layout: Packing, tokens: int) -> None:
    """3 tokens of advantage 1; 8 of advantage -3 in two branches, which a pass of 8 tokens reads one by one."""
    samples = [sample([3, 4], [5, 6, 7]), branching()]
    batches = pack_tokens(samples, np.array([1.0, -3.0]), PackSettings(micro_batch_tokens=tokens, layout=layout))
    assert len(batches) == 1 or tokens == 8
    for average, expected in (("sequence", (3 - 1) / 2), ("constant", (24 - 3) / (2 * 10)), ("token", (24 - 3) / 11)):
        loss = TokenLossSection(importance="none", average=average, constant_length=10)  # type: ignore[arg-type]
        metrics = Learner(TokenObjective(policy(), loss, packing=layout), OptimizerSection()).step(batches)
        assert metrics["loss"] == pytest.approx(expected, rel=1e-5)
        assert (metrics["sequences"], metrics["tokens"]) == pytest.approx((2, 11))


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 1000), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.sampled_from([15, 60, 1000]))
def test_any_groups_give_the_same_step(seed: int, sizes: list[int], tokens: int) -> None:
    assert_equal(trained(groups(seed, sizes), "prefix", tokens), trained(groups(seed, sizes), "padded"))


def test_a_prompt_is_read_once_and_its_completions_once_each() -> None:
    prompt = list(range(3, 10)) * 5
    samples = [sample(prompt, [3, 4]), sample(prompt, [3, 5, 6]), sample(prompt, [4])]
    (batch,) = pack_tokens(samples, np.zeros(3), PackSettings(layout="prefix"))
    assert batch.segments_K3 is not None
    assert batch.token_ids_RT.shape == (1, 35 + 2 + 3 + 1)
    assert batch.segments_K3.tolist() == [[0, 35, -1], [35, 37, 0], [37, 40, 0], [40, 41, 0]]
    assert batch.position_ids_RT[0, 35:].tolist() == [35, 36, 35, 36, 37, 35]


def test_a_branch_goes_on_from_trained_tokens_that_are_trained_once() -> None:
    (batch,) = pack_tokens([branching()], np.ones(1), PackSettings(layout="prefix"))
    assert batch.segments_K3 is not None
    assert batch.segments_K3.tolist() == [[0, 5, -1], [5, 8, 0], [8, 11, 0]]
    assert batch.loss_mask_RT[0].tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 0, 1, 1]
    assert batch.sequences_RT[0].tolist() == [0] * 8 + [1] * 3


@pytest.mark.parametrize("layout", ["padded", "packed", "prefix"])
def test_halves_have_the_same_trained_tokens(layout: Packing) -> None:
    samples = [*groups(3, [3, 2]), branching()]
    (batch,) = pack_tokens(samples, np.arange(6), PackSettings(layout=layout))
    parts = halved(batch)
    assert len(parts) == 2
    wanted = batch.token_ids_RT[batch.loss_mask_RT != 0]
    chosen = np.concatenate([numbers for _, numbers in parts])
    assert sorted(chosen.tolist()) == list(range(len(wanted)))
    for part, numbers in parts:
        assert part.token_ids_RT[part.loss_mask_RT != 0].tolist() == wanted[numbers].tolist()
        assert part.trained_tokens_N.sum() == len(numbers)


@pytest.mark.parametrize("layout", ["padded", "packed", "prefix"])
def test_a_step_that_does_not_fit_goes_on_in_smaller_passes(
    layout: Packing, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    samples = [*groups(0, [4, 4]), branching()]
    wanted = trained(samples, layout)
    share = TokenObjective.share

    def cramped(self: TokenObjective, batch: Any, score: PriorLogprobs, totals: Any) -> Any:
        found = share(self, batch, score, totals)
        if batch.token_ids_RT.numel() > 45:
            found[0].backward(retain_graph=True)  # part of the gradient is there already
            raise torch.OutOfMemoryError("CUDA out of memory")
        return found

    monkeypatch.setattr(TokenObjective, "share", cramped)
    assert_equal(trained(samples, layout), wanted)
    assert "out of device memory" in caplog.text


@pytest.mark.parametrize("allowed", [True, False])
def test_activations_are_recomputed_before_passes_are_made_smaller(
    allowed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where they may be: else passes of half the tokens are what is left."""
    samples = groups(0, [4, 4])
    wanted = trained(samples, "prefix")
    share = TokenObjective.share
    computed: list[int] = []

    def cramped(self: TokenObjective, batch: Any, score: PriorLogprobs, totals: Any) -> Any:
        found = share(self, batch, score, totals)
        computed.append(batch.token_ids_RT.numel())
        if not self.policy.recomputes and computed[-1] > wanted["tokens"] / 2:
            found[0].backward(retain_graph=True)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return found

    monkeypatch.setattr(TokenObjective, "share", cramped)
    assert_equal(trained(samples, "prefix", may_recompute=allowed), wanted)
    assert ("recomputing activations from now on" in caplog.text) is allowed
    assert ("continuing with at most" in caplog.text) is not allowed
    assert (computed == [wanted["tokens"]] * 2) is allowed


@pytest.mark.parametrize("layout", ["padded", "packed", "prefix"])
@pytest.mark.parametrize("updates", [2, 3])
def test_a_step_has_as_many_updates_as_were_asked_for(layout: Packing, updates: int) -> None:
    samples = groups(0, [4, 4, 4])
    batches = pack_tokens(samples, np.ones(12), PackSettings(layout=layout, micro_batches=updates))
    tokens = [int(batch.trained_tokens_N.sum()) for batch in batches]
    assert len(batches) >= updates
    assert max(tokens) <= 0.8 * sum(tokens), "one update has nearly all"
    optimizer = OptimizerSection(minibatches=updates, epochs=2)
    owner = Learner(TokenObjective(policy(), TokenLossSection(), packing=layout), optimizer)
    assert owner.step(batches)["updates"] == 2 * updates


def test_a_sequence_that_never_fits_fails_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def cramped(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(TokenObjective, "share", cramped)
    with pytest.raises(RunFailed, match="a single sequence"):
        trained(groups(0, [2]), "prefix")


def test_a_longer_sequence_in_the_same_step_does_not_keep_passes_from_being_halved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What does not fit is a forest of 16 tokens with more keys. A single sequence of 20 tokens does fit."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, 10, 8).tolist()
    samples = [sample(prompt, rng.integers(3, 10, 2).tolist()) for _ in range(4)]
    samples.append(sample(rng.integers(3, 10, 10).tolist(), rng.integers(3, 10, 10).tolist()))
    wanted = trained(samples, "prefix", 16, may_recompute=False)
    share, fits = TokenObjective.share, []

    def cramped(self: TokenObjective, batch: Any, score: PriorLogprobs, totals: Any) -> Any:
        fits.append(int(batch.options["layout"].key_bounds[-1]) <= 25)
        if not fits[-1]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return share(self, batch, score, totals)

    monkeypatch.setattr(TokenObjective, "share", cramped)
    assert_equal(trained(samples, "prefix", 16, may_recompute=False), wanted)
    assert False in fits


def test_recomputed_activations_give_the_same_step() -> None:
    plain, checkpointed = policy(), policy()
    checkpointed.checkpoint_activations()
    batches = pack_tokens(groups(0, [3]), np.array([1.0, -1.0, 0.5]), PackSettings(layout="prefix"))
    for made in (plain, checkpointed):
        Learner(TokenObjective(made, packing="prefix"), OptimizerSection(learning_rate=1e-2)).step(batches)
    assert all(layer.training for layer in checkpointed.module.model.layers)  # type: ignore[union-attr]
    for name, tensor in plain.named_tensors().items():
        torch.testing.assert_close(checkpointed.named_tensors()[name], tensor, atol=1e-6, rtol=1e-5)


def test_models_that_cannot_are_left_alone() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    small = {"vocab_size": 12, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    windowed = MistralForCausalLM(MistralConfig(**small, **heads, sliding_window=4))  # type: ignore[arg-type]
    assert not attend_in_forests(windowed)
    assert windowed.config._attn_implementation == "sdpa"
    assert attend_in_forests(MistralForCausalLM(MistralConfig(**small, **heads, sliding_window=None)))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")
def test_grouped_heads_and_learned_positions() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    qwen = Qwen2Config(
        vocab_size=12, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    gpt2 = GPT2Config(vocab_size=12, n_embd=16, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0.1)
    samples = groups(5, [3, 2])
    for model in (Qwen2ForCausalLM(qwen), GPT2LMHeadModel(gpt2)):
        made = LanguagePolicy(model, policy().tokenizer)
        scores = []
        for layout in ("padded", "prefix"):
            objective = TokenObjective(made, packing=layout)
            batches: list[TokenMicroBatch] = pack_tokens(samples, np.ones(5), PackSettings(layout=layout))
            (prior,) = objective.score(batches, several_updates=True)
            assert prior.old_M is not None
            order = np.lexsort(_keys(batches[0]))
            scores.append(prior.old_M[order])
        torch.testing.assert_close(scores[1], scores[0], atol=1e-5, rtol=1e-5)


def _keys(batch: TokenMicroBatch) -> tuple[np.ndarray, np.ndarray]:
    """Position and advantage do not tell samples apart; their sampled log-probabilities and lengths nearly do."""
    at = np.nonzero(batch.loss_mask_RT)
    return batch.position_ids_RT[at], _sample_order(batch)[batch.sequences_RT[at]]


def _sample_order(batch: TokenMicroBatch) -> np.ndarray:
    """Padded rows stand longest first: number sequences by their tokens."""
    texts = []
    for number in range(len(batch.advantages_N)):
        own = (batch.sequences_RT == number) & (batch.loss_mask_RT != 0)
        texts.append(
            bytes(batch.token_ids_RT[own].astype(np.uint8)) + bytes(batch.position_ids_RT[own].astype(np.uint8))
        )
    return np.array([sorted(texts).index(text) for text in texts])
