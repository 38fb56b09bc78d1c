"""Fewer kernels for a decode step than the model's own code launches, with the same result.

Query heads that share keys attend in one call; with a mask, transformers would copy keys and values for every query
head at every step. Norms are fused, as in training.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from penstock.engines.fused import fuse_norms

NAME = "penstock_decode"


def use_fewer_kernels(model: nn.Module) -> None:
    """Replaces the parts of a model that these kernels support; the rest is unchanged."""
    fuse_norms(model)
    _group_attention(model)


def _group_attention(model: nn.Module) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    config: Any = model.config
    if getattr(config, "_attn_implementation", None) != "sdpa":
        return
    AttentionInterface.register(NAME, grouped_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    config._attn_implementation = NAME


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    rows, heads, tokens, width = query.shape
    if tokens != 1 or attention_mask is None or options.get("softcap") is not None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], width)
    attended = torch.nn.functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, scale=options.get("scaling")
    )
    return attended.reshape(rows, 1, heads, value.shape[-1]), None
