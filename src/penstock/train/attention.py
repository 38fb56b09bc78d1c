"""Attention over a row of sequences without padding, in which sequences may share a prefix.

A row is a forest of segments. The tokens of a segment attend to all tokens of its ancestors, and to those of their
own segment up to themselves. So the prompt of a group is computed once, and each completion continues it.

On a GPU in bfloat16 this is one call of torch's variable-length flash attention: the keys of a segment are gathered
behind those of its ancestors, and the causal mask is aligned to the end of the keys. Elsewhere segments of the same
shape share a call of `scaled_dot_product_attention`.

Shape suffixes: H heads, T tokens, D width of a head, K segments.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from penstock.engines.architecture import TOLERANCE, miniature, text_config, tried_once
from penstock.errors import ConfigError

log = logging.getLogger(__name__)

NAME = "penstock_forest"


@dataclass(frozen=True, slots=True)
class Bucket:
    """Segments with equal numbers of queries and of keys."""

    queries_KQ: Tensor
    keys_KC: Tensor
    mask_QC: Tensor | None
    """None for the plain causal mask."""


class Forest:
    """The attention structure of a row, made of segments [first token, token after the last, parent or -1].

    They cover the row in order, parents first.
    """

    def __init__(self, segments_K3: np.ndarray, device: torch.device) -> None:
        self._device = device
        self._chains: list[np.ndarray] = []
        """For each segment, the tokens it attends to: those of its ancestors and its own."""
        for start, end, parent in segments_K3.tolist():
            own = np.arange(start, end)
            self._chains.append(own if parent < 0 else np.concatenate([self._chains[parent], own]))
        self._lengths = segments_K3[:, 1] - segments_K3[:, 0]
        keys = np.array([len(chain) for chain in self._chains])
        shared = bool((segments_K3[:, 2] >= 0).any())
        self.keys = torch.from_numpy(np.concatenate(self._chains)).to(device) if shared else None
        """The keys of all segments, one segment after the other; None if no segment has ancestors."""
        self.query_bounds = _bounds(self._lengths, device)
        self.key_bounds = _bounds(keys, device)
        self.longest_query = int(self._lengths.max())
        self.longest_keys = int(keys.max())

    @cached_property
    def buckets(self) -> tuple[list[Bucket], Tensor]:
        """All segments by shape, and the position of each token of the row in them."""
        shapes: dict[tuple[int, int], list[np.ndarray]] = {}
        for queries, chain in zip(self._lengths.tolist(), self._chains, strict=True):
            shapes.setdefault((queries, len(chain)), []).append(chain)
        found: list[Bucket] = []
        visited: list[np.ndarray] = []
        for (queries, keys), chains in shapes.items():
            mask = None
            if queries != keys:
                mask = torch.ones(queries, keys, dtype=torch.bool, device=self._device).tril(keys - queries)
            all_keys = np.stack(chains)
            own = all_keys[:, keys - queries :]
            visited.append(own.ravel())
            own_index, key_index = (torch.from_numpy(index).to(self._device) for index in (own, all_keys))
            found.append(Bucket(own_index, key_index, mask))
        return found, torch.from_numpy(np.argsort(np.concatenate(visited))).to(self._device)


def attend_in_forests(module: nn.Module) -> bool:
    """Makes a model attend according to its `layout`. Returns False and changes nothing if the model cannot."""
    model: Any = module
    if not _may_attend(model) or not _attends(model.config):
        return False
    _attend_with_ours(model)
    return True


def _may_attend(model: Any) -> bool:
    config = text_config(model)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    special = windowed or getattr(config, "attn_logit_softcapping", None) is not None
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return not special and kinds == {"full_attention"} and getattr(base, "_supports_attention_backend", False)


def _attend_with_ours(model: Any) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)  # for calls without a layout
    text_config(model)._attn_implementation = NAME


@tried_once
def _attends(config: Any) -> bool:
    """Whether a miniature of this config gives two sequences with a common beginning in one row the logits that it
    gives each of them alone. Some models do not pass the layout on."""
    try:
        model: Any = miniature(config)
    except ConfigError as error:
        log.info("several sequences per row are not tried out: %s", error)
        return False
    ids = torch.arange(10, 34)[None]
    parts = [[*range(8), *range(8, 16)], [*range(8), *range(16, 24)]]
    with torch.no_grad():
        alone = [model(input_ids=ids[:, part], use_cache=False).logits[0, 8:] for part in parts]
        _attend_with_ours(model)
        options = row_options(np.array([[0, 8, -1], [8, 16, 0], [16, 24, 0]]), torch.device("cpu"))
        positions = torch.tensor([[*range(16), *range(8, 16)]])
        together = model(input_ids=ids, position_ids=positions, use_cache=False, **options).logits[0, 8:]
    return torch.allclose(together, torch.cat(alone), atol=TOLERANCE, rtol=0)


def row_options(segments_K3: np.ndarray, device: torch.device) -> dict[str, Any]:
    """Arguments of the model for a row of segments."""
    # A mask of four dimensions is not replaced by the model; its content is not read.
    mask = torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=device)
    return {"layout": Forest(segments_K3, device), "attention_mask": mask}


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    layout: Forest | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function of a layer: [1, H, T, D] in, [1, T, H, D] out."""
    if layout is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **options)
        return out, None
    grouped = query.shape[1] != key.shape[1]
    if _flash_supports(query):
        return _flash(query, key, value, layout, scaling)[None], None
    parts: list[Tensor] = []
    buckets, order_T = layout.buckets
    for bucket in buckets:
        q, k, v = (
            states[0][:, index].transpose(0, 1)
            for states, index in ((query, bucket.queries_KQ), (key, bucket.keys_KC), (value, bucket.keys_KC))
        )
        causal = bucket.mask_QC is None
        part = scaled_dot_product_attention(
            q, k, v, attn_mask=bucket.mask_QC, is_causal=causal, scale=scaling, enable_gqa=grouped
        )
        parts.append(part.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts)[order_T][None], None


def _flash_supports(query: Tensor) -> bool:
    width = query.shape[-1]
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and width <= 256 and width % 8 == 0


def _flash(query: Tensor, key: Tensor, value: Tensor, layout: Forest, scaling: float | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    causal = _causal_options()
    if "scale" in causal:
        causal |= {"scale": scaling}
    q, k, v = (states[0].transpose(0, 1).contiguous() for states in (query, key, value))
    if layout.keys is not None:
        k, v = k[layout.keys], v[layout.keys]
    bounds = layout.query_bounds, layout.key_bounds
    out = varlen_attn(q, k, v, *bounds, layout.longest_query, layout.longest_keys, **causal)
    assert isinstance(out, Tensor)
    return out


@cache
def _flash_parameters() -> tuple[str, ...]:
    from torch.nn.attention.varlen import varlen_attn

    return tuple(inspect.signature(varlen_attn).parameters)


def _causal_options() -> dict[str, Any]:
    """Arguments with which this torch aligns the causal mask to the end of the keys."""
    taken = _flash_parameters()
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in taken else {"is_causal": True}
    return options | {name: value for name, value in (("enable_gqa", True), ("scale", None)) if name in taken}


def _bounds(lengths: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(device)
