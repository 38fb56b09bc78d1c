"""Random models with the shapes of well-known ones, for the benchmarks that compute with a language model."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden": 64, "inner": 128, "layers": 2, "heads": 2, "kv_heads": 1, "vocabulary": 512},
    "7m": {"hidden": 256, "inner": 1024, "layers": 6, "heads": 4, "kv_heads": 4, "vocabulary": 32000},
    "135m": {"hidden": 576, "inner": 1536, "layers": 30, "heads": 9, "kv_heads": 3, "vocabulary": 49152},
    "0.5b": {"hidden": 896, "inner": 4864, "layers": 24, "heads": 14, "kv_heads": 2, "vocabulary": 151936},
    "7b": {"hidden": 3584, "inner": 18944, "layers": 28, "heads": 28, "kv_heads": 4, "vocabulary": 152064},
}
PAD, EOS = 0, 1


def qwen2(shape: dict[str, int], device: torch.device, dtype: torch.dtype, *, positions: int = 32768) -> Any:
    """A Qwen2 of this shape; always the same weights."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=shape["vocabulary"],
        hidden_size=shape["hidden"],
        intermediate_size=shape["inner"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        max_position_embeddings=positions,
        tie_word_embeddings=shape["hidden"] < 2048,
        pad_token_id=PAD,
        bos_token_id=PAD,
        eos_token_id=EOS,
        dtype=dtype,
    )
    torch.manual_seed(0)
    with device:
        return Qwen2ForCausalLM(config).to(dtype)  # type: ignore[arg-type]


def release(package: str) -> str:
    """Its name and version, or that it is missing."""
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"{package} (not installed)"


def spread(values: Sequence[float], form: str = ",.0f") -> str:
    """Median, and least to most."""
    median = format(statistics.median(values), form)
    return f"{median} ({format(min(values), form)} to {format(max(values), form)})" if len(values) > 1 else median
