"""Norms and gated feed-forward layers of a decoder, with fewer memory passes and fewer saved activations.

transformers writes an RMS norm as seven operations, of which autograd saves float32 copies; torch has one operation
that saves its input. Of `silu(gate) * up` autograd saves both the silu and the gate; the silu is cheap to recompute.
Only modules whose code equals that of Llama's are changed, which most families share. Results differ by rounding only.
"""

from __future__ import annotations

import inspect
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu


def fuse(module: nn.Module) -> int:
    """Changes the forward pass of a transformers model; returns the number of changed modules."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    gated = [part for part in _alike(module, LlamaMLP) if "silu" in type(part.act_fn).__name__.lower()]
    for part in gated:
        part.forward = partial(_feed_forward, part)
    return fuse_norms(module) + len(gated)


def fuse_norms(module: nn.Module) -> int:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norms = _alike(module, LlamaRMSNorm)
    for part in norms:
        part.forward = partial(_norm, part)
    return len(norms)


def _alike(module: nn.Module, kind: type[nn.Module]) -> list[nn.Module]:
    return [part for part in module.modules() if _code(type(part)) == _code(kind)]


@cache
def _code(kind: type[nn.Module]) -> str:
    """The source of its forward pass; empty if it is not available."""
    try:
        return inspect.getsource(kind.forward)
    except (OSError, TypeError):
        return ""


def _norm(module: Any, hidden_states: Tensor) -> Tensor:
    if module.weight.dtype != hidden_states.dtype:
        return type(module).forward(module, hidden_states)
    return rms_norm(hidden_states, module.weight.shape, module.weight, module.variance_epsilon)


def _feed_forward(module: Any, x: Tensor) -> Tensor:
    return module.down_proj(_GatedSilu.apply(module.gate_proj(x), module.up_proj(x)))


class _GatedSilu(torch.autograd.Function):
    """silu(gate) · up. The backward pass recomputes silu(gate)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        [gradient] = gradients
        return torch.ops.aten.silu_backward(gradient * up, gate), gradient * silu(gate)
