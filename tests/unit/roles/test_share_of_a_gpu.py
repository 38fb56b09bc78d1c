"""How much of a GPU's memory a worker's engine takes where others of the run use the same GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.config.run import Config
from penstock.roles.rollout_worker import SHARE_BESIDE_TRAINER, SHARE_OF_ENGINES, memory_share


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({}, SHARE_BESIDE_TRAINER),
        ({"rollout": {"workers": 2}}, SHARE_BESIDE_TRAINER / 2),
        ({"rollout": {"device": "cuda:0"}}, SHARE_BESIDE_TRAINER),
        ({"rollout": {"device": "cuda:1"}}, 1.0),
        ({"rollout": {"device": "cuda:1", "workers": 3}}, SHARE_OF_ENGINES / 3),
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


def test_pipelines_without_a_pool_divide_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    common = {"steps": 1, "env": {"name": "copy"}, "model": {"kind": "tiny"}}
    pipelines = [
        common | {"name": "left", "rollout": {"workers": 3}},
        common | {"name": "right"},
        common | {"name": "away", "train": {"device": "cuda:2"}, "rollout": {"device": "cuda:3"}},
    ]
    run = Config.model_validate({"run": {"name": "r"}, "pipeline": pipelines})
    assert [memory_share(run, pipeline) for pipeline in run.pipeline] == [
        SHARE_BESIDE_TRAINER / 4,
        SHARE_BESIDE_TRAINER / 4,
        1.0,
    ]
