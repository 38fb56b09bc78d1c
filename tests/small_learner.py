"""A small language model and batches for it, for tests of a learner."""

from __future__ import annotations

import numpy as np
import torch

from penstock.batch.pack import PackSettings, TokenMicroBatch, pack_tokens
from penstock.engines.models import LanguagePolicy, TinyLanguageModel, build

SPEC = TinyLanguageModel(alphabet="abcdef>", hidden_size=32, layers=2, heads=2, max_positions=32)


def policy(dtype: torch.dtype = torch.float32) -> LanguagePolicy:
    """The same numbers in every dtype."""
    made = build(SPEC)
    assert isinstance(made, LanguagePolicy)
    made.module.to(torch.bfloat16).to(dtype)
    return made


def batches(seed: int = 0, *, groups: int = 4, micro_batch_tokens: int = 16_384) -> list[TokenMicroBatch]:
    """Groups of four that share a prompt of six tokens, six completion tokens each, with random advantages."""
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(groups):
        prompt = rng.integers(3, 10, 6)
        for _ in range(4):
            ids = np.concatenate([prompt, rng.integers(3, 10, 6)]).astype(np.int32)
            mask = np.array([0] * 6 + [1] * 6, np.uint8)
            samples.append({"token_ids": ids, "loss_mask": mask, "logprobs": np.full(12, -2.3, np.float32)})
    settings = PackSettings(layout="prefix", micro_batch_tokens=micro_batch_tokens)
    return pack_tokens(samples, rng.normal(size=4 * groups).astype(np.float32), settings)
