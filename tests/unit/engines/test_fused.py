"""Norms and feed-forward parts in fewer operations: the same numbers, less kept for the gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from penstock.engines.fused import fuse

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 40,
}
IDS = torch.arange(24).reshape(2, 12)


def gradients(model: Any) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """Logits, gradients of all parameters, and the bytes that autograd kept beside them."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(input_ids=IDS, use_cache=False).logits
    logits.float().log_softmax(-1)[..., 3].sum().backward()
    return logits.detach(), [parameter.grad.clone() for parameter in model.parameters()], sum(kept.values())


@pytest.mark.parametrize(
    ("kind", "config", "fused"),
    [
        (LlamaForCausalLM, LlamaConfig, 7),
        (Qwen2ForCausalLM, Qwen2Config, 7),
        (Qwen3ForCausalLM, Qwen3Config, 11),  # its queries and keys have norms too
    ],
)
def test_fused_parts_give_the_same_numbers_and_keep_less(kind: Any, config: Any, fused: int) -> None:
    torch.manual_seed(0)
    model = kind(config(**SIZES))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    logits, before, kept_before = gradients(model)
    assert fuse(model) == fused
    found, after, kept = gradients(model)
    torch.testing.assert_close(found, logits, atol=1e-5, rtol=1e-5)
    for one, other in zip(after, before, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    assert kept < kept_before


def test_models_that_compute_otherwise_are_left_alone() -> None:
    model: Any = GemmaForCausalLM(GemmaConfig(**SIZES))  # type: ignore[arg-type]
    logits, _, _ = gradients(model)
    assert fuse(model) == 0, "its norms multiply by one plus the weight, its feed-forward parts use GELU"
    assert torch.equal(gradients(model)[0], logits)


def test_a_norm_in_another_precision_than_its_input_is_computed_as_before() -> None:
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES))  # type: ignore[arg-type]
    norm = model.model.norm
    hidden = torch.randn(4, 32, dtype=torch.bfloat16)
    expected = norm(hidden)
    fuse(model)
    assert torch.equal(norm(hidden), expected)
