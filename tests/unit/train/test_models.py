from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.engines.models import (
    ActorCriticPolicy,
    GymnasiumPolicy,
    LanguagePolicy,
    PretrainedLanguageModel,
    TinyLanguageModel,
    build,
)
from penstock.engines.tokenizer import FILE_NAME, CharacterTokenizer, load_tokenizer
from penstock.errors import ConfigError


def test_the_character_tokenizer_round_trips_and_leaves_special_tokens_out(tmp_path: Path) -> None:
    tokenizer = CharacterTokenizer("abc>")
    ids = tokenizer.encode("cab>")
    assert tokenizer.decode([tokenizer.pad_id, tokenizer.bos_id, *ids, tokenizer.eos_id]) == "cab>"
    assert max(ids) == tokenizer.vocabulary_size - 1
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).encode("cab>") == ids


def test_mistakes_in_text_alphabet_and_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'z'"):
        CharacterTokenizer("abc").encode("az")
    for alphabet in ("", "aba"):
        with pytest.raises(ConfigError, match="alphabet"):
            CharacterTokenizer(alphabet)
    for content in (b"{}", b'{"alphabet": "\xff"}'):
        (tmp_path / FILE_NAME).write_bytes(content)
        with pytest.raises(ConfigError, match="damaged"):
            load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "spec",
    [
        TinyLanguageModel(alphabet="ab", hidden_size=16, heads=2, layers=1),
        GymnasiumPolicy((4,), "discrete", 2),
        GymnasiumPolicy((2, 3), "gaussian", 2),
    ],
)
def test_a_spec_gives_the_same_numbers_every_time(spec: TinyLanguageModel | GymnasiumPolicy) -> None:
    global_state = torch.random.get_rng_state()
    first, second = build(spec).named_tensors(), build(spec).named_tensors()
    assert torch.equal(global_state, torch.random.get_rng_state())
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_tied_tensors_are_listed_once() -> None:
    names = build(TinyLanguageModel(alphabet="ab", hidden_size=16, heads=2, layers=1)).named_tensors().keys()
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_loading_changes_everything_or_nothing() -> None:
    spec = GymnasiumPolicy((4,), "discrete", 2)
    policy = build(spec)
    before = {name: tensor.clone() for name, tensor in policy.named_tensors().items()}
    changed = {name: tensor + 1 for name, tensor in before.items()}
    missing = dict(list(changed.items())[1:])
    misshapen = changed | {next(iter(changed)): torch.zeros(1)}
    for wrong in (missing, misshapen, changed | {"surplus": torch.zeros(1)}):
        with pytest.raises(ConfigError, match="another model"):
            policy.load_tensors(wrong)
        assert all(torch.equal(before[name], tensor) for name, tensor in policy.named_tensors().items())
    policy.load_tensors(changed)
    assert all(torch.equal(changed[name], tensor) for name, tensor in policy.named_tensors().items())


def test_a_saved_directory_opens_as_a_model(tmp_path: Path) -> None:
    import safetensors.torch

    policy = build(TinyLanguageModel(alphabet="abc>", hidden_size=16, heads=2, layers=2))
    policy.save_config(tmp_path)
    safetensors.torch.save_file(policy.named_tensors(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    reopened = build(PretrainedLanguageModel(str(tmp_path)))
    assert isinstance(reopened, LanguagePolicy)
    assert reopened.tokenizer.encode("cab") == [5, 3, 4]
    ids = torch.tensor([[3, 4, 5, 6]])
    assert torch.equal(policy.module(input_ids=ids).logits, reopened.module(input_ids=ids).logits)


@pytest.mark.parametrize("content", [None, "config.json"])
def test_a_bad_model_path_is_a_config_error(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "model"
    if content:
        path.mkdir()
        (path / content).write_text("{}")
    with pytest.raises(ConfigError, match="model"):
        build(PretrainedLanguageModel(str(path)))


def test_hidden_size_and_heads_must_agree() -> None:
    with pytest.raises(ConfigError, match="multiple"):
        build(TinyLanguageModel(alphabet="ab", hidden_size=10, heads=4))


@pytest.mark.parametrize("kind", ["discrete", "gaussian"])
def test_actions_come_with_their_own_logprobs(kind: str) -> None:
    policy = build(GymnasiumPolicy((4,), kind, 3))  # type: ignore[arg-type]
    assert isinstance(policy, ActorCriticPolicy)
    observations = torch.from_numpy(np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32))
    actions, logprobs = policy.network.act(observations, torch.Generator().manual_seed(1))
    again, _ = policy.network.act(observations, torch.Generator().manual_seed(1))
    assert torch.equal(actions, again)
    torch.testing.assert_close(logprobs, policy.network.distribution(observations).log_prob(actions).detach())
    greedy, greedy_logprobs = policy.network.act(observations, torch.Generator(), greedy=True)
    assert bool((greedy_logprobs >= logprobs - 1e-6).all())
    assert greedy.shape == actions.shape


def test_noise_is_drawn_on_the_device_of_its_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a device it is made on the CPU, which the generator of a GPU refuses."""
    policy = build(GymnasiumPolicy((4,), "gaussian", 2))
    assert isinstance(policy, ActorCriticPolicy)
    randn, asked = torch.randn, []

    def recorded(*shape: Any, **options: Any) -> torch.Tensor:
        asked.append(options.get("device"))
        return randn(*shape, **options)

    monkeypatch.setattr(torch, "randn", recorded)
    generator = torch.Generator()
    policy.network.act(torch.zeros(3, 4), generator)
    assert asked == [generator.device]


def test_attention_that_plans_for_every_shape_is_not_used() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    build(TinyLanguageModel(alphabet="ab", hidden_size=16, heads=2, layers=1))
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_the_scale_of_returns_that_are_alike_and_far_from_zero_is_their_spread() -> None:
    torch.manual_seed(0)
    policy = build(GymnasiumPolicy((3,), "discrete", 2))
    assert isinstance(policy, ActorCriticPolicy)
    network: Any = policy.module
    observations = torch.randn(8, 3)
    network.observe_returns(100 + 0.01 * torch.randn(4096))
    values = network.value(observations)
    for _ in range(40):
        network.observe_returns(100 + 0.01 * torch.randn(4096))
    assert network.return_mean == pytest.approx(100, abs=1e-2)
    assert network.return_std == pytest.approx(0.01, rel=0.1), "a difference of squares is noise here"
    torch.testing.assert_close(network.value(observations), values, atol=1e-3, rtol=0)
    network.observe_returns(torch.full((4096,), 100.0) + 1e-5 * torch.randn(4096))
    assert network.return_std >= 1e-4
