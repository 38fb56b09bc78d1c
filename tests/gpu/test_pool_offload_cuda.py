"""A trainer between two turns: its GPU memory is really free, and training goes on as if it had never left."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from penstock.roles.turns import RESIDUE_BYTES
from penstock.train.loss import TokenLossSettings
from penstock.train.model import LanguagePolicy, TinyLanguageModel, build
from penstock.train.step import Learner, OptimSettings

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

CUDA = torch.device("cuda")


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
        self.packed = False


def learner() -> Learner:
    """About 100 MB of weights, twice that of optimiser state, and a reference."""
    policy, reference = (build(TinyLanguageModel(hidden_size=1024, layers=2, heads=8)) for _ in range(2))
    assert isinstance(policy, LanguagePolicy)
    assert isinstance(reference, LanguagePolicy)
    return Learner(policy, TokenLossSettings(kl_coefficient=0.1), OptimSettings(), reference=reference)


def test_the_device_is_free_between_turns_and_training_goes_on_exactly() -> None:
    moving, staying = learner(), learner()
    staying.onload(CUDA)
    resident_bytes = staying.device_bytes()
    for turn in range(3):
        expected = staying.step([Batch(turn)])
        moving.onload(CUDA)
        found = moving.step([Batch(turn)])
        assert moving.device_bytes() > 2 * resident_bytes, "two learners are on the device during a turn"
        moving.offload()
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    staying.offload()
    gc.collect()
    torch.cuda.empty_cache()
    assert moving.device_bytes() <= RESIDUE_BYTES
    assert torch.cuda.memory_reserved() <= RESIDUE_BYTES
    for name, tensor in moving.policy.named_tensors().items():
        assert tensor.device.type == "cpu"
        torch.testing.assert_close(tensor, staying.policy.named_tensors()[name], rtol=1e-3, atol=1e-5)
