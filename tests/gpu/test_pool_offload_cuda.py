"""A trainer on a shared GPU: between two turns its memory is free, and training goes on as if it had never left.

Scoring and training in turn need less of it than both at once.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest
import torch

from penstock.engines.models import LanguagePolicy, TinyLanguageModel, build
from penstock.runtime.tensors import RESIDUE_BYTES, device_bytes, free_device_caches
from penstock.train.objectives import TokenObjective
from penstock.train.settings import OptimizerSection, TokenLossSection
from penstock.train.step import Learner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

CUDA = torch.device("cuda", 0)


class Batch:
    """Random tokens, half of each row trained."""

    def __init__(self, seed: int, rows: int = 8, length: int = 64) -> None:
        rng = np.random.default_rng(seed)
        mask = np.zeros((rows, length), np.uint8)
        mask[:, length // 2 :] = 1
        self.token_ids_RT = rng.integers(3, 40, (rows, length), dtype=np.int32)
        self.position_ids_RT = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
        self.sequences_RT = np.repeat(np.arange(rows, dtype=np.int16)[:, None], length, 1)
        self.loss_mask_RT = mask
        self.logprobs_RT = (mask * -3.5).astype(np.float32)
        self.advantages_N = rng.normal(size=rows).astype(np.float32)
        self.trained_tokens_N = np.full(rows, length // 2)
        self.sample_tokens_N = self.trained_tokens_N
        self.segments_K3 = None


def learner(optim: OptimizerSection = OptimizerSection(learning_rate=1e-4)) -> Learner:
    """A few hundred MB of weights, twice that of optimiser state, and a reference."""
    spec = TinyLanguageModel(hidden_size=2048, layers=2, heads=16)
    policy, reference = build(spec), build(spec)
    assert isinstance(reference, LanguagePolicy)
    return Learner(
        TokenObjective(policy, TokenLossSection(kl_coefficient=0.1), reference=reference, packing="padded"), optim
    )


def weight_bytes(it: Learner) -> int:
    return sum(tensor.nbytes for tensor in it.policy.named_tensors().values())


@pytest.fixture(autouse=True)
def _an_empty_device() -> None:
    gc.collect()
    free_device_caches()


def test_the_device_is_free_between_turns_and_training_goes_on_exactly() -> None:
    moving, staying = learner(), learner()
    staying.onload(CUDA)
    resident_bytes = device_bytes()
    for turn in range(3):
        expected = staying.step([Batch(turn)])
        moving.onload(CUDA)
        found = moving.step([Batch(turn)])
        assert device_bytes() > 2 * resident_bytes, "two learners are on the device during a turn"
        moving.offload()
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-4)
    staying.offload()
    gc.collect()
    free_device_caches()
    assert device_bytes() <= RESIDUE_BYTES
    assert torch.cuda.memory_reserved() <= RESIDUE_BYTES
    for name, tensor in moving.policy.named_tensors().items():
        assert tensor.device.type == "cpu"
        torch.testing.assert_close(tensor, staying.policy.named_tensors()[name], rtol=1e-2, atol=1e-3)


def peak_bytes(work: Callable[[], object]) -> int:
    """The most device memory that was allocated while it ran, beyond what was there before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize(
    "optim", [OptimizerSection(learning_rate=1e-4), OptimizerSection(learning_rate=1e-4, minibatches=2)]
)
def test_scoring_and_training_in_turn_need_less_of_the_device(
    optim: OptimizerSection, capsys: pytest.CaptureFixture[str]
) -> None:
    apart, at_once = learner(optim), learner(optim)
    batches = [Batch(1), Batch(2)]
    for it in (apart, at_once):  # the optimiser's state exists from the first step on
        it.onload(CUDA)
        it.step(batches)
        it.offload()
    found: list[dict[str, float]] = []

    def everything() -> None:
        at_once.onload(CUDA)
        found.append(at_once.step(batches))
        at_once.offload()

    def score() -> None:
        apart.onload(CUDA, apart.scored_by)
        scores.extend(apart.score(batches))
        apart.offload()

    def train() -> None:
        apart.onload(CUDA, ("policy", "optimizer"))
        found.append(apart.step(batches, scores))
        apart.offload()

    scores = []
    together, scoring = peak_bytes(everything), peak_bytes(score)
    assert device_bytes() <= RESIDUE_BYTES, "the process that is let in between finds the device empty"
    training = peak_bytes(train)
    assert device_bytes() <= RESIDUE_BYTES
    weights = weight_bytes(apart)
    with capsys.disabled():
        print(  # noqa: T201 - a figure that is asked for
            f"\npeak device memory, weights of {weights >> 20} MiB: everything at once {together >> 20} MiB; "
            f"scoring {scoring >> 20} MiB, then training {training >> 20} MiB "
            f"({max(scoring, training) / together:.2f} of it)"
        )
    assert found[1] == pytest.approx(found[0], rel=1e-3, abs=1e-4)
    assert max(scoring, training) < together - 0.8 * weights, "the reference was not there while training"
