"""The example a reader copies: short, and it really runs."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from penstock.engines.policy import PolicyEngine
from penstock.records.ids import PromptIndex, SampleId, Version
from penstock.records.payload import PayloadRef
from penstock.records.prompt import PromptLease
from penstock.rollout.io.runner import Runner, RunnerSettings
from penstock.rollout.prefetch import Bounds
from penstock.wire.messages import Delivered, Leased

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_workload.py"


class FollowsTheHint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(50.0))

    def act(self, observations: torch.Tensor, generator: torch.Generator, greedy: bool = False) -> Any:
        logprobs = torch.log_softmax(observations * self.scale, -1)
        actions = torch.multinomial(logprobs.exp(), 1, generator=generator)
        return actions[:, 0], logprobs.gather(-1, actions)[:, 0]


class Desk:
    def __init__(self) -> None:
        self.issued = 0
        self.rollouts: list[Any] = []
        self.failures: list[Any] = []

    async def lease(self, samples: int, wait_s: float) -> Leased:
        leases = []
        while samples >= 3 and self.issued < 50:
            ids = tuple(SampleId(self.issued * 3 + member) for member in range(3))
            leases.append(PromptLease(PromptIndex(self.issued), 0, ids, (0, 1, 2), Version(0)))
            self.issued += 1
            samples -= 3
        return Leased(tuple(leases), "granted" if leases else "exhausted", "running")

    async def deliver(
        self, rollouts: Sequence[Any], failures: Sequence[Any], returned: Sequence[Any], scores: Sequence[Any] = ()
    ) -> Delivered:
        self.rollouts += rollouts
        self.failures += failures
        return Delivered()


class Store:
    def __init__(self) -> None:
        self.arrays: list[dict[str, np.ndarray]] = []

    def write(self, arrays: dict[str, np.ndarray]) -> PayloadRef:
        self.arrays.append(arrays)
        return PayloadRef("ring", 0, len(self.arrays), 0, 0, 0)

    def discard(self, payloads: object) -> None:
        raise AssertionError("everything is delivered here")


async def test_the_example_workload_runs_and_pays() -> None:
    spec = importlib.util.spec_from_file_location("custom_workload", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    workload = example.BanditWorkload(example.Bandit(seed=1), PolicyEngine(FollowsTheHint(), version=2, digest="two"))
    desk, store = Desk(), Store()
    await Runner(workload, desk, store, RunnerSettings(bounds=Bounds(batch_samples=12, queue_samples=24))).run()
    assert not desk.failures
    assert len(desk.rollouts) == 150
    assert np.mean([rollout.reward for rollout in desk.rollouts]) > 0.8
    assert {(rollout.version, rollout.weights_digest) for rollout in desk.rollouts} == {(2, "two")}
    for arrays in store.arrays:
        assert arrays["observations"].shape == (1, 8)
        assert arrays["actions"].shape == arrays["logprobs"].shape == arrays["rewards"].shape == (1,)


def test_the_example_is_short_enough_to_copy() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 60
