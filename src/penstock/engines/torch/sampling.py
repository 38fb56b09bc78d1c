"""How tokens are drawn: each row in its own way, the same on every device, without a word to the host.

Shape suffixes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engines.requests import Sampling

BLOCK = 256
"""Tokens whose probabilities are summed together before one of them is looked for."""
UNDER_ONE = 1.0 - 2.0**-52


class Kind(NamedTuple):
    """What some of the rows need; what none of them needs costs nothing."""

    drawn: bool
    greedy: bool
    cut: bool


class Ways:
    """How each row is sampled, on the device. Rows are set one by one and read together."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.temperature_B = torch.ones(rows, device=device)
        self.greedy_B = torch.zeros(rows, dtype=torch.bool, device=device)
        self.top_k_B = torch.ones(rows, dtype=torch.long, device=device)
        self.top_p_B = torch.ones(rows, device=device)
        self.min_p_B = torch.zeros(rows, device=device)

    def _all(self) -> tuple[Tensor, ...]:
        return self.temperature_B, self.greedy_B, self.top_k_B, self.top_p_B, self.min_p_B

    @classmethod
    def of(cls, samplings: Sequence[Sampling], device: torch.device) -> Ways:
        ways = cls(len(samplings), device)
        ways.put(torch.arange(len(samplings), device=device), samplings)
        return ways

    def put(self, index_B: Tensor, samplings: Sequence[Sampling]) -> None:
        columns = zip(*((one.temperature, one.greedy, one.top_k or 0, one.top_p, one.min_p) for one in samplings))  # noqa: B905
        for mine, column in zip(self._all(), columns, strict=True):
            mine[index_B] = torch.tensor(column, dtype=mine.dtype).to(mine.device)

    def keep(self, others: Ways, rows: int) -> None:
        """The first rows of others."""
        for mine, theirs in zip(self._all(), others._all(), strict=True):
            mine[:rows] = theirs[:rows]

    def move(self, source: int, target: int) -> None:
        for mine in self._all():
            mine[target] = mine[source]

    def first(self, rows: int) -> Ways:
        return self._picked(slice(rows))

    def at(self, index_B: Tensor) -> Ways:
        return self._picked(index_B)

    def _picked(self, index: slice | Tensor) -> Ways:
        picked = object.__new__(Ways)
        picked.temperature_B, picked.greedy_B = self.temperature_B[index], self.greedy_B[index]
        picked.top_k_B, picked.top_p_B, picked.min_p_B = self.top_k_B[index], self.top_p_B[index], self.min_p_B[index]
        return picked


def kind_of(samplings: Sequence[Sampling]) -> Kind:
    return Kind(
        any(not one.greedy for one in samplings),
        any(one.greedy for one in samplings),
        any(one.top_k is not None or one.top_p < 1.0 or one.min_p > 0.0 for one in samplings),
    )


def draw(logits_BV: Tensor, ways: Ways, kind: Kind, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Next tokens, and the log-probabilities of drawing them in float32."""
    logprobs_BV = torch.log_softmax(logits_BV.float().div_(ways.temperature_B[:, None]), dim=-1)
    order_BV = None
    if kind.cut:
        logprobs_BV, order_BV = _cut(logprobs_BV, ways)
    if not kind.drawn:
        chosen_B1 = logprobs_BV.argmax(-1, keepdim=True)
    elif logprobs_BV.is_cuda:
        chosen_B1 = _raced(logprobs_BV, ways.greedy_B[:, None] if kind.greedy else None, generator)
    else:
        chosen_B1 = _looked_up(logprobs_BV, generator)
        if kind.greedy:
            chosen_B1 = torch.where(ways.greedy_B[:, None], logprobs_BV.argmax(-1, keepdim=True), chosen_B1)
    drawn_B = logprobs_BV.gather(-1, chosen_B1)[:, 0]
    tokens_B1 = chosen_B1 if order_BV is None else order_BV.gather(-1, chosen_B1)
    return tokens_B1[:, 0], drawn_B


def _raced(logprobs_BV: Tensor, greedy_B1: Tensor | None, generator: torch.Generator) -> Tensor:
    """The least of exponential times, each with its probability as rate, is a draw from them. Few kernels."""
    times_BV = torch.empty_like(logprobs_BV).exponential_(generator=generator)
    if greedy_B1 is not None:
        times_BV.masked_fill_(greedy_B1, 1.0)
    return torch.div(logprobs_BV.exp(), times_BV, out=times_BV).argmax(-1, keepdim=True)


def _looked_up(logprobs_BV: Tensor, generator: torch.Generator) -> Tensor:
    """One random number for each row, looked up in the sums of its probabilities: of many tokens first among blocks,
    then in the block. A random number for each token, as in a race, takes a CPU longer than a small model's pass.
    """
    rows, tokens = logprobs_BV.shape
    p_BV, drawn_B1 = logprobs_BV.exp(), torch.rand((rows, 1), dtype=torch.float64, generator=generator)
    if tokens <= 2 * BLOCK:
        return _place(p_BV, drawn_B1)[0]
    p_BKL = torch.nn.functional.pad(p_BV, (0, -tokens % BLOCK)).view(rows, -1, BLOCK)
    block_B1, drawn_B1 = _place(p_BKL.sum(-1), drawn_B1)
    token_B1, _ = _place(p_BKL[torch.arange(rows), block_B1[:, 0]], drawn_B1)
    return block_B1 * BLOCK + token_B1


def _place(weights_BN: Tensor, drawn_B1: Tensor) -> tuple[Tensor, Tensor]:
    """In which of N parts of these sizes a number from [0, 1) falls, never in one of size 0; and where in it, from
    [0, 1) again."""
    ends_BN = weights_BN.cumsum(-1, dtype=torch.float64)
    at_B1 = drawn_B1.clamp(max=UNDER_ONE) * ends_BN[:, -1:]
    part_B1 = torch.searchsorted(ends_BN, at_B1, right=True)
    return part_B1, 1 - (ends_BN.gather(-1, part_B1) - at_B1) / weights_BN.gather(-1, part_B1)


def _cut(logprobs_BV: Tensor, ways: Ways) -> tuple[Tensor, Tensor]:
    """What `min_p`, `top_k` and `top_p` leave of each row, normalised again, likeliest first; and its tokens."""
    sorted_BV, order_BV = logprobs_BV.sort(dim=-1, descending=True)
    sorted_BV = _without(sorted_BV, sorted_BV < sorted_BV[:, :1] + ways.min_p_B[:, None].log())
    last_B1 = (ways.top_k_B[:, None] - 1).clamp(0, sorted_BV.shape[-1] - 1)
    beyond_BV = sorted_BV < sorted_BV.gather(-1, last_B1)
    sorted_BV = _without(sorted_BV, beyond_BV & (ways.top_k_B > 0)[:, None])
    before_BV = sorted_BV.exp().cumsum(-1) - sorted_BV.exp()
    beyond_BV = (before_BV >= ways.top_p_B[:, None]) & (ways.top_p_B < 1.0)[:, None]
    return _without(sorted_BV, beyond_BV), order_BV


def _without(logprobs_BV: Tensor, left_out_BV: Tensor) -> Tensor:
    return torch.log_softmax(logprobs_BV.masked_fill(left_out_BV, -torch.inf), dim=-1)
