"""What a model is built of: the settings of its text part, and a miniature of it to try things out on.

A miniature has the class, the kinds of layers and all switches of a model, but few and small random weights, so a
question about the model's code ("do logits depend on later tokens?") is answered by a forward pass of milliseconds,
in float32, without reading the weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn

from penstock.errors import ConfigError, PenstockError

HIDDEN, HEADS, KEY_HEADS, HEAD_WIDTH, VOCABULARY, POSITIONS, WINDOW = 64, 4, 2, 16, 96, 128, 4
MOST_PARAMETERS = 20_000_000
"""A miniature with more would take too long."""
TOLERANCE = 5e-3
"""Log-probabilities of a miniature that differ by more differ for another reason than rounding."""

_SIZES_BY_NAME = [
    (
        HIDDEN,
        "hidden_size d_model n_embd attention_hidden_size feed_forward_size backbone_hidden_size hidden_size_global "
        "lru_width embedding_size input_embedding_size word_embed_proj_dim embedding_dim intermediate_size n_inner "
        "d_inner intermediate_size_mlp moe_intermediate_size shared_expert_intermediate_size dense_intermediate_size "
        "moe_shared_expert_intermediate_size expert_ffn_hidden_size ffn_hidden_size ffn_dim decoder_ffn_dim "
        "encoder_ffn_dim dim_ff dff mlp_dim shared_intermediate_size emb_dim",
    ),
    (
        HEADS,
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads attention_heads "
        "num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads linear_num_value_heads "
        "linear_num_heads index_n_heads num_experts num_local_experts n_routed_experts moe_num_experts",
    ),
    (
        KEY_HEADS,
        "num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads num_query_groups linear_num_key_heads "
        "num_global_key_value_heads num_experts_per_tok num_experts_per_token moe_top_k moe_topk moe_k",
    ),
    (
        HEAD_WIDTH,
        "head_dim d_head dim_head v_head_dim attention_head_dim swa_head_dim linear_head_dim linear_key_head_dim "
        "linear_value_head_dim index_head_dim kv_channels global_head_dim mamba_head_dim mamba_d_head "
        "attention_head_size qk_nope_head_dim qk_rope_head_dim rotary_dim q_lora_rank o_lora_rank mamba_d_state "
        "state_size",
    ),
    (
        VOCABULARY,
        "vocab_size n_words vocab_size_per_layer_input decoder_vocab_size encoder_hash_byte_group_vocab",
    ),
    (
        WINDOW,
        "sliding_window attention_window_size local_attention sliding_window_size attention_chunk_size",
    ),
    (POSITIONS, "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions"),
    (2 * HEAD_WIDTH, "qk_head_dim"),
    (2 * HIDDEN, "mamba_d_ssm"),
    (24, "kv_lora_rank"),
    (8, "hidden_size_per_layer_input mamba_n_heads"),
    (1, "n_group topk_group num_expert_group"),
]
_SIZES = {name: size for size, names in _SIZES_BY_NAME for name in names.split()}
"""The largest value of an entry of a miniature's config."""
_LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "encoder_layers",
    "num_decoder_layers",
    "num_encoder_layers",
    "num_blocks",
    "depth",
    "conf_num_hidden_layers",
)
_KINDS = ("layer_types", "layers_block_type", "mlp_layer_types")
_OFF = {"num_kv_shared_layers": 0, "tie_word_embeddings": False}


def text_config(model: Any) -> Any:
    """The settings of a model's text part, given the model or its config. Multimodal models nest them."""
    config = getattr(model, "config", model)
    get = getattr(config, "get_text_config", None)
    if get is None:
        return config
    try:
        return get()
    except ValueError:  # it also has a text encoder
        return get(decoder=True)


