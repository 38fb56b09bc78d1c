"""How much of a GPU a worker's engine takes where the trainer works on the same one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.config.run import Config
from penstock.roles.rollout_worker import SHARE_BESIDE_TRAINER, memory_share


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({}, SHARE_BESIDE_TRAINER),
        ({"rollout": {"workers": 2}}, SHARE_BESIDE_TRAINER / 2),
        ({"rollout": {"device": "cuda:0"}}, SHARE_BESIDE_TRAINER),
        ({"rollout": {"device": "cuda:1"}}, 1.0),
        ({"rollout": {"device": "cuda:1"}, "train": {"ranks": 2}}, SHARE_BESIDE_TRAINER),
        ({"train": {"device": "cpu"}}, 1.0),
    ],
)
def test_the_share(settings: dict[str, Any], share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    pipeline = {"name": "p", "steps": 1, "env": {"name": "copy"}, "model": {"kind": "tiny"}} | settings
    alone = Config.model_validate({"run": {"name": "r"}, "pipeline": [pipeline]})
    assert memory_share(alone, alone.pipeline[0]) == share
    pooled = Config.model_validate({"run": {"name": "r"}, "pool": {"devices": 4}, "pipeline": [pipeline]})
    assert memory_share(pooled, pooled.pipeline[0]) == 1.0
