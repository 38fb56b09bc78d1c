"""The other rank of an engine of two. Apart from its tests: a process that is spawned imports this by name."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.engines.torch.shards import ShardGroup, Shards

CPU = torch.device("cpu")
ROWS, CACHE_TOKENS = 6, 512


def model(seed: int) -> Any:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "max_position_embeddings": 128,
    }
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=97, tie_word_embeddings=True, **sizes, **heads))


def follow(store: str, end: socket.socket) -> None:
    torch.set_num_threads(1)
    group = ShardGroup(Path(store), 1, 2, [end], CPU)
    Shards(model(0), group).follow(ROWS, CACHE_TOKENS, graphs=False)