def tried_once(attempt: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Keeps the answer of a function of a config for equal configs."""
    answers: dict[tuple[type, str], bool] = {}

    @wraps(attempt)
    def answer(config: Any) -> bool:
        key = type(config), config.to_json_string(use_diff=False)
        if key not in answers:
            answers[key] = attempt(config)
        return answers[key]

    return answer


def miniature(config: Any) -> nn.Module:
    """A small random model with the code and the switches of this config, in float32 on the CPU. Its attention and its
    head are sharp, so that caps, scales and windows show in its logits.

    Raises ConfigError if the config cannot be made small, or needs more than text.
    """
    from transformers import AutoModelForCausalLM

    name = type(config).__name__
    entries = _shrunk(config.to_dict())
    for entry in ("transformers_version", "model_type", "architectures", "quantization_config"):
        entries.pop(entry, None)
    entries["dtype"] = "float32"
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            with torch.device("meta"):
                parameters = sum(one.numel() for one in _built(AutoModelForCausalLM, config, entries).parameters())
            if parameters > MOST_PARAMETERS:
                raise ConfigError(f"no small model can be made of a {name}: {parameters} parameters are left")
            model = _built(AutoModelForCausalLM, config, entries).eval()
            _sharpen(model)
            logits = model(input_ids=torch.arange(3, 9)[None], use_cache=False).logits
    except PenstockError:
        raise
    except Exception as error:  # of the model's code
        raise ConfigError(f"no small model can be made of a {name}: {type(error).__name__}: {error}") from error
    if logits.shape[1] != 6 or not torch.isfinite(logits).all():
        raise ConfigError(f"a small model of a {name} gives logits of shape {tuple(logits.shape)}, or not finite ones")
    return model


def _built(kind: Any, config: Any, entries: dict[str, Any]) -> Any:
    return build_model(kind.from_config, type(config)(**copy.deepcopy(entries)))


def build_model(build: Any, *arguments: Any, **options: Any) -> Any:
    """Calls a function of transformers that builds a model: with the fastest attention that the model has."""
    try:
        return build(*arguments, attn_implementation="sdpa", **options)
    except (ValueError, ImportError) as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
    return build(*arguments, attn_implementation="eager", **options)


def _shrunk(entries: dict[str, Any]) -> dict[str, Any]:
    layers = max(2, entries.get("attn_layer_offset", 0) + 1)
    for name in _KINDS:
        kinds = entries.get(name)
        if isinstance(kinds, list) and kinds:
            layers = max(layers, *(kinds.index(kind) + 1 for kind in kinds))
    whole = next((entries[name] for name in _LAYERS if isinstance(entries.get(name), int)), None)
    heads = entries.get("num_attention_heads")
    shrunk: dict[str, Any] = {}
    for name, value in entries.items():
        small: Any = value
        if name == "per_layer_config" and isinstance(value, dict):
            small = {layer: _shrunk(one) for layer, one in value.items() if int(layer) < layers}
        elif isinstance(value, dict) and name.endswith("config"):
            small = _shrunk(value)
        elif isinstance(value, list) and whole is not None and len(value) == whole:
            small = value[:layers]
        elif name.endswith("_token_id"):
            small = _small_ids(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            most = layers if name in _LAYERS else _SIZES.get(name, value)
            if name == "num_key_value_heads" and value == heads:
                most = HEADS
            small = VOCABULARY if name == "vocab_size" else min(value, most)
        shrunk[name] = small
    # A tied head would answer each token with itself, whatever came before.
    shrunk |= {name: off for name, off in _OFF.items() if shrunk.get(name)}
    return shrunk


def _small_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [_small_ids(one) for one in value]
    return value if not isinstance(value, int) or value < VOCABULARY else 1


@torch.no_grad()
def _sharpen(model: Any) -> None:
    """Gives every matrix entries of a size at which its output is about as large as its input, and the head larger."""
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight.ndim < 2 or not name.endswith(("weight", "proj")):
                continue
            spread = 1.0 if isinstance(module, nn.Embedding) else 1.5 / weight.shape[-1] ** 0.5
            weight.normal_(0.0, spread)
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear):
        head.weight.normal_(0.0, 4.0 / head.weight.shape[-1] ** 0.5)


def logprobs_of(model: Any, ids: list[int]) -> torch.Tensor:
    """Log-probability of every token but the first, by a plain call of the model."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    return torch.log_softmax(logits[:-1], dim=-1).gather(-1, torch.tensor(ids)[1:, None])[:, 0]
