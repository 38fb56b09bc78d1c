"""On-policy distillation: the student's own samples, the teacher's log-probabilities, the reverse divergence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from penstock.batch.pack import PackSettings, pack_tokens
from penstock.config.pipeline import PipelineSection
from penstock.engines.models import AdaptedPolicy, LanguagePolicy, TinyLanguageModel, adapt, build
from penstock.engines.requests import Sampling
from penstock.engines.settings import LoraSection
from penstock.engines.torch.engine import TorchEngine
from penstock.errors import ConfigError
from penstock.train.losses.tokens import Tokens, distill
from penstock.train.objectives import TokenObjective
from penstock.train.settings import OptimizerSection, TokenLossSection
from penstock.train.step import Learner


def policy(alphabet: str = "abcdef>", *, hidden: int = 16, seed: int = 0, sharpness: float = 1.0) -> LanguagePolicy:
    made = build(TinyLanguageModel(alphabet=alphabet, hidden_size=hidden, heads=2, max_positions=32, seed=seed))
    assert isinstance(made, LanguagePolicy)
    with torch.no_grad():
        made.module.get_output_embeddings().weight.mul_(sharpness)  # type: ignore[operator]
    return made


def test_by_hand() -> None:
    current, behaviour, teacher = (
        torch.tensor(row).log() for row in ([0.5, 0.2, 0.9], [0.5, 0.4, 0.3], [0.25, 0.4, 0.9])
    )
    tokens = Tokens(
        current.requires_grad_(), current.detach(), behaviour, torch.ones(3), torch.tensor([0, 0, 1]), 2, teacher
    )
    loss, metrics = distill(tokens, TokenLossSection(importance_cap=2.0))
    loss.sum().backward()
    assert current.grad is not None
    # Weights 1, 0.5 and 3, capped at 2; log π − log T is log 2, −log 2 and 0. The group's advantage has no part in it.
    assert current.grad.tolist() == pytest.approx([np.log(2), -0.5 * np.log(2), 0.0], abs=1e-6)
    assert metrics["kl_teacher"].item() == pytest.approx(0.0, abs=1e-6)
    assert metrics["capped_fraction"].item() == 1


def test_its_gradient_is_that_of_the_reverse_divergence() -> None:
    """Summed over all tokens, each as often as the student draws it."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    teacher = torch.log_softmax(torch.tensor([1.0, 0.0, -0.5, 0.2], dtype=torch.float64), -1)
    student = torch.log_softmax(logits, -1)
    (wanted,) = torch.autograd.grad((student.exp() * (student - teacher)).sum(), logits, retain_graph=True)
    tokens = Tokens(student, student.detach(), student.detach(), torch.zeros(4), torch.zeros(4).long(), 1, teacher)
    loss, _ = distill(tokens, TokenLossSection())
    (found,) = torch.autograd.grad((student.detach().exp() * loss).sum(), logits)
    assert found.tolist() == pytest.approx(wanted.tolist(), abs=1e-12)


def adapted(spread: float = 0.0) -> AdaptedPolicy:
    """One base with an adapter that changes nothing yet, or much: a teacher that another adapter can become."""
    pytest.importorskip("peft")
    made = adapt(policy(hidden=32, sharpness=8.0), LoraSection(rank=4))
    with torch.no_grad():
        for name, tensor in made.named_tensors().items():
            if ".lora_B." in name:
                tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(3)) * spread)
    return made


@pytest.mark.parametrize("adapter", [False, True])
def test_a_student_comes_nearer_to_its_teacher(adapter: bool) -> None:
    torch.set_num_threads(1)
    student, teacher = policy(), policy(hidden=32, seed=5, sharpness=25.0)
    served = policy()
    if adapter:
        student, teacher, served = adapted(), adapted(spread=0.3), adapted()
    objective = TokenObjective(student, loss="distill", packing="prefix", teacher=teacher)
    learner = Learner(objective, OptimizerSection(learning_rate=1e-2))
    engine = TorchEngine(served.module, pad_id=0, seed=0)
    distances = []
    for _ in range(30):
        served.load_tensors(student.named_tensors())
        drawn = engine.generate([[3, 4, 5, 9]], Sampling(max_new_tokens=6, stop_ids=(2,)), repeats=[32])
        samples = [
            {
                "token_ids": np.array([3, 4, 5, 9, *one.token_ids], np.int32),
                "loss_mask": np.array([0] * 4 + [1] * len(one.token_ids), np.uint8),
                "logprobs": np.array([0.0] * 4 + [*one.logprobs], np.float32),
            }
            for one in drawn
        ]
        settings = PackSettings(layout="prefix", micro_batch_tokens=64)
        distances.append(learner.step(pack_tokens(samples, np.zeros(32, np.float32), settings))["kl_teacher"])
    assert np.mean(distances[:3]) > 0.5
    assert np.mean(distances[-3:]) < 0.3 * np.mean(distances[:3])


def test_the_teacher_is_moved_with_the_reference_and_never_trained() -> None:
    teacher = policy(seed=5)
    learner = Learner(TokenObjective(policy(), loss="distill", teacher=teacher, packing="padded"))
    assert learner.scored_by == ("reference",)
    learner.onload(torch.device("meta"), ("reference",))
    assert {tensor.device.type for tensor in teacher.named_tensors().values()} == {"meta"}
    assert not [name for name in learner.state() if "teacher" in name]


def test_another_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"vocabulary of 10 tokens is not the student's of 10: 2 entries differ.*'f'"):
        TokenObjective(policy("abcdef>"), loss="distill", teacher=policy("abcdeg>"), packing="padded")
    with pytest.raises(ConfigError, match=r"needs a teacher: set train\.teacher"):
        TokenObjective(policy(), loss="distill", packing="padded")


def section(**train: Any) -> PipelineSection:
    return PipelineSection.model_validate(
        {
            "name": "letters",
            "steps": 1,
            "env": {"name": "copy"},
            "model": {"kind": "tiny"},
            "rollout": {"group_size": 1},
            "train": train,
        }
    )


def test_configurations_that_would_not_distill_are_refused() -> None:
    assert section(loss="distill", teacher="large").rollout.group_size == 1, "nothing is compared within a group"
    with pytest.raises(ValidationError, match=r"needs train\.teacher"):
        section(loss="distill")
    with pytest.raises(ValidationError, match=r"not used by train\.loss = 'grpo'"):
        section(teacher="large", advantage="own.module:function")
