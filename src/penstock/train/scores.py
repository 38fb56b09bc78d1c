"""Log-probabilities and entropies of the trained tokens of a micro-batch, without logits of all tokens in memory.

The language-model head is applied to a chunk of tokens at a time, forward and backward. Only hidden states and a few
numbers per token are kept for the gradient; the logits of a chunk are recomputed. The head runs inside the model's own
forward call, so that everything attached to that call (sharded parameters, adapters) works as usual.

Shape suffixes: R rows, T tokens in a row, M trained tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from penstock.batch.pack import TokenMicroBatch
from penstock.engines.architecture import miniature, tried_once
from penstock.errors import ConfigError
from penstock.train.attention import row_options

log = logging.getLogger(__name__)

CHUNK_BYTES = 256 << 20
"""Size of a chunk of float32 logits; the backward pass has up to three such arrays."""


class TokenTensors:
    """A token micro-batch on the training device, reduced to what predicts a trained token."""

    def __init__(self, batch: TokenMicroBatch, device: torch.device) -> None:
        self.token_ids_RT = torch.from_numpy(batch.token_ids_RT.astype(np.int64)).to(device)
        rows, columns = np.nonzero(batch.loss_mask_RT)
        sequence_M = batch.sequences_RT[rows, columns].astype(np.int64)
        # Columns that predict no trained token are never projected.
        kept, kept_M = np.unique(_predictors(columns, batch.segments_K3), return_inverse=True)
        self.kept_columns = torch.from_numpy(kept).to(device)
        self.row_M = torch.from_numpy(rows).to(device)
        self.kept_M = torch.from_numpy(kept_M).to(device)
        self.target_M = torch.from_numpy(batch.token_ids_RT[rows, columns].astype(np.int64)).to(device)
        self.behaviour_M = torch.from_numpy(batch.logprobs_RT[rows, columns]).to(device)
        self.advantage_M = torch.from_numpy(batch.advantages_N[sequence_M]).to(device)
        self.sequence_M = torch.from_numpy(sequence_M).to(device)
        self.sample_tokens_M = torch.from_numpy(batch.sample_tokens_N[sequence_M].astype(np.float32)).to(device)
        self.sequences = len(batch.trained_tokens_N)
        self.tokens = len(rows)
        self.samples = batch.samples
        # Padding follows each row's tokens, so the causal mask alone excludes it.
        self.options: dict[str, Any] = {}
        if batch.segments_K3 is not None:
            self.options |= row_options(batch.segments_K3, device)
            self.options["position_ids"] = torch.from_numpy(batch.position_ids_RT.astype(np.int64)).to(device)

    def scores(self, module: nn.Module, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probability of each trained token, and entropy of the distribution it was drawn from."""
        head = output_head(module)
        if head is None:
            logits_MV = self._kept(self._call(module))[self.row_M, self.kept_M].float() / temperature
            log_p_MV = torch.log_softmax(logits_MV, dim=-1)
            logprobs_M = log_p_MV.gather(-1, self.target_M[:, None]).squeeze(-1)
            return logprobs_M, -(log_p_MV.exp() * log_p_MV).sum(-1)

        found: list[Tensor] = []

        def project(hidden_RKH: Tensor) -> Tensor:
            hidden_MH = self._kept(hidden_RKH)[self.row_M, self.kept_M]
            found.extend(chunked_scores(hidden_MH, head.weight, head.bias, self.target_M, temperature))
            return found[0]

        with _forward_replaced(head, project):
            logprobs_M = self._call(module)
        return logprobs_M, found[1]

    def _call(self, module: nn.Module) -> Tensor:
        options = self.options | ({"logits_to_keep": self.kept_columns} if _keeps_columns(module) else {})
        return module(input_ids=self.token_ids_RT, use_cache=False, **options).logits

    def _kept(self, states: Tensor) -> Tensor:
        """The columns to keep, of a model that may not have selected them itself."""
        return states if states.shape[1] == len(self.kept_columns) else states[:, self.kept_columns]


def _predictors(columns: np.ndarray, segments_K3: np.ndarray | None) -> np.ndarray:
    """The column whose logits predict each of these: the one before, or the last one of the parent segment."""
    if segments_K3 is None:
        return columns - 1
    starts, _, parents = segments_K3.T
    segment = np.searchsorted(starts, columns, side="right") - 1
    first = columns == starts[segment]
    return np.where(first, segments_K3[parents[segment], 1] - 1, columns - 1)


def output_head(module: nn.Module) -> nn.Linear | None:
    """The language-model head; None if logits are not exactly its output."""
    model: Any = module
    head = model.get_output_embeddings()
    return head if type(head) is nn.Linear and head_gives_logits(module) else None


_GIVES_LOGITS: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def head_gives_logits(module: nn.Module) -> bool:
    """Whether a model's logits are the output of its head, and nothing caps, scales or shifts them afterwards. Tried
    out on a miniature of it; False if there is none."""
    if module not in _GIVES_LOGITS:
        _GIVES_LOGITS[module] = _head_of_config_gives_logits(module.config)
    return _GIVES_LOGITS[module]


