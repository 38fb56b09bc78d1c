"""What of a step is kept in memory, by kind of model and device, if the configuration leaves it open."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config.pipeline import PipelineSection
from penstock.roles.models import micro_batch_tokens, recomputes_activations


def section(model: dict[str, Any], **train: Any) -> PipelineSection:
    table = {"name": "a", "steps": 1, "env": {"name": "copy"}, "model": model, "train": train}
    return PipelineSection.model_validate(table)


TINY, PRETRAINED = {"kind": "tiny"}, {"kind": "path", "path": "models/some"}


@pytest.mark.parametrize(
    ("model", "train", "recomputes", "tokens"),
    [
        (TINY, {"device": "cpu"}, False, 16_384),
        (TINY, {"device": "cuda"}, False, 16_384),
        (PRETRAINED, {"device": "cpu"}, False, 16_384),
        (PRETRAINED, {"device": "cuda"}, False, 16_384),
        (PRETRAINED, {"device": "cuda", "ranks": 2}, True, 65_536),
        (PRETRAINED, {"device": "cuda", "fsdp": True}, True, 65_536),
        (PRETRAINED, {"device": "cuda", "fsdp": True, "activation_checkpointing": False}, False, 16_384),
        (PRETRAINED, {"device": "cuda", "ranks": 2, "tokens_per_micro_batch": 2048}, True, 2048),
        (TINY, {"device": "cuda", "ranks": 2}, False, 16_384),
        (TINY, {"device": "cpu", "activation_checkpointing": True}, True, 65_536),
    ],
)
def test_sharded_models_on_gpus_recompute_and_have_long_passes(
    model: dict[str, Any], train: dict[str, Any], recomputes: bool, tokens: int
) -> None:
    made = section(model, **train)
    assert recomputes_activations(made) is recomputes
    assert micro_batch_tokens(made) == tokens
