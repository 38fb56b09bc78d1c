"""A worker's loop with leases of training and of an evaluation in one line: own hooks, own batches, nothing leaks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from penstock.engines.models import LanguagePolicy, TinyLanguageModel, build
from penstock.engines.torch.engine import TorchEngine
from penstock.envs.tasks import Copy
from penstock.records.ids import FIRST_EVALUATION_SAMPLE, PromptIndex, SampleId, Version
from penstock.records.payload import PayloadRef
from penstock.records.prompt import PromptLease
from penstock.records.rollout import Score
from penstock.rollout.hooks import Failed, Finished, Outcome
from penstock.rollout.io.hook_calls import Evaluating
from penstock.rollout.io.language_workload import LanguageWorkload
from penstock.rollout.io.runner import Runner, RunnerSettings
from penstock.rollout.prefetch import Bounds
from penstock.rollout.settings import RolloutSection
from penstock.wire.messages import Delivered, Leased


def training(prompt: int, samples: int = 2) -> PromptLease:
    numbers = tuple(SampleId(samples * prompt + member) for member in range(samples))
    return PromptLease(PromptIndex(prompt), 0, numbers, tuple(range(samples)), Version(0))


def evaluation(prompt: int, version: int = 3) -> PromptLease:
    sample = SampleId(FIRST_EVALUATION_SAMPLE + prompt)
    return PromptLease(PromptIndex(prompt), 0, (sample,), (0,), Version(version), evaluation=Version(version))


class ControllerApi:
    """Grants everything at the first ask."""

    def __init__(self, leases: Sequence[PromptLease]) -> None:
        self.leases = tuple(leases)
        self.rollouts: list[Any] = []
        self.failures: list[Any] = []
        self.scores: list[Score] = []
        self.returned: list[SampleId] = []

    async def lease(self, samples: int, wait_s: float) -> Leased:
        leases, self.leases = self.leases, ()
        return Leased(leases, "granted" if leases else "exhausted", "running")

    async def deliver(
        self,
        rollouts: Sequence[Any],
        failures: Sequence[Any],
        returned: Sequence[SampleId],
        scores: Sequence[Score] = (),
    ) -> Delivered:
        self.rollouts += rollouts
        self.failures += failures
        self.returned += returned
        self.scores += scores
        return Delivered()


class Store:
    def __init__(self) -> None:
        self.written = 0

    def write(self, arrays: dict[str, np.ndarray]) -> PayloadRef:
        self.written += 1
        return PayloadRef("ring", 0, self.written, 0, 0, 0)

    def discard(self, payloads: Sequence[PayloadRef]) -> None:
        raise AssertionError("nothing was to be discarded")


class Serving:
    def __init__(self, version: int) -> None:
        self.version = version


class Toy:
    """Notes what it generates; may swap the weights while it does."""

    def __init__(self, serving: Serving, swaps_to: int | None = None, breaks: bool = False) -> None:
        self.serving = serving
        self.swaps_to = swaps_to
        self.breaks = breaks
        self.batches: list[list[int]] = []
        self.preflights = 0

    def preflight(self) -> None:
        self.preflights += 1

    def prepare(self, lease: PromptLease) -> PromptLease:
        return lease

    def collate(self, prepared: Sequence[PromptLease]) -> list[PromptLease]:
        return list(prepared)

    def generate(self, batch: Sequence[PromptLease]) -> list[int]:
        self.batches.append([lease.prompt for lease in batch])
        began = self.serving.version
        if self.swaps_to is not None:
            self.serving.version = self.swaps_to
        return [began for _ in batch]

    def postprocess(self, prepared: PromptLease, generated: int) -> list[Outcome]:
        if self.breaks:
            return [Failed("no") for _ in prepared.samples]
        arrays = {"number": np.array([1])}
        return [Finished(arrays, float(prepared.prompt), Version(generated), "d", 7) for _ in prepared.samples]


def run(
    controller: ControllerApi,
    store: Store,
    workload: Any,
    evaluating: Evaluating | None,
    prefetch: bool = True,
    batch_samples: int = 8,
) -> None:
    bounds = Bounds(batch_samples=batch_samples, queue_samples=64)
    runner = Runner(
        workload,
        controller,
        store,
        RunnerSettings(drain_s=10.0, bounds=bounds, prefetch=prefetch),
        evaluating=evaluating,
    )
    asyncio.run(runner.run())


@pytest.mark.parametrize("prefetch", [False, True])
def test_evaluations_have_hooks_and_batches_of_their_own_and_no_payload(prefetch: bool):
    leases = [training(0), evaluation(0), evaluation(1), training(1), training(2), evaluation(2)]
    controller, store, serving = ControllerApi(leases), Store(), Serving(3)
    trains, evaluates = Toy(serving), Toy(serving)
    kept: list[tuple[int, int]] = []
    evaluating = Evaluating(evaluates, serving, lambda lease, member, made: kept.append((lease.prompt, made.version)))
    run(controller, store, trains, evaluating, prefetch)
    assert trains.preflights == evaluates.preflights == 1
    assert (trains.batches, evaluates.batches) == ([[0], [1, 2]], [[0, 1], [2]])
    assert (store.written, len(controller.rollouts)) == (6, 6)
    assert sorted(controller.scores, key=lambda score: score.sample) == [
        Score(SampleId(FIRST_EVALUATION_SAMPLE + prompt), Version(3), Version(3), "d", float(prompt), 7)
        for prompt in range(3)
    ]
    assert sorted(kept) == [(0, 3), (1, 3), (2, 3)]


def test_a_score_says_if_the_weights_changed_while_it_was_made():
    controller, serving = ControllerApi([evaluation(0)]), Serving(3)
    run(controller, Store(), Toy(serving), Evaluating(Toy(serving, swaps_to=4), serving))
    assert (controller.scores[0].version, controller.scores[0].newest) == (3, 4)


def test_a_sample_of_an_evaluation_that_failed_is_reported_as_one():
    controller, serving = ControllerApi([evaluation(0)]), Serving(3)
    run(controller, Store(), Toy(serving), Evaluating(Toy(serving, breaks=True), serving))
    assert [failure.sample for failure in controller.failures] == [FIRST_EVALUATION_SAMPLE]
    assert controller.scores == []


def test_an_evaluation_without_a_configuration_for_it_costs_that_lease():
    controller = ControllerApi([evaluation(0), training(0)])
    run(controller, Store(), Toy(Serving(3)), None)
    assert "its configuration has none" in controller.failures[0].error
    assert len(controller.rollouts) == 2


def test_greedy_evaluations_leave_no_trace_in_training_samples():
    """Beside an evaluation the same engine makes as many training samples as without one, and draws them."""
    torch.set_num_threads(1)
    environment = Copy()

    def drawn(leases: list[PromptLease]) -> tuple[list[Any], list[Score]]:
        policy = build(TinyLanguageModel(hidden_size=16, layers=1, heads=2, alphabet=environment.alphabet))
        assert isinstance(policy, LanguagePolicy)
        engine = TorchEngine(policy.module, pad_id=policy.tokenizer.pad_id, seed=5, version=3, digest="d")
        controller = ControllerApi(leases)
        settings = RolloutSection(max_new_tokens=4)
        workload = LanguageWorkload(environment, engine, policy.tokenizer, settings)
        held_out = LanguageWorkload(Copy(seed=1), engine, policy.tokenizer, settings, greedy=True)
        tokens: list[Any] = []

        class Tokens(Store):
            def write(self, arrays: dict[str, np.ndarray]) -> PayloadRef:
                tokens.append(arrays["token_ids"].tolist())
                return super().write(arrays)

        run(controller, Tokens(), workload, Evaluating(held_out, engine), batch_samples=4)
        assert controller.failures == []
        return tokens, controller.scores

    without, _ = drawn([training(0, 4), training(1, 4)])
    beside, scores = drawn([training(0, 4), evaluation(0), evaluation(1), training(1, 4)])
    assert len(beside) == len(without) == 8
    assert len({tuple(sample) for sample in beside}) > 2, "training samples are drawn"
    _, again = drawn([evaluation(0), evaluation(1)])
    assert [score.reward for score in again] == [score.reward for score in scores]
