"""Draws tokens: each row with its own sampling parameters, on any device, without synchronisation with the host.

Shape suffixes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engines.requests import Sampling

BLOCK = 256
"""Tokens per block in the two-level search of the cumulative distribution."""
UNDER_ONE = 1.0 - 2.0**-52


class Kind(NamedTuple):
    """The operations that at least one row needs; the others are skipped."""

    drawn: bool
    greedy: bool
    cut: bool


class SamplingParams:
    """The sampling parameters of all rows, on the device. Rows are set one by one and read together."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.temperature_B = torch.ones(rows, device=device)
        self.greedy_B = torch.zeros(rows, dtype=torch.bool, device=device)
        self.top_k_B = torch.ones(rows, dtype=torch.long, device=device)
        self.top_p_B = torch.ones(rows, device=device)
        self.min_p_B = torch.zeros(rows, device=device)

    def _all(self) -> tuple[Tensor, ...]:
        return self.temperature_B, self.greedy_B, self.top_k_B, self.top_p_B, self.min_p_B

    @classmethod
    def of(cls, samplings: Sequence[Sampling], device: torch.device) -> SamplingParams:
        params = cls(len(samplings), device)
        params.put(torch.arange(len(samplings), device=device), samplings)
        return params

    def put(self, index_B: Tensor, samplings: Sequence[Sampling]) -> None:
        columns = zip(*((one.temperature, one.greedy, one.top_k or 0, one.top_p, one.min_p) for one in samplings))  # noqa: B905
        for mine, column in zip(self._all(), columns, strict=True):
            mine[index_B] = torch.tensor(column, dtype=mine.dtype).to(mine.device)

    def keep(self, others: SamplingParams, rows: int) -> None:
        """Copies the first rows of `others`."""
        for mine, theirs in zip(self._all(), others._all(), strict=True):
            mine[:rows] = theirs[:rows]

    def move(self, source: int, target: int) -> None:
        for mine in self._all():
            mine[target] = mine[source]

    def first(self, rows: int) -> SamplingParams:
        return self._rows(slice(rows))

    def at(self, index_B: Tensor) -> SamplingParams:
        return self._rows(index_B)

    def _rows(self, index: slice | Tensor) -> SamplingParams:
        picked = object.__new__(SamplingParams)
        picked.temperature_B, picked.greedy_B = self.temperature_B[index], self.greedy_B[index]
        picked.top_k_B, picked.top_p_B, picked.min_p_B = self.top_k_B[index], self.top_p_B[index], self.min_p_B[index]
        return picked


def kind_of(samplings: Sequence[Sampling]) -> Kind:
    return Kind(
        any(not one.greedy for one in samplings),
        any(one.greedy for one in samplings),
        any(one.top_k is not None or one.top_p < 1.0 or one.min_p > 0.0 for one in samplings),
    )


def draw(logits_BV: Tensor, params: SamplingParams, kind: Kind, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Next tokens, and their log-probabilities in float32."""
    logprobs_BV = torch.log_softmax(logits_BV.float().div_(params.temperature_B[:, None]), dim=-1)
    order_BV = None
    if kind.cut:
        logprobs_BV, order_BV = _truncated(logprobs_BV, params)
    if not kind.drawn:
        chosen_B1 = logprobs_BV.argmax(-1, keepdim=True)
    elif logprobs_BV.is_cuda:
        chosen_B1 = _exponential_race(logprobs_BV, params.greedy_B[:, None] if kind.greedy else None, generator)
    else:
        chosen_B1 = _inverse_transform(logprobs_BV, generator)
        if kind.greedy:
            chosen_B1 = torch.where(params.greedy_B[:, None], logprobs_BV.argmax(-1, keepdim=True), chosen_B1)
    drawn_B = logprobs_BV.gather(-1, chosen_B1)[:, 0]
    tokens_B1 = chosen_B1 if order_BV is None else order_BV.gather(-1, chosen_B1)
    return tokens_B1[:, 0], drawn_B


def _exponential_race(logprobs_BV: Tensor, greedy_B1: Tensor | None, generator: torch.Generator) -> Tensor:
    """The index of the smallest of exponential variables, each with its probability as rate, is a draw from the
    distribution. Few kernels."""
    times_BV = torch.empty_like(logprobs_BV).exponential_(generator=generator)
    if greedy_B1 is not None:
        times_BV.masked_fill_(greedy_B1, 1.0)
    return torch.div(logprobs_BV.exp(), times_BV, out=times_BV).argmax(-1, keepdim=True)


def _inverse_transform(logprobs_BV: Tensor, generator: torch.Generator) -> Tensor:
    """Inverse transform sampling: one random number per row, searched in the cumulative probabilities; in a large
    vocabulary first among blocks, then in the block. On a CPU a random number per token, as in the exponential race,
    takes longer than a forward pass of a small model.
    """
    rows, tokens = logprobs_BV.shape
    p_BV, drawn_B1 = logprobs_BV.exp(), torch.rand((rows, 1), dtype=torch.float64, generator=generator)
    if tokens <= 2 * BLOCK:
        return _located(p_BV, drawn_B1)[0]
    p_BKL = torch.nn.functional.pad(p_BV, (0, -tokens % BLOCK)).view(rows, -1, BLOCK)
    block_B1, drawn_B1 = _located(p_BKL.sum(-1), drawn_B1)
    token_B1, _ = _located(p_BKL[torch.arange(rows), block_B1[:, 0]], drawn_B1)
    return block_B1 * BLOCK + token_B1


def _located(weights_BN: Tensor, drawn_B1: Tensor) -> tuple[Tensor, Tensor]:
    """The index of the part, of N parts with these sizes, that contains a number from [0, 1), never one of size 0; and
    the position inside it, in [0, 1)."""
    ends_BN = weights_BN.cumsum(-1, dtype=torch.float64)
    at_B1 = drawn_B1.clamp(max=UNDER_ONE) * ends_BN[:, -1:]
    part_B1 = torch.searchsorted(ends_BN, at_B1, right=True)
    return part_B1, 1 - (ends_BN.gather(-1, part_B1) - at_B1) / weights_BN.gather(-1, part_B1)


def _truncated(logprobs_BV: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Each row after `min_p`, `top_k` and `top_p`, normalised, most likely first; and the tokens in this order."""
    sorted_BV, order_BV = logprobs_BV.sort(dim=-1, descending=True)
    sorted_BV = _masked(sorted_BV, sorted_BV < sorted_BV[:, :1] + params.min_p_B[:, None].log())
    last_B1 = (params.top_k_B[:, None] - 1).clamp(0, sorted_BV.shape[-1] - 1)
    beyond_BV = sorted_BV < sorted_BV.gather(-1, last_B1)
    sorted_BV = _masked(sorted_BV, beyond_BV & (params.top_k_B > 0)[:, None])
    before_BV = sorted_BV.exp().cumsum(-1) - sorted_BV.exp()
    beyond_BV = (before_BV >= params.top_p_B[:, None]) & (params.top_p_B < 1.0)[:, None]
    return _masked(sorted_BV, beyond_BV), order_BV


def _masked(logprobs_BV: Tensor, left_out_BV: Tensor) -> Tensor:
    return torch.log_softmax(logprobs_BV.masked_fill(left_out_BV, -torch.inf), dim=-1)
