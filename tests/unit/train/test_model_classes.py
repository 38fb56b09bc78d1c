"""What the engine draws and what the trainer computes, at equal weights, for the causal classes of transformers."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError

from penstock.batch.pack import Packing, PackSettings, pack_tokens
from penstock.engines.architecture import TOLERANCE, VOCABULARY, logprobs_of, miniature, text_config
from penstock.engines.models import LanguagePolicy, TinyLanguageModel, build
from penstock.engines.requests import Sampling
from penstock.engines.torch.engine import TorchEngine
from penstock.engines.torch.support import check_served
from penstock.errors import ConfigError
from penstock.train.objectives import TokenObjective
from penstock.train.scores import output_head
from penstock.train.settings import OptimizerSection
from penstock.train.step import Learner
from penstock.train.support import check_trained

pytestmark = pytest.mark.filterwarnings("ignore")  # of the models' code

TEXT: dict[str, dict[str, Any]] = {
    "beam": {"final_logit_softcapping": 3.0},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25},
    "gemma2": {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 1.0},
    "gemma3_text": {"final_logit_softcapping": 3.0},
    "gemma4": {"final_logit_softcapping": 3.0},
    "granite": {"logits_scaling": 4.0},
    "granitemoe": {"logits_scaling": 4.0},
    "granitemoeshared": {"logits_scaling": 4.0},
    "hyperclovax": {"logits_scaling": 0.25},
    "nanochat": {"final_logit_softcapping": 3.0},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "recurrent_gemma": {"logits_soft_cap": 3.0},
}
"""Switches of the text part that its defaults leave off or weak."""


COMPLETED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "reformer": {"is_decoder": True},
}
"""What the defaults of a class leave out, although a model cannot be made without it."""


def config_of(model_type: str) -> Any:
    """The default config of a class, with its switches on."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind: Any = CONFIG_MAPPING[model_type]
    switches = TEXT.get(model_type, {}) | COMPLETED.get(model_type, {})
    if "text_config" in getattr(kind, "sub_configs", {}):
        return kind(text_config=text_config(kind()).to_dict() | switches)
    return kind(**switches)


def samples_of(model: Any, *, engine: bool) -> list[dict[str, np.ndarray]]:
    """Two prompts with two completions each: drawn by the engine, or fixed, with the model's own log-probabilities."""
    prompts = [list(range(10, 17))] * 2 + [list(range(40, 52))] * 2
    if engine:
        drawn = TorchEngine(copy.deepcopy(model), pad_id=0).generate(prompts, Sampling(max_new_tokens=9))
        completions = [(one.token_ids.tolist(), one.logprobs) for one in drawn]
    else:
        rng = np.random.default_rng(0)
        texts = [rng.integers(5, 90, 9).tolist() for _ in prompts]
        completions = [
            (ids, logprobs_of(model, prompt + ids)[-9:].numpy()) for prompt, ids in zip(prompts, texts, strict=True)
        ]
    return [
        {
            "token_ids": np.array(prompt + ids, np.int32),
            "loss_mask": np.array([0] * len(prompt) + [1] * len(ids), np.uint8),
            "logprobs": np.concatenate([np.zeros(len(prompt), np.float32), logprobs]),
        }
        for prompt, (ids, logprobs) in zip(prompts, completions, strict=True)
    ]


def assert_trained_on_policy(model: Any, *, engine: bool) -> Packing:
    """Trains on samples of the model itself in every layout that it supports; returns the last one of them."""
    samples, used = samples_of(model, engine=engine), "padded"
    layouts: tuple[Packing, ...] = ("padded", "packed", "prefix")
    for layout in layouts:
        objective = TokenObjective(LanguagePolicy(copy.deepcopy(model), None), packing=layout)  # type: ignore[arg-type]
        if objective.packing != layout:
            continue
        learner = Learner(objective, OptimizerSection(name="torch.optim:SGD", learning_rate=1e-3))
        metrics = learner.step(
            pack_tokens(samples, np.array([1.0, -1.0, 0.5, 2.0], np.float32), PackSettings(layout=layout))
        )
        assert metrics["ratio_max"] == pytest.approx(1, abs=TOLERANCE), layout
        assert metrics["kl_sampling"] == pytest.approx(0, abs=1e-5), layout
        assert metrics["grad_norm"] > 0
        used = layout
    return used


