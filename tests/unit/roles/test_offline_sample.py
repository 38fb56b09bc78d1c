"""`penstock sample` gives a model the context that training gives it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from penstock.engines.torch.engine import TorchEngine
from penstock.roles import offline


def save_base_model(directory: Path) -> None:
    """Its tokenizer puts a token before every text, as those of many base models do."""
    vocabulary = {"<s>": 0, "</s>": 1, "<unk>": 2, "a": 3, "b": 4, "c": 5}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # type: ignore[assignment]
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.save_pretrained(directory)
    config = LlamaConfig(
        vocab_size=6,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def test_a_prompt_begins_with_the_tokens_that_precede_every_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_base_model(tmp_path)
    contexts: list[list[int]] = []
    complete = TorchEngine.complete

    async def record(engine: TorchEngine, context: Any, sampling: Any, **options: Any) -> Any:
        contexts.append([*context])
        return await complete(engine, context, sampling, **options)

    monkeypatch.setattr(TorchEngine, "complete", record)
    one = offline.saved(tmp_path, env={"name": "copy"})
    offline.sample(one, "abc", count=1, temperature=0.0, max_new_tokens=2)
    assert contexts == [[0, 3, 4, 5]]
