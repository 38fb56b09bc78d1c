"""An adapter alone is trained, published, checkpointed and served; the base is there once and never changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import small_learner
from penstock.engines.models import AdaptedPolicy, adapt
from penstock.engines.requests import Sampling
from penstock.engines.settings import LoraSection
from penstock.engines.torch.engine import TorchEngine
from penstock.errors import ConfigError
from penstock.train import checkpoint
from penstock.train.objectives import TokenObjective
from penstock.train.settings import OptimizerSection, TokenLossSection
from penstock.train.step import Learner
from small_learner import batches

pytest.importorskip("peft")


def policy() -> AdaptedPolicy:
    return adapt(small_learner.policy(), LoraSection(rank=4, alpha=8.0))


def learner(made: AdaptedPolicy) -> Learner:
    objective = TokenObjective(made, TokenLossSection(kl_coefficient=0.1), packing="prefix", reference=made.base())
    return Learner(objective, OptimizerSection(learning_rate=1e-2))


def test_only_the_adapter_is_trained_and_the_reference_is_the_base() -> None:
    made = policy()
    names = set(made.named_tensors())
    assert names
    assert all(".lora_" in name for name in names)
    everything = {name: p.detach().clone() for name, p in made.module.named_parameters()}
    owner = learner(made)
    divergences = [owner.step(batches())["kl_reference"] for _ in range(4)]
    assert divergences[0] == pytest.approx(0, abs=1e-6)
    assert divergences[-1] > 1e-5
    changed = {name for name, p in made.module.named_parameters() if not torch.equal(p, everything[name])}
    assert changed == names


def test_an_engine_serves_versions_of_the_adapter() -> None:
    trained, served = policy(), policy()
    engine = TorchEngine(served.module, pad_id=served.tokenizer.pad_id, seed=0)
    assert engine.served_tensors().keys() == trained.named_tensors().keys()
    owner = learner(trained)
    for _ in range(3):
        owner.step(batches())
    engine.stage(trained.named_tensors())
    engine.swap(3, "digest")
    (drawn,) = engine.generate([[3, 4, 5]], Sampling(max_new_tokens=6))
    ids = torch.tensor([[3, 4, 5, *drawn.token_ids.tolist()]])
    with torch.no_grad():
        log_p = torch.log_softmax(trained.module(input_ids=ids).logits[0], -1)
    wanted = [float(log_p[at - 1, ids[0, at]]) for at in range(3, ids.shape[1])]
    assert drawn.logprobs.tolist() == pytest.approx(wanted, abs=1e-5)


def test_a_checkpoint_holds_the_adapter_and_goes_on_exactly(tmp_path: Path) -> None:
    straight, first, second = learner(policy()), learner(policy()), learner(policy())
    for step in range(4):
        straight.step(batches(step))
    for step in range(2):
        first.step(batches(step))
    saved = checkpoint.save(tmp_path, first)
    assert (saved.directory / "adapter_config.json").is_file()
    checkpoint.load(saved, second)
    for step in range(2, 4):
        second.step(batches(step))
    for name, tensor in straight.policy.named_tensors().items():
        assert torch.equal(second.policy.named_tensors()[name], tensor)


def test_unknown_targets_are_named() -> None:
    made = small_learner.policy()
    with pytest.raises(ConfigError, match="nowhere"):
        adapt(made, LoraSection(targets=["nowhere"]))


def test_it_is_saved_as_peft_and_transformers_open_it(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    plain = small_learner.policy()
    plain.module.save_pretrained(tmp_path / "base")  # type: ignore[operator]
    made = policy()
    owner = learner(made)
    for step in range(3):
        owner.step(batches(step))
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        wanted = made.module(input_ids=ids).logits
        assert not torch.allclose(plain.module(input_ids=ids).logits, wanted, atol=1e-3)
    for name in ("adapter", "merged"):
        (tmp_path / name).mkdir()
    made.save_adapter(tmp_path / "adapter", str(tmp_path / "base"))
    made.save_merged(tmp_path / "merged")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        for opened in (adapted, merged):
            assert torch.allclose(opened(input_ids=ids).logits, wanted, atol=1e-5)