@pytest.mark.parametrize(
    ("model_type", "layout"),
    [
        ("cohere", "prefix"),
        ("gemma2", "padded"),
        ("gemma3", "padded"),
        ("gemma3_text", "padded"),
        ("gemma4", "padded"),
        ("gpt2", "prefix"),
        ("gpt_oss", "padded"),
        ("granite", "prefix"),
        ("hyperclovax", "prefix"),
        ("llama", "prefix"),
        ("mistral", "padded"),
        ("nemotron", "padded"),
        ("nanochat", "prefix"),
        ("qwen2", "padded"),
        ("qwen3_moe", "prefix"),
    ],
)
def test_samples_of_the_weights_that_are_trained_have_ratio_one(model_type: str, layout: Packing) -> None:
    config = config_of(model_type)
    check_trained(config)
    check_served(config)
    model: Any = miniature(config)
    assert assert_trained_on_policy(model, engine=True) == layout
    changed = TEXT.get(model_type, {}).keys() - {"use_sliding_window", "max_window_layers"}
    assert (output_head(model) is None) == bool(changed)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("bart", "BartForCausalLM.*ignores the positions"),
        ("deepseek_v3", "keys and values of one shape; those of this DeepseekV3ForCausalLM"),
        ("qwen3_next", "Qwen3NextForCausalLM.*linear_attention"),
        ("recurrent_gemma", "RecurrentGemmaForCausalLM has 2 layers and caches keys and values of 0"),
    ],
)
def test_a_model_that_the_torch_engine_cannot_serve_is_refused_with_the_reason(model_type: str, reason: str) -> None:
    config = config_of(model_type)
    check_trained(config)
    with pytest.raises(ConfigError, match=f"{reason}.*vLLM"):
        check_served(config)
    assert_trained_on_policy(miniature(config), engine=False)  # on what another engine draws


def test_a_model_that_sees_later_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"BertLMHeadModel cannot be trained: .* tokens after it"):
        check_trained(config_of("bert"))


def test_a_kind_of_model_without_a_causal_class_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'qwen2_5_vl' cannot be trained: .* no causal language model"):
        check_trained(config_of("qwen2_5_vl"))


def test_a_model_smaller_than_its_miniature_is_tried_out_too() -> None:
    config: Any = build(TinyLanguageModel(alphabet="ab", hidden_size=16, heads=2, layers=1)).module.config
    check_trained(config)
    check_served(config)
    assert miniature(config).config.vocab_size == VOCABULARY  # type: ignore[union-attr]


def test_a_plain_call_of_a_trained_model_obeys_its_attention_mask() -> None:
    model: Any = miniature(config_of("llama"))
    ids, mask = torch.arange(20, 28)[None], torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    with torch.no_grad():
        wanted = model(input_ids=ids, attention_mask=mask).logits
        unmasked = model(input_ids=ids).logits
        assert TokenObjective(LanguagePolicy(model, None), packing="prefix").packing == "prefix"  # type: ignore[arg-type]
        torch.testing.assert_close(model(input_ids=ids, attention_mask=mask).logits, wanted)
        torch.testing.assert_close(model(input_ids=ids).logits, unmasked)
    assert not torch.allclose(wanted[0, -1], unmasked[0, -1], atol=1e-2)


SHARDS = 6
DOCUMENT = Path(__file__).parents[3] / "docs" / "models.md"
Outcome = Literal["prefix", "padded", "vllm", "refused", "unknown"]


def outcome_of(model_type: str) -> Outcome:
    """How a model of this class is trained; ratios are asserted on the way."""
    try:
        config = config_of(model_type)
        model: Any = miniature(config)
    except (ConfigError, StrictDataclassClassValidationError):
        return "unknown"
    try:
        check_trained(config)
    except ConfigError:
        return "refused"
    try:
        check_served(config)
    except ConfigError:
        assert_trained_on_policy(model, engine=False)
        return "vllm"
    return "padded" if assert_trained_on_policy(model, engine=True) == "padded" else "prefix"


def documented() -> dict[str, str]:
    """The outcome of each class, as the tables of the document list them."""
    sections = re.findall(r"<!-- (\w+) -->\n(.*?)\n\n", DOCUMENT.read_text() + "\n\n", re.DOTALL)
    return {name: outcome for outcome, names in sections for name in re.findall(r"`([\w-]+)`", names)}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_causal_class_is_trained_on_policy_or_refused_as_documented(shard: int) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert documented().keys() == set(names)
    found = {name: outcome_of(name) for name in names[shard::SHARDS]}
    assert found == {name: documented()[name] for name in found}
