"""Compares the log-probabilities of engine and trainer, once, on samples that the weights being trained have drawn.

They are the same function of the same weights, so they differ by rounding only. A larger difference means that one of
the two computes something else: the run would train on wrong importance weights without a sign of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from penstock.batch.assemble import Sample
from penstock.errors import RunFailed

TOKENS = 8192
"""About as many tokens are compared, of the longest samples."""
EXACT_LIMIT, TF32_LIMIT, HALF_LIMIT = 0.005, 0.04, 0.15
"""The largest mean difference that rounding explains: float32 on a CPU, float32 on a GPU, 16 bits. Measured on CPUs:
1e-6 in float32, 3e-3 in bfloat16; on a GPU, for sharp random weights, up to 0.013 in float32 and 0.049 in bfloat16."""
MOST = 1.0
"""A larger difference of one token counts as this one, so that no single token decides."""


class Difference(msgspec.Struct, frozen=True):
    """Of the log-probabilities of some tokens."""

    tokens: float
    mean: float
    largest: float

    def metrics(self) -> dict[str, float]:
        return {"engine_difference_mean": self.mean, "engine_difference_max": self.largest}

    def check(self, step: int, dtype: torch.dtype, device: torch.device) -> None:
        """Raises RunFailed unless rounding explains the difference, computed in this dtype on this device."""
        exact = EXACT_LIMIT if device.type == "cpu" else TF32_LIMIT
        limit = exact if dtype in (torch.float32, torch.float64) else HALF_LIMIT
        if self.mean <= limit:
            return
        name = str(dtype).removeprefix("torch.")
        raise RunFailed(
            f"engine and trainer disagree about samples that the weights of step {step} have drawn, those being "
            f"trained: the log-probabilities of {self.tokens:.0f} tokens differ by {self.mean:.2g} on average, by up "
            f"to {self.largest:.2g}; rounding in {name} explains {limit:g}. Likely causes: logits that one of the two "
            "processes in another way (temperature, softcap, scale, top_p, options of the server), another attention "
            "(sliding window, positions), another adapter, or an engine that is quantised. Nothing was trained at this "
            "step. To train on such samples, set train.check_logprobs = false"
        )


def longest(samples: Sequence[Sample]) -> list[Sample]:
    """The longest of these samples, with about `TOKENS` tokens or environment steps; at least one if there is any."""
    chosen: list[Sample] = []
    left = TOKENS
    for sample in sorted(samples, key=lambda one: -len(one["logprobs"])):
        if chosen and len(sample["logprobs"]) > left:
            break
        chosen.append(sample)
        left -= len(sample["logprobs"])
    return chosen


def summed(differences_M: Tensor, *, one_sided: bool) -> tuple[float, float, float]:
    """Number, sum and maximum of the sizes of these differences, engine below trainer; with `one_sided` only of those
    where the engine's probability is the smaller one."""
    size_M = differences_M.double().clamp(min=0) if one_sided else differences_M.double().abs()
    size_M = torch.nan_to_num(size_M, nan=torch.inf)
    return float(len(size_M)), float(size_M.clamp(max=MOST).sum()), float(size_M.max()) if len(size_M) else 0.0
