"""Classes by import path, what they are given, and where their memory lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from penstock.config.pipeline import PipelineSection
from penstock.train import checkpoint
from penstock.train.objectives import TokenObjective
from penstock.train.settings import OptimizerSection
from penstock.train.step import Learner
from small_learner import batches, policy


def learner(dtype: torch.dtype = torch.float32, **settings: Any) -> Learner:
    options: dict[str, Any] = {"learning_rate": 1e-3, "max_grad_norm": 0.05} | settings
    return Learner(TokenObjective(policy(dtype), packing="prefix"), OptimizerSection(**options))


def steps(it: Learner, first: int, end: int) -> list[dict[str, float]]:
    """In several micro-batches, whose gradients are summed; they are long enough to be clipped."""
    metrics = [it.step(batches(step, micro_batch_tokens=40)) for step in range(first, end)]
    assert all(one["grad_norm"] > 0.05 for one in metrics)
    return metrics


def everything(it: Learner) -> dict[str, torch.Tensor]:
    moments = {name: tensor for name, tensor in it.state().items() if not name.startswith("master/")}
    return {name: tensor.clone() for name, tensor in (it.policy.named_tensors() | moments).items()}


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_on_the_host_is_the_same_update(dtype: torch.dtype, tmp_path: Path) -> None:
    plain, offloaded = learner(dtype), learner(dtype, offload=True)
    assert steps(plain, 0, 3) == steps(offloaded, 0, 3)
    assert_equal(everything(plain), everything(offloaded))
    resumed = learner(dtype)
    checkpoint.load(checkpoint.save(tmp_path, offloaded), resumed)
    steps(plain, 3, 4)
    steps(resumed, 3, 4)
    assert_equal(everything(plain), everything(resumed))


def test_masters_and_moments_stay_on_the_host_if_they_are_told_to() -> None:
    it = learner(torch.bfloat16, offload=True)
    steps(it, 0, 1)
    it.onload(torch.device("meta"))
    assert {tensor.device.type for tensor in it.policy.named_tensors().values()} == {"meta"}
    assert {tensor.device.type for tensor in it.state().values()} == {"cpu"}


def test_adam_updates_in_one_pass_unless_it_is_told_otherwise() -> None:
    def passes(**settings: Any) -> Any:
        return learner(**settings)._optimizer._inner.param_groups[0].get("fused")

    assert passes()
    assert passes(name="torch.optim:Adam")
    assert not passes(options={"foreach": True})
    assert not passes(name="torch.optim:SGD")


@pytest.mark.parametrize("name", ["torch.optim:SGD", "torch.optim:Adafactor", "torch.optim:RMSprop"])
def test_classes_are_given_the_keys_that_they_take(name: str, tmp_path: Path) -> None:
    straight, first, second = (learner(torch.bfloat16, name=name) for _ in range(3))
    steps(straight, 0, 3)
    steps(first, 0, 2)
    checkpoint.load(checkpoint.save(tmp_path, first), second)
    steps(second, 2, 3)
    assert_equal(everything(straight), everything(second))


def test_adafactor_keeps_next_to_nothing() -> None:
    it = learner(torch.bfloat16, name="torch.optim:Adafactor")
    steps(it, 0, 1)
    kept = sum(tensor.numel() for name, tensor in it.state().items() if not name.startswith("master/"))
    assert kept < 0.1 * it.policy.parameter_count()


def test_offloading_is_for_one_rank() -> None:
    table = {"name": "a", "steps": 1, "env": {"name": "copy"}, "model": {"kind": "tiny"}}
    for train in ({"ranks": 2}, {"fsdp": True}):
        with pytest.raises(ValidationError, match=r"optimizer\.offload is for one rank"):
            PipelineSection.model_validate(table | {"train": train, "optimizer": {"offload": True}})
        with pytest.raises(ValidationError, match="needs whole matrices"):
            PipelineSection.model_validate(table | {"train": train, "optimizer": {"name": "torch.optim:Adafactor"}})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_learner_that_moves_off_its_device_keeps_no_gradient(dtype: torch.dtype) -> None:
    """A gradient that was left behind would hold device memory, and would count in the next update."""
    stray, plain = learner(dtype), learner(dtype)
    work = stray.objective.prepare(batches(7), stray.score(batches(7)), torch.device("cpu"))
    for loss, _ in work.losses(np.arange(work.units), work.totals):
        loss.backward()
    held = [p.grad for p in stray.policy.module.parameters()] + list(stray._optimizer._sums.values())
    assert any(gradient is not None for gradient in held)
    stray.offload()
    assert all(p.grad is None for p in stray.policy.module.parameters())
    assert not stray._optimizer._sums
    for one in (stray, plain):
        one.step(batches(1))
    for found, wanted in zip(stray.policy.module.parameters(), plain.policy.module.parameters(), strict=True):
        assert torch.equal(found, wanted)