@tried_once
def _head_of_config_gives_logits(config: Any) -> bool:
    try:
        return _returns_what_the_head_returns(miniature(config))
    except ConfigError as error:
        log.info("trained with all logits in memory: %s", error)
        return False


def _returns_what_the_head_returns(model: Any) -> bool:
    returned: list[Tensor] = []

    def answer(hidden: Tensor) -> Tensor:
        returned.append(torch.randn(*hidden.shape[:2], 8, generator=torch.Generator().manual_seed(0)) * 30)
        return returned[0]

    ids = torch.arange(3, 9)[None]
    with torch.no_grad(), _forward_replaced(model.get_output_embeddings(), answer):
        logits = model(input_ids=ids, use_cache=False).logits
    return len(returned) == 1 and torch.equal(logits, returned[0])


def _keeps_columns(module: nn.Module) -> bool:
    model: Any = module
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return "logits_to_keep" in inspect.signature(type(base).forward).parameters


@contextmanager
def _forward_replaced(module: nn.Module, forward: Any) -> Iterator[None]:
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def chunked_scores(
    hidden_MH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, target_M: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """float32 log-probability of each target and entropy of each distribution softmax((hidden · weight + bias) / τ)."""
    return _ChunkedScores.apply(hidden_MH, weight_VH, bias_V, target_M, temperature)  # type: ignore[return-value]


class _ChunkedScores(torch.autograd.Function):
    """With z the tempered logits and p their softmax:

    d log p_y / d z = 1_y − p,    d H / d z = −p (log p + H)
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_MH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, target_M: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        logprobs_M = hidden_MH.new_empty(len(hidden_MH), dtype=torch.float32)
        entropy_M, lse_M = torch.empty_like(logprobs_M), torch.empty_like(logprobs_M)
        for part in _chunks(len(hidden_MH), len(weight_VH)):
            logits_CV = _logits(hidden_MH[part], weight_VH, bias_V, temperature)
            first_C = logits_CV[:, 0].clone()
            log_p_CV = torch.log_softmax(logits_CV, dim=-1, out=logits_CV)
            lse_M[part] = first_C - log_p_CV[:, 0]
            logprobs_M[part] = log_p_CV.gather(-1, target_M[part, None]).squeeze(-1)
            entropy_M[part] = -torch.linalg.vecdot(log_p_CV.exp(), log_p_CV)
        ctx.save_for_backward(hidden_MH, weight_VH, bias_V, target_M, lse_M, entropy_M)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logprobs_M, entropy_M

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_MH, weight_VH, bias_V, target_M, lse_M, entropy_M = ctx.saved_tensors
        by_logprob_M, by_entropy_M = gradients
        by_logprob_M = torch.zeros_like(lse_M) if by_logprob_M is None else by_logprob_M / ctx.temperature
        by_entropy_M = None if by_entropy_M is None else by_entropy_M / ctx.temperature
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        hidden_gradient = torch.empty_like(hidden_MH) if needs_hidden else None
        # Summed over chunks, so in float32 for all dtypes of weights.
        weight_gradient = torch.zeros_like(weight_VH, dtype=torch.float32) if needs_weight else None
        bias_gradient = torch.zeros_like(bias_V, dtype=torch.float32) if needs_bias else None
        for part in _chunks(len(hidden_MH), len(weight_VH)):
            log_p_CV = _logits(hidden_MH[part], weight_VH, bias_V, ctx.temperature).sub_(lse_M[part, None])
            if by_entropy_M is None:
                gradient_CV = log_p_CV.exp_().mul_(-by_logprob_M[part, None])
            else:
                p_CV = log_p_CV.exp()
                factor_CV = log_p_CV.add_(entropy_M[part, None]).mul_(-by_entropy_M[part, None])
                gradient_CV = p_CV.mul_(factor_CV.sub_(by_logprob_M[part, None]))
            gradient_CV.scatter_add_(1, target_M[part, None], by_logprob_M[part, None])
            if bias_gradient is not None:
                bias_gradient += gradient_CV.sum(0)
            gradient_CV = gradient_CV.to(weight_VH.dtype)
            if hidden_gradient is not None:
                hidden_gradient[part] = gradient_CV @ weight_VH
            if weight_gradient is not None:
                weight_gradient += gradient_CV.T @ hidden_MH[part].to(weight_VH.dtype)
        cast = None if weight_gradient is None else weight_gradient.to(weight_VH.dtype)
        bias_cast = None if bias_gradient is None or bias_V is None else bias_gradient.to(bias_V.dtype)
        return hidden_gradient, cast, bias_cast, None, None


def _chunks(tokens: int, vocabulary: int) -> Iterator[slice]:
    size = max(1, CHUNK_BYTES // (4 * vocabulary))
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


def _logits(hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, temperature: float) -> Tensor:
    """float32 [C, V]."""
    hidden_CH = hidden_CH.to(weight_VH.dtype)
    if weight_VH.is_cuda and weight_VH.dtype is not torch.float32:
        logits = torch.mm(hidden_CH, weight_VH.T, out_dtype=torch.float32)  # keep the float32 sums
    else:
        logits = (hidden_CH @ weight_VH.T).float()
    if bias_V is not None:
        logits += bias_V
    return logits if temperature == 1.0 else logits.div_(temperature)
